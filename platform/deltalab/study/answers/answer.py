"""The answer of a study: each arm against the base, with error bars, p-values and costs."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from deltalab.store import Arm, Store, Study, TrialRow
from deltalab.store.models import Stage
from deltalab.store.trainings import TrainingRow, trainings
from deltalab.study.answers.ladder_trends import Ladder, ladders
from deltalab.study.answers.recorded_scores import Measured
from deltalab.study.answers.sensitivity import ends, sweep
from deltalab.study.planning.tuning_candidates import recorded_as
from deltalab.study.specs.ladder_sizes import families
from deltalab.study.statistics.intervals import Interval, Share, mean_interval, share_learned, within
from deltalab.study.statistics.joint_test import (
    ALPHA,
    UNKNOWN,
    Difference,
    Outcome,
    compare,
    seeds_needed,
    seeds_to_decide,
    smallest_p,
)
from deltalab.study.statistics.pareto import front
from deltalab.study.statistics.seed_choice import Scores, outcomes

if TYPE_CHECKING:
    from deltalab.study.answers.search_results import Discovery

NO_DIFFERENCE = "no difference found at this budget"
UNEVEN = 0.05
"""An arm that differs from the base by more than this share in state, parameters or arithmetic is marked."""
MOST_GIVEN_UP = 5
"""Stacks of an incomplete study that its answer names."""
# What times depend on besides the arm. It does not matter which of a host's GPUs was used.
TIMED_WITH = {
    "device": "device",
    "host": "host",
    "torch": "version of torch",
    "stack": "runs trained as one",
    "cuda_graph": "use of CUDA graphs",
}
SPLIT: dict[Stage, str] = {"tune": "validation", "confirm": "test"}


@dataclass(frozen=True)
class Row:
    """One arm on one task.

    difference: arm minus base; its interval and p hold jointly over the family. by_seed: the difference of each seed.
    seeds_needed: about how many seeds would decide an undecided difference; None where it is decided, or unknown.
    diverged: runs that did.
    learned: where some seeds of the table did not learn the task.
    seconds: the training time of all its trials. state_size: elements.
    tuned: the values that are best on validation over all seeds; chose: how many seeds chose them for themselves.
    by_budget: the expected score if 1, 2, ... of the candidates had been tried.
    """

    arm: str
    is_base: bool
    verdict: str
    score: Interval
    diverged: int
    difference: Difference | None
    learned: Share | None
    seconds: float | None
    microseconds_per_token: float | None
    state_size: int | None
    parameters: int | None
    flops_per_token: float | None
    tuned: dict[str, Any]
    chose: int
    by_budget: list[float]
    by_seed: dict[int, float] = field(default_factory=dict)
    seeds_needed: int | None = None


@dataclass(frozen=True)
class Interaction:
    """How far the changes of arms a and b together, in arm `both`, are from the sum of the two differences."""

    a: str
    b: str
    both: str
    difference: Difference


@dataclass(frozen=True)
class TaskTable:
    """All arms on one task. warnings: what to know before reading it. notes: what to know besides.

    front: the arms that no other arm beats in mean metric, arithmetic per token and state size at once.
    """

    task: str
    version: int
    metric: str
    maximize: bool
    chance: float
    split: str
    rows: list[Row]
    front: list[str]
    interactions: list[Interaction]
    warnings: list[str]
    notes: list[str]


@dataclass(frozen=True)
class Failure:
    """A trial that raised, and the last line of its traceback. name: what it is called."""

    arm: str
    task: str
    stage: Stage
    number: int
    key: str
    message: str
    name: str


@dataclass(frozen=True)
class InfeasibleCandidate:
    """Values that tuning drew for an arm and that make no model, so that no trial ran."""

    arm: str
    task: str
    number: int
    values: dict[str, Any]
    reason: str


@dataclass(frozen=True)
class Answer:
    """A study's answer, and what it rests on. profile: None is the default one. warnings: what makes it doubtful.
    trainings: of what was exported from the study. ladders: of a study with `scales`, of each task. search: what a
    search found, where the study is one. overrides: settings given beside the study's file, by their keys.
    """

    study: str
    profile: str | None
    study_id: int
    state: str
    stage: Stage
    warnings: list[str]
    tables: list[TaskTable]
    failures: list[Failure]
    infeasible: list[InfeasibleCandidate]
    notes: list[str]
    trainings: list[TrainingRow] = field(default_factory=list)
    ladders: list[Ladder] = field(default_factory=list)
    search: "Discovery | None" = None
    overrides: dict[str, Any] = field(default_factory=dict)


def answer(store: Store, study_id: int, *, which: Stage = "confirm", intervals: bool = True) -> Answer:
    """The answer of a study.

    which: "confirm" compares the arms on the test split. "tune" shows each arm's best candidate so far on the
    validation split, for a look at a study that runs; it compares nothing, since the best of a sweep is optimistic.
    intervals: False leaves the intervals of undecided arms infinite, and takes a tenth of the time.
    Raises `InputError` where there is no such study.
    """
    study = store.study(study_id)
    arms, trials = store.arms(study_id), store.trials(study_id)
    ledger = Measured(store, study_id, trials, study.spec)
    tasks = study.provenance["tasks"]
    climbed: list[Ladder] = []
    scores: dict[str, Scores] = {}
    if which == "tune":
        tables = [_tuning_table(task, about, arms, ledger) for task, about in tasks.items()]
    else:
        scores = {task: ledger.scores(task, about, arms) for task, about in tasks.items()}
        compared: dict[str, dict[str, Outcome]] = {}
        for family in families(study.spec, list(tasks)):
            found = outcomes([scores[task] for task in family], ledger.looks, intervals=intervals)
            compared |= dict(zip(family, found, strict=True))
        climbed = ladders(study.spec, tasks, arms, ledger, scores, compared)
        ended = study.state in ("done", "failed")
        if not ended:  # an arm that seems to have stopped may go on when the range is extended
            compared = {
                task: {arm: replace(outcome, stopped=None) for arm, outcome in found.items()}
                for task, found in compared.items()
            }
        tables = [_table(task, about, arms, ledger, scores[task], compared[task]) for task, about in tasks.items()]
    for at, table in enumerate(tables if not study.spec.get("search") else ()):
        drawn = [trial for trial in trials if trial.task == table.task]
        tables[at] = replace(table, notes=[*table.notes, *_infeasible_notes(drawn)])
    failures = [
        Failure(
            trial.arm,
            trial.task,
            trial.stage,
            trial.number,
            trial.key,
            _exception(trial.error),
            recorded_as(study.spec, trial.arm, trial.stage, trial.number),
        )
        for trial in trials
        if trial.state == "failed"
    ]
    infeasible = [
        InfeasibleCandidate(trial.arm, trial.task, trial.number, trial.values, trial.error or "")
        for trial in trials
        if trial.state == "infeasible"
    ]
    warnings = [
        f"rule '{rule}': {reason} (the study ran with --unchecked), so its equation may not be what it trains"
        for rule, reason in study.provenance.get("unchecked", {}).items()
    ]
    if study.state == "incomplete":
        given_up = study.provenance.get("given_up", [])
        warnings += given_up[:MOST_GIVEN_UP]
        if len(given_up) > MOST_GIVEN_UP:
            warnings.append(f"{len(given_up) - MOST_GIVEN_UP} more stacks of trials were given up")
    tried = bool(study.spec.get("tune")) or any(len(own) > 1 for one in scores.values() for own in one.runs.values())
    notes = _notes(which, study.spec, tried=tried)
    return Answer(
        study.name,
        study.profile,
        study.id,
        study.state,
        which,
        warnings,
        tables,
        failures,
        infeasible,
        notes,
        trainings(store, study),
        climbed,
        _searched(store, study, arms, trials),
        study.overrides,
    )


def _searched(store: Store, study: Study, arms: Sequence[Arm], trials: list[TrialRow]) -> "Discovery | None":
    if not study.spec.get("search"):
        return None
    from deltalab.study.answers.search_results import discovery  # It brings Optuna, which takes a second to load.

    return discovery(store, study, arms, trials)


def _table(
    task: str,
    about: Mapping[str, Any],
    arms: Sequence[Arm],
    ledger: Measured,
    scores: Scores,
    found: Mapping[str, Outcome],
) -> TaskTable:
    bounds = tuple(about["bounds"]) if about.get("bounds") else None
    rows = [_row(arm, task, bounds, ledger, scores, found.get(arm.name)) for arm in arms]
    if bounds:
        rows = _with_learned(rows, scores, (scores.chance + bounds[scores.maximize]) / 2)
    interactions = []
    for a, b, both in _factorial(arms):
        four = [scores.results[arm] for arm in (scores.base, a, b, both)]
        seeds = [seed for seed in four[0] if all(seed in results for results in four)]
        if seeds:
            apart = [four[3][seed] - four[1][seed] - four[2][seed] + four[0][seed] for seed in seeds]
            interactions.append(Interaction(a, b, both, compare([apart])[0]))
    sign = -1 if scores.maximize else 1
    points = [(sign * row.score.mean, _known(row.flops_per_token), _known(row.state_size)) for row in rows]
    best = [rows[i].arm for i in front(points)]
    shown = [trial for arm in arms for trial in ledger.of(arm.name, task)]
    return TaskTable(
        task=task,
        version=about["version"],
        metric=about["metric"],
        maximize=about["maximize"],
        chance=about["chance"],
        split=SPLIT["confirm"],
        rows=rows,
        front=best,
        interactions=interactions,
        warnings=_warnings(rows, task, about, ledger, scores),
        notes=_table_notes(rows, best, interactions, shown, found),
    )


def _tuning_table(task: str, about: Mapping[str, Any], arms: Sequence[Arm], ledger: Measured) -> TaskTable:
    """Each arm's best candidate on validation."""
    rows = []
    for arm in arms:
        trials = ledger.of(arm.name, task, "tune") or ledger.of(arm.name, task)
        best: tuple[float, TrialRow, list[float]] | None = None
        for trial in trials:
            found = ledger.finals.get(trial.key, {}).get(("validation", about["metric"]), {})
            if found and len(found) == len(trial.runs):  # the best of a candidate without its diverged seeds misleads
                mean = math.fsum(found.values()) / len(found) * (1 if about["maximize"] else -1)
                if best is None or mean > best[0]:
                    best = mean, trial, list(found.values())
        values, trial_or_none = (best[2], best[1]) if best else ([], None)
        rows.append(
            Row(
                arm=arm.name,
                is_base=arm.is_base,
                verdict="base" if arm.is_base else "not compared" if trials else "not run",
                score=mean_interval(values, about.get("bounds")),
                diverged=sum(state == "diverged" for trial in trials for state in trial.runs.values()),
                difference=None,
                learned=None,
                **_costs(trial_or_none, trials, ledger),
                tuned=trial_or_none.values if trial_or_none else {},
                chose=0,
                by_budget=[],
            )
        )
    shown = {key: about[key] for key in ("version", "metric", "maximize", "chance")}
    return TaskTable(
        task=task, **shown, split=SPLIT["tune"], rows=rows, front=[], interactions=[], warnings=[], notes=[]
    )


