"""Ray and what it may lose; weights and checkpoints at a URL. Nodes that are lost: tests/chaos/test_cluster.py."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import psutil
import pytest
import yaml

from deltalab.cli.app import main
from deltalab.errors import InputError
from deltalab.store import Store, TrialRecord
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.running import weights_at_url
from deltalab.study.running.activity import DriverActivity
from deltalab.study.running.progress_bars import ProgressBars
from deltalab.study.running.ray import driver as ray_driver
from deltalab.study.running.run import arm_records, run_study_file
from deltalab.study.running.schedule import Schedule
from deltalab.study.specs.study_file import StudySpec
from deltalab.study.winners.best_run import _weights
from deltalab.study.workers.jobs import Job, Lost, record_to_json, stack_from_json
from deltalab.study.workers.train_stack import execute
from deltalab.study.workers.worker import Worker

STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}},
    "base": {
        "rule": "linear_attention",
        "model": {"d_model": 16, "layers": 1, "heads": 1},
        "train": {"steps": 4, "batch_size": 4, "lr": 1e-2, "evaluations": 2, "eval_batches": 1},
    },
    "ablate": [],
    "arms": {"slow": {"train": {"lr": 1e-3}}},
    "seeds": 2,
    "resources": {"stack": 1},
}


def planned(**more: Any) -> Plan:
    return make_plan(StudySpec.model_validate({**STUDY, **more}))


# An address that does not answer.


@contextmanager
def listening(answer: bytes) -> Iterator[int]:
    """A server that says this to whoever connects, and then nothing."""
    connections = []

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            connection.sendall(answer)
            connections.append(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def refused(address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lab: Path) -> str:
    import yaml

    (lab / "s.yaml").write_text(yaml.safe_dump(STUDY))
    monkeypatch.setattr("sys.argv", ["platform", *f"study run s.yaml --storage {lab} --address".split(), address])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_an_address_where_no_ray_is_ends_in_one_line(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_driver, "_RayProcess", lambda *_: pytest.fail("Ray itself would try for two minutes"))
    monkeypatch.setattr(ray_driver, "ANSWERS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    began = time.monotonic()
    assert "refused" in refused(f"127.0.0.1:{port}", capsys, monkeypatch, lab)
    assert "--address no-such-host.invalid:6379: " in refused("no-such-host.invalid:6379", capsys, monkeypatch, lab)
    for answer in (b"HTTP/1.0 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"):
        with listening(answer) as port:
            assert "something else than Ray listens there" in refused(f"127.0.0.1:{port}", capsys, monkeypatch, lab)
    with listening(b"") as port:
        assert "no answer within" in refused(f"127.0.0.1:{port}", capsys, monkeypatch, lab)
    assert "give HOST:PORT" in refused("head", capsys, monkeypatch, lab)
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_a_server_that_only_looks_like_ray_is_left_in_time(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_driver, "CONNECTS", 3.0)
    with (
        listening(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) as port,
        pytest.raises(InputError, match=r"no Ray cluster answers within 3 s"),
    ):
        run_study_file(STUDY, address=f"127.0.0.1:{port}", storage=str(lab))


def test_what_ray_says_becomes_one_line_without_identifiers() -> None:
    from deltalab.study.running.ray.process import _line

    version = "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.12.1\nThis process ..."
    assert _line(RuntimeError(version)) == (
        "RuntimeError: Version mismatch: The cluster was started with: Ray: 2.50.0 Python: 3.12.1 This process ..."
    )
    died = "The actor died unexpectedly before finishing this task.\n\tactor_id: 4a2d\n\tpid: 7\nIts node was lost."
    assert _line(ValueError(died)).endswith("before finishing this task. Its node was lost.")


# What Ray loses.


class FakeRay:
    """Ray's process, as the driver sees it: trains here, but for what `loses` says of the n-th stack."""

    machines = ({"CPU": 1.0, "GPU": 0.0, "memory": 2.0**30},)

    def __init__(self, runs: Path, loses: Callable[[int], object]) -> None:
        self.runs, self.loses, self.sent, self.inbox = runs, loses, 0, [{"free": 0}]

    @contextmanager
    def __call__(self, address: str | None, folder: Path) -> Iterator["FakeRay"]:
        self.inbox = [{"free": 0}]
        yield self

    def send(self, message: dict[str, Any]) -> None:
        if "stack" in message:
            self.sent += 1
            if (lost := self.loses(self.sent)) == "gone":
                self.inbox.append({"gone": True})
            elif lost:
                self.inbox += [{"place": 0, "lost": lost, "of": "infrastructure"}, {"free": 0}]
            else:
                records = [record_to_json(record) for record in execute(stack_from_json(message["stack"]), self.runs)]
                self.inbox += [{"place": 0, "records": records, "device": "cpu"}, {"free": 0}]

    def receive(self, patience: float) -> dict[str, Any]:
        message = self.inbox.pop(0) if self.inbox else {}
        if "gone" in message:
            raise ray_driver._RayGone("Ray's process has ended with exit code -6")
        return message


