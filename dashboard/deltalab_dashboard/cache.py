"""A ledger whose rows a server reads only once, since a recorded trial never changes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import streamlit as st

from deltalab.store import FinalMetric, Store, Study, TrialRow
from deltalab.store.models import Stage
from deltalab.store.records import Placed
from deltalab.study.reports.report import Report, report

MOST_ROWS = 120_000
"""The most rows that a server keeps in memory. They take about 80 MB."""
MOST_REPORTS = 20
"""The most reports that a server keeps in memory."""

T = TypeVar("T")


class CachedStore(Store):
    """A store whose `trials` and `final_metrics` read only the rows that they have not read before.

    All sessions share the rows, and must not change them. If the store holds more than `MOST_ROWS` rows, it forgets the
    rows of the queries that were made longest ago.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.RLock()
        self._rows: OrderedDict[Hashable, dict[Placed, list[Any]]] = OrderedDict()

    def trials(
        self, study_id: int, *, limit: int | None = None, offset: int = 0, trials: Iterable[str] | None = None
    ) -> list[TrialRow]:
        """Returns the trials of a study, as `Store.trials` does."""
        if limit is not None or offset or trials is not None:
            return super().trials(study_id, limit=limit, offset=offset, trials=trials)
        read = super().trials
        rows = self._read(
            ("trials", study_id),
            self.placed(study_id),
            lambda keys: read(study_id, trials=keys),
            lambda row: (row.arm, row.key, row.number),
        )
        return [row for rows_of_trial in rows for row in rows_of_trial]

    def final_metrics(
        self,
        study_id: int,
        *,
        stage: Stage | None = None,
        metrics: Iterable[tuple[str, str]] | None = None,
        trials: Iterable[str] | None = None,
    ) -> list[FinalMetric]:
        """Returns the metrics of a study at the last step, as `Store.final_metrics` does."""
        if trials is not None:
            return super().final_metrics(study_id, stage=stage, metrics=metrics, trials=trials)
        wanted = None if metrics is None else frozenset(metrics)
        places = {(at.arm, at.key): at._replace(number=0) for at in self.placed(study_id)}
        read = super().final_metrics
        rows = self._read(
            ("finals", study_id, wanted),
            list(places.values()),
            lambda keys: read(study_id, metrics=wanted, trials=keys),
            lambda final: (final.arm, final.trial, 0),
        )
        order = {arm.name: arm.position for arm in self.arms(study_id)}
        finals = [final for of_trial in rows for final in of_trial if stage in (None, final.stage)]
        return sorted(finals, key=lambda final: (order[final.arm], final.task, final.trial))

    def _read(
        self,
        query: Hashable,
        places: list[Placed],
        read: Callable[[list[str] | None], list[T]],
        place: Callable[[T], tuple[str, str, int]],
    ) -> list[list[T]]:
        """Returns a list of rows for each of the `places`. Only the rows of new places are read.

        Args:
            query: Identifies the query whose rows are kept.
            places: The places of the trials in their arms.
            read: Reads rows from the ledger. It takes the keys of the trials to read, or None to read all trials.
            place: Returns the place of a row: arm, key and number.
        """
        with self._lock:  # Another session with the same query waits here, and then finds the rows.
            known: dict[Placed, list[T]] = self._rows.pop(query, {})
            new = [at for at in places if at not in known]
            by_place: dict[tuple[str, str, int], list[T]] = {}
            for row in read([at.key for at in new] if known else None) if new else ():
                by_place.setdefault(place(row), []).append(row)
            rows = {at: known[at] if at in known else by_place.get((at.arm, at.key, at.number), []) for at in places}
            self._rows[query] = rows
            while len(self._rows) > 1 and sum(map(_count, self._rows.values())) > MOST_ROWS:
                self._rows.popitem(last=False)
            return list(rows.values())


def _count(rows: dict[Placed, list[Any]]) -> int:
    """Counts the rows that are kept for one query."""
    return sum(map(len, rows.values()))


def report_of(
    store: Store, study: Study, stage: Stage = "confirm", against: str | None = None, *, importances: bool = False
) -> Report:
    """Returns a study's report. The server keeps the report until a trial or the state of the study changes.

    All sessions share the report, and must not change it.

    Args:
        store: The ledger.
        study: The study.
        stage: The stage whose scores are shown.
        against: The arm to compare the others with in place of the base.
        importances: Whether the report of a search says how much each setting explains, which may take seconds.
    """
    return _report(store, repr(store), study.id, stage, against, importances, store.mark(study.id))


@st.cache_resource(show_spinner=False, max_entries=MOST_REPORTS)
def _report(
    _store: Store, where: str, study_id: int, stage: Stage, against: str | None, importances: bool, mark: str
) -> Report:
    """Makes a report. Streamlit keeps a report for each combination of the arguments other than `_store`."""
    return report(_store, study_id, which=stage, against=against, importances=importances)