def _costs(trial: TrialRow | None, trials: Sequence[TrialRow], ledger: Measured) -> dict[str, Any]:
    """The costs of an arm's row, from one of its trials; the seconds are those of all."""
    flops = ledger.finals.get(trial.key, {}).get(("cost", "flops_per_token"), {}) if trial else {}
    return {
        "seconds": math.fsum(trial.seconds for trial in trials) if trials else None,
        "microseconds_per_token": 1e6 / trial.tokens_per_second if trial and trial.tokens_per_second else None,
        "state_size": trial.state_size if trial else None,
        "parameters": trial.parameters if trial else None,
        "flops_per_token": next(iter(flops.values()), None),
    }


def _row(
    arm: Arm,
    task: str,
    bounds: tuple[float, float] | None,
    ledger: Measured,
    scores: Scores,
    outcome: Outcome | None,
) -> Row:
    trials = ledger.of(arm.name, task)
    results = scores.results.get(arm.name, {})
    choices = {seed: scores.choice(arm.name, seed) for seed in results}
    best = scores.shown(arm.name)
    done = [trial for trial in trials if trial.state == "done"]
    shown = next((trial for trial in done if trial.number == best), done[0] if done else None)
    difference = None
    if outcome is not None:
        ends = (bounds[0] - bounds[1], bounds[1] - bounds[0]) if bounds else None
        difference = outcome.difference if outcome.difference.n else UNKNOWN
        if math.isfinite(difference.low):
            low, high = within(difference.low, difference.high, ends)
            difference = replace(difference, low=low, high=high)
    by_seed: dict[int, float] = {}
    needed = None
    if difference is not None and difference.n:
        by_seed = dict([*scores.by_seed(arm.name).items()][: difference.n])
        if not difference.decided:
            needed = seeds_to_decide(list(by_seed.values()), len(scores.others))
    return Row(
        arm=arm.name,
        is_base=arm.is_base,
        verdict=_verdict(arm, trials, difference, bool(results), scores.maximize),
        score=mean_interval(list(results.values()), bounds, sum(number is None for number in choices.values())),
        diverged=sum(state == "diverged" for trial in trials for state in trial.runs.values()),
        difference=difference,
        learned=None,
        **_costs(shown, trials, ledger),
        tuned=shown.values if shown else {},
        chose=sum(number == best for number in choices.values()),
        by_budget=scores.by_budget(arm.name) if len(scores.runs[arm.name]) > 1 else [],
        by_seed=by_seed,
        seeds_needed=needed,
    )


