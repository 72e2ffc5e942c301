"""Finds the best arm of a study for lists of studies, and keeps it in the ledger, since exact tests take seconds."""

from typing import Any

from deltalab.store import Store
from deltalab.store.studies.shelf import ListedStudy, keep_best
from deltalab.study.answers.answer import Answer, answer

ENDED = ("done", "failed")
"""The states of a study that has ended."""
_OF_EARLY_RELEASES = "no difference found at this budget"
"""A verdict that ledgers keep of studies that ended under an early release."""


def find_best_arm(result: Answer) -> dict[str, Any] | None:
    """Finds the arm with the best mean on the first task on which an arm beats the base, else on the first task.

    Returns:
        The arm with its task, metric, mean and verdict, whether it is the base, and how many tasks the study has; {}
        if no arm has a score; None if the study has not ended.
    """
    if result.state not in ENDED:
        return None
    with_better_arm = (table for table in result.tables if any(row.verdict == "better" for row in table.rows))
    table = next(with_better_arm, result.tables[0])
    top = table.best
    if top is None:
        return {}
    return {
        "task": table.task,
        "metric": table.metric,
        "arm": top.arm,
        "is_base": top.is_base,
        "mean": top.score.mean,
        "verdict": top.verdict,
        "tasks": len(result.tables),
    }


def keep_best_arm(store: Store, study_id: int) -> None:
    """Finds a study's best arm and keeps it in the ledger, for a study that ended under an earlier release.

    Raises:
        InputError: The ledger cannot be written.
    """
    keep_best(store, study_id, find_best_arm(answer(store, study_id, intervals=False, importances=False)))


def best_arm_text(best: dict[str, Any] | None) -> str:
    """Writes what `find_best_arm` returns in a few words; "" if nothing is known.

    Examples:
        >>> best = {"arm": "iplr", "mean": 0.9012, "is_base": False, "verdict": "better"}
        >>> best_arm_text(best), best_arm_text({**best, "verdict": "equal or better"})
        ('iplr 0.901, better', 'iplr 0.901, equal or better')
        >>> best_arm_text({**best, "arm": "base", "is_base": True, "verdict": "base"}), best_arm_text(None)
        ('base 0.901', '')
        >>> best_arm_text({**best, "task": "mqar", "tasks": 2})
        'iplr 0.901 on mqar, better'
    """
    if not best:
        return ""
    text = f"{best['arm']} {best['mean']:.3f}" + (f" on {best['task']}" if best.get("tasks", 1) > 1 else "")
    if best["is_base"]:
        return text
    return f"{text}, {best['verdict'].replace(_OF_EARLY_RELEASES, 'undecided')}"


def without_best_arm(rows: list[ListedStudy]) -> list[ListedStudy]:
    """Returns the listed studies that ended under an earlier release, which kept no best arm."""
    return [row for row in rows if row.best is None and row.state in ENDED]
