"""The answer of a study: each arm against the base, with error bars, corrected p-values and costs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from deltalab.store import Arm, Store, TrialRow
from deltalab.store.models import Stage
from deltalab.study.pareto import front
from deltalab.study.stats import (
    Difference,
    Interval,
    holm,
    interaction,
    mean_interval,
    paired,
    seeds_needed,
    simultaneous_level,
    smallest_holm_p,
)

ALPHA = 0.05
NO_DIFFERENCE = "no difference found at this budget"
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

    difference: arm minus base; its interval holds jointly over the task's arms. diverged: seeds that did.
    seconds: the trial's training time, all seeds together. state_size: elements. tuned: the values that tuning chose.
    """

    arm: str
    is_base: bool
    verdict: str
    score: Interval
    diverged: int
    difference: Difference | None
    p_holm: float | None
    seconds: float | None
    microseconds_per_token: float | None
    state_size: int | None
    parameters: int | None
    flops_per_token: float | None
    tuned: dict[str, Any]


@dataclass(frozen=True)
class Interaction:
    """How far the changes of arms a and b together, in arm `both`, are from the sum of the two differences."""

    a: str
    b: str
    both: str
    difference: Difference


@dataclass(frozen=True)
class TaskTable:
    """All arms on one task. notes: what to know before reading it.

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
    notes: list[str]


@dataclass(frozen=True)
class Failure:
    """A trial that raised, and the last line of its traceback."""

    arm: str
    task: str
    stage: Stage
    number: int
    key: str
    message: str


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
    """A study's answer, and what it rests on. profile: None is the default one."""

    study: str
    profile: str | None
    study_id: int
    state: str
    stage: Stage
    tables: list[TaskTable]
    failures: list[Failure]
    infeasible: list[InfeasibleCandidate]
    notes: list[str]


def answer(store: Store, study_id: int, *, which: Stage = "confirm") -> Answer:
    """The answer of a study.

    which: "confirm" compares the confirmed trials on the test split. "tune" shows each arm's best tuning trial on the
    validation split, for a look at a study that runs; it compares nothing, since the best of a sweep is optimistic.
    Raises `InputError` where there is no such study.
    """
    study = store.study(study_id)
    arms = store.arms(study_id)
    trials = store.trials(study_id)
    finals: dict[tuple[str, str], dict[int, float]] = {}
    flops: dict[str, float] = {}
    for final in store.final_metrics(study_id, stage=which):
        if (final.split, final.metric) == ("cost", "flops_per_token"):
            flops[final.trial] = final.value
        if final.split == SPLIT[which] and final.run_state == "done":
            finals.setdefault((final.trial, final.metric), {})[final.seed] = final.value
    tables = []
    for task, about in study.provenance["tasks"].items():
        chosen: dict[str, _Outcome] = {}
        for trial in trials:
            if (trial.task, trial.stage) != (task, which) or trial.state == "infeasible":
                continue
            outcome = _Outcome(trial, finals.get((trial.key, about["metric"]), {}), flops.get(trial.key))
            before = chosen.get(trial.arm)
            if before is None or outcome.rank(about["maximize"]) > before.rank(about["maximize"]):
                chosen[trial.arm] = outcome
        table = _table(task, about, which, arms, chosen)
        drawn = [trial for trial in trials if (trial.task, trial.stage) == (task, "tune")]
        tables.append(replace(table, notes=[*table.notes, *_infeasible_notes(drawn)]))
    failures = [
        Failure(trial.arm, trial.task, trial.stage, trial.number, trial.key, _exception(trial.error))
        for trial in trials
        if trial.state == "failed"
    ]
    infeasible = [
        InfeasibleCandidate(trial.arm, trial.task, trial.number, trial.values, trial.error or "")
        for trial in trials
        if trial.state == "infeasible"
    ]
    return Answer(study.name, study.profile, study.id, study.state, which, tables, failures, infeasible, _notes(which))


