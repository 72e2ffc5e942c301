"""What a plan says of a study beside its figures, each a sentence."""

import json
from collections.abc import Sequence

from deltalab.authoring import verdict
from deltalab.authoring.module_checks.module_suite import unstackable
from deltalab.models.dead_parameters import MOST_COUNTED, dead_parameters_text
from deltalab.own_module import OwnModule
from deltalab.study.answers.presets import preset_text
from deltalab.study.forecast.figures import ArmCost, from_to
from deltalab.study.forecast.step_time import Training
from deltalab.study.planning.plan import Plan
from deltalab.study.specs.sections.ladder_sizes import learning_rates_text
from deltalab.study.specs.setting_paths import training_part

MOST_TRIED = 2**25
"""The parameters of all blocks in which a plan looks for some that do nothing, which takes a second or two."""
MOST_WRITTEN = 2**27
"""The elements that the models write in which a plan looks for them, which takes up to 4 s."""
MOST_MODELS = 64
"""The different models in which a plan looks for them, which takes 10 ms each on a core of its own."""


def notes_of(plan: Plan, arms: list[ArmCost], trainings: list[Training], steps: Sequence[float | None]) -> list[str]:
    """Returns the notes on a plan.

    Args:
        plan: The study.
        arms: The figures of each arm.
        trainings: The training of each arm.
        steps: The seconds of a step of each arm; None where it is not known.
    """
    return [
        *_searched(plan),
        *plan.notes,
        *_dead(plan, arms),
        *_extended(plan),
        *_one_rate(plan),
        *_flops(plan),
        *_within_seconds(plan, trainings, steps),
        *_passes(trainings),
        *_not_checked(plan),
        *_one_by_one(plan),
        *_as_published(plan),
    ]


def _dead(plan: Plan, costs: list[ArmCost]) -> list[str]:
    """Notes on arms with parameters that do nothing. An arm with as many on each task is named once.

    Arms whose blocks are not looked at share a note. What a search will find is not known, and its
    finalists stand in the plan as the base.
    """
    known = [cost for cost, arm in zip(costs, plan.arms, strict=True) if arm.is_base or not plan.spec.search]
    notes = [
        dead_parameters_text(cost.arm, cost.dead_parameters, cost.parameters)
        for cost in known
        if cost.dead_parameters is not None
    ]
    if large := dict.fromkeys(cost.arm for cost in known if cost.dead_parameters is None):
        notes.append(
            f"{', '.join(large)}: parameters that do nothing are not counted in blocks of over {MOST_COUNTED:,} "
            f"parameters, nor in the blocks after the first {MOST_TRIED:,}, nor after {MOST_WRITTEN:,} elements that "
            "models wrote."
        )
    return list(dict.fromkeys(filter(None, notes)))


def _not_checked(plan: Plan) -> list[str]:
    """Notes on rules that fail their checks or have not been checked."""
    return [
        f"not checked yet: {rule}; `deltalab study run` checks it first"
        if reason == verdict.NOT_CHECKED
        else f"rule '{rule}' {reason}: `deltalab study run` refuses it"
        for rule, reason in verdict.unchecked(plan.rules).items()
    ]


def _one_by_one(plan: Plan) -> list[str]:
    """Notes on modules of other authors whose runs cannot train as one stack."""
    reasons: dict[str, str | None] = {}
    for block in (block for model in plan.models() for _, block in model.kinds()):
        rule = block.make_rule()
        if isinstance(rule, OwnModule) and rule.name not in reasons:
            reasons[rule.name] = unstackable(rule, block)
    return [f"module '{name}' trains alone, run by run: {reason}." for name, reason in reasons.items() if reason]


def _as_published(plan: Plan) -> list[str]:
    """Says which arms are as their authors publish them. A search makes its arms later."""
    arms = [arm for arm in plan.arms if arm.is_base or not plan.spec.search]
    return [text] if (text := preset_text({arm.name: arm.config for arm in arms})) else []


