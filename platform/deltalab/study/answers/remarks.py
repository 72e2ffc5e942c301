"""Writes the warnings and notes of an answer's tables, and the notes on how to read the answer."""

import json
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence

from deltalab.statistics.joint_test import ALPHA, Outcome, smallest_p
from deltalab.statistics.looks import IN_ALL, left_error
from deltalab.statistics.seed_choice import Scores
from deltalab.store import TrialRow
from deltalab.store.models import Stage
from deltalab.study.answers.recorded_scores import RecordedScores
from deltalab.study.answers.rows import Interaction, Row
from deltalab.study.answers.sensitivity import range_end_notes, sweep
from deltalab.study.answers.wording import format_interval, format_p
from deltalab.study.specs.recorded_study import RecordedSpec, RecordedTask
from deltalab.study.specs.setting_text import settings_text
from deltalab.training.time_budget import STEPS

TIMED_WITH = {
    "device": "device",
    "host": "host",
    "torch": "version of torch",
    "stack": "runs trained as one",
    "cuda_graph": "use of CUDA graphs",
}
"""What times depend on besides the arm, by the key of a trial's hardware. Any GPU of a host will do."""
SHARED = 0.8
"""The share of the time below which a training that had its core is said to have shared it."""
SLOWER = 1.2
"""The ratio of times at equal flops from which a table speaks of it."""
UNEVEN = 0.05
"""The share of the base's state, parameters or flops by which an arm may differ without being marked."""
SMALL = "A proxy task of this size does not rank every method as training at scale does."


def table_warnings(rows: list[Row], task: RecordedTask, ledger: RecordedScores, scores: Scores) -> list[str]:
    """Returns the warnings of a table: sentences that change how the table is to be read."""
    reference = next(row for row in rows if row.is_reference)
    return [
        *([] if reference.is_base else _unshared(rows, reference, ledger, scores)),
        *too_few_seeds(rows, reference),
        *_lost_candidates(scores, reference),
        *_at_an_end(reference, task),
        *range_end_notes([sweep(row.arm, task, ledger, scores) for row in rows], ledger.spec, task.name, ledger.state),
        *_uneven(rows, reference),
        *_dead(rows),
    ]


def _unshared(rows: list[Row], reference: Row, ledger: RecordedScores, scores: Scores) -> Iterator[str]:
    """Yields what cannot be compared with another reference than the base, since arms stop for themselves."""
    if not scores.results[reference.arm]:
        yield f"No arm is compared with {reference.arm}, which has no score here."
        return
    fewer = []
    for row in rows:
        shared = len(scores.shared_seeds(row.arm))
        if row.difference and row.difference.n:
            if row.difference.n < max(row.score.n, reference.score.n) and ledger.spec.seeds_of_base is None:
                fewer.append(f"{row.arm} {row.difference.n}")
        elif row.score.n and shared < ledger.looks[0].seeds:
            yield (
                f"{row.arm} is not compared: it shares {shared} seed{'' if shared == 1 else 's'} with {reference.arm}, "
                f"and the first look takes {ledger.looks[0].seeds}."
            )
    if fewer:
        yield f"Tested on the seeds up to the look that decides, or to the last that both reached: {', '.join(fewer)}."


def too_few_seeds(rows: Sequence[Row], reference: Row) -> Iterator[str]:
    """Warns if the seeds are too few to tell any arm from the reference."""
    compared = [row for row in rows if row.difference is not None and row.difference.n]
    if any(row.verdict.startswith("undecidable") for row in compared):
        pairs = max(row.difference.n for row in compared if row.difference)
        yield f"No arm can be told from {reference.called} with {pairs} seeds: p is at least {smallest_p(pairs):.3g}."


def _lost_candidates(scores: Scores, reference: Row) -> Iterator[str]:
    again = "`deltalab study run` with --retry-failed runs such trials again"
    for number, arms in scores.lost.items():
        yield f"Candidate {number} counts in no arm, since its trial failed in {', '.join(arms)}: {again}."
    for arm, seeds in scores.seeds.items():
        trained = scores.trained(arm)
        if arm in scores.failed and scores.failed[arm] and len(trained) < len(seeds):
            yield f"{arm} has {len(trained)} of {len(seeds)} seeds, since its other trials failed: {again}."
    counts = {arm: len(scores.numbers(arm)) for arm in (scores.base, *scores.others) if scores.trained(arm)}
    for arm, count in counts.items():
        if count != counts[scores.base]:
            yield f"{arm} chose among {count} candidates and {reference.called} among {counts[scores.base]}."