def _verdict(arm: Arm, trials: Sequence[TrialRow], difference: Difference | None, trained: bool, maximize: bool) -> str:
    if not trials:
        return "not run"
    if not trained:
        return "failed" if any(trial.state == "failed" for trial in trials) else "not measured"
    if arm.is_base:
        return "base"
    if difference is None or not difference.n:
        return "not compared"
    if difference.decided:
        return "better" if (difference.mean > 0) == maximize else "worse"
    if smallest_p(difference.n) > ALPHA:
        return f"undecidable: needs {seeds_needed()} seeds"
    return NO_DIFFERENCE


def _with_learned(rows: list[Row], scores: Scores, threshold: float) -> list[Row]:
    """Adds the share of seeds that learned, where some did not: the mean of both kinds is no seed's score."""
    found = {
        row.arm: share_learned([score if scores.maximize else -score for score in results.values()], threshold)
        for row in rows
        if (results := scores.results.get(row.arm))
    }
    if all(share.learned == share.n for share in found.values()):
        return rows
    return [replace(row, learned=found.get(row.arm)) for row in rows]


def _factorial(arms: Sequence[Arm]) -> Iterator[tuple[str, str, str]]:
    """Arms (a, b, both) where `both` makes exactly the changes of a and b, which share no key."""
    changed = [arm for arm in arms if arm.change]
    for (a, b), both in product(combinations(changed, 2), changed):
        if not a.change.keys() & b.change.keys() and {**a.change, **b.change} == both.change:
            yield a.name, b.name, both.name