def _searched(plan: Plan) -> list[str]:
    """What a search draws, what bounds it and what it weighs."""
    search = plan.spec.search
    if search is None:
        return []
    conditional = sum(knob.when is not None for knob in search.searched.values())
    space = f"search: {len(search.searched)} settings"
    space += f", of which {conditional} exist only beside others" if conditional else ""
    space += f"; {search.whole:,} candidates, all tried" if search.enumerated else ""
    if search.match:
        scaled = " and ".join(f"{quantity}, by its {path}" for quantity, path in search.match.dimensions.items())
        space += f"; each candidate is as large as the base in {scaled}"
    space += "".join(f"; {quantity} {bound}" for quantity, bound in search.constrain.bounds.items())
    weighed = ", ".join(f"{objective} ({'more' if objective.maximize else 'less'})" for objective in plan.objectives)
    lines = [f"{space}.", f"search: weighs {weighed}."]
    if not search.enumerated:
        rest = search.trials - search.controls
        random = f", random search {search.controls} as a control" if search.controls else ""
        lines.append(f"search: {search.sampler} draws {rest} of {search.trials} candidates{random}.")
    if search.fidelity:
        rungs = [
            f"{count} at {' and '.join(f'{path} {value}' for path, value in rung.items())}"
            for count, rung in zip(search.halved, search.rungs, strict=True)
        ]
        lines.append(f"search: successive halving trains {', '.join(rungs)}.")
    if search.warm:
        begins = [json.dumps(entry) if isinstance(entry, dict) else entry for entry in search.warm]
        lines.append(f"search: begins with {', '.join(begins)}.")
    if search.proposals:
        lines.append(f"search: {search.proposals} proposes candidates in some of the sampler's places.")
    training = ", ".join(training_part(search.searched))
    most = {arm.is_base: plan.tried(arm) for arm in plan.arms}
    if training:
        arms = "of the base" if most[False] == 1 else "of the base and of each finalist"
        on_tasks = " on each task" if len(plan.tasks) > 1 else ""
        tries = f"tries {most[True]} values of {training}{on_tasks}"
        lines.append(f"search: each seed {arms} {tries}, weighted by the other seeds.")
    return lines


def _extended(plan: Plan) -> list[str]:
    """Notes that tuning may add candidates, if it may."""
    if plan.spec.tune is None or not plan.spec.tune.extend:
        return []
    return ["tune.extend may add candidates, which are not counted here, where a best value is at the end of a range."]


def _one_rate(plan: Plan) -> list[str]:
    """Notes that all widths of a ladder train at one learning rate, if they do."""
    tuned = plan.spec.tune.searched if plan.spec.tune else ()
    text = learning_rates_text(plan.spec.scales, tuned) if plan.spec.scales else None
    return [f"scales: {text}. Give transfer: mup, or tune train.lr."] if text and "one learning rate" in text else []


def _flops(plan: Plan) -> list[str]:
    """Notes how many steps the operations of a training are on each task, if operations give the steps."""
    lines = []
    for task in plan.tasks:
        arms = [arm for arm in plan.arms if arm.task == task]
        base = next(arm for arm in arms if arm.is_base)
        if base.flops is not None:
            steps = [arm.config["train"]["steps"] for arm in arms]
            others = f", and of all arms {min(steps):,} to {max(steps):,}" if len(set(steps)) > 1 else ""
            own = base.config["train"]["steps"]
            lines.append(f"train.flops: {base.flops:g} operations on {task} are {own:,} steps of the base{others}.")
    return lines


def _within_seconds(plan: Plan, trainings: list[Training], steps: Sequence[float | None]) -> list[str]:
    """Notes how many steps the time of a training is on each task, if time ends it.

    Args:
        plan: The study.
        trainings: The training of each arm.
        steps: The seconds of a step of each arm; None where it is not known.
    """
    lines = []
    for task in plan.tasks:
        here = [
            (training.spec, step)
            for training, step, arm in zip(trainings, steps, plan.arms, strict=True)
            if arm.task == task
        ]
        seconds = here[0][0].seconds
        if seconds is not None:
            counts = [min(spec.steps, int(seconds / step)) for spec, step in here if step is not None]
            about = f", about {min(counts):,} to {max(counts):,} of them by the time of a step" if counts else ""
            lines.append(
                f"train.seconds: on {task}, {seconds:g} s of steps or {here[0][0].steps:,} steps end a run{about}."
            )
            if counts and max(counts) == here[0][0].steps:
                lines.append(f"train.seconds: train.steps may end runs on {task} before their time: give more steps.")
    return lines


def _passes(trainings: list[Training]) -> list[str]:
    """Notes how often a run reads its task's training data, if the data are finite. Equal notes appear once."""
    lines: dict[tuple[str, str], list[int]] = {}
    for task, spec in ((training.task, training.spec) for training in trainings):
        if task.train_tokens is not None:
            passes = spec.steps * spec.batch_size * task.length / task.train_tokens
            shown = f"{passes:,.0f}" if passes >= 10 else f"{passes:.2g}"
            lines.setdefault((task.name, shown), []).append(task.train_tokens)
    return [
        f"{name}: a run makes {shown} passes over {from_to(tokens)} tokens of training data"
        for (name, shown), tokens in lines.items()
    ]
