"""Makes the tables of an answer from the metrics in the ledger."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np

from deltalab.statistics.interquartile import interquartile_parts
from deltalab.statistics.intervals import Interval, mean_interval, share_learned, within
from deltalab.statistics.joint_test import ALPHA, UNKNOWN, Difference, Outcome, compare, seeds_needed, smallest_p
from deltalab.statistics.looks import left_error, seeds_to_decide
from deltalab.statistics.over_tasks import OverTasks
from deltalab.statistics.pairs import Contrast
from deltalab.statistics.pareto import front
from deltalab.statistics.seed_choice import Scores
from deltalab.store import Arm, TrialRow
from deltalab.study.answers.recorded_scores import RECORDED_COSTS, RecordedScores
from deltalab.study.answers.remarks import headline_notes, table_notes, table_warnings, too_few_seeds
from deltalab.study.answers.rows import OVER_TASKS, SPLIT, Interaction, Row, SeedScore, TaskTable
from deltalab.study.specs.recorded_study import RecordedTask


def comparison_table(
    task: RecordedTask, arms: Sequence[Arm], ledger: RecordedScores, scores: Scores, outcomes: Mapping[str, Outcome]
) -> TaskTable:
    """Returns the table of a task on the test split, in which each arm is compared with the base of `scores`.

    Args:
        task: The task at one size.
        arms: The arms of the study, in order.
        ledger: The study's trials and their metrics.
        scores: The runs of all arms on the task.
        outcomes: The test's outcome for each arm but that base, by the arm's name.
    """
    rows = [_row(arm, task, ledger, scores, outcomes.get(arm.name)) for arm in arms]
    rows = _counted_alike(rows)
    if task.limit is not None:
        rows = _with_learned(rows, scores, (scores.chance + task.limit) / 2)
        rows = _without_equals_at_chance(rows, task)
    interactions = [*_interactions(arms, scores)]
    points = [(-task.sign * row.score.mean, _known(row.flops_per_token), _known(row.state_size)) for row in rows]
    best = [rows[i].arm for i in front(points)]
    trials = [trial for arm in arms for trial in ledger.of(arm.name, task.name)]
    return TaskTable(
        task=task.name,
        version=task.version,
        metric=task.metric,
        maximize=task.maximize,
        chance=task.chance,
        margin=task.margin,
        split=SPLIT["confirm"],
        rows=rows,
        front=best,
        interactions=interactions,
        warnings=table_warnings(rows, task, ledger, scores),
        notes=table_notes(rows, best, interactions, trials, outcomes),
    )


def headline_table(
    arms: Sequence[Arm], ledger: RecordedScores, scores: Mapping[str, Scores], *, intervals: bool = True
) -> TaskTable | None:
    """Returns the table of each arm's mean over all tasks, in which scores are normalized: chance is 0, perfect is 1.

    Args:
        arms: The arms of the study, in order.
        ledger: The study's trials and their metrics.
        scores: The runs of all arms, by task.
        intervals: Whether undecided arms get an interval.

    Returns:
        The table; None for a study with one task, with a ladder, or with a task whose best possible value is not known.
    """
    tasks = [*ledger.tasks.values()]
    perfect = [task.perfect for task in tasks if task.perfect is not None]
    if len(tasks) < 2 or len(perfect) < len(tasks) or ledger.spec.is_ladder:
        return None
    over = OverTasks([scores[task.name] for task in tasks], perfect, ledger.looks[0].seeds)
    differences = over.differences(intervals=intervals)
    rows = [_headline_row(arm, tasks, ledger, over, differences) for arm in arms]
    return TaskTable(
        task=OVER_TASKS,
        version=None,
        metric="normalized score",
        maximize=True,
        chance=0.0,
        margin=over.margin,
        split=SPLIT["confirm"],
        rows=rows,
        front=[],
        interactions=[],
        warnings=[*too_few_seeds(rows, next(row for row in rows if row.is_reference))],
        notes=headline_notes(rows, ledger.spec),
        over=[task.name for task in tasks],
    )


def _headline_row(
    arm: Arm,
    tasks: Sequence[RecordedTask],
    ledger: RecordedScores,
    over: OverTasks,
    differences: Mapping[str, tuple[Difference, Difference]],
) -> Row:
    trials = [trial for task in tasks for trial in ledger.of(arm.name, task.name)]
    trained = arm.name in over.arms
    seeds = over.seeds_of(arm.name) if trained else []
    results = over.results(arm.name) if trained else np.empty((0, len(tasks)))
    missing = sum(any(of_task.choice(arm.name, seed) is None for of_task in over.scores) for seed in seeds)
    bounds = min(task.normalized(task.bounds[not task.maximize]) if task.bounds else -math.inf for task in tasks), 1.0
    difference, iqm_difference = (_bounded(of_arm, bounds) for of_arm in differences.get(arm.name, (UNKNOWN, UNKNOWN)))
    by_seed: dict[int, float] = {}
    if difference.n:
        d = results.mean(1) - over.results(over.scores[0].base).mean(1)
        by_seed = dict(zip(seeds, d.tolist(), strict=True))
    return Row(
        arm=arm.name,
        is_base=arm.is_base,
        is_reference=arm.name == over.scores[0].base,
        verdict=_verdict(arm, trials, difference, trained, True, arm.name == over.scores[0].base),
        score=mean_interval(results.mean(1), bounds, missing),
        diverged=_diverged(trials),
        difference=None if arm.name == over.scores[0].base else difference,
        learned=None,
        **_costs(None, trials, ledger),
        tuned={},
        chose=0,
        by_budget={},
        by_seed=by_seed,
        iqm=float(interquartile_parts(results).mean()) if trained else None,
        iqm_difference=None if arm.name == over.scores[0].base else iqm_difference,
    )


def tuning_table(task: RecordedTask, arms: Sequence[Arm], ledger: RecordedScores) -> TaskTable:
    """Returns a table of each arm's best candidate so far on the validation split. No arm is compared."""
    return TaskTable(
        task=task.name,
        version=task.version,
        metric=task.metric,
        maximize=task.maximize,
        chance=task.chance,
        margin=task.margin,
        split=SPLIT["tune"],
        rows=_counted_alike([_tuning_row(arm, task, ledger) for arm in arms]),
        front=[],
        interactions=[],
        warnings=[],
        notes=[],
    )


