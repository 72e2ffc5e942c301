"""Writes a study's answer in one sentence, and its verdicts in a word or two."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deltalab.statistics.joint_test import ALPHA, Difference, seeds_needed, smallest_p
from deltalab.study.answers.answer import Answer
from deltalab.study.answers.ladder_trends import TaskLadder
from deltalab.study.answers.rows import Row, TaskTable
from deltalab.study.answers.wording import format_p, verdict_text

DECIDED = ("better", "worse", "equal")
"""The verdicts that leave nothing open."""
MOST_SEEDS = 1000
"""An arm that would need more seeds is said to need "over 1,000", since the difference is next to nothing."""
MOST_NAMES = 3
"""The most arms of one verdict that are named; more are counted."""
CLEARLY_SMALLER = 0.9
"""The largest share of the mean at which an unbiased difference is told of."""
BEGINNINGS = {
    "running": "So far, while the study runs: ",
    "interrupted": "Interrupted, so verdicts may change: ",
    "incomplete": "Incomplete until the next run tries its lost trials again: ",
    "failed": "Some trials failed; of the others: ",
}

"""How the sentence begins, by the state of the study."""


class Comparison(NamedTuple):
    """The comparison of an arm with the base, or another reference, on one task.

    Attributes:
        table: The table of the task.
        row: The row of the arm.
        difference: The difference of the arm to the reference.
    """

    table: TaskTable
    row: Row
    difference: Difference

    @property
    def is_better(self) -> bool:
        """Whether the arm is better than the reference."""
        return self.row.verdict == "better"

    @property
    def is_decided(self) -> bool:
        """Whether the arm is better or worse than the reference."""
        return self.row.verdict in ("better", "worse")


def short_verdict(row: Row) -> str:
    """Returns a row's verdict in a few words, with the seeds that would decide it.

    "undecidable" means that there are too few seeds to find any difference.
    """
    difference = row.difference
    if difference is None or not difference.n or row.verdict in DECIDED:
        return verdict_text(row)
    if smallest_p(difference.n) > ALPHA:
        return f"undecidable: needs {_seeds(row.seeds_needed or seeds_needed())}"
    if row.seeds_needed:
        return f"{row.verdict}: needs {_seeds(row.seeds_needed)}"
    return row.verdict if difference.mean else f"{row.verdict}: no difference"


def verdict_counts(answer: Answer) -> dict[str, int]:
    """Counts the comparisons with the reference that are better, worse, equal and undecided, over arms and tasks."""
    compared = _comparisons(answer.tables)
    verdicts = [row.verdict if row.verdict in DECIDED else "undecided" for _, row, _ in compared]
    return {verdict: verdicts.count(verdict) for verdict in (*DECIDED, "undecided")}


def sentence(answer: Answer) -> str:
    """Returns the answer of a study in one sentence of plain text."""
    if answer.stage == "tune":
        return _of_tuning(answer)
    compared = list(_comparisons(answer.tables))
    decided = [comparison for comparison in compared if comparison.is_decided]
    equal = [comparison for comparison in compared if comparison.row.verdict == "equal"]
    if not compared:
        return _of_nothing(answer)
    if decided:
        text = _of_decided(decided, compared, answer.ladders)
        text += f"; {_equal(equal)}" if equal else ""
    else:
        text = f"no arm is better or worse: {_equal(equal)}" if equal else _of_undecided(compared)
    if equal and (undecided := len(compared) - len(decided) - len(equal)):
        text += f"; {undecided} of {len(compared)} comparisons are undecided"
    over = [*_comparisons([answer.headline] if answer.headline else [])]
    leads = bool(over) and bool(decided or any(comparison.is_decided for comparison in over))
    if leads:
        text = f"{_over_tasks(over)}; {'' if decided else 'on single tasks '}{text}"
    beginning = BEGINNINGS.get(answer.state, "")
    if not beginning and (leads or not decided):
        text = text[0].upper() + text[1:]
    return f"{beginning}{text}."


def _comparisons(tables: Sequence[TaskTable]) -> Iterator[Comparison]:
    """Yields the comparison of each arm with the reference on each task that has one."""
    for table in tables:
        for row in table.rows:
            if row.difference is not None and row.difference.n:
                yield Comparison(table, row, row.difference)


def _over_tasks(over: list[Comparison]) -> str:
    """A clause on the arm that is most clearly better than the reference over all tasks, or worse if none is better."""
    decided = [comparison for comparison in over if comparison.is_decided]
    better = [comparison for comparison in decided if comparison.is_better]
    where = f"over {len(over[0].table.over)} tasks"
    if not decided:
        return f"{where} no arm is told from {over[0].table.reference.called}"
    table, row, difference = max(better or decided, key=_clarity)
    beats = "beats" if better else "is worse than"
    return (
        f"{where} {row.arm} {beats} {table.reference.called} by {_amount(difference.mean)} {table.metric} "
        f"(p {format_p(difference.p)})"
    )


def _of_decided(decided: list[Comparison], compared: list[Comparison], ladders: Sequence[TaskLadder]) -> str:
    """A sentence on the arm that is most clearly better than the reference; on the clearest worse arm if none is."""
    better = [comparison for comparison in decided if comparison.is_better]
    table, row, difference = max(better or decided, key=_clarity)
    beats = "beats" if better else "is worse than"
    text = (
        f"{row.arm} {beats} {table.reference.called} on {table.trained} by {_amount(difference.mean)} {table.metric} "
        f"({_without_optimism(row, difference)}p {format_p(difference.p)}, {_seeds(difference.n)})"
    )
    elsewhere = [other for other in decided if other.row.arm == row.arm and other.table.task != table.task]
    also = _tasks([other for other in elsewhere if other.is_better == bool(better)])
    against = _tasks([other for other in elsewhere if other.is_better != bool(better)])
    text += f", and on {also}" if also else ""
    text += f", but is worse on {against}" if against else ""
    text += _trend(ladders, row.arm)
    leading = _arms(better or decided)
    text += _also([arm for arm in leading if arm != row.arm], "better too" if better else "worse too")
    if better:
        text += _also([arm for arm in _arms(decided) if arm not in leading], "worse")
    else:
        text += "; no arm beats it" if len(_arms(compared)) > 1 else ""
    return text


def _arms(comparisons: Sequence[Comparison]) -> list[str]:
    """The arms of comparisons, once each, the clearest first."""
    return list(dict.fromkeys(comparison.row.arm for comparison in sorted(comparisons, key=_clarity, reverse=True)))


def _also(arms: Sequence[str], verdict: str) -> str:
    """A clause that says a verdict of arms, by name if they are at most `MOST_NAMES`; empty without arms."""
    if not arms:
        return ""
    *first, last = arms
    names = f"{', '.join(first)} and {last}" if first else last
    if len(arms) > MOST_NAMES:
        names = f"{len(arms)} more arms"
    return f"; {names} {'are' if first else 'is'} {verdict}"


def _equal(equal: list[Comparison]) -> str:
    """A clause on the arms that equal the reference, with the margin of each metric."""
    margins = {comparison.table.metric: comparison.table.margin for comparison in equal}
    within = " and ".join(f"{margin:g} {metric}" for metric, margin in margins.items())
    arms = {comparison.row.arm for comparison in equal}
    several = len(equal) == len(arms)
    named = ", ".join(sorted(arms)) if several and len(arms) < 3 else f"{len(arms)} arms"
    tasks = _tasks([*{comparison.table.task: comparison for comparison in equal}.values()]).replace(" more", "")
    verb = "equals" if len(arms) == 1 else "equal"
    return f"{named} {verb} {equal[0].table.reference.called} within {within} on {tasks}"


def _of_undecided(compared: list[Comparison]) -> str:
    """A sentence on the arm that is nearest to a verdict, and on the number of seeds that would decide it."""

    def distance(comparison: Comparison) -> tuple[float, float]:
        return comparison.row.seeds_needed or math.inf, comparison.difference.p

    table, row, difference = min(compared, key=distance)
    seeds = max(comparison.difference.n for comparison in compared)
    needed = row.seeds_needed
    if smallest_p(seeds) > ALPHA:
        text = f"{_seeds(seeds)} cannot decide anything, which takes at least {seeds_needed()}"
        if needed and needed > seeds_needed():
            text += f"; the nearest to a verdict, {row.arm} on {table.task}, needs {_about(needed)}"
        return text
    arms = len({comparison.row.arm for comparison in compared})
    text = f"{_seeds(seeds)} tell {'no arm' if arms > 1 else f'no difference between {row.arm} and'}"
    text += f" {'from ' if arms > 1 else ''}{table.reference.called}"
    if not needed:
        return f"nothing is decided: {text}" if difference.mean else f"nothing is decided: {text}, whose scores agree"
    nearest = f"{row.arm} on {table.task} ({difference.mean:+.3g} {table.metric}, p {format_p(difference.p)})"
    return f"nothing is decided: {text}; {_about(needed)} would decide {nearest}"


def _of_tuning(answer: Answer) -> str:
    """A sentence on the arms that lead on validation while a study tunes."""
    leads = [f"{table.best.arm} leads on {table.task}" for table in answer.tables if table.best]
    if not leads:
        return "Tuning has scored no candidate yet, so nothing is answered."
    several = f"{leads[0]} and so on, task by task" if len(leads) > 2 else " and ".join(leads)
    return f"No answer, since the best of a sweep is optimistic: on validation {several}."


def _of_nothing(answer: Answer) -> str:
    """A sentence on why no arm is compared."""
    arms = {row.arm for table in answer.tables for row in table.rows}
    measured = [(table, row) for table in answer.tables for row in table.rows if math.isfinite(row.score.mean)]
    if len(arms) == 1 and measured and not answer.search:
        table, row = measured[0]
        scored = f"{row.score.mean:.3g} {table.metric} on {table.task}"
        return f"Nothing to compare: the study has only its base, with {scored}."
    reference = answer.against or "the base"
    reasons = {
        "done": f"The study is done, and no arm could be compared with {reference}.",
        "failed": f"The study failed before any arm could be compared with {reference}.",
        "incomplete": "Incomplete: run the study again, which tries its lost trials again; no arm is compared yet.",
        "interrupted": "Interrupted before any arm could be compared: run the study again, and it goes on.",
    }
    if answer.state in reasons:
        return reasons[answer.state]
    return "No answer yet: " + ("confirmation has begun." if measured else "confirmation has not begun.")


def _trend(ladders: Sequence[TaskLadder], arm: str) -> str:
    """A clause on how an arm's difference to the reference changes with size."""
    verdicts = {row.verdict for ladder in ladders for row in ladder.arms if row.arm == arm}
    trend = verdicts.pop() if len(verdicts) == 1 else "not decidable"
    return "" if trend == "not decidable" else f"; with size, the difference {trend}"


