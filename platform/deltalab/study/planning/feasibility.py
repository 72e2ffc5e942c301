"""Checks, before a study starts, that the settings it tunes or searches exist and that its space has candidates."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from deltalab.errors import InputError
from deltalab.study.planning.matching import Bounded
from deltalab.study.planning.plan import Plan, PlannedArm
from deltalab.study.planning.warm_starts import named_candidates
from deltalab.study.specs.method_settings import resolve
from deltalab.study.specs.sections.budget import Searching
from deltalab.study.specs.sections.search_space import (
    INTEGERS,
    Search,
    Space,
    combinations,
    count_combinations,
    example_with,
)
from deltalab.study.specs.setting_paths import model_part, setting

MOST_COMBINATIONS = 500
"""How many configurations of candidates a plan resolves at most, over all its arms."""
MOST_COUNTED = 200
"""The most candidates that a plan draws until one has costs that `match` and `constrain` allow."""


def check_space(plan: Plan) -> list[str]:
    """Checks what a plan tunes or searches.

    Returns:
        Notes on the combinations that make no model, and on those whose costs are not allowed.

    Raises:
        InputError: A setting or an objective does not exist, a choice or bound makes no model in any combination, two
            arms are the same once they are tuned, or the space has no candidate.
    """
    key = "search" if plan.spec.search else "tune"
    for task in plan.tasks:
        space = _space(plan, task)
        if space.whole is not None and space.trials > space.whole:
            own = "" if space is plan.budget else f" on task '{task}'"
            problem = f"{key}.trials {space.trials}: there are only {space.whole} choices to try{own}"
            raise InputError(problem, key=f"{key}.trials")
    notes = _check_models(plan, key)
    try:
        decodes = any(objective.name == "decode_us" for objective in plan.objectives)
        for name, planned in plan.tasks.items():
            if decodes and planned.patches is not None:
                raise InputError(f"objectives: decode_us times a token, and task '{name}' has images")
        named_candidates(plan)
    except InputError as error:
        raise InputError(f"{key}.{error}") from None
    for arm in plan.arms:
        if arm.is_base:
            try:
                plan.candidates(arm)
            except InputError as error:
                own = "" if plan.space(arm.task) is plan.budget else f" on task '{arm.task}'"
                raise InputError(f"{key}.{error}{own}") from None
    search = plan.spec.search
    if search:
        _check_finalists(search)
    if search and search.fidelity:
        notes += _check_rungs(plan, search)
    if search and (search.match or search.constrain.bounds or search.fidelity):
        notes += _check_costs(plan, search)
    return notes


def _space(plan: Plan, task: str) -> Space:
    """The settings that vary on a task of a plan that tunes or searches."""
    space = plan.space(task)
    assert space is not None
    return space


def _check_finalists(search: Searching) -> None:
    """Raises `InputError` if the space has fewer models than the search confirms finalists."""
    models = model_part(search.knobs)
    if models and all(parent in models for knob in models.values() for parent in knob.parents):
        most = count_combinations(models)
        if most is not None and search.finalists > most:
            raise InputError(
                f"search.finalists {search.finalists}: the space has {most} models, and each is confirmed once"
            )


def _check_rungs(plan: Plan, search: Searching) -> list[str]:
    """Notes where the last rung differs from the base's training; raises `InputError` for a rung without a model."""
    notes = []
    for arm in plan.arms:
        if arm.is_base:
            try:
                *_, last = (plan.config_for(arm, {}, rung) for rung in range(len(search.rungs)))
            except InputError as error:
                raise InputError(f"search.fidelity: {error}") from None
            for path in search.rungs[-1]:
                if path != "train.seeds" and setting(last, path, "") != (of_base := setting(arm.config, path, "")):
                    notes.append(
                        f"search.fidelity.{path} ends at {setting(last, path, '')}: candidates are judged there, and "
                        f"confirmed at the base's {of_base} on task '{arm.task}'."
                    )
    return notes