def _tuning_row(arm: Arm, task: RecordedTask, ledger: RecordedScores) -> Row:
    trials = ledger.of(arm.name, task.name, "tune") or ledger.of(arm.name, task.name)
    best = ledger.best_on_validation(trials, task)
    values = list(ledger.finals[best.key]["validation", task.metric].values()) if best else []
    return Row(
        arm=arm.name,
        is_base=arm.is_base,
        is_reference=arm.is_base,
        verdict="base" if arm.is_base else "not compared" if trials else "not run",
        score=mean_interval(values, task.bounds),
        diverged=_diverged(trials),
        difference=None,
        learned=None,
        **_costs(best, trials, ledger),
        tuned=best.values if best else {},
        chose=0,
        by_budget={},
    )


def _costs(trial: TrialRow | None, trials: Sequence[TrialRow], ledger: RecordedScores) -> dict[str, Any]:
    """The costs in an arm's row. The seconds are summed over `trials`; every other cost comes from `trial`."""
    finals = ledger.finals.get(trial.key, {}) if trial else {}
    recorded = {name: next(iter(finals.get(("cost", name), {}).values()), None) for name in RECORDED_COSTS}
    return {
        "seconds": math.fsum(trial.seconds for trial in trials) if trials else None,
        "microseconds_per_token": 1e6 / trial.tokens_per_second if trial and trial.tokens_per_second else None,
        "state_size": trial.state_size if trial else None,
        "parameters": trial.parameters if trial else None,
        "flops_per_token": recorded.pop("flops_per_token"),
        **{name: None if value is None else int(value) for name, value in recorded.items()},
    }