@dataclass(frozen=True)
class _Outcome:
    """The trial that stands for an arm on a task, and the metric of each seed that finished."""

    trial: TrialRow
    values: dict[int, float]
    flops_per_token: float | None

    def rank(self, maximize: bool) -> tuple[float, ...]:
        """The trial of the largest rank stands for its arm: the latest confirmation, or the best tuning trial."""
        if self.trial.stage == "confirm":
            return self.trial.number, self.trial.finished_at.timestamp()
        if not self.values or len(self.values) < len(self.trial.runs):  # a diverged seed wins no tuning
            return (-math.inf,)
        mean = math.fsum(self.values.values()) / len(self.values)
        return (mean if maximize else -mean,)


def _table(
    task: str, about: dict[str, Any], which: Stage, arms: Sequence[Arm], chosen: dict[str, _Outcome]
) -> TaskTable:
    base = next(arm.name for arm in arms if arm.is_base)
    others = [arm.name for arm in arms if not arm.is_base]
    seeds = sorted({seed for outcome in chosen.values() for seed in outcome.trial.runs})
    values = {
        arm.name: [chosen[arm.name].values.get(seed, math.nan) if arm.name in chosen else math.nan for seed in seeds]
        for arm in arms
    }
    differences: dict[str, Difference] = {}
    interactions = []
    if which == "confirm":
        level = simultaneous_level(len(others), 1 - ALPHA)
        differences = {arm: paired(values[arm], values[base], level) for arm in others}
        for a, b, both in _factorial(arms):
            together = interaction(values[base], values[a], values[b], values[both], 1 - ALPHA)
            interactions.append(Interaction(a, b, both, together))
    corrected = dict(zip(differences, holm([d.p_exact for d in differences.values()]), strict=True))
    rows = [
        _row(arm, chosen.get(arm.name), differences.get(arm.name), corrected.get(arm.name), about["maximize"])
        for arm in arms
    ]
    sign = -1 if about["maximize"] else 1
    points = [(sign * row.score.mean, _known(row.flops_per_token), _known(row.state_size)) for row in rows]
    best = [rows[i].arm for i in front(points)]
    return TaskTable(
        task=task,
        version=about["version"],
        metric=about["metric"],
        maximize=about["maximize"],
        chance=about["chance"],
        split=SPLIT[which],
        rows=rows,
        front=best,
        interactions=interactions,
        notes=_table_notes(rows, best, interactions, [outcome.trial for outcome in chosen.values()]),
    )


def _row(
    arm: Arm, outcome: _Outcome | None, difference: Difference | None, p_holm: float | None, maximize: bool
) -> Row:
    trial = outcome.trial if outcome else None
    runs = trial.runs if trial else {}
    score = mean_interval([outcome.values.get(seed, math.nan) for seed in runs] if outcome else [])
    diverged = sum(state == "diverged" for state in runs.values())
    if trial is None:
        verdict = "not run"
    elif trial.state == "failed":
        verdict = "failed"
    elif score.n == 0:
        verdict = "diverged" if diverged else "not measured"
    elif arm.is_base:
        verdict = "base"
    elif difference is None or p_holm is None:
        verdict = "not compared"
    elif difference.n == 0:
        verdict = "no pair with the base"
    elif p_holm <= ALPHA:
        verdict = "better" if (difference.mean > 0) == maximize else "worse"
    else:
        verdict = NO_DIFFERENCE
    return Row(
        arm=arm.name,
        is_base=arm.is_base,
        verdict=verdict,
        score=score,
        diverged=diverged,
        difference=difference,
        p_holm=p_holm,
        seconds=trial.seconds if trial else None,
        microseconds_per_token=1e6 / trial.tokens_per_second if trial and trial.tokens_per_second else None,
        state_size=trial.state_size if trial else None,
        parameters=trial.parameters if trial else None,
        flops_per_token=outcome.flops_per_token if outcome else None,
        tuned=trial.values if trial else {},
    )


