"""Running a study: the same answer whoever executes it, whatever dies on the way, and whenever."""

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy.orm import Session
from tests.support.delta_rule import delta_rule
from tests.support.studies import STUDY, assert_ledger_is_of, ledger, measured, planned, write

from deltalab import registry
from deltalab.cli.app import main
from deltalab.errors import InputError
from deltalab.store import ArtifactRecord, Store, TrialRecord
from deltalab.study.planning.plan import Plan
from deltalab.study.running import run as running
from deltalab.study.running import schedule as scheduling
from deltalab.study.running.run import run_study_file
from deltalab.study.workers import train_stack as trials
from deltalab.study.workers.jobs import Job, record_from_json, record_to_json
from deltalab.study.workers.train_stack import execute, failed
from deltalab.study.workers.worker import Worker
from deltalab.training.train import train_together

RAISES = 'if calls > 5 and Path("broken").exists(): raise RuntimeError(f"boom\\0 \\udc80")'
DIES = 'if calls > 5 and Path("deadly").exists(): os._exit(9)'


def rule(file: Path, name: str, trouble: str = "pass") -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(delta_rule(name, trouble))
    return file


def recorded(db: Path) -> int:
    if not db.exists():
        return 0
    with closing(sqlite3.connect(db, timeout=30)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM trial").fetchone()[0])
        except sqlite3.OperationalError:  # the tables are still being made
            return 0


def assert_whole(db: Path, plan: Plan) -> None:
    """Every trial of the plan is there once, with the weights of every confirmed run."""
    assert_ledger_is_of(db, plan)
    with Store.open(db) as store:
        study = store.study(plan.spec.name)
        for arm in plan.names:
            files = [artifact for _, _, artifact in store.artifacts(study.id, arm)]
            assert len(files) == plan.spec.looks[-1].seeds * plan.tried(plan.arms[0]) * len(plan.tasks)
            for artifact in files:
                content = Path(artifact.path).read_bytes()
                assert (len(content), hashlib.sha256(content).hexdigest()) == (artifact.bytes, artifact.sha256)
    assert not list((db.parent / "runs").rglob("*.partial"))
    assert not list((db.parent / "runs").rglob("checkpoints/*"))


# One study, inline.


def test_a_study_runs_and_its_report_compares_the_arms(lab: Path) -> None:
    file = write(lab / "s.yaml")
    result = run_study_file(file, executor="inline")
    assert (result.trials, result.known, result.failed) == (4, 0, 0)
    assert_whole(lab / "deltalab.db", planned(file))
    (table,) = result.report.tables
    assert [(row.arm, row.score.n) for row in table.rows] == [("base", 2), ("without_d", 2)]
    again = run_study_file(file, executor="inline")
    assert (again.trials, again.known, again.failed, again.study_id) == (4, 4, 0, result.study_id)
    rows = [[(row.arm, row.score) for row in one.report.tables[0].rows] for one in (result, again)]
    assert rows[0] == rows[1]


def test_one_thread_or_what_resources_say_whatever_torch_was_set_to(lab: Path) -> None:
    notes = f'os.getpid() != {os.getpid()} and Path(str(__import__("torch").get_num_threads()) + ".n").touch()'
    registry.add_plugin(rule(lab / "counts.py", "counts", notes))
    torch.set_num_threads(2)
    given = {"base": {**STUDY["base"], "rule": "counts"}, "ablate": [], "tune": None}
    for name, resources in {"s": {}, "t": {"cpu": 3.5}}.items():
        run_study_file(
            write(lab / f"{name}.yaml", **given, name=name, resources=resources), executor="inline", db=f"{name}.db"
        )
        (seen,) = lab.glob("*.n")
        assert seen.name == f"{3 if resources else 1}.n"
        seen.unlink()
    assert torch.get_num_threads() == 2


def test_provenance_has_versions_and_no_password(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "--db=postgresql://me:s3cret@host/lab?password=s3cret"
    monkeypatch.setattr(sys, "argv", ["platform", "study", "run", url])
    found = running.provenance(planned(write(lab / "s.yaml")), {})
    assert "s3cret" not in json.dumps(found)
    assert found["command"][-1] == "--db=postgresql://me:***@host/lab?password=***"
    assert found["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert found["tasks"]["mqar"]["chance"] == 1 / 16
    monkeypatch.setattr(running, "version", partial(_missing, {"ray"}, running.version))
    assert running.provenance(planned(lab / "s.yaml"), {})["versions"]["ray"] is None


def _missing(names: set[str], version: Callable[[str], str], name: str) -> str:
    if name in names:
        raise running.PackageNotFoundError(name)
    return version(name)


REFUSED = [
    ({"executor": "rey"}, {}, "--executor: unknown executor 'rey'; did you mean 'ray'"),
    ({"workers": 0}, {}, "--workers must be at least 1"),
    ({"address": "auto"}, {}, "--storage"),
    ({"executor": "inline", "workers": 2}, {}, "--executor inline"),
    ({"executor": "inline", "address": "auto", "storage": "x"}, {}, "--executor inline"),
    ({"executor": "inline"}, {"resources": {"gpu": 0.5}}, "s.yaml: resources: a stack wants 0.5 GPU; this machine has"),
    ({}, {"resources": {"gpu": 1}}, "s.yaml: resources: a stack wants 1 GPU; this machine has none"),
    ({}, {"arms": {"on_gpu": {"train": {"device": "cuda"}}}}, "arms.on_gpu: train.device: cuda needs resources"),
]


@pytest.mark.parametrize(("given", "study", "says"), REFUSED, ids=lambda x: str(x))
def test_what_cannot_be_met_is_refused_before_anything_is_written(
    lab: Path, given: dict[str, Any], study: dict[str, Any], says: str
) -> None:
    if study and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    file = write(lab / "s.yaml", **study)
    with pytest.raises(InputError, match=says):
        run_study_file(file, **given)
    assert [path.name for path in lab.iterdir()] == ["s.yaml"]


class Cluster:
    """What `on_ray` sees of Ray's process, on machines of these CPUs and GPUs."""

    def __init__(self, *machines: tuple[float, float]) -> None:
        self.machines = [{"CPU": cpus, "GPU": gpus, "memory": 4.0 * 2**30} for cpus, gpus in machines]

    def send(self, message: dict[str, Any]) -> None:
        raise AssertionError(message)

    @contextmanager
    def __call__(self, address: str | None, folder: Path) -> Iterator["Cluster"]:
        yield self


@pytest.mark.parametrize(
    "resources", [{"cpu": 3}, {"cpu": 1, "gpu": 0.5}, {"memory": 5}], ids=["cores", "a GPU", "memory"]
)
def test_ray_refuses_what_no_machine_of_the_cluster_has(
    lab: Path, monkeypatch: pytest.MonkeyPatch, resources: dict[str, float]
) -> None:
    """It would wait forever. Three cores of two machines are no place for a stack, either."""
    from deltalab.study.running.ray import driver as ray_driver

    monkeypatch.setattr(ray_driver, "_started", Cluster((2, 0), (2, 0)))
    with pytest.raises(InputError, match=r"s\.yaml: resources: a stack wants .* of one machine; Ray's .* 2 CPU, 0 GPU"):
        run_study_file(write(lab / "s.yaml", resources=resources), address="a:1", storage=str(lab))
    with Store.open(lab / "deltalab.db") as store:
        assert store.study("s").state == "interrupted"


# Trials that fail.


def test_a_trial_that_raises_is_recorded_and_the_study_goes_on(lab: Path) -> None:
    registry.add_plugin(rule(lab / "raises.py", "raises_inline", RAISES))
    (lab / "broken").touch()
    arms = {"bad": {"rule": "raises_inline"}, "iplr": {"rule": {"transition": "iplr"}}}
    file = write(lab / "s.yaml", ablate=[], arms=arms)
    result = run_study_file(file, executor="inline")
    assert (result.trials, result.failed) == (6, 2)
    with Store.open(lab / "deltalab.db") as store:
        assert store.study("s").state == "failed"
        rows = store.trials(result.study_id)
        bad = [row for row in rows if row.state == "failed"]
        assert [(row.arm, row.stage, row.number) for row in bad] == [("bad", "confirm", 0), ("bad", "confirm", 1)]
        for row in bad:
            assert row.error is not None
            assert row.error.startswith("Traceback")
            assert "RuntimeError: boom" in row.error
            assert "operands" in row.error
            assert row.runs == {}
            assert row.rule == "raises_inline"
    verdicts = {row.arm: row.verdict for row in result.report.tables[0].rows}
    assert verdicts["bad"] == "failed"
    assert verdicts["iplr"] != "failed"

    known = run_study_file(file, executor="inline")
    assert (known.known, known.failed) == (6, 2), "a failed trial is not run again unasked"

    (lab / "broken").unlink()
    retried = run_study_file(file, executor="inline", retry_failed=True)
    assert (retried.known, retried.failed) == (4, 0)
    assert_whole(lab / "deltalab.db", planned(file))


@pytest.mark.usefixtures("in_process")
def test_two_candidates_that_share_a_failed_trial_can_retry_it(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of Mamba has no MLP, with or without one."""
    space = {"model.block": {"choice": ["transformer", "mamba"]}, "model.mlp": {"choice": [True, False]}}
    file = write(lab / "s.yaml", ablate=[], tune={"trials": 4, **space})
    with monkeypatch.context() as patch:
        patch.setattr(trials, "train_together", lambda *args, **kwargs: 1 / 0)
        assert run_study_file(file, executor="inline").failed == 4
    retried = run_study_file(file, executor="inline", retry_failed=True)
    assert (retried.failed, retried.trials) == (0, 4)


def test_a_deadline_ends_a_trial(lab: Path) -> None:
    result = run_study_file(write(lab / "s.yaml", deadline=1e-3, ablate=[], tune=None), executor="inline")
    assert result.failed == 1
    with Store.open(lab / "deltalab.db") as store:
        (row,) = store.trials(result.study_id)
    assert row.error is not None
    assert "deadline of 0.001 s, at step 0 of 6" in row.error.splitlines()[-1]


def test_a_diverged_trial_is_no_failure(lab: Path) -> None:
    train_spec = {**STUDY["base"]["train"], "lr": 1e30, "clip": 0.0}
    file = write(lab / "s.yaml", base={**STUDY["base"], "train": train_spec}, tune=None, ablate=[])
    result = run_study_file(file, executor="inline")
    assert result.failed == 0
    (row,) = result.report.tables[0].rows
    assert (row.score.missing, row.score.mean) == (2, 1 / 16), "each seed counts as chance"
    found = ledger(lab / "deltalab.db")
    assert all(state == "diverged" and at is not None for _, _, state, at in found["runs"])
    assert found["weights"] == []


def job(file: Path) -> Job:
    plan = planned(file)
    return plan.job(plan.arms[0], "confirm", 0, {})


def test_code_that_changed_since_the_plan_is_refused(lab: Path) -> None:
    planned_job = job(write(lab / "s.yaml"))
    kind, name, file, _ = planned_job.plugins[0]
    other = replace(planned_job, plugins=((kind, name, file, "0" * 64), *planned_job.plugins[1:]))
    (record,) = execute([other], lab / "runs")
    assert record.state == "failed"
    assert record.error is not None
    assert "rule 'comba' in" in record.error.splitlines()[-1]
    assert "is not what the study was planned with" in record.error.splitlines()[-1]
    assert record.rule.hash == "0" * 64, "the record names the code that was planned"


def test_code_that_a_worker_lacks_is_a_failed_trial(lab: Path) -> None:
    planned_job = job(write(lab / "s.yaml"))
    gone = ("rule", "gone", str(lab / "gone.py"), "0" * 64)
    config = {**planned_job.config, "rule": {"name": "gone"}}
    (record,) = execute([replace(planned_job, config=config, plugins=(gone,))], lab / "runs")
    assert record.state == "failed"
    assert record.error is not None
    assert "gone.py: no such plugin file" in record.error.splitlines()[-1]
    assert (record.rule.name, record.rule.source) == ("gone", planned_job.rule_source)


def test_a_record_survives_json(lab: Path) -> None:
    planned_job = job(write(lab / "s.yaml"))
    (record,) = execute([planned_job], lab / "runs")
    assert (record.state, len(record.runs)) == ("done", 2)
    assert record_from_json(record_to_json(record)) == record
    assert record_from_json(record_to_json(failed(planned_job, "died"))).error == "died"
    assert isinstance(record.runs[0].artifacts[0], ArtifactRecord)


def test_a_trial_that_was_cut_off_goes_on_from_its_checkpoint(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a deadline, and with the same figures as a trial that was left alone."""
    planned_job = job(write(lab / "s.yaml"))
    (whole,) = execute([planned_job], lab / "whole")
    monkeypatch.setattr(trials, "train_together", partial(train_together, checkpoint_seconds=0))

    def cut(step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute([planned_job], lab / "cut", watch=cut)
    assert (lab / "cut" / "checkpoints" / f"{planned_job.key}.pt").exists()
    steps: list[int] = []
    (resumed,) = execute([planned_job], lab / "cut", watch=steps.append)
    assert steps == [6]
    runs: list[list[tuple[int, Any, str]]] = [
        [(run.seed, run.metrics, run.artifacts[0].sha256) for run in one.runs] for one in (whole, resumed)
    ]
    assert [run[:2] for run in runs[0]] == [run[:2] for run in runs[1]]
    assert not list((lab / "cut" / "checkpoints").iterdir())


@pytest.mark.usefixtures("in_process")
def test_a_full_disk_under_the_weights_is_no_result(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study is incomplete until there is space; then it goes on, with the same figures."""
    save, tries = torch.save, []

    def full(state: object, to: Any) -> None:
        tries.append(to.name)
        raise OSError(28, "No space left on device", to.name)

    file = write(lab / "s.yaml", ablate=[], tune=None)
    monkeypatch.setattr(scheduling, "PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr("torch.save", full)
    result = run_study_file(file, executor="inline")
    assert (result.trials, result.failed, len(tries)) == (0, 0, 4)
    assert list(result.missing.values()) == [
        f"weights and checkpoints in {lab / 'runs'}: [Errno 28] No space left on device: '{tries[-1]}'"
    ]
    assert recorded(lab / "deltalab.db") == 0
    with Store.open(lab / "deltalab.db") as store:
        assert store.study("s").state == "incomplete"
    monkeypatch.setattr("torch.save", save)
    again = run_study_file(file, executor="inline")
    assert (again.trials, again.known, again.missing) == (1, 0, {})
    assert_whole(lab / "deltalab.db", planned(file))


# A driver that is killed: between any two writes of the ledger, and in the middle of each.


class Killed(BaseException):
    pass


def quick(worker: Worker, stack: Sequence[Job], *_: Any) -> list[TrialRecord]:
    """Trials in no time, with figures of their own."""
    return [measured(planned_job) for planned_job in stack]


@pytest.mark.slow(keep="in a write")
@pytest.mark.parametrize("committed", [False, True], ids=["in a write", "after a write"])
def test_a_driver_killed_at_any_write_goes_on_with_the_same_command(
    lab: Path, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    monkeypatch.setattr(Worker, "execute", quick)
    file = write(lab / "s.yaml")
    whole = run_study_file(file, db=lab / "whole.db", executor="inline")
    right = ledger(lab / "whole.db")
    writing = Store._writing

    def die_at(fatal: int) -> int:
        """A store whose process is gone from that write on; the writes that were tried."""
        count = 0

        @contextmanager
        def dying(self: Store) -> Iterator[Session]:
            nonlocal count
            count += 1
            if count > fatal:
                raise Killed
            with writing(self) as session:
                yield session
                if count == fatal and not committed:
                    raise Killed
            if count == fatal:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(Store, "_writing", dying)
            with pytest.raises(Killed):
                run_study_file(file, db=db, executor="inline")
        return count

    for fatal in range(1, 1 + 4 + 1 + 1):  # the study, its trials, its end
        db = lab / f"{fatal}.db"
        assert die_at(fatal) >= fatal
        before = recorded(db)
        result = run_study_file(file, db=db, executor="inline")
        assert ledger(db) == right
        assert result.known == before
        assert repr(result.report.tables) == repr(whole.report.tables), "as text, since NaN differs from itself"
        with Store.open(db) as store:
            assert store.study("s").state == "done"


def test_two_drivers_of_one_study_would_do_it_twice(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "execute", quick)
    file = write(lab / "s.yaml")
    second: list[object] = []

    def meanwhile(worker: Worker, stack: Sequence[Job], *_: Any) -> list[TrialRecord]:
        if not second:
            second.append("tried")
            with pytest.raises(InputError, match=f"study 's' is running already, on .*, process {os.getpid()}"):
                run_study_file(file, executor="inline")
            other = run_study_file(write(lab / "t.yaml", name="t", ablate=["b"]), executor="inline")
            assert (other.trials, other.failed) == (4, 0)
        return quick(worker, stack)

    monkeypatch.setattr(Worker, "execute", meanwhile)
    assert run_study_file(file, executor="inline").failed == 0
    assert_ledger_is_of(lab / "deltalab.db", planned(file))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)]
)
def test_a_signal_ends_the_study_in_order_and_says_how_to_go_on(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    done = []

    def interrupted(worker: Worker, stack: Sequence[Job], *_: Any) -> list[TrialRecord]:
        if done:
            os.kill(os.getpid(), number)
        done.append(stack)
        return quick(worker, stack)

    monkeypatch.setattr(Worker, "execute", interrupted)
    monkeypatch.setattr(sys, "argv", ["platform", "study", "run", str(write(lab / "s.yaml")), "--executor", "inline"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted: the same command goes on from here"
    assert {signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)} == {signal.SIG_DFL}
    with Store.open(lab / "deltalab.db") as store:
        study = store.study("s")
        assert study.state == "interrupted"
        assert len(store.trials(study.id)) == sum(map(len, done)) < planned(lab / "s.yaml").trials


def test_ray_that_ended_early_is_no_success(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_with_ray", lambda *args, **kwargs: None)
    with pytest.raises(KeyboardInterrupt):
        run_study_file(write(lab / "s.yaml"))
    with Store.open(lab / "deltalab.db") as store:
        assert store.study("s").state == "interrupted"


LONGER = {**STUDY["base"], "train": {**STUDY["base"]["train"], "steps": 80, "evaluations": 8}}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Any, ...]]]:
    """The ledger of the longer study, run in peace."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_study_file(write(folder / "s.yaml", base=LONGER), db=folder / "lab.db", executor="inline")
    return ledger(folder / "lab.db")


def start(lab: Path, *more: str) -> subprocess.Popen[bytes]:
    """The command, in a session of its own."""
    command = [str(Path(sys.executable).with_name("platform")), "study", "run", "s.yaml", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=lab, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def in_session(session: int) -> list[str]:
    """What still runs of a session, zombies aside."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, of, *_ = rest.split()
        if int(of) == session and state not in "ZX":
            alive.append(name)
    return alive


def kill_when(process: subprocess.Popen[bytes], reached: Callable[[], bool], patience: float = 240) -> None:
    """kill -9 of the driver alone; all that it started must follow it."""
    until = time.monotonic() + patience
    while not reached():
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        assert time.monotonic() < until
        time.sleep(0.02)
    assert in_session(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # Ray's two agents train nothing, and take a minute to see that they are alone.
    ends(process, but=("ray::DashboardA", "ray::RuntimeEnv"))


def ends(process: subprocess.Popen[bytes], but: tuple[str, ...] = (), patience: float = 90) -> None:
    """Waits until nothing that the command started is left."""
    until = time.monotonic() + patience
    while left := [name for name in in_session(process.pid) if not name.endswith(but or "\0")]:
        assert time.monotonic() < until, left
        time.sleep(0.1)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err.decode()
    ends(process)


@pytest.mark.slow
def test_kill_9_inline(lab: Path, uninterrupted: dict[str, list[tuple[Any, ...]]]) -> None:
    file = write(lab / "s.yaml", base=LONGER, resources={"stack": 1})
    db = lab / "deltalab.db"
    kill_when(start(lab, "--executor", "inline"), lambda: recorded(db) >= 1)
    first = recorded(db)
    assert 1 <= first < 4
    process = start(lab, "--executor", "inline")
    kill_when(process, lambda: recorded(db) >= first + 1 and not time.sleep(0.1))  # in the middle of the next
    second = recorded(db)
    assert first < second < 4
    finish(start(lab, "--executor", "inline"))
    assert_whole(db, planned(file))
    assert ledger(db) == uninterrupted


@pytest.mark.slow
def test_kill_9_with_ray(
    lab: Path, uninterrupted: dict[str, list[tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(lab / "s.yaml", base=LONGER, resources={"stack": 1})
    db = lab / "deltalab.db"
    monkeypatch.setenv("RAY_TMPDIR", str(short := Path(tempfile.mkdtemp())))  # a socket's path has at most 107 bytes
    kill_when(start(lab), lambda: recorded(db) >= 2 and not time.sleep(0.1))
    before = recorded(db)
    assert 2 <= before < 4
    with Store.open(db) as store:
        assert store.study("s").state == "interrupted"
    assert run_study_file(file).known == before
    assert not list(short.glob("deltalab-*"))
    shutil.rmtree(short)
    assert_whole(db, planned(file))
    assert ledger(db) == uninterrupted


@pytest.mark.slow
def test_ray_gives_what_inline_gives_and_survives_its_workers(lab: Path) -> None:
    """Plugins of both kinds, a corpus by a relative path, a trial that raises, a worker that dies, an edited rule."""
    rule(lab / "plugins" / "mine.py", "mine")
    registry.add_plugin(rule(lab / "elsewhere" / "named.py", "named"))
    registry.add_plugin(rule(lab / "raises.py", "raises_in_ray", RAISES))
    registry.add_plugin(rule(lab / "dies.py", "dies", DIES))
    edited = rule(lab / "edited.py", "edited")
    registry.add_plugin(edited)
    (lab / "corpus.txt").write_bytes(bytes(range(256)) * 8)
    given: dict[str, Any] = {
        "task": {"text": {"length": 8, "corpus": "corpus.txt"}},
        "ablate": [],
        "tune": None,
        "arms": {name: {"rule": name} for name in ("mine", "named", "raises_in_ray")},
    }
    (lab / "broken").touch()
    inline = write(lab / "inline.yaml", **given)
    alone = run_study_file(inline, db=lab / "inline.db", executor="inline")
    assert (alone.trials, alone.failed) == (4, 1)

    (lab / "deadly").touch()
    original = edited.read_text()
    edited.write_text(original + "\n# edited after the plan\n")
    troubled = {"dies": {"rule": "dies"}, "edited": {"rule": "edited"}}
    file = write(lab / "s.yaml", **{**given, "arms": {**given["arms"], **troubled}})
    result = run_study_file(file, db=lab / "ray.db")
    assert (result.trials, result.failed) == (6, 3)

    def of(db: str, table: str) -> list[tuple[Any, ...]]:
        rows = ledger(lab / db)[table]
        return [row for row in rows if not {"dies", "edited"} & set(row)]

    for table in ("places", "runs", "metrics", "weights"):
        assert of("inline.db", table) == of("ray.db", table)
        assert of("inline.db", table)
    with Store.open(lab / "ray.db") as store:
        assert store.study("s").state == "failed"
        last = {
            (row.arm, (row.error or "").strip().splitlines()[-1]) for row in store.trials(1) if row.state == "failed"
        }
    assert {arm for arm, _ in last} == {"raises_in_ray", "dies", "edited"}
    for arm, line in last:
        says = {
            "raises_in_ray": "RuntimeError: boom",
            "dies": "ended the process with os._exit(",
            "edited": "not what the study was",
        }
        assert says[arm] in line

    # The same ledger goes on inline, without the trouble.
    (lab / "broken").unlink()
    (lab / "deadly").unlink()
    edited.write_text(original)
    again = run_study_file(file, db=lab / "ray.db", executor="inline", retry_failed=True)
    assert (again.trials, again.known, again.failed) == (6, 3, 0)
    assert_whole(lab / "ray.db", planned(file))