def through(ray: FakeRay, lab: Path, monkeypatch: pytest.MonkeyPatch, start: Any = None) -> Schedule:
    monkeypatch.setattr(ray_driver, "_started", start or ray)
    monkeypatch.setattr("deltalab.study.running.schedule.PAUSES", (0.01, 0.01, 0.01))
    monkeypatch.setattr(ray_driver.time, "sleep", lambda seconds: None)
    plan = planned()
    with Store.open(lab / "lab.db") as store:
        study = store.begin_study("s", None, plan.identity, {}, arm_records(plan), {}, runs=str(lab))
        schedule = Schedule(plan, store, study)
        schedule.refresh()
        with ProgressBars(schedule, DriverActivity(), quiet=True) as progress:
            ray_driver.run_all(schedule, lab, progress, workers=None, address=None)
        return schedule


@pytest.mark.parametrize("lost", ["gone", "OutOfMemoryError: Task was killed due to the node running low on memory"])
def test_what_ray_loses_runs_again_and_is_no_failed_trial(
    lab: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    ray = FakeRay(lab, lambda number: lost if number == 1 else None)
    schedule = through(ray, lab, monkeypatch)
    assert (schedule.done, schedule.completed, schedule.failures, schedule.missing) == (True, 2, 0, {})
    assert ray.sent == 3


def test_a_stack_that_is_lost_again_and_again_is_missing_and_not_failed(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay(lab, lambda number: "its node was lost")
    schedule = through(ray, lab, monkeypatch)
    assert not schedule.done
    assert (schedule.completed, schedule.failures) == (0, 0)
    assert len(schedule.missing) == 2
    assert all("its node was lost" in reason for reason in schedule.missing.values())


def test_a_study_whose_places_never_begin_ends(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NeverBegins(FakeRay):
        def receive(self, patience: float) -> dict[str, Any]:
            return {"down": 0, "why": "ImportError: no such library"}

    schedule = through(NeverBegins(lab, lambda number: None), lab, monkeypatch)
    assert not schedule.done
    assert len(schedule.missing) == 2
    assert all("no such library" in reason for reason in schedule.missing.values())


def test_a_place_that_ends_loses_its_stack_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from deltalab.study.running.ray import process as ray_process

    said: list[dict[str, Any]] = []
    monkeypatch.setattr(ray_process, "_say", lambda **message: said.append(message))
    monkeypatch.setattr(ray_process.ray, "get", lambda call: call)
    put: list[tuple[str, str]] = []
    mailbox = SimpleNamespace(put=SimpleNamespace(remote=lambda *given: put.append(given)))
    pipe = ray_process.Pipe(1, mailbox)
    lost = {"place": 0, "lost": "Ray lost the worker", "of": "infrastructure"}

    def says(*messages: dict[str, Any]) -> bool:
        told = said == [*messages]
        said.clear()
        return told

    assert pipe.suggest("a") == {}
    assert pipe.suggest("b") is None, "one place, one trial"
    pipe.on_trial_result("a", ray_process.IDLE)
    pipe.on_trial_result("a", ray_process.IDLE)
    assert says({"free": 0})
    pipe.send(0, "first")
    pipe.on_trial_result("a", {"step": 3, "device": "cpu"})
    pipe.on_trial_result("a", {"step": 4, "result": '{"records": [], "device": "cpu"}'})
    assert says({"place": 0, "step": 3, "device": "cpu"}, {"place": 0, "records": [], "device": "cpu"}, {"free": 0})

    pipe.send(0, "second")
    pipe.why["a"] = "its node was lost"
    pipe.on_trial_complete("a", error=True)
    assert says({**lost, "lost": "its node was lost"}, {"down": 0, "why": None})
    pipe.send(0, "third")
    assert says(lost), "the place had ended while the stack was on its way"

    assert pipe.suggest("b") == {}
    pipe.on_trial_complete("b", error=True)
    assert says({"down": 0, "why": "Ray lost the worker"}), "a place that never began"
    assert pipe.suggest("c") == {}
    pipe.on_trial_result("c", ray_process.IDLE)
    pipe.send(0, "third")
    pipe.on_trial_complete("c", error=True)
    assert says({"free": 0}, lost, {"down": 0, "why": None})
    assert put == [("a", "first"), ("a", "second"), ("c", "third")]


@pytest.mark.parametrize("times", [2, 3])
def test_a_ray_of_our_own_that_does_not_start_is_started_three_times(
    lab: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Ray gives up after 30 s, which a busy machine may need."""
    ray, started = FakeRay(lab, lambda number: None), []

    def start(address: str | None, folder: Path) -> Any:
        started.append(folder)
        if len(started) <= times:
            raise ray_driver._RayGone("The current node timed out during startup")
        return ray(address, folder)

    if times == 2:
        assert through(ray, lab, monkeypatch, start).done
    else:
        with pytest.raises(InputError, match="Ray: The current node timed out during startup"):
            through(ray, lab, monkeypatch, start)
    assert len(started) == 3


def test_a_cluster_that_stays_away_ends_the_study_in_one_line(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_driver, "PATIENCE", -1.0)
    with pytest.raises(InputError, match=r"exit code -6, .* the same command goes on from here"):
        through(FakeRay(lab, lambda number: "gone" if number == 2 else None), lab, monkeypatch)


# Who can reach a local Ray.


@pytest.fixture(scope="module")
def local_ray() -> Iterator[Any]:
    """The process of a Ray of our own. Starting one takes 8 s of a core."""
    with ExitStack() as stack:
        folder = stack.enter_context(ray_driver.ray_folder())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_AUTH_MODE", "disabled")
            ray = stack.enter_context(ray_driver._started(None, folder))
        yield ray


@pytest.mark.slow
def test_a_ray_of_our_own_listens_on_loopback_with_a_token_of_its_own(local_ray: Any) -> None:
    tokens: list[str] = []
    assert local_ray.machines[0]["CPU"] >= 1
    own = (Path("/proc") / str(local_ray._process.pid) / "environ").read_text()
    assert "\0RAY_ENABLE_AUTO_CONNECT=0\0" in own, "a call after Ray's end would start another Ray"
    listeners = [address for pid in group(local_ray._process.pid) for address in listening_at(pid, tokens)]
    assert len(listeners) >= 4
    assert set(listeners) == {"127.0.0.1"}
    assert len(set(tokens)) == 1
    assert len(tokens[0]) == 64
    assert "RAY_AUTH_TOKEN" not in os.environ


def group(leader: int) -> list[int]:
    """The processes that Ray's process started, and it."""
    found = [leader]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent in found:
            found.append(int(stat.parent.name))
    return found


def listening_at(pid: int, tokens: list[str]) -> Iterator[str]:
    """The addresses at which a process listens; its token is added to `tokens`."""
    environment = (Path("/proc") / str(pid) / "environ").read_text()
    tokens += re.findall(r"\0RAY_AUTH_TOKEN=(\w+)", "\0" + environment)
    inodes = set()
    for file in (Path("/proc") / str(pid) / "fd").iterdir():
        try:
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(file)))
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        for line in (Path("/proc") / str(pid) / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                words = bytes.fromhex(fields[1].partition(":")[0])
                last = words[-4:][::-1]  # an IPv4 address, or the last word of ::ffff:127.0.0.1
                yield ".".join(map(str, last))


ASKS = """
import sys, ray
from ray._raylet import GcsClient
print(len(GcsClient(address=f"127.0.0.1:{sys.argv[1]}").get_all_node_info(timeout=20)))
"""


@pytest.mark.slow
def test_a_local_ray_answers_who_has_its_token_alone(local_ray: Any) -> None:
    of_ray = psutil.Process(local_ray._process.pid)
    opened = [
        (one.name(), port)
        for one in of_ray.children(recursive=True)
        if one.name() in ("gcs_server", "raylet")
        for port in one.net_connections(kind="inet")
    ]
    assert all(ip_address(port.laddr.ip.removeprefix("::ffff:")).is_loopback for _, port in opened)
    (port,) = {one.laddr.port for name, one in opened if (name, one.status) == ("gcs_server", psutil.CONN_LISTEN)}
    token = of_ray.environ()["RAY_AUTH_TOKEN"]
    for given, answers in ((token, True), ("0" * len(token), False)):
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": given}
        command = [sys.executable, "-c", ASKS, str(port)]
        asked = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (asked.returncode == 0 and asked.stdout.strip() == "1") == answers, asked.stderr
        assert answers or "nvalid" in asked.stderr, asked.stderr


# Weights and checkpoints at a URL.


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that store at a URL keep their folder here."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def url(temporary: None) -> Iterator[str]:
    files = fsspec.filesystem("memory")
    yield "memory://bucket/lab"
    files.store.clear()


@pytest.mark.usefixtures("in_process")
def test_weights_lie_at_the_url_and_are_exported_from_there(lab: Path, url: str) -> None:
    run_study_file(STUDY, db=lab / "lab.db", executor="inline", storage=url)
    run_study_file(STUDY, db=lab / "local.db", executor="inline", storage=f"file://{lab}/local")
    found = {}
    for db in ("lab.db", "local.db"):
        with Store.open(lab / db) as store:
            kept = [artifact for _, _, artifact in store.artifacts(store.study("s").id, "slow")]
        found[db] = {artifact.sha256 for artifact in kept}
        assert len(kept) == 2
        assert _weights(kept[0])
        assert kept[0].path.startswith(url if db == "lab.db" else str(lab / "local"))
    assert found["lab.db"] == found["local.db"]
    assert not weights_at_url.Remote(url).names("checkpoints")


def test_a_stack_that_was_cut_off_goes_on_on_another_machine(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(resources={"stack": 2})
    stack = [plan.job(arm, "confirm", 0, {}) for arm in plan.arms]
    seen = []

    def dies(worker: Worker, stack: Sequence[Job], watch: Callable[[int], None], *_: object) -> list[TrialRecord]:
        file = weights_at_url.checkpoint_file(stack, worker.runs)
        seen.append(file.read_bytes() if file.exists() else None)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".json").write_text(f'["{stack[0].key}", "{stack[1].key}"]')
        file.write_bytes(b"step 2")
        watch(2)
        if len(seen) == 1:
            raise Lost("its machine is gone", "infrastructure")
        return []

    monkeypatch.setattr(Worker, "execute", dies)
    for machine in ("one", "two"):
        (tmp_path / machine).mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / machine))
        worker = weights_at_url.make_worker(url)
        if machine == "one":
            with pytest.raises(Lost):
                worker.execute(stack)
            assert weights_at_url.interrupted_stacks(url) == [(stack[0].key, stack[1].key)]
        else:
            worker.execute(stack)
    assert seen == [None, b"step 2"]
    assert weights_at_url.interrupted_stacks(url) == []


def test_a_url_that_cannot_be_reached_loses_the_stack_to_the_infrastructure(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    plan = planned()
    worker = weights_at_url.make_worker(url)
    monkeypatch.setattr(weights_at_url.Remote, "names", away)
    with pytest.raises(Lost, match=rf"{url}: no route to host") as lost:
        worker.execute([plan.job(plan.arms[0], "confirm", 0, {})])
    assert lost.value.of == "infrastructure"


@pytest.mark.parametrize(
    ("given", "says"),
    [("s3://bucket/lab", r"pip install 'deltalab\[s3\]'"), ("nosuch://bucket/lab", "nosuch")],
)
def test_a_url_that_needs_another_package_names_it(monkeypatch: pytest.MonkeyPatch, given: str, says: str) -> None:
    def missing(url: str, **_: object) -> None:
        raise ImportError("Install s3fs")

    if given.startswith("s3"):
        monkeypatch.setattr(weights_at_url, "url_to_fs", missing)
    with pytest.raises(InputError, match=says) as refused:
        weights_at_url.runs_at(given)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("in_process", "temporary")
def test_weights_on_s3(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = pytest.importorskip("moto.server", reason="pip install 's3fs' 'moto[server]'")
    boto = pytest.importorskip("boto3")
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    moto.start()
    try:
        host, port = moto.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        with pytest.raises(InputError, match=r"--storage s3://none/lab: .*bucket"):
            weights_at_url.runs_at("s3://none/lab")
        boto.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="lab")
        run_study_file(STUDY, db=lab / "lab.db", executor="inline", storage="s3://lab/weights")
        with Store.open(lab / "lab.db") as store:
            (first, _) = [artifact for _, _, artifact in store.artifacts(store.study("s").id, "slow")]
        assert first.path.startswith("s3://lab/weights/weights/")
        assert _weights(first)
    finally:
        moto.stop()


# A worker that is stopped.


@pytest.mark.slow
def test_a_worker_of_ray_that_is_stopped_is_ended_and_its_stack_runs_again(
    lab: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin = "from deltalab.study.running.ray import process; process.STILL = 6.0; process.main()"
    monkeypatch.setattr(ray_driver, "_PLACES", f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); {begin}")
    stopped: list[int] = []

    def stop(bars: ProgressBars, stack: Sequence[Job], step: int, device: str | None = None) -> None:
        if not stopped:
            workers = [one for one in psutil.Process().children(recursive=True) if one.name().startswith("ray::Place")]
            stopped.extend(one.pid for one in workers)
            for one in workers:
                one.suspend()

    monkeypatch.setattr(ProgressBars, "advanced", stop)
    file = lab / "s.yaml"
    train = {**STUDY["base"]["train"], "steps": 4000}  # A place tells its step each second; 800 end within it.
    file.write_text(yaml.safe_dump({**STUDY, "arms": {}, "base": {**STUDY["base"], "train": train}}))
    result = run_study_file(file, db=lab / "lab.db", workers=1)
    assert (result.state, result.trials, len(stopped)) == ("done", 1, 1)
    assert "runs again in 1 s" in caplog.text
