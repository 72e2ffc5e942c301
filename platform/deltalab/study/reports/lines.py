"""Writes the titles, captions, ladders, trainings and failures that every form of a report shows, as text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from deltalab.reading import pairs
from deltalab.store.trainings import TrainingRow
from deltalab.study.answers.answer import Answer, Failure
from deltalab.study.answers.ladder_trends import TaskLadder
from deltalab.study.answers.rows import TaskTable
from deltalab.study.answers.wording import format_interval, format_metric, format_p
from deltalab.study.specs.setting_paths import training_part

if TYPE_CHECKING:
    from deltalab.study.reports.search_sections import Section

TRAININGS = "Trainings of exported folders"
TRAINING_HEADERS = (
    "training", "arm", "rule", "parameters", "steps", "tokens", "train loss", "validation loss", "tokens/s",
    "evaluations",
)  # fmt: skip
COMPARISONS = "Evaluations compared item by item"
COMPARISON_HEADERS = ("training", "compared with", "evaluation", "difference", "p", "items")
COMPARISON_NOTE = (
    "A difference is the training's value less that of the model that it is compared with; ln: of logarithms. All 95% "
    "intervals of one `deltalab eval` hold together."
)


def title(answer: Answer) -> str:
    """Returns the title of a report: the study, the way it was run, and its progress."""
    profile = f"profile {answer.profile}" if answer.profile else "default profile"
    state = answer.state if answer.state in ("done", "failed") else f"{answer.state}: verdicts may change"
    settings = f", with {pairs(answer.overrides)}" if answer.overrides else ""
    against = f", against {answer.against}" if answer.against else ""
    return f"{answer.study}, {profile}{settings}{against}, id {answer.study_id} ({state})"


def shown_tables(answer: Answer) -> list[TaskTable]:
    """Returns the tables as readers see them.

    The report of a search describes each arm in a separate line, so its tables leave the descriptions out.
    """
    if answer.search is None:
        return answer.all_tables
    return [
        replace(table, rows=[replace(row, tuned=training_part(row.tuned)) for row in table.rows])
        for table in answer.all_tables
    ]


def search_lines(answer: Answer, most: int | None = None) -> "list[Section]":
    """Returns the findings of a search in sections; [] for a study without a search.

    Args:
        answer: The answer of a study.
        most: How many rows a table shows at most; None shows all.
    """
    if answer.search is None:
        return []
    from deltalab.study.reports.search_sections import sections  # This module imports Optuna, which takes a second.

    return sections(answer.search, most)


def caption(table: TaskTable) -> str:
    """Returns the caption of a table: its task, metric and split, in one line."""
    direction = "higher" if table.maximize else "lower"
    margin = f", margin {table.margin:.3g}" if table.margin else ""
    if table.over:
        return f"Over {len(table.over)} tasks: mean {table.metric} on {table.split}, {direction} is better{margin}"
    return (
        f"{table.trained} (version {table.version}): {table.metric} on {table.split}, {direction} is better, "
        f"chance {table.chance:.3g}{margin}"
    )


def metrics_caption(table: TaskTable) -> str:
    """Returns the caption of a table of further metrics in one line."""
    return f"Further metrics of {table.task} on {table.split}, not tested"


def metrics_headers(table: TaskTable) -> list[str]:
    """Returns the headings of the columns of `metrics_cells`."""
    return ["arm", *table.metrics]


def metrics_cells(table: TaskTable) -> list[list[str]]:
    """Returns the cells of a table of further metrics: a row for each arm that has any."""
    return [
        [row.arm, *(format_metric(row.metrics[name]) if name in row.metrics else "" for name in table.metrics)]
        for row in table.rows
        if row.metrics
    ]


def training_cells(row: TrainingRow) -> list[str]:
    """Returns the text of a training in each column of `TRAINING_HEADERS`; "" for a figure that is not known."""
    losses = [f"{row.losses[split]:.4f}" if split in row.losses else "" for split in ("train", "validation")]
    return [
        row.name,
        row.arm or "",
        row.rule,
        "" if row.parameters is None else f"{row.parameters:,}",
        f"{row.steps:,}",
        f"{row.tokens:,}",
        *losses,
        "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        ", ".join(
            f"{name} {value:.4g}" + (f" ± {row.stderrs[name]:.2g}" if name in row.stderrs else "")
            for name, value in row.evaluations.items()
        ),
    ]


def comparison_cells(rows: Sequence[TrainingRow]) -> list[list[str]]:
    """Returns the text of each comparison of trainings in each column of `COMPARISON_HEADERS`."""
    return [
        [
            row.name,
            one.reference,
            f"{one.name} (ln)" if one.is_log else one.name,
            f"{one.difference:+.4g} [{one.low:+.4g}, {one.high:+.4g}]",
            format_p(one.p),
            f"{one.items:,}",
        ]
        for row in rows
        for one in row.comparisons
    ]


def ladder_caption(ladder: TaskLadder) -> str:
    """Returns the caption of a ladder in one line."""
    direction = "higher" if ladder.maximize else "lower"
    return f"Ladder of {ladder.task}: differences to {ladder.reference} in {ladder.metric}, {direction} is better"


def ladder_headers(ladder: TaskLadder) -> list[str]:
    """Returns the headings of the columns of `ladder_cells`."""
    sizes = [size.label.removeprefix(f"{ladder.task}.") for size in ladder.sizes]
    return ["arm", *sizes, "slope", "p", "verdict"]


def ladder_cells(ladder: TaskLadder) -> list[list[str]]:
    """Returns the cells of a ladder's table: a row for each arm but the one that they are compared with."""
    return [
        [
            row.arm,
            *(format_interval(difference, "+") for difference in row.differences),
            format_interval(row.slope, "+"),
            format_p(row.slope.p),
            row.verdict,
        ]
        for row in ladder.arms
        if row.slope is not None
    ]


def ladder_notes(ladder: TaskLadder) -> list[str]:
    """Returns sentences on the fits of a ladder and on how to read its table."""
    computes = ", ".join(f"{size.compute:.2g}" for size in ladder.sizes)
    notes = [
        f"Operations of {ladder.reference}'s training, by size: {computes}. The slope is per tenfold of them, tested "
        "over all arms by flips of whole seeds; intervals of differences hold jointly over sizes and arms.",
        *ladder.notes,
    ]
    for row in ladder.arms:
        if row.fit:
            a, b, c = (
                f"{value:.3g} [{low:.3g}, {high:.3g}]"
                for value, low, high in zip((row.fit.a, row.fit.b, row.fit.c), row.fit.low, row.fit.high, strict=True)
            )
            notes.append(
                f"{row.arm}: loss = a + b C^-c with a {a}, b {b}, c {c}; C 1 is {ladder.reference}'s smallest size."
            )
        for prediction in row.predictions:
            notes.append(
                f"{row.arm} at {prediction.label}, which the fits left out: predicted difference in loss "
                f"{format_interval(prediction.predicted, '+')}, measured {format_interval(prediction.measured, '+')}: "
                + ("they agree." if prediction.agrees else "the prediction misses.")
            )
    return notes


def failure_lines(failures: Sequence[Failure]) -> list[str]:
    """Returns a line for each trial that raised an error."""
    return [f"failed: {failure.name} on {failure.task}: {failure.message}" for failure in failures]