def _known(cost: float | None) -> float:
    return math.nan if cost is None else cost


def _warnings(rows: list[Row], task: str, about: Mapping[str, Any], ledger: Measured, scores: Scores) -> list[str]:
    """What changes how the table is to be read."""
    warnings = []
    compared = [row for row in rows if row.difference is not None and row.difference.n]
    short = next((row.verdict for row in compared if row.verdict.startswith("undecidable")), None)
    if short:
        pairs = max(row.difference.n for row in compared if row.difference)
        warnings.append(f"No arm can be told from the base with {pairs} seeds: p is at least {smallest_p(pairs):.3g}.")
    base = next(row for row in rows if row.is_base)
    if bounds := about.get("bounds"):
        end = bounds[1] if about["maximize"] else bounds[0]
        learned = (base.score.mean - about["chance"]) / (end - about["chance"])
        if learned < 0.1:
            warnings.append(
                f"The base has hardly learned the task (chance {about['chance']:.3g}): the differences say how fast "
                "learning starts, not how far it gets."
            )
        elif learned > 0.99:
            warnings.append("The base is at the end of the scale: an arm can be worse, and hardly better.")
    warnings += ends([sweep(row.arm, task, about, ledger, scores) for row in rows], ledger.spec)
    for row in rows:
        apart = []
        for what, own, of_base in (
            ("state", row.state_size, base.state_size),
            ("parameters", row.parameters, base.parameters),
            ("flops", row.flops_per_token, base.flops_per_token),
        ):
            if own and of_base and abs(own / of_base - 1) > UNEVEN:
                apart.append(f"{own / of_base:.2f} times the {what}")
        if apart and not row.is_base:
            warnings.append(f"{row.arm} has {', '.join(apart)} of the base.")
    return warnings


def _table_notes(
    rows: list[Row],
    best: list[str],
    interactions: list[Interaction],
    trials: list[TrialRow],
    found: Mapping[str, Outcome],
) -> list[str]:
    notes = []
    if best:
        notes.append(f"Pareto front of mean, flops per token and state: {', '.join(best)}.")
    for row in rows:
        if row.score.missing:
            notes.append(
                f"{row.arm}: {row.score.missing} of {row.score.n} seeds did not finish; each counts as the worst "
                "outcome of its seed."
            )
    if shares := [row for row in rows if row.learned]:
        told = (
            f"{row.arm} {row.learned.learned} of {row.learned.n} [{row.learned.low:.2f}, {row.learned.high:.2f}]"
            for row in shares
            if row.learned
        )
        notes.append(f"Seeds that learned, past half way from chance to the best possible: {', '.join(told)}.")
    hopeless = [arm for arm, outcome in found.items() if outcome.stopped == "hopeless"]
    if hopeless:
        notes.append(f"Stopped early, with little prospect of a verdict: {', '.join(hopeless)}.")
    if len({row.score.n for row in rows if row.score.n}) > 1:
        notes.append(
            "Arms have different numbers of seeds: a mean is over an arm's own, a difference over those of both."
        )
    open_ended = [
        row.arm for row in rows if row.difference and row.difference.n and not math.isfinite(row.difference.low)
    ]
    if open_ended:
        notes.append(f"No interval for {', '.join(open_ended)}: so few seeds cannot exclude any difference.")
    if budgets := [row for row in rows if len(row.by_budget) > 1]:
        told = (f"{row.arm} {', '.join(f'{score:.3f}' for score in row.by_budget)}" for row in budgets)
        most = max(len(row.by_budget) for row in budgets)
        notes.append(f"Expected score with 1 to {most} candidates: {'; '.join(told)}.")
    for found_one in interactions:
        notes.append(
            f"{found_one.a} and {found_one.b} together ({found_one.both}) make "
            f"{format_interval(found_one.difference, '+')} beyond their sum "
            f"(p {format_p(found_one.difference.p)}, exact, not corrected)."
        )
    timed = [trial.hardware for trial in trials if trial.tokens_per_second]
    differ = [what for key, what in TIMED_WITH.items() if len({json.dumps(found.get(key)) for found in timed}) > 1]
    if differ:
        notes.append(f"Times are not comparable: the arms differ in {', '.join(differ)}.")
    return notes


