"""What the pages say of a study that runs."""

from collections.abc import Callable
from typing import Any

import pytest
import streamlit as st
from tests.support.ledgers import BASE, begin, open_page, record, texts

from deltalab.errors import InputError
from deltalab.store import Store
from deltalab.store.studies.driver_status import Device, DriverStatus, RunningStack
from deltalab_dashboard import frame
from deltalab_dashboard.progress import STACKS

ONE = RunningStack("mqar / no_*d* / candidate 3", "confirm", 1200, 3000, 75.0, "NVIDIA H100 *1* on lab")
NEW = RunningStack("mqar / base / candidate 3", "confirm", 2550, 3000, 1.0, None, budget=30.0)
DOING = DriverStatus(
    600.0, 4, 0.9, (ONE, NEW), (Device("NVIDIA H100 *1* on lab", 1, 0.97),), {"tune": (8, 8), "confirm": (4, 32)}, 170.0
)


def test_a_running_study_shows_first_how_far_it_is(store: Store) -> None:
    study = begin(store, "new")
    record(store, study, "base", "mqar", BASE)
    store.beat(study, DOING.to_json())
    app = open_page()
    said = texts(app)
    assert "12 of 40 trials, ETA 3 min" in said
    assert "2 of 4 places have a stack, and had one 90% of the time since the start, 10 min ago." in said
    bars = [(bar.proto.text, bar.proto.value) for bar in app.get("progress")]
    assert bars == [("tune: 8 of 8 trials", 100), ("confirm: 4 of 32 trials", 12)]
    stacks, devices = (table.value.map(lambda cell: str(cell).replace("\\", "")) for table in app.table[:2])
    assert stacks.to_dict("records") == [
        {
            "running": ONE.name,
            "stage": "confirm",
            "at": "step 1,200 of 3,000",
            "for": "75 s",
            "on": "NVIDIA H100 *1* on lab",
        },
        {"running": NEW.name, "stage": "confirm", "at": "25.5 of 30 s", "for": "1 s", "on": "not known yet"},
    ]
    assert devices.to_dict("records") == [{"device": "NVIDIA H100 *1* on lab", "stacks now": "1", "busy": "97%"}]
    store.finish_study(study, "done")
    app.run()
    assert "ETA" not in texts(app)
    assert not app.get("progress")


def test_a_study_that_starts_says_so_and_many_stacks_are_counted(store: Store) -> None:
    study = begin(store, "new")
    assert "starting" in texts(open_page())
    many = tuple(RunningStack(f"stack {i}", "confirm", 0, 10, 1.0, None) for i in range(STACKS + 5))
    store.beat(study, DriverStatus(9.0, 64, 0.5, many, (), {"confirm": (0, 99)}, None).to_json())
    app = open_page()
    assert "0 of 99 trials, ETA unknown" in texts(app)
    assert len(app.table[0].value) == STACKS
    assert "and 5 more" in texts(app)


@pytest.fixture
def fragments(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Callable[[], None], Any]]:
    """The fragments that a page draws, by name, each with how often it runs."""
    found: dict[str, tuple[Callable[[], None], Any]] = {}
    original = st.fragment

    def recorded(function: Callable[..., None], *, run_every: float | None = None) -> Any:
        found[function.__name__] = function, run_every
        return original(function, run_every=run_every)

    monkeypatch.setattr(st, "fragment", recorded)
    return found


def test_a_running_study_is_drawn_again_only_where_something_is_new(
    store: Store, fragments: dict[str, tuple[Callable[[], None], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = begin(store, "new")
    open_page()
    (_, page), (watch, often) = fragments["draw"], fragments["watch"]
    assert page is None, "the page itself waits for something new"
    assert often == fragments["_now"][1] == frame.REFRESH_SECONDS
    again: list[bool] = []
    monkeypatch.setattr(st, "rerun", lambda: again.append(True))
    watch()
    store.beat(study, DOING.to_json())
    watch()
    assert not again, "a heartbeat is no news for the page"
    record(store, study, "base", "mqar", BASE)
    watch()
    assert len(again) == 1
    monkeypatch.setattr(Store, "mark", lambda *_: (_ for _ in ()).throw(InputError("the database is gone")))
    watch()
    assert len(again) == 1


def test_a_study_that_has_ended_is_not_watched(
    store: Store, fragments: dict[str, tuple[Callable[[], None], Any]]
) -> None:
    store.finish_study(begin(store, "old"), "done")
    open_page()
    assert "draw" in fragments
    assert fragments.keys().isdisjoint({"watch", "_now"})
