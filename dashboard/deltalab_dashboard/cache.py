"""The ledger as the pages read it: each trial once, since a recorded trial never changes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import streamlit as st

from deltalab.store import FinalMetric, Store, Study, TrialRow
from deltalab.store.models import Stage
from deltalab.store.records import Placed
from deltalab.study.reports.report import Report, report

KEPT = 120_000
"""Rows that a server remembers: about 80 MB."""
REPORTS = 20
"""Reports that a server remembers."""

T = TypeVar("T")


class Recorded(Store):
    """A store whose `trials` and `final_metrics` read what is new, and remember the rest.

    The rows are shared by all readers, who leave them as they are. The studies that were asked for last are remembered.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._lock = threading.RLock()
        self._known: OrderedDict[Hashable, dict[Placed, list[Any]]] = OrderedDict()

    def trials(
        self, study_id: int, *, limit: int | None = None, offset: int = 0, trials: Iterable[str] | None = None
    ) -> list[TrialRow]:
        if limit is not None or offset or trials is not None:
            return super().trials(study_id, limit=limit, offset=offset, trials=trials)
        read = super().trials
        rows = self._read(
            ("trials", study_id),
            self.placed(study_id),
            lambda keys: read(study_id, trials=keys),
            lambda row: (row.arm, row.key, row.number),
        )
        return [row for own in rows for row in own]

    def final_metrics(
        self,
        study_id: int,
        *,
        stage: Stage | None = None,
        metrics: Iterable[tuple[str, str]] | None = None,
        trials: Iterable[str] | None = None,
    ) -> list[FinalMetric]:
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
        found = [final for own in rows for final in own if stage in (None, final.stage)]
        return sorted(found, key=lambda final: (order[final.arm], final.task, final.trial))

    def _read(
        self,
        about: Hashable,
        places: list[Placed],
        read: Callable[[list[str] | None], list[T]],
        place: Callable[[T], tuple[str, str, int]],
    ) -> list[list[T]]:
        """The rows at each place. Those at unknown places are read: of some keys, or of all where None is known."""
        with self._lock:  # another session that asks for the same waits, and need not read
            known: dict[Placed, list[T]] = self._known.pop(about, {})
            new = [at for at in places if at not in known]
            own: dict[tuple[str, str, int], list[T]] = {}
            for row in read([at.key for at in new] if known else None) if new else ():
                own.setdefault(place(row), []).append(row)
            fresh = {at: known[at] if at in known else own.get((at.arm, at.key, at.number), []) for at in places}
            self._known[about] = fresh
            while len(self._known) > 1 and sum(map(_size, self._known.values())) > KEPT:
                self._known.popitem(last=False)
            return list(fresh.values())


def _size(known: dict[Placed, list[Any]]) -> int:
    return sum(map(len, known.values()))


def found(store: Store, study: Study, which: Stage = "confirm") -> Report:
    """A study's report, kept until a trial or the state of the study changes. Readers leave it as it is."""
    return _found(store, repr(store), study.id, which, store.mark(study.id))


@st.cache_resource(show_spinner=False, max_entries=REPORTS)
def _found(_store: Store, where: str, study_id: int, which: Stage, mark: str) -> Report:
    return report(_store, study_id, which=which)
