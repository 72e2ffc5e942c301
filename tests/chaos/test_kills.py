"""Kills at random moments. Whatever dies, the same command ends in the undisturbed ledger, byte by byte of results.

A round is one or more studies that are struck some times. Its seed gives the moments and the victims:
`pytest -m chaos tests/chaos/test_kills.py -k worker-17` repeats round 17.
"""

import random
import signal
import subprocess
import time
from collections.abc import Callable

import pytest
from tests.chaos.conftest import Postgres
from tests.chaos.lab import Lab, Right, end, lab, moment

pytestmark = pytest.mark.chaos

SHARES = {
    "sqlite": {
        "driver": 22,
        "worker": 28,
        "joined driver": 8,
        "postgres": 18,
        "ray driver": 8,
        "ray worker": 10,
        "raylet": 6,
    },
    "postgresql": {"driver": 24, "worker": 20, "joined driver": 16, "postgres": 24, "connection": 16},
}
"""Of 100 kills, by --chaos-database. The kinds `postgres` and `connection` strike a ledger in PostgreSQL always."""

STRIKES = 4
"""In one round."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" not in metafunc.fixturenames:
        return
    kills, seed = metafunc.config.getoption("--kills", 100), metafunc.config.getoption("--chaos-seed", 0)
    rounds = []
    for kind, share in SHARES[metafunc.config.getoption("--chaos-database", "sqlite")].items():
        left = max(1, round(kills * share / 100))
        while left > 0:
            rounds.append((kind, 1000 * seed + len(rounds), min(left, STRIKES)))
            left -= STRIKES
    metafunc.parametrize(("kind", "seed", "strikes"), rounds, ids=[f"{kind}-{seed}" for kind, seed, _ in rounds])


def test_kills(kind: str, seed: int, strikes: int, right: Right, request: pytest.FixtureRequest,
               tell: Callable[..., None]) -> None:  # fmt: skip
    rng = random.Random(f"{kind} {seed}")
    remote = kind == "postgres" or request.config.getoption("--chaos-database", "sqlite") == "postgresql"
    server: Postgres | None = request.getfixturevalue("postgres") if remote else None
    figures = {"events": 0, "commands": 0, "lost": 0, "doubled": 0, "unequal": 0}
    try:
        while figures["events"] < strikes:
            executor = ["--executor", "ray", "--workers", "2"] if "ray" in kind else ["--executor", "inline"]
            stack = rng.choice([1, 2, "auto"])
            with lab(server and server.fresh(), *executor, resources={"cpu": 1, "stack": stack}) as one:
                left = strikes - figures["events"]
                if kind == "joined driver":
                    figures["events"] += struck_of_two(one, left, rng, right)
                else:
                    figures["events"] += struck(one, kind, left, rng, right, server)
                for name, value in {**right.row(one), "commands": one.commands}.items():
                    figures[name] += value
                right.demand(one)
                one.follows(patience=90)
    finally:
        tell(f"kill: {kind}", seed=seed, **figures)


def struck(one: Lab, kind: str, strikes: int, rng: random.Random, right: Right, server: Postgres | None) -> int:
    """Strikes a study so often, or until it ends. Returns how often."""
    process = one.start()
    done = 0
    while done < strikes:
        try:
            process.wait(timeout=moment(rng, right))
            break
        except subprocess.TimeoutExpired:
            pass
        if not strike(one, process, kind, rng, server):
            break
        done += 1
        if "driver" in kind:
            process.wait()
            one.follows()
            process = one.start()
    one.finish(process)
    return done


def struck_of_two(one: Lab, strikes: int, rng: random.Random, right: Right) -> int:
    """Kills one of two drivers that share a study, and lets another one join, so often or until the study ends."""
    drivers, done = [one.start()], 0
    one.begun(drivers[0])
    while done < strikes:
        drivers.append(one.start("--join"))
        time.sleep(rng.uniform(0, right.seconds))
        alive = [driver for driver in drivers if driver.poll() is None]
        if not alive:
            break
        victim = rng.choice(alive)
        end(victim)
        victim.wait()
        done += 1
    for driver in drivers:
        # 2: it wanted to join when nobody ran the study.
        assert driver.wait(timeout=240) in (0, 2, -signal.SIGKILL), one.log()
    one.finish(one.start())
    return done


def strike(one: Lab, process: subprocess.Popen[bytes], kind: str, rng: random.Random, server: Postgres | None) -> bool:
    """Kills something of that kind; false where the study ended before there was one."""
    if "driver" in kind:
        end(process)
        return True
    if kind == "postgres":
        assert server is not None
        outage(server, rng)
        return True
    if kind == "connection":
        assert server is not None
        return cut(server, process, rng)
    name = {"worker": "", "ray worker": "ray::", "raylet": rng.choice(["raylet", "gcs_server"])}[kind]
    while process.poll() is None:
        if found := one.workers(name):
            end(rng.choice(sorted(found, key=lambda victim: victim.pid)))
            return True
        time.sleep(0.02)
    return False


def outage(server: Postgres, rng: random.Random) -> None:
    """Kills or stops the server, or kills the process of one of its connections, which restarts it too."""
    if (sessions := server.sessions()) and rng.random() < 0.3:
        end(rng.choice(sessions))
        return
    # SIGINT and SIGQUIT stop it as its `pg_ctl stop` does, with and without a checkpoint.
    server.kill(rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGQUIT, signal.SIGINT]))
    time.sleep(rng.uniform(0.2, 4))
    server.start()


def cut(server: Postgres, process: subprocess.Popen[bytes], rng: random.Random) -> bool:
    """Ends one connection, as `pg_terminate_backend` does; false where the study ended before there was one."""
    while process.poll() is None:
        if sessions := server.sessions():
            end(rng.choice(sessions), signal.SIGTERM)
            return True
        time.sleep(0.02)
    return False
