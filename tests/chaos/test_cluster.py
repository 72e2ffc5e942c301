"""A cluster of two nodes on this machine loses a node, or its head, which comes back. The answer stays the same."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.util import get_node_ip_address

from deltalab.store import Store
from deltalab.study.running.run import run_study_file

pytestmark = pytest.mark.chaos

TOKEN = "0123456789abcdef" * 4
STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}},
    "base": {
        "rule": "linear_attention",
        "model": {"d_model": 16, "layers": 1, "heads": 1},
        "train": {"steps": 200, "batch_size": 8, "lr": 1e-2, "evaluations": 4, "eval_batches": 1},
    },
    "ablate": [],
    "arms": {f"lr_{number}": {"train": {"lr": 0.0015 * number}} for number in range(1, 6)},
    "seeds": 6,
    "resources": {"stack": 1},
}
PATIENCE = 600.0


class Cluster:
    """Nodes that `ray start` makes, each with one core and a folder of its own, on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = get_node_ip_address()  # Ray has no cluster on 127.0.0.1
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self, name: str) -> None:
        """Starts a node; that named head is the head."""
        where = (
            ["--head", f"--port={self.port}", "--include-dashboard=false"]
            if name == "head"
            else [f"--address={self.address}"]
        )
        command = ["ray", "start", "--block", "--num-cpus=1", f"--temp-dir={self.folder / name}", *where]
        self.nodes[name] = subprocess.Popen(
            [str(Path(sys.executable).with_name(command[0])), *command[1:]],
            cwd=self.folder,
            env=self.environment,
            start_new_session=True,
            stdout=(self.folder / f"{name}.log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        until = time.monotonic() + PATIENCE
        while b"--block" not in (self.folder / f"{name}.log").read_bytes():
            assert self.nodes[name].poll() is None, (self.folder / f"{name}.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.2)

    def kill(self, name: str) -> None:
        """kill -9 of all that runs on a node, at once."""
        node = self.nodes.pop(name)
        (self.folder / f"{name}.log").unlink()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[3]) == node.pid:
                    os.kill(int(stat.parent.name), signal.SIGKILL)
        node.wait()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(Path("/tmp") / f"c{os.getpid()}")  # Ray's sockets need a short path
    cluster.folder.mkdir()
    try:
        cluster.start("head")
        cluster.start("other")
        yield cluster
    finally:
        for name in list(cluster.nodes):
            cluster.kill(name)
        shutil.rmtree(cluster.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_study_file(STUDY, db=folder / "lab.db", executor="inline", unchecked=True)
    return results(folder / "lab.db")


def results(db: Path) -> dict[str, Any]:
    """State, metrics and the weights' hashes of each trial, by its arm."""
    with Store.open(db) as store:
        study = store.study("s")
        assert study.state == "done"
        found: dict[str, Any] = {}
        for row in store.trials(study.id):
            kept = store.artifacts(study.id, row.arm)
            hashes = {(run.seed, artifact.sha256) for _, run, artifact in kept}
            summary = store.known_trials([row.key])[row.key]
            found[row.arm] = row.state, summary.finals[("test", "accuracy")], hashes
        return found


def recorded(db: Path) -> int:
    if not db.exists():
        return 0
    with Store.open(db) as store:
        return len(store.trials(1)) if store.studies() else 0


def drive(cluster: Cluster, folder: Path) -> subprocess.Popen[bytes]:
    """The command, in a folder in which no node was started."""
    folder.mkdir()
    (folder / "s.yaml").write_text(yaml.safe_dump(STUDY))
    command = [
        "study",
        "run",
        "s.yaml",
        "--unchecked",
        "--address",
        cluster.address,
        "--storage",
        str(cluster.folder / "runs"),
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "deltalab", *command],
        cwd=folder,
        env=cluster.environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("wb"),
    )


def reach(process: subprocess.Popen[bytes], log: Path, reached: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not reached():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)


def finish(process: subprocess.Popen[bytes], folder: Path, undisturbed: dict[str, Any]) -> str:
    said = folder / "log"
    assert process.wait(PATIENCE) == 0, said.read_text()
    assert results(folder / "deltalab.db") == undisturbed
    assert "Traceback" not in said.read_text()
    return said.read_text()


def test_a_lost_node_loses_no_trial(cluster: Cluster, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    folder = tmp_path / "elsewhere"
    process = drive(cluster, folder)
    reach(process, folder / "log", lambda: recorded(folder / "deltalab.db") >= 1)
    cluster.kill("other")
    finish(process, folder, undisturbed)


def test_a_lost_head_that_comes_back_loses_no_trial(
    cluster: Cluster, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    folder = tmp_path / "elsewhere"
    process = drive(cluster, folder)
    reach(process, folder / "log", lambda: recorded(folder / "deltalab.db") >= 1)
    cluster.kill("head")
    cluster.kill("other")
    reach(process, folder / "log", lambda: "trying again" in (folder / "log").read_text())
    cluster.start("head")
    cluster.start("other")
    assert "trying again" in finish(process, folder, undisturbed)