def _counted_alike(rows: list[Row]) -> list[Row]:
    """The rows with states that count the same.

    Early releases recorded one number for all that is held. Where a row has only that, every row gets it.
    """
    if all(row.conv_cache is not None for row in rows if row.state_size is not None):
        return rows
    return [
        row
        if row.state_size is None
        else replace(row, state_size=row.state_size + (row.conv_cache or 0), kv_cache=None, conv_cache=None)
        for row in rows
    ]


def _row(arm: Arm, task: RecordedTask, ledger: RecordedScores, scores: Scores, outcome: Outcome | None) -> Row:
    trials = ledger.of(arm.name, task.name)
    results = scores.results.get(arm.name, {})
    choices = {seed: scores.choice(arm.name, seed) for seed in results}
    best = scores.shown(arm.name)
    done = [trial for trial in trials if trial.state == "done"]
    shown = next((trial for trial in done if trial.number == best), done[0] if done else None)
    difference = None if outcome is None else _bounded(outcome.difference, task.bounds)
    by_seed: dict[int, float] = {}
    needed = None
    if difference is not None and difference.n:
        by_seed = scores.by_seed(arm.name, difference.n) if difference.of_base is None else {}
        if scores.block is None and not (difference.decided or difference.is_equal):
            needed = seeds_to_decide(
                list(by_seed.values()), len(scores.others), margin=task.margin, alpha=left_error(ledger.looks)
            )
    return Row(
        arm=arm.name,
        is_base=arm.is_base,
        is_reference=arm.name == scores.base,
        verdict=_verdict(arm, trials, difference, bool(results), scores.maximize, arm.name == scores.base),
        score=mean_interval(list(results.values()), task.bounds, sum(number is None for number in choices.values())),
        diverged=_diverged(trials),
        difference=difference,
        learned=None,
        **_costs(shown, trials, ledger),
        tuned=shown.values if shown else {},
        chose=sum(number == best for number in choices.values()),
        by_budget=scores.by_budget(arm.name) if len(scores.numbers(arm.name)) > 1 else {},
        by_seed=by_seed,
        scores=_by_seed(arm.name, scores, choices, by_seed, {trial.number: trial.values for trial in trials}),
        one_setting=_one_setting(scores, arm.name, task.bounds),
        seeds_needed=needed,
        metrics=_other_metrics(arm.name, task, ledger, scores),
        unbiased=_unbiased(outcome, difference),
    )


def _by_seed(
    arm: str,
    scores: Scores,
    choices: Mapping[int, int | None],
    differences: Mapping[int, float],
    values: Mapping[int, dict[str, Any]],
) -> dict[int, SeedScore]:
    """The result of each seed of an arm."""
    alone = dict(zip(scores.trained(arm), scores.one_setting(arm), strict=False))
    return {
        seed: SeedScore(
            score,
            differences.get(seed),
            choices[seed],
            {} if choices[seed] is None else values.get(choices[seed] or 0, {}),
            alone.get(seed),
        )
        for seed, score in scores.results.get(arm, {}).items()
    }


def _other_metrics(arm: str, task: RecordedTask, ledger: RecordedScores, scores: Scores) -> dict[str, Interval]:
    """The mean of each further metric over the seeds that have it, each under its name."""

    def order(name: str) -> tuple[str, int, str]:
        return name.partition("@")[0], len(name), name  # The label of a length follows the @.

    other = ledger.other_metrics(arm, task)
    by_seed = {name: scores.weighed(arm, other[name]) for name in sorted(other, key=order)}
    known = {name: [value for value in values if math.isfinite(value)] for name, values in by_seed.items()}
    return {name: mean_interval(values) for name, values in known.items() if values}


def _unbiased(outcome: Outcome | None, difference: Difference | None) -> float | None:
    """The unbiased difference, cut off at the ends of the interval."""
    if not outcome or not difference or outcome.unbiased is None:
        return None
    return min(max(outcome.unbiased, difference.low), difference.high)


