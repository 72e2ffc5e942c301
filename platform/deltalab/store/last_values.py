"""Reads the last value of each metric of many runs by a few reads a metric, however many steps it has."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import BindParameter, Double, Integer, String, Subquery, bindparam, column, select, text
from sqlalchemy.orm import Session

LAST_STEPS = """
WITH RECURSIVE
runs(id) AS ({runs}),
splits(run_id, split) AS (
    SELECT id, (SELECT max(split) FROM metric WHERE metric.run_id = runs.id) FROM runs
    UNION ALL
    SELECT run_id, (SELECT max(split) FROM metric WHERE metric.run_id = splits.run_id AND metric.split < splits.split)
    FROM splits WHERE split IS NOT NULL
),
names(run_id, split, name) AS (
    SELECT run_id, split,
        (SELECT max(name) FROM metric WHERE metric.run_id = splits.run_id AND metric.split = splits.split)
    FROM splits WHERE split IS NOT NULL
    UNION ALL
    SELECT run_id, split, (
        SELECT max(name) FROM metric
        WHERE metric.run_id = names.run_id AND metric.split = names.split AND metric.name < names.name
    )
    FROM names WHERE name IS NOT NULL
),
last(run_id, split, name, step) AS (
    SELECT run_id, split, name, (
        SELECT max(step) FROM metric
        WHERE metric.run_id = names.run_id AND metric.split = names.split AND metric.name = names.name
    )
    FROM names WHERE name IS NOT NULL
)
SELECT run_id, split, name, step, (
    SELECT value FROM metric
    WHERE metric.run_id = last.run_id AND metric.split = last.split AND metric.name = last.name
        AND metric.step = last.step
) AS value
FROM last
"""
LAST_STEP_OF_ONE = """
WITH runs(id) AS ({runs})
SELECT metric.run_id, metric.split, metric.name, metric.step, metric.value FROM runs JOIN metric
ON metric.run_id = runs.id AND metric.split = :split AND metric.name = :name AND metric.step = (
    SELECT max(step) FROM metric AS other
    WHERE other.run_id = runs.id AND other.split = :split AND other.name = :name
)
"""


def last_values(
    session: Session,
    runs: str,
    metrics: Iterable[tuple[str, str]] | None,
    parameters: dict[str, int | Sequence[str]],
) -> Iterator[Sequence[Any]]:
    """Yields (run id, split, name, step, value) of each metric at its last step.

    Args:
        session: An open transaction.
        runs: An SQL query for the ids of the runs.
        metrics: The pairs (split, name) to read; None reads all.
        parameters: The parameters of `runs`.
    """
    if metrics is None:
        last = last_steps(runs, **parameters)
        yield from session.execute(select(last.c.run_id, last.c.split, last.c.name, last.c.step, last.c.value))
        return
    query = text(LAST_STEP_OF_ONE.format(runs=runs))
    for split, name in sorted(set(metrics)):
        yield from session.execute(query.bindparams(*_parameters({**parameters, "split": split, "name": name}))).all()


def last_steps(runs: str, **parameters: int | Sequence[str]) -> Subquery:
    """Returns a subquery for run_id, split, name, step and value of each metric at its last step.

    The subquery goes from each split to the split before it, and likewise from name to name. So a metric takes a few
    reads of the primary key, however many steps it has. `GROUP BY` would read every step. The subquery itself looks the
    values up, since SQLite's planner reads every step if the table of metrics is joined. It is written as text, since
    SQLAlchemy would take longer to build it than a database takes to run it.

    Args:
        runs: An SQL query for the ids of the runs.
        parameters: The parameters of `runs`.
    """
    kinds: dict[str, type[Any]] = {"run_id": Integer, "split": String, "name": String, "step": Integer, "value": Double}
    columns = [column(name, kind) for name, kind in kinds.items()]
    return text(LAST_STEPS.format(runs=runs)).bindparams(*_parameters(parameters)).columns(*columns).subquery("last")


def _parameters(values: Mapping[str, int | str | Sequence[str]]) -> list[BindParameter[Any]]:
    """Returns the parameters of an SQL query. A list becomes several values, as `IN` needs them."""
    return [bindparam(key, value, expanding=not isinstance(value, int | str)) for key, value in values.items()]