def _check_models(plan: Plan, key: str) -> list[str]:
    """Notes the combinations that make no model, on the first task that has such a combination."""
    tuned = [arm for arm in plan.arms if arm.is_base or not plan.spec.search]
    most = max(1, MOST_COMBINATIONS // len(tuned))
    combinations_of = {task: _drawn(_space(plan, task).knobs, most) for task in plan.tasks}
    note: list[str] = []
    seen: dict[tuple[str, str], str] = {}
    for arm in tuned:
        space, drawn = _space(plan, arm.task), combinations_of[arm.task]
        reasons: list[str | None] = []
        first = None
        for knobs in drawn:
            config = plan.with_values(arm, space.settings(knobs))
            try:
                config = resolve(config, plan.tasks[arm.task])
            except InputError as error:
                reasons.append(str(error))
            else:
                first = first or json.dumps(config, sort_keys=True)
                reasons.append(None)
        if None not in reasons:
            raise InputError(
                f"{key}: no combination makes a model on task '{arm.task}', such as {_listed(drawn[0])}: {reasons[0]}"
            )
        for name, knob in space.knobs.items():
            for value in knob.extremes:
                why = [r for knobs, r in zip(drawn, reasons, strict=True) if name in knobs and knobs[name] == value]
                if None not in why:
                    raise InputError(f"{key}.{name}: {value!r} makes no model on task '{arm.task}': {why[0]}")
        bad = [i for i, why in enumerate(reasons) if why is not None]
        if bad and not note:
            first_bad = _listed(drawn[bad[0]])
            note = [
                f"{key}: {len(bad)} of {len(drawn)} combinations tried make no model, such as {first_bad}: "
                f"{reasons[bad[0]]}. The run records such a candidate as infeasible and draws another in its place."
            ]
        twin = seen.setdefault((arm.task, first or ""), arm.name)
        if twin != arm.name:
            paths = list(space.searched)
            raise InputError(
                f"arm '{arm.name}' is the same as {twin if twin == 'base' else repr(twin)} on task '{arm.task}' "
                f"once {', '.join(paths)} {'is' if len(paths) == 1 else 'are'} tuned",
                key=arm.name,
            )
    return note


def _check_costs(plan: Plan, space: Space) -> list[str]:
    """Draws candidates until the costs of one are allowed on every task, and notes the candidates before it."""
    bases = [arm for arm in plan.arms if arm.is_base]
    draw = random.Random(0)
    drawn = [space.draw(lambda _, knob: draw.choice(knob.points(INTEGERS))) for _ in range(MOST_COUNTED)]
    # The training changes no cost, so that each model is counted once.
    models = [model_part(candidate) for candidate in drawn]
    different = {_listed(model): values for model, values in zip(models, drawn, strict=True)}
    nearest: dict[str, tuple[Bounded, str]] = {}
    reasons: list[str] = []
    for values in different.values():
        why = next(filter(None, (_misfit(plan, arm, values, nearest) for arm in bases)), None)
        if why is None:
            if not reasons:
                return []
            return [
                f"search: {len(reasons)} of {len(reasons) + 1} candidates drawn do not fit, such as {reasons[0]}. "
                "The run records such a candidate as infeasible and draws another in its place."
            ]
        reasons.append(f"{_listed(values)}: {why}")
    for quantity, (bounded, candidate) in nearest.items():
        if not bounded.holds:
            raise InputError(
                f"search.constrain.{quantity}: none of {len(reasons)} candidates drawn has {bounded.bound}: "
                f"the nearest has {bounded.amount:,.0f}, with {candidate}"
            )
    raise InputError(f"search: none of {len(reasons)} candidates drawn is feasible, such as {reasons[0]}")


def _misfit(
    plan: Plan, arm: PlannedArm, values: Mapping[str, Any], nearest: dict[str, tuple[Bounded, str]]
) -> str | None:
    """Says why a candidate is not allowed, or returns None. Updates `nearest`, the nearest candidate to each bound."""
    try:
        quantities = plan.bounded(arm, plan.config_for(arm, values))
        for rung in range(len(plan.spec.search.rungs) if plan.spec.search else 0):
            plan.config_for(arm, values, rung)
    except InputError as error:
        return str(error)
    for quantity, bounded in quantities.items():
        if quantity not in nearest or bounded.apart < nearest[quantity][0].apart:
            nearest[quantity] = bounded, _listed(values)
    return next((f"constrain.{name}: {bounded}" for name, bounded in quantities.items() if not bounded.holds), None)


def _listed(values: Mapping[str, Any]) -> str:
    """Lists values by path in one line."""
    return ", ".join(f"{path}={value}" for path, value in values.items())


def _drawn(knobs: Mapping[str, Search], most: int) -> list[dict[str, Any]]:
    """Lists all combinations of choices, bounds and some integers between; a random sample if there are over `most`.

    Every choice and bound is in at least one combination.
    """
    every = [*islice(combinations(knobs, lambda knob: knob.points(INTEGERS)), most + 1)]
    if len(every) <= most:
        # A condition may name an integer that is not among the points.
        drawn = {name for combination in every for name in combination}
        return [*every, *_covering(knobs, [name for name in knobs if name not in drawn])]
    draw = random.Random(0)
    sample = [next(combinations(knobs, lambda knob: [draw.choice(knob.points(INTEGERS))])) for _ in range(most)]
    return [*_covering(knobs, knobs), *sample]


def _covering(knobs: Mapping[str, Search], names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields a combination with each point of each named knob; the other knobs have their first point if possible."""
    for name in names:
        above = example_with(knobs, name) or {}
        for value in knobs[name].points(INTEGERS):
            wanted = {**above, name: value}
            drawn: dict[str, Any] = {}
            for other, knob in knobs.items():
                if knob.exists(drawn):
                    drawn[other] = wanted.get(other, knob.points(INTEGERS)[0])
            yield drawn