def _one_setting(scores: Scores, arm: str, bounds: tuple[float, float] | None) -> Interval | None:
    """The score of the best candidate alone; None if there is one candidate, or if none finished all seeds."""
    one_setting = scores.one_setting(arm) if len(scores.numbers(arm)) > 1 else []
    return mean_interval(one_setting, bounds) if one_setting else None


def _diverged(trials: Sequence[TrialRow]) -> int:
    return sum(state == "diverged" for trial in trials for state in trial.runs.values())


def _bounded(difference: Difference, bounds: tuple[float, float] | None) -> Difference:
    """The difference, with its interval cut off at the largest differences that the metric's bounds allow."""
    if not difference.n:
        return UNKNOWN
    if not math.isfinite(difference.low):
        return difference
    widest = (bounds[0] - bounds[1], bounds[1] - bounds[0]) if bounds else None
    low, high = within(difference.low, difference.high, widest)
    return replace(difference, low=low, high=high)


def _verdict(
    arm: Arm,
    trials: Sequence[TrialRow],
    difference: Difference | None,
    trained: bool,
    maximize: bool,
    is_reference: bool,
) -> str:
    if not trials:
        return "not run"
    if not trained:
        return "failed" if any(trial.state == "failed" for trial in trials) else "not measured"
    if is_reference:
        return "base" if arm.is_base else "reference"
    if difference is None or not difference.n:
        return "not compared"
    if difference.is_equal:
        return "equal"
    if difference.decided:
        return "better" if (difference.mean > 0) == maximize else "worse"
    if smallest_p(difference.n) > ALPHA:
        return f"undecidable: needs {seeds_needed()} seeds"
    up, down = ("better", "worse") if maximize else ("worse", "better")
    if difference.low > -difference.margin:
        return f"equal or {up}"
    return f"equal or {down}" if difference.high < difference.margin else "undecided"


def _without_equals_at_chance(rows: list[Row], task: RecordedTask) -> list[Row]:
    """The rows, in which no arm equals a reference that has hardly learned: at chance all arms are alike."""
    if not any(row.is_reference and task.is_hardly_learned(row.score.mean) for row in rows):
        return rows
    return [replace(row, verdict="undecided") if row.verdict == "equal" else row for row in rows]


def _with_learned(rows: list[Row], scores: Scores, threshold: float) -> list[Row]:
    """The rows with the share of seeds that learned, if some seeds did not.

    A mean over seeds that learned and seeds that did not is a score that no seed has.
    """
    sign = 1 if scores.maximize else -1
    shares = {
        row.arm: share_learned([sign * score for score in results.values()], sign * threshold)
        for row in rows
        if (results := scores.results.get(row.arm))
    }
    if all(share.learned == share.n for share in shares.values()):
        return rows
    return [replace(row, learned=shares.get(row.arm)) for row in rows]


def _interactions(arms: Sequence[Arm], scores: Scores) -> Iterator[Interaction]:
    base = next(arm.name for arm in arms if arm.is_base)
    for a, b, both in _factorial(arms):
        if all(scores.results[arm] for arm in (base, a, b, both)):
            effects = scores.pairs(both, a), scores.pairs(b, base)
            seeds = min(effect.seeds for effect in effects)
            apart = Contrast(tuple(effect.head(seeds) for effect in effects), weights=(1.0, -1.0))
            yield Interaction(a, b, both, compare([apart])[0])


def _factorial(arms: Sequence[Arm]) -> Iterator[tuple[str, str, str]]:
    """Yields arms (a, b, both). `both` makes exactly the changes of `a` and of `b`, which change no key in common."""
    changed = [arm for arm in arms if arm.change]
    for (a, b), both in product(combinations(changed, 2), changed):
        if not a.change.keys() & b.change.keys() and {**a.change, **b.change} == both.change:
            yield a.name, b.name, both.name


def _known(cost: float | None) -> float:
    return math.nan if cost is None else cost