def _factorial(arms: Sequence[Arm]) -> Iterator[tuple[str, str, str]]:
    """Arms (a, b, both) where `both` makes exactly the changes of a and b, which share no key."""
    changed = [arm for arm in arms if arm.change]
    for (a, b), both in product(combinations(changed, 2), changed):
        if not a.change.keys() & b.change.keys() and {**a.change, **b.change} == both.change:
            yield a.name, b.name, both.name


def _known(cost: float | None) -> float:
    return math.nan if cost is None else cost


def _table_notes(
    rows: list[Row], best: list[str], interactions: list[Interaction], trials: list[TrialRow]
) -> list[str]:
    notes = []
    if best:
        notes.append(f"Pareto front of mean, flops per token and state: {', '.join(best)}.")
    compared = [row for row in rows if row.difference is not None]
    if compared:
        pairs = max(row.difference.n for row in compared if row.difference)
        least, needed = smallest_holm_p(pairs, len(compared)), seeds_needed(len(compared), ALPHA)
        short = f", so no arm can be told from the base: {ALPHA} needs {needed} seeds" if least > ALPHA else ""
        notes.append(f"No p can be below {least:.3g} ({pairs} pairs, Holm over {len(compared)}){short}.")
    for row in compared:
        if row.difference and row.difference.n and row.difference.missing:
            whole = row.difference.n + row.difference.missing
            notes.append(f"{row.arm} is compared on {row.difference.n} of {whole} seeds: the others lack a side.")
    for found in interactions:
        if not found.difference.n:  # one of the four arms has not finished yet
            continue
        notes.append(
            f"{found.a} and {found.b} together ({found.both}) make {format_interval(found.difference, '+')} "
            f"beyond their sum (p {format_p(found.difference.p_exact)}, exact, not corrected)."
        )
    timed = [trial.hardware for trial in trials if trial.tokens_per_second]
    differ = [what for key, what in TIMED_WITH.items() if len({hardware.get(key) for hardware in timed}) > 1]
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


def _notes(which: Stage) -> list[str]:
    small = "A proxy task of this size does not rank every method as training at scale does."
    if which == "tune":
        return [
            "Each arm's best tuning trial on the validation split: optimistic, and no answer. "
            "The answer is the confirmation, on the test split, with seeds that tuning never used.",
            small,
        ]
    return [
        "Means are over confirmation seeds, which tuning never used, at the last step on the test split, "
        f"with a {1 - ALPHA:.0%} t interval.",
        "Differences are arm minus base, paired by seed. Their t intervals assume normal differences "
        f"and hold jointly over a task's arms at {1 - ALPHA:.0%} (Bonferroni).",
        "p is of the exact two-sided sign-flip test, after Holm over a task's arms; "
        f"better and worse mean p <= {ALPHA}.",
        "Costs are those of the confirmed trial: time per trained token, elements of state, parameters.",
        small,
    ]


def format_interval(found: Interval | Difference, sign: str = "") -> str:
    """mean [low, high]; "" where the mean is not known."""
    if not math.isfinite(found.mean):
        return ""
    bounds = f" [{found.low:{sign}.3f}, {found.high:{sign}.3f}]" if math.isfinite(found.low) else ""
    return f"{found.mean:{sign}.3f}{bounds}"


def format_values(values: Mapping[str, Any]) -> str:
    """Tuned values, a rule as its name with its knobs.

    >>> format_values({"rule": {"name": "comba", "transition": "iplr"}, "train.lr": 0.0123456})
    'rule=comba(transition=iplr), train.lr=0.0123'
    """
    said = []
    for key, value in values.items():
        if isinstance(value, dict) and "name" in value:
            knobs = ", ".join(f"{knob}={given}" for knob, given in value.items() if knob != "name")
            value = f"{value['name']}({knobs})" if knobs else value["name"]
        said.append(f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}")
    return ", ".join(said)


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
