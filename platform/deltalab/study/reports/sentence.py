"""A study's answer in one sentence, and its verdicts in a word or two."""

import math
from collections.abc import Iterator, Sequence

from deltalab.study.answers.answer import Answer, Row, TaskTable, format_p
from deltalab.study.answers.ladder_trends import Ladder
from deltalab.study.statistics.joint_test import ALPHA, Difference, seeds_needed, smallest_p

MOST_SEEDS = 1000
"""An arm that would need more seeds is said to need "over 1,000": the difference is next to nothing."""
BEGINNINGS = {
    "running": "So far, while the study runs: ",
    "interrupted": "Interrupted, so verdicts may change: ",
    "incomplete": "Incomplete until the next run tries its lost trials again: ",
    "failed": "Some trials failed; of the others: ",
}

Compared = tuple[TaskTable, Row, Difference]


def short(row: Row) -> str:
    """A row's verdict in a word or two.

    "undecided" means that so many seeds found no difference, and "undecidable" that so few could find none.
    """
    found = row.difference
    if found is None or not found.n or found.decided:
        return row.verdict
    if smallest_p(found.n) > ALPHA:
        return f"undecidable: needs {_seeds(row.seeds_needed or seeds_needed())}"
    return f"undecided: needs {_seeds(row.seeds_needed)}" if row.seeds_needed else "undecided: no difference"


def best(table: TaskTable) -> str | None:
    """The arm with the best mean; None where no arm has one, or several share it."""
    means = {row.arm: row.score.mean for row in table.rows if math.isfinite(row.score.mean)}
    if not means:
        return None
    most = (max if table.maximize else min)(means.values())
    arms = [arm for arm, mean in means.items() if mean == most]
    return arms[0] if len(arms) == 1 else None


def counts(found: Answer) -> dict[str, int]:
    """How many comparisons of an arm on a task are better, worse and undecided."""
    said = [row.verdict if difference.decided else "undecided" for _, row, difference in _compared(found.tables)]
    return {verdict: said.count(verdict) for verdict in ("better", "worse", "undecided")}


def sentence(found: Answer) -> str:
    """The answer of a study in one sentence of plain text."""
    if found.stage == "tune":
        return _of_tuning(found)
    compared = list(_compared(found.tables))
    decided = [one for one in compared if one[2].decided]
    if not compared:
        return _of_nothing(found)
    said = _of_decided(decided, compared, found.ladders) if decided else _of_undecided(compared)
    beginning = BEGINNINGS.get(found.state, "")
    if not beginning and not decided:
        said = said[0].upper() + said[1:]
    return f"{beginning}{said}."


def _compared(tables: Sequence[TaskTable]) -> Iterator[Compared]:
    for table in tables:
        for row in table.rows:
            if row.difference is not None and row.difference.n:
                yield table, row, row.difference


def _of_decided(decided: list[Compared], compared: list[Compared], ladders: Sequence[Ladder]) -> str:
    """The clearest arm that is better than the base; the clearest worse one where none is."""
    better = [one for one in decided if one[1].verdict == "better"]
    table, row, difference = max(better or decided, key=_clarity)
    beats = "beats" if better else "is worse than"
    said = (
        f"{row.arm} {beats} the base on {table.task} by {_amount(difference.mean)} {table.metric} "
        f"(p {format_p(difference.p)}, {_seeds(difference.n)})"
    )
    own = [one for one in decided if one[1].arm == row.arm and one[0].task != table.task]
    also = _tasks([one for one in own if (one[1].verdict == "better") == bool(better)])
    against = _tasks([one for one in own if (one[1].verdict == "better") != bool(better)])
    said += f", and on {also}" if also else ""
    said += f", but is worse on {against}" if against else ""
    said += _trend(ladders, row.arm)
    arms = {one[1].arm for one in (better or decided)} - {row.arm}
    if arms:
        others = next(iter(arms)) if len(arms) == 1 else f"{len(arms)} more arms"
        verb = "is" if len(arms) == 1 else "are"
        said += f"; {others} {verb} {'better' if better else 'worse'} too"
    if not better:
        said += "; no arm beats it" if len({one[1].arm for one in compared}) > 1 else ""
    return said