def _at_an_end(reference: Row, task: RecordedTask) -> Iterator[str]:
    if task.limit is None:
        return
    name = "The base" if reference.is_base else reference.arm
    if task.is_hardly_learned(reference.score.mean):
        yield (
            f"{name} has hardly learned the task (chance {task.chance:.3g}): the differences say how fast "
            "learning starts, not how far it gets, and no arm counts as equal."
        )
    elif (reference.score.mean - task.chance) / (task.limit - task.chance) > 0.99:
        yield f"{name} is at the end of the scale: an arm can be worse, and hardly better."


def _uneven(rows: list[Row], reference: Row) -> Iterator[str]:
    for row in rows:
        sizes = (
            ("state", row.state_size, reference.state_size),
            ("parameters", row.parameters, reference.parameters),
            ("flops", row.flops_per_token, reference.flops_per_token),
        )
        apart = [
            f"{arm_size / size:.2f} times the {quantity}"
            for quantity, arm_size, size in sizes
            if arm_size and size and abs(arm_size / size - 1) > UNEVEN
        ]
        if apart and row is not reference:
            yield f"{row.arm} has {', '.join(apart)} of {reference.called}."


def _dead(rows: list[Row]) -> Iterator[str]:
    if not any(row.dead_parameters for row in rows):
        return
    from deltalab.models.dead_parameters import dead_parameters_text  # This module imports torch: it takes a second.

    for row in rows:
        if row.parameters and (text := dead_parameters_text(row.arm, row.dead_parameters, row.parameters)):
            yield text


def table_notes(
    rows: list[Row],
    front: list[str],
    interactions: list[Interaction],
    trials: list[TrialRow],
    outcomes: Mapping[str, Outcome],
) -> list[str]:
    """Returns the notes of a table: sentences that help to read it but are no warnings.

    Args:
        rows: The rows of the table.
        front: The arms on the Pareto front.
        interactions: The interactions of arms in the table.
        trials: All trials that the table rests on.
        outcomes: The test's outcome for each arm but the reference, by the arm's name.
    """
    return [
        *([f"Pareto front of mean, flops per token and state: {', '.join(front)}."] if front else []),
        *_about_seeds(rows, [arm for arm, outcome in outcomes.items() if outcome.stopped == "hopeless"]),
        *_about_budgets(rows),
        *(
            f"{pair.a} and {pair.b} together ({pair.both}) make {format_interval(pair.difference, '+')} beyond their "
            f"sum (p {format_p(pair.difference.p)}, exact, not corrected)."
            for pair in interactions
        ),
        *_about_states(rows),
        *_about_times(rows, trials),
    ]


def _about_seeds(rows: list[Row], hopeless: list[str]) -> Iterator[str]:
    for row in rows:
        if row.score.missing:
            yield (
                f"{row.arm}: {row.score.missing} of {row.score.n} seeds did not finish; each counts as the worst "
                "outcome of its seed."
            )
    if shares := [(row.arm, row.learned) for row in rows if row.learned]:
        learned = (f"{arm} {share.learned} of {share.n} [{share.low:.2f}, {share.high:.2f}]" for arm, share in shares)
        yield f"Seeds that learned, past half way from chance to the best possible: {', '.join(learned)}."
    if any(row.unbiased is not None for row in rows):
        yield (
            "Unbiased: a look decides an arm whose difference is large so far, so that the means of early decisions "
            "tend to be too large. Half of the unbiased differences are above the true ones, but they are less precise."
        )
    if hopeless:
        yield f"Stopped early, with little prospect of a verdict: {', '.join(hopeless)}."
    by_groups = any(row.difference and row.difference.of_base is not None for row in rows)
    if len({row.score.n for row in rows if row.score.n}) > 1 and not by_groups:
        yield "Arms have different numbers of seeds: a mean is over an arm's own, a difference over those of both."
    widths = [row.difference.high - row.difference.low for row in rows if row.difference and row.difference.n]
    if widths and math.isfinite(half := statistics.median(widths) / 2):
        yield f"The median interval reaches {half:.2g} to either side: a smaller difference can hardly be decided here."
    unbounded = [
        row.arm for row in rows if row.difference and row.difference.n and not math.isfinite(row.difference.low)
    ]
    if unbounded:
        yield f"No interval for {', '.join(unbounded)}: so few seeds cannot exclude any difference."