def _infeasible_notes(drawn: list[TrialRow]) -> Iterator[str]:
    """A line for each arm that drew candidates that make no model."""
    for arm in dict.fromkeys(trial.arm for trial in drawn):
        own = [trial for trial in drawn if trial.arm == arm]
        infeasible = [trial for trial in own if trial.state == "infeasible"]
        if infeasible:
            yield (
                f"{len(infeasible)} of {len(own)} candidates drawn for {arm} make no model and did not run, "
                f"such as {format_values(infeasible[0].values)}: {infeasible[0].error}."
            )


def _notes(which: Stage, spec: Mapping[str, Any], *, tried: bool) -> list[str]:
    """tried: whether a seed chooses among several runs."""
    small = "A proxy task of this size does not rank every method as training at scale does."
    if which == "tune":
        return [
            "Each arm's best candidate on the validation split: optimistic, and no answer. "
            "The answer is on the test split.",
            small,
        ]
    family = "the study's" if spec.get("family") == "study" else "a task's"
    score = "A seed's score is that on the test split at the last step."
    if tried:
        does = "tries every training of its arm" if spec.get("search") else "trains every candidate"
        score = (
            f"A seed {does}; its score is the test score, at the last step, of its run with the best validation score."
        )
    return [
        f"{score} Means are over seeds, with a 95% t interval.",
        f"Differences are arm minus base, paired by seed. Intervals and p are of one exact sign-flip test over {family}"
        f" arms and hold jointly: better and worse mean p <= {ALPHA}, and an interval that leaves out 0.",
        "Costs are those of the tuned candidate: time per trained token, elements of state, parameters.",
        small,
    ]


def format_interval(found: Interval | Difference, sign: str = "") -> str:
    """mean [low, high]; "" where the mean is not known."""
    if not math.isfinite(found.mean):
        return ""
    bounds = f" [{found.low:{sign}.3f}, {found.high:{sign}.3f}]" if math.isfinite(found.low) else ""
    return f"{found.mean:{sign}.3f}{bounds}"


def format_values(values: Mapping[str, Any]) -> str:
    """Tuned values, a rule as its name with its knobs and a gate as its form with its numbers.

    >>> format_values({"rule": {"name": "comba", "d": {"head": {"init": 0.02}}}, "train.lr": 0.0123456})
    'rule=comba(d=head(init=0.02)), train.lr=0.0123'
    """
    return ", ".join(f"{key}={_written(value)}" for key, value in values.items())


def _written(value: Any) -> str:
    """
    >>> _written({"head": {}}), _written([{"name": "attention", "window": 8}]), _written(None)
    ('head', '[attention(window=8)]', 'None')
    """
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if not isinstance(value, Mapping):
        return str(value)
    if "name" in value:
        value = {value["name"]: {key: given for key, given in value.items() if key != "name"}}
    if len(value) != 1 or not isinstance(next(iter(value.values())), Mapping):
        return str(value)
    ((form, given),) = value.items()
    return f"{form}({format_values(given)})" if given else str(form)


def format_p(p: float | None) -> str:
    """A p-value; "" where it is not known."""
    if p is None or not math.isfinite(p):
        return ""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _exception(error: str | None) -> str:
    """The line of a traceback that names the exception; its message may take up more lines below."""
    lines = (error or "").strip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith("  File ")]
    return next((line for line in lines[frames[-1] + 1 if frames else 0 :] if line[:1].strip()), "")