def _of_undecided(compared: list[Compared]) -> str:
    """The arm nearest to a verdict, and the seeds that it needs."""
    table, row, difference = min(compared, key=lambda one: (one[1].seeds_needed or math.inf, one[2].p))
    seeds = max(one[2].n for one in compared)
    needed = row.seeds_needed
    if smallest_p(seeds) > ALPHA:
        said = f"{_seeds(seeds)} cannot decide anything, which takes at least {seeds_needed()}"
        if needed and needed > seeds_needed():
            said += f"; the nearest to a verdict, {row.arm} on {table.task}, needs {_about(needed)}"
        return said
    arms = len({one[1].arm for one in compared})
    said = f"{_seeds(seeds)} tell {'no arm' if arms > 1 else f'no difference between {row.arm} and'}"
    said += " from the base" if arms > 1 else " the base"
    if not needed:
        return f"nothing is decided: {said}" if difference.mean else f"nothing is decided: {said}, whose scores agree"
    nearest = f"{row.arm} on {table.task} ({difference.mean:+.3g} {table.metric}, p {format_p(difference.p)})"
    return f"nothing is decided: {said}; {_about(needed)} would decide {nearest}"


def _of_tuning(found: Answer) -> str:
    leads = [f"{best(table)} leads on {table.task}" for table in found.tables if best(table)]
    if not leads:
        return "Tuning has scored no candidate yet, so nothing is answered."
    several = f"{leads[0]} and so on, task by task" if len(leads) > 2 else " and ".join(leads)
    return f"No answer, since the best of a sweep is optimistic: on validation {several}."


def _of_nothing(found: Answer) -> str:
    """Why nothing is compared."""
    arms = {row.arm for table in found.tables for row in table.rows}
    measured = [(table, row) for table in found.tables for row in table.rows if math.isfinite(row.score.mean)]
    if len(arms) == 1 and measured and not found.search:
        table, row = measured[0]
        scored = f"{row.score.mean:.3g} {table.metric} on {table.task}"
        return f"Nothing to compare: the study has only its base, with {scored}."
    ended = {
        "done": "The study is done, and no arm could be compared with the base.",
        "failed": "The study failed before any arm could be compared with the base.",
        "incomplete": "Incomplete: run the study again, which tries its lost trials again; no arm is compared yet.",
        "interrupted": "Interrupted before any arm could be compared: run the study again, and it goes on.",
    }
    if found.state in ended:
        return ended[found.state]
    return "No answer yet: " + ("confirmation has begun." if measured else "confirmation has not begun.")


def _trend(ladders: Sequence[Ladder], arm: str) -> str:
    """What becomes of an arm's difference with size."""
    said = {row.verdict for ladder in ladders for row in ladder.arms if row.arm == arm}
    trend = said.pop() if len(said) == 1 else "not decidable"
    return "" if trend == "not decidable" else f"; with size, the difference {trend}"


def _clarity(one: Compared) -> tuple[float, float]:
    """The order of decided arms: by p, then by the difference over the width of its interval."""
    difference = one[2]
    width = difference.high - difference.low
    return -difference.p, abs(difference.mean) / width if width else math.inf


def _amount(difference: float) -> str:
    return f"{abs(difference):.3g}"


def _tasks(of: Sequence[Compared]) -> str:
    names = [table.task for table, _, _ in of]
    return " and ".join(names) if len(names) < 3 else f"{len(names)} more tasks"


def _seeds(n: int | None) -> str:
    if n is not None and n > MOST_SEEDS:
        return f"over {MOST_SEEDS:,} seeds"
    return f"{n} seed{'' if n == 1 else 's'}"


def _about(n: int) -> str:
    return _seeds(n) if n > MOST_SEEDS else f"about {_seeds(n)}"