def _about_budgets(rows: list[Row]) -> Iterator[str]:
    if tuned := [row for row in rows if len(row.by_budget) > 1]:
        sizes = max((list(row.by_budget) for row in tuned), key=max)
        scores = ([row.by_budget[size] for size in sizes if size in row.by_budget] for row in tuned)
        expected = (
            f"{row.arm} {', '.join(f'{score:.3f}' for score in of_row)}"
            for row, of_row in zip(tuned, scores, strict=True)
        )
        each = sum(at == size for at, size in enumerate(sizes, 1))
        said = f"1 to {each}" + "".join(f", {size}" for size in sizes[each:])
        yield f"Expected score with {said} candidates: {'; '.join(expected)}."


def _about_states(rows: list[Row]) -> Iterator[str]:
    if any(row.state_size is not None and row.conv_cache is None for row in rows):
        yield (
            "State counts the convolution's cache and KV caches too: some trials were recorded by a release that did "
            "not tell them apart."
        )


def _about_times(rows: list[Row], trials: list[TrialRow]) -> Iterator[str]:
    reference = next(row for row in rows if row.is_reference)
    timed = [trial.hardware for trial in trials if trial.tokens_per_second]
    shares = [float(hardware["core_share"]) for hardware in timed if "core_share" in hardware]
    if 0 < len(shares) < len(timed):
        yield "Times are not comparable: some trials were timed by the clock on the wall, others by that of their core."
    elif shares and min(shares) < SHARED:
        yield (
            f"The machine was loaded: trainings had their core for {min(shares):.0%} to {max(shares):.0%} of the time. "
            "us/token counts that time alone."
        )
    elif not shares and (apart := [*_apart_in_time(rows, reference)]):
        yield (
            f"us/token differs at equal flops ({', '.join(apart)} times {reference.called}'s): the rules may take "
            "different time, or other work loaded the machine, which the clock on the wall does not tell apart."
        )
    differ = [
        name for key, name in TIMED_WITH.items() if len({json.dumps(hardware.get(key)) for hardware in timed}) > 1
    ]
    if differ:
        yield f"Times are not comparable: the arms differ in {', '.join(differ)}."


def _apart_in_time(rows: list[Row], reference: Row) -> Iterator[str]:
    """Yields the arms that take another time than the reference for the same arithmetic, each with the ratio."""
    for row in rows:
        if not (row.flops_per_token and reference.flops_per_token):
            continue
        if not (row.microseconds_per_token and reference.microseconds_per_token):
            continue
        times = row.microseconds_per_token / reference.microseconds_per_token
        if abs(row.flops_per_token / reference.flops_per_token - 1) <= UNEVEN and max(times, 1 / times) > SLOWER:
            yield f"{row.arm} {times:.2f}"


def headline_notes(rows: Sequence[Row], spec: RecordedSpec) -> list[str]:
    """Returns the notes of the table over tasks.

    Args:
        rows: The rows of the table.
        spec: The study's file.
    """
    notes = [
        "A normalized score is (score - chance) / (best - chance), where best is the best possible value of the task's "
        "metric, which is 0 for a loss without bounds.",
        "Difference, p and verdict are of the mean, tested by exchanging all runs of a seed on all tasks at once. The "
        "IQM is the mean without the least and the greatest quarter of an arm's scores over tasks and seeds; the "
        "intervals of its differences hold jointly over the arms, apart from those of the mean.",
    ]
    if len(spec.looks) > 1:
        notes.append(
            f"Only the first {spec.looks[0].seeds} seeds count here: which arms have more depends on their results on "
            "single tasks."
        )
    elif spec.seeds_of_base is not None:
        notes.append(f"Only the {spec.looks[0].seeds} seeds that arms and base share count here, in pairs.")
    lacking = [row.arm for row in rows if not row.score.n]
    if lacking:
        notes.append(f"Not on every task yet, or failed: {', '.join(lacking)}.")
    return notes


def infeasible_notes(trials: Sequence[TrialRow]) -> Iterator[str]:
    """Writes a line for each arm with candidates whose values make no valid model.

    Args:
        trials: All trials of one task.
    """
    for arm in dict.fromkeys(trial.arm for trial in trials):
        drawn = [trial for trial in trials if trial.arm == arm]
        infeasible = [trial for trial in drawn if trial.state == "infeasible"]
        if infeasible:
            yield (
                f"{len(infeasible)} of {len(drawn)} candidates drawn for {arm} make no model and did not run, "
                f"such as {settings_text(infeasible[0].values, 3)}: {infeasible[0].error}."
            )


