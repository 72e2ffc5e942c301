"""A ledger in PostgreSQL whose server stands still, turns everybody away, or has a full disk, amid a study."""

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.chaos.conftest import Postgres
from tests.chaos.disks import fill, small_disk
from tests.chaos.lab import Right, end, lab, moment

pytestmark = pytest.mark.chaos
INLINE = ("--executor", "inline")


@pytest.mark.parametrize("seed", range(2))
def test_a_driver_that_stands_still(seed: int, right: Right, postgres: Postgres, tell: Callable[..., None]) -> None:
    """It goes on where it stood, also amid a transaction."""
    rng, events = random.Random(f"driver {seed}"), 0
    with lab(postgres.fresh(), *INLINE) as one:
        process = one.start()
        while process.poll() is None and events < 3:
            time.sleep(moment(rng, right) / 2)
            end(process, signal.SIGSTOP)
            time.sleep(rng.uniform(0.5, 4))
            end(process, signal.SIGCONT)
            events += 1
        one.finish(process)
        assert one.commands == 1, "it ended, and had to be given again"
        tell("PostgreSQL: driver stopped", seed=seed, events=events, commands=one.commands, **right.row(one))
        right.demand(one)


@pytest.mark.parametrize("whole", [False, True], ids=["session", "server"])
@pytest.mark.parametrize("seed", range(2))
def test_a_server_that_stands_still(
    whole: bool, seed: int, right: Right, postgres: Postgres, tell: Callable[..., None]
) -> None:
    """The processes of the sessions alone, or all of the server's: nobody answers, and nobody hangs up."""
    rng, events = random.Random(f"server {whole} {seed}"), 0
    with lab(postgres.fresh(), *INLINE) as one:
        process = one.start()
        one.begun(process)
        while process.poll() is None and events < 3:
            stopped = postgres.everything() if whole else postgres.sessions()
            for victim in stopped:
                end(victim, signal.SIGSTOP)
            time.sleep(rng.uniform(0.5, 4))
            for victim in stopped:
                end(victim, signal.SIGCONT)
            events += bool(stopped)
            time.sleep(rng.uniform(0, 1))
        one.finish(process)
        assert one.commands == 1, "it ended, and had to be given again"
        kind = f"PostgreSQL: {'server' if whole else 'sessions'} stopped"
        tell(kind, seed=seed, events=events, commands=one.commands, **right.row(one))
        right.demand(one)


@pytest.mark.parametrize("seed", range(2))
def test_a_server_that_takes_no_connections_for_a_while(
    seed: int, right: Right, postgres: Postgres, tell: Callable[..., None]
) -> None:
    """All sessions are ended, and new ones are refused, as an administrator does before maintenance."""
    rng, events = random.Random(f"refused {seed}"), 0
    with lab(postgres.fresh(), *INLINE) as one:
        database = one.url.partition("?")[0].rpartition("/")[2]
        process = one.start()
        one.begun(process)
        while process.poll() is None and events < 2:
            postgres.psql(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false;")
            postgres.psql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}';")
            time.sleep(rng.uniform(0.5, 5))
            postgres.psql(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true;")
            events += 1
            time.sleep(rng.uniform(0, 2))
        one.finish(process)
        assert one.commands == 1, "it ended, and had to be given again"
        tell("PostgreSQL: refuses connections", seed=seed, events=events, commands=one.commands, **right.row(one))
        right.demand(one)


@contextmanager
def tablespace(postgres: Postgres, disk: Path) -> Iterator[str]:
    """Makes an empty database whose tables lie on that disk."""
    disk.chmod(0o755)
    folder = disk / "space"
    folder.mkdir(mode=0o700)
    owner = os.stat(postgres.server.pgdata)
    os.chown(folder, owner.st_uid, owner.st_gid)
    postgres.psql(f"CREATE TABLESPACE small LOCATION '{folder}';")
    url = postgres.fresh("TABLESPACE small")
    try:
        yield url
    finally:
        database = url.partition("?")[0].rpartition("/")[2]
        postgres.psql(f"DROP DATABASE {database} WITH (FORCE);")
        postgres.psql("DROP TABLESPACE small;")


@pytest.mark.parametrize("seed", range(3))
def test_a_server_whose_disk_is_full_for_a_while(
    seed: int, right: Right, postgres: Postgres, tell: Callable[..., None]
) -> None:
    """The disk of the tables is full from a trial on; the driver waits, says so, and goes on once there is room."""
    rng = random.Random(f"full {seed}")
    disk = Path(tempfile.mkdtemp(prefix="pg-disk")) / "disk"
    disk.parent.chmod(0o755)  # the server has a user of its own
    with small_disk(disk, 24 * 1024), tablespace(postgres, disk) as url, lab(url, *INLINE) as one:
        process = one.start()
        one.begun(process)
        end(process, signal.SIGSTOP)
        fill(disk)
        end(process, signal.SIGCONT)
        until, said = time.monotonic() + 120, False
        while not said and process.poll() is None and time.monotonic() < until:
            said = "No space left on device" in one.log()
            time.sleep(0.1)
        time.sleep(rng.uniform(0, 3))
        (disk / "ballast").unlink()
        one.finish(process)
        assert one.commands == 1, "it ended, and had to be given again"
        assert said, "the disk was not full"
        tell("PostgreSQL: disk full", seed=seed, events=1, commands=one.commands, **right.row(one))
        right.demand(one)