def _clarity(comparison: Comparison) -> tuple[float, float]:
    """The clarity of a decided comparison, for sorting: p, then the difference divided by its interval's width."""
    difference = comparison.difference
    width = difference.high - difference.low
    return -difference.p, abs(difference.mean) / width if width else math.inf


def _without_optimism(row: Row, difference: Difference) -> str:
    """A clause on the unbiased difference of an arm, if it is clearly smaller than the mean."""
    if row.unbiased is None or abs(row.unbiased) > CLEARLY_SMALLER * abs(difference.mean):
        return ""
    return f"about {_amount(row.unbiased)} without the optimism of several looks, "


def _amount(difference: float) -> str:
    """The size of a difference without its sign."""
    return f"{abs(difference):.3g}"


def _tasks(comparisons: Sequence[Comparison]) -> str:
    """The tasks of comparisons as text; their number if there are more than two."""
    names = [comparison.table.task for comparison in comparisons]
    return " and ".join(names) if len(names) < 3 else f"{len(names)} more tasks"


def _seeds(n: int | None) -> str:
    """A number of seeds as text."""
    if n is not None and n > MOST_SEEDS:
        return f"over {MOST_SEEDS:,} seeds"
    return f"{n} seed{'' if n == 1 else 's'}"


def _about(n: int) -> str:
    """An estimated number of seeds as text."""
    return _seeds(n) if n > MOST_SEEDS else f"about {_seeds(n)}"