def _about_looks(spec: RecordedSpec, *, is_open: bool) -> Iterator[str]:
    """Yields what further looks at the same arms cost."""
    if spec.is_further_look:
        *earlier, last = spec.looks
        tested = " and ".join(str(look.seeds) for look in earlier if look.is_last)
        yield (
            f"These arms were tested with {tested} seeds before: the test with {last.seeds} is a further look, which "
            f"decides an arm at p <= {left_error(earlier):.2g} of its own."
        )
    if is_open and not spec.is_ladder:
        yield (
            "More seeds are a further look at the same arms, which may err in "
            f"{left_error(spec.looks):.2g} of studies: the numbers of seeds that arms need count with that."
        )


def other_reference(against: str, base: str) -> str:
    """Returns the sentence that a comparison with another arm than the base begins with."""
    return (
        f"Compared with {against}, while the study was planned against {base}: p-values and intervals hold for one "
        "such choice of reference, made before looking at results. Another choice is another family of tests, with "
        f"its own {ALPHA:.0%}."
    )


def answer_notes(
    stage: Stage,
    ledger: RecordedScores,
    *,
    is_choice: bool,
    is_open: bool,
    against: str | None,
    has_metrics: bool,
    has_headline: bool,
    presets: str,
) -> list[str]:
    """Returns sentences that explain how to read an answer.

    Args:
        stage: The stage whose scores the answer compares.
        ledger: The study's file and tasks.
        is_choice: Whether a seed chooses among several runs.
        is_open: Whether more seeds would decide an arm.
        against: The arm that the others are compared with in place of the base.
        has_metrics: Whether a table has further metrics.
        has_headline: Whether the answer has a table over tasks.
        presets: The sentence that says which arms are as published.
    """
    spec = ledger.spec
    if stage == "tune":
        return [
            "Each arm's best candidate on the validation split: optimistic, and no answer. "
            "The answer is on the test split.",
            SMALL,
        ]
    family = "the study's" if spec.is_one_family else "a task's"
    families = 1 if spec.is_one_family else max(1, len(spec.tasks))
    error = IN_ALL if spec.is_further_look else spec.looks[-1].spent  # The data may have chosen its seeds.
    most = 1 - (1 - error) ** families
    score = "A seed's score is that on the test split at the last step."
    if is_choice:
        does = "tries every training of its arm" if spec.is_search else "trains every candidate"
        score = (
            f"A seed {does}; its score is the mean of its runs' test scores at the last step, weighted by how well the "
            "candidates did on validation with the arm's other seeds."
        )
    return [
        f"{score} Means are over seeds, with a 95% t interval.",
        _about_test(spec, family, against),
        f"Equal means that two one-sided tests at {ALPHA} find the difference smaller than the margin; better and "
        "worse, that the interval leaves out 0, and by over the margin, the margin too; equal or better, that the arm "
        "is not worse by the margin.",
        *(
            [
                "Further metrics are means over the seeds that have them, weighted as the score is, with a 95% t "
                "interval: no test compares them."
            ]
            if has_metrics
            else []
        ),
        "Costs are those of the tuned candidate: time per trained token, elements of state, parameters.",
        f"Whole study: if no arm differed from {against or 'the base'}, at most {100 * most:.3g}% of such studies "
        f"would find a difference{' on a task' if has_headline else ''}"
        + (f", {100 * error:.3g}% on each task; family: study keeps to it." if families > 1 else "."),
        *_about_engine(ledger),
        *_about_flops(ledger),
        *_about_seconds(ledger),
        *_about_headline(ledger, has_headline),
        *_about_looks(spec, is_open=is_open),
        *([presets] if presets else []),
        SMALL,
    ]


def _about_test(spec: RecordedSpec, family: str, against: str | None) -> str:
    """Returns what test gave differences, p and intervals."""
    if spec.seeds_of_base is None or against is not None:
        shared = "" if spec.seeds_of_base is None else f", on the {spec.looks[0].seeds} that all have"
        return (
            f"Differences are arm minus {against or 'base'}, paired by seed{shared}. Intervals and p are of one exact "
            f"sign-flip test over {family} arms and hold jointly."
        )
    return (
        f"Differences are arm minus base, {spec.looks[0].seeds} seeds against {spec.seeds_of_base}, not paired. p is "
        "that of an exact test by relabelling runs, or of Welch's test if that is larger, times the number of "
        f"{family} arms; so intervals hold jointly."
    )


