"""The best arm of a study in a few words, which a list of many studies shows: kept, since exact tests take seconds."""

import math
from typing import Any

from deltalab.store import Store
from deltalab.store.shelf import Listed, keep_best
from deltalab.study.answers.answer import Answer, answer

ENDED = ("done", "failed")


def best(found: Answer) -> dict[str, Any] | None:
    """The arm with the best mean on the first task on which an arm is better than the base, else on the first task.

    Its task, metric, arm, mean, verdict, whether it is the base, and how many tasks the study has. {} where nothing is
    measured; None for a study that has not ended.
    """
    if found.state not in ENDED:
        return None
    won = (table for table in found.tables if any(row.verdict == "better" for row in table.rows))
    table = next(won, found.tables[0])
    rows = [row for row in table.rows if math.isfinite(row.score.mean)]
    if not rows:
        return {}
    sign = 1 if table.maximize else -1
    top = max(rows, key=lambda row: (sign * row.score.mean, row.is_base))
    return {
        "task": table.task,
        "metric": table.metric,
        "arm": top.arm,
        "is_base": top.is_base,
        "mean": top.score.mean,
        "verdict": top.verdict,
        "tasks": len(found.tables),
    }


def keep(store: Store, study_id: int) -> None:
    """Finds a study's best arm and keeps it in the ledger, where an earlier release has not.

    Raises `InputError` where the ledger cannot be written.
    """
    keep_best(store, study_id, best(answer(store, study_id, intervals=False)))


def told(kept: dict[str, Any] | None) -> str:
    """What `best` found, in words.

    >>> kept = {"arm": "iplr", "mean": 0.9012, "is_base": False, "verdict": "better"}
    >>> told(kept), told({**kept, "verdict": "no difference found at this budget"}), told(None)
    ('iplr 0.901, better', 'iplr 0.901, no difference found', '')
    >>> told({**kept, "arm": "base", "is_base": True, "verdict": "base"})
    'base 0.901'
    >>> told({**kept, "task": "mqar", "tasks": 2})
    'iplr 0.901 on mqar, better'
    """
    if not kept:
        return ""
    said = f"{kept['arm']} {kept['mean']:.3f}" + (f" on {kept['task']}" if kept.get("tasks", 1) > 1 else "")
    if kept["is_base"]:
        return said
    return f"{said}, {'better' if kept['verdict'] == 'better' else 'no difference found'}"


def lacking(rows: list[Listed]) -> list[Listed]:
    """The studies that ended under a release that kept no best arm."""
    return [row for row in rows if row.best is None and row.state in ENDED]