def _about_engine(ledger: RecordedScores) -> Iterator[str]:
    """Yields what trained the runs, and where their learning rates come from, of a study with an engine."""
    trials = [trial for trial in ledger.trials if trial.stage == "confirm"]
    if trials and (engine := ledger.spec.values.get("engine")):
        rates = _rates(ledger.spec, trials, engine.get("recipe"))
        trained = f"Each run was trained by {engine['name']}"
        yield f"{trained}; {rates}. Its weights were measured on the test split by deltalab."


def _rates(spec: RecordedSpec, trials: Sequence[TrialRow], recipe: str | None) -> str:
    """Says which learning rates trials had, and whether a sweep, a recipe or the file gave them, and at which width."""
    by_arm: dict[str, set[float]] = {}
    for trial in trials:
        by_arm.setdefault(trial.arm, set()).add(trial.config["train"]["lr"])
    if "train.lr" in spec.tuned:
        tried = set[float]().union(*by_arm.values())
        return f"{len(tried)} learning rates were swept at {'each' if spec.is_ladder else 'this'} size, {_span(tried)}"
    transferred = spec.is_ladder and spec.scales.transfer == "mup"
    of_width = f" at width {trials[0].config['model']['base_width']}, which mup scales" if transferred else ""
    own = {arm: rates for arm, rates in by_arm.items() if not rates <= by_arm.get("base", rates)}
    of_base = set[float]().union(*(rates for arm, rates in by_arm.items() if arm not in own))
    source, rest = f"recipe {recipe}" if recipe else "the file", [f"{arm} has {_span(own[arm])}" for arm in own]
    first = f"{'other' if own else 'all'} arms have the learning rate of {source}, {_span(of_base)}{of_width}"
    return "; ".join([first, *rest])


def _span(values: Collection[float]) -> str:
    """Returns a number, or the least and the largest of several.

    Examples:
        >>> _span({0.002}), _span({0.002, 0.001, 0.004})
        ('0.002', '0.001 to 0.004')
    """
    return " to ".join(f"{end:g}" for end in sorted({min(values), max(values)}))


def _about_flops(ledger: RecordedScores) -> Iterator[str]:
    """Yields how many operations each run trained for, where they gave the steps."""
    values, lines = ledger.spec.values, []
    for task in ledger.tasks:
        sections = [values.get("base"), (values.get("for_task") or {}).get(ledger.spec.task_of(task))]
        given = [flops for section in sections if section and (flops := (section.get("train") or {}).get("flops"))]
        if not given:
            continue
        trials = [trial for trial in ledger.trials if (trial.task, trial.stage) == (task, "confirm")]
        if steps := {trial.config["train"]["steps"] for trial in trials}:
            span = f"{min(steps):,}" if len(steps) == 1 else f"{min(steps):,} to {max(steps):,}"
            lines.append(f"{given[-1]:g} on {task}, in {span} steps")
    if lines:
        yield (
            "train.flops: each run took the most whole steps within as many operations of matrix products, forward "
            f"and backward: {'; '.join(lines)}."
        )


def _about_seconds(ledger: RecordedScores) -> Iterator[str]:
    """Yields how many steps the runs of each arm made in their time, where time ends them."""
    for task in ledger.tasks:
        reached: dict[str, list[float]] = {}
        given: set[tuple[float, int]] = set()
        for trial in ledger.trials:
            if (trial.task, trial.stage) == (task, "confirm") and (
                seconds := trial.config.get("train", {}).get("seconds")
            ):
                given.add((seconds, trial.config["train"]["steps"]))
                steps = ledger.finals.get(trial.key, {}).get(("cost", STEPS), {})
                reached.setdefault(trial.arm, []).extend(steps.values())
        for seconds, most in given:
            spans = [
                f"{arm} {min(steps):,.0f}" + (f" to {max(steps):,.0f}" if min(steps) < max(steps) else "")
                for arm, steps in reached.items()
                if steps
            ]
            yield (
                f"train.seconds: each run on {task} trained for {seconds:g} s of steps, or for {most:,} steps if these "
                f"ended before. Steps reached: {'; '.join(spans)}."
            )


def _about_headline(ledger: RecordedScores, has_headline: bool) -> Iterator[str]:
    if has_headline:
        yield f"The table over tasks is a family of its own, and adds at most {ALPHA:.0%} to this."
    elif not ledger.spec.is_ladder and len(ledger.tasks) > 1:
        unknown = [task.name for task in ledger.tasks.values() if task.perfect is None]
        yield f"No mean over tasks: the best possible value is not known of {', '.join(unknown)}."
