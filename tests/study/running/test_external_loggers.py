"""Logging a study elsewhere: every run once, whatever the logger does, and nothing of it in the study's way."""

import json
import os
import re
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.folders import DOCS

from deltalab import registry
from deltalab.cli.app import main
from deltalab.errors import InputError
from deltalab.loggers import BUILTIN, LoggedReport, LoggedRun, LoggedStudy, arms_of, make_logger
from deltalab.store import Store
from deltalab.study.running import external_loggers
from deltalab.study.running.run import StudyResult, run_study_file

STUDY: dict[str, Any] = {
    "name": "tiny",
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}},
    "base": {
        "rule": "gated_deltanet",
        "model": {"d_model": 16, "layers": 1, "heads": 1, "mlp": False},
        "train": {"steps": 4, "batch_size": 4, "lr": 0.01, "evaluations": 2, "eval_batches": 1},
    },
    "ablate": ["g"],
    "seeds": 2,
}
RUNS = 4
"""Of the study: two arms with two seeds."""

PLUGIN = """
import json, os, time
from pathlib import Path

SAID = Path(__file__).with_name("said.jsonl")


class Kept:
    where = "said.jsonl"

    def begin(self, study):
        self.say("begin", study.label)
        return [line["id"] for line in self.said() if line["what"] == "log"]

    def log(self, run):
        self.say("log", run.label, id=run.id, curves=run.curves, state=run.state, facts=run.facts)

    def end(self, report):
        self.say("end", report.state, markdown=report.markdown)

    def say(self, what, label, **more):
        print("a library prints", what)
        with SAID.open("a") as file:
            file.write(json.dumps({"what": what, "label": label, **more}) + "\\n")

    def said(self):
        return [json.loads(line) for line in SAID.read_text().splitlines()]


class Raising(Kept):
    def log(self, run):
        raise ConnectionError("https://me:" + os.environ["PROBE_API_KEY"] + "@server/ is not there")


class Hanging(Kept):
    def log(self, run):
        self.say("pid", os.getpid())
        time.sleep(600)


class Dying(Kept):
    def log(self, run):
        os._exit(3)


class Lost(Kept):
    tries = 0

    def log(self, run):
        Lost.tries += 1
        if Lost.tries == 2:
            raise TimeoutError("for a moment")
        super().log(run)


class Missing(Kept):
    def __init__(self):
        import not_installed.part


class Broken(Kept):
    def __init__(self):
        raise ValueError("no configuration")
"""
KINDS = ("Kept", "Raising", "Hanging", "Dying", "Lost", "Missing", "Broken")


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[dict[str, Any]]]:
    """Installs a package with loggers, in a folder to work in; gives what they were told."""
    site = tmp_path / "site"
    (site / "probe-1.dist-info").mkdir(parents=True)
    (site / "probe-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1\n")
    points = "".join(f"{kind.lower()} = probe_loggers:{kind}\n" for kind in KINDS)
    (site / "probe-1.dist-info" / "entry_points.txt").write_text(f"[deltalab.loggers]\n{points}")
    (site / "probe_loggers.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(external_loggers, "POLL_SECONDS", 0.05)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("PROBE_API_KEY", "s3cret-key")

    def lines(what: str) -> list[dict[str, Any]]:
        file = site / "said.jsonl"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line for line in found if line["what"] == what]

    return lines


def ran(*names: str, **given: Any) -> StudyResult:
    return run_study_file(STUDY, executor="inline", log_to=names, **given)


def test_a_trial_of_a_search_has_the_name_that_the_report_gives_it() -> None:
    trial = types.SimpleNamespace(
        task="mqar", stage="tune", key="k", parameters=1, state_size=None, seconds=1.0, tokens_per_second=None,
        config={}, error=None, state="done",
    )  # fmt: skip
    study = cast(LoggedStudy, types.SimpleNamespace(id="s", spec={"search": {"trials": 8}}))
    for stage, number, name in (
        ("tune", 1_000_002, "base, mqar, random candidate 2, seed 5"),
        ("confirm", 3, "base, mqar, training 3, seed 5"),
    ):
        trial.stage = stage
        ended = types.SimpleNamespace(trial=trial, arm="base", number=number, values={}, runs={5: ("done", None, {})})
        (run,) = external_loggers.logged_runs(cast(Any, ended), study)
        assert run.label == name


def test_every_run_is_logged_once_with_its_curves_and_the_report(said: Callable[..., Any]) -> None:
    result = ran("kept")
    logged = said("log")
    assert sorted(run["label"] for run in logged) == [
        f"{arm}, mqar, confirm 0, seed {seed}" for arm in ("base", "without_g") for seed in (1, 2)
    ]
    with Store.open(create=False) as store:
        points = store.curves(result.study_id, "mqar", "accuracy", "validation")
    known = [[point.step, point.value] for point in points if (point.arm, point.seed) == ("base", 2)]
    (run,) = (run for run in logged if run["label"] == "base, mqar, confirm 0, seed 2")
    assert known
    assert run["curves"]["validation/accuracy"] == known
    assert run["facts"]["parameters"] > 0
    assert [end["label"] for end in said("end")] == ["done"]
    assert "gated_deltanet" in said("end")[0]["markdown"] or "without_g" in said("end")[0]["markdown"]


@pytest.mark.slow
def test_what_the_ledger_had_is_logged_once_and_not_again(said: Callable[..., Any]) -> None:
    ran()
    ran("kept")
    assert len(said("log")) == RUNS
    ran("kept")
    assert len(said("log")) == RUNS
    ran("kept", overrides={"seeds": 3})
    assert len({run["id"] for run in said("log")}) == len(said("log")) == RUNS + 6  # another study
    assert said("begin")[-1]["label"] == "tiny with seeds=3"


def test_a_logger_that_raises_is_told_once_without_secrets(
    said: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert ran("raising").state == "done"
    warnings = [record.getMessage() for record in caplog.records if "--log-to" in record.getMessage()]
    assert len(warnings) == 2
    assert warnings[0].startswith(
        "--log-to raising: ConnectionError: https://me:***@server/ is not there; the study goes on"
    )
    assert "4 runs and the report could not be logged" in warnings[1]
    assert "s3cret" not in caplog.text


@pytest.mark.slow
def test_a_logger_that_hangs_holds_the_study_up_for_a_bounded_time(
    said: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(external_loggers, "STALL_SECONDS", 1.0)
    began = time.monotonic()
    assert ran("hanging", "kept").state == "done"
    assert time.monotonic() - began < 300
    assert "--log-to hanging: 4 runs and the report could not be logged (no answer for 1 s)" in caplog.text
    assert len(said("log")) == RUNS  # by the other one
    (hung,) = said("pid")
    with pytest.raises(ProcessLookupError):
        os.kill(hung["label"], 0)


def test_a_logger_that_dies_leaves_the_study_alone(said: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    assert ran("dying").state == "done"
    assert "--log-to dying: its process ended with exit code 3; it said last: a library prints begin" in caplog.text
    assert "the same command logs what is missing" in caplog.text


def test_a_run_that_failed_once_is_logged_later(said: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    ran()  # so that all four come at once, and the third and fourth after the failure
    assert ran("lost").state == "done"
    ran("kept")
    assert len({run["id"] for run in said("log")}) == len(said("log")) == RUNS


def test_an_interrupted_study_does_not_wait_for_its_loggers(
    said: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deltalab.study.running.run._inline", stopped)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ran("hanging")
    assert time.monotonic() - began < 300
    assert not said("end")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandbb", "--log-to: unknown logger 'wandbb'; did you mean 'wandb'? allowed: broken, dying, hanging, kept, "),
        ("missing", "--log-to missing: needs the package not_installed: pip install 'not_installed'"),
        ("broken", "--log-to broken: cannot be loaded: ValueError: no configuration"),
    ],
)
def test_a_logger_that_there_is_not_is_told_before_anything_runs(
    said: Callable[..., Any],
    name: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("tiny.yaml").write_text(json.dumps(STUDY))
    monkeypatch.setattr(
        sys, "argv", ["platform", "study", "run", "tiny.yaml", "--executor", "inline", "--log-to", name]
    )
    with registry.isolated(), pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("\n")) == (2, 1)
    assert message in err
    assert not Path("deltalab.db").exists()


def test_a_package_that_is_not_installed_is_named_with_the_command(said: Callable[..., Any]) -> None:
    Path("site", "wandb.py").write_text("raise ModuleNotFoundError(\"No module named 'wandb'\", name='wandb')")
    with pytest.raises(InputError, match=r"--log-to wandb: needs the package wandb: pip install 'deltalab\[wandb\]'"):
        ran("wandb")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with the study, of which a seed diverged and a trial failed for the loggers' sake."""
    db = tmp_path_factory.mktemp("finished") / "deltalab.db"
    run_study_file(STUDY, db=db, executor="inline")
    return db


def logged(db: Path, name: str, folder: Path) -> tuple[Any, list[LoggedRun], LoggedReport]:
    """Logs a study's runs, one of them as diverged, and its report, in this process."""
    from dataclasses import replace

    from deltalab.store.studies import whole_trials
    from deltalab.study.reports.report import report

    with Store.open(db, create=False) as store:
        study = external_loggers._logged_study(store, 1)
        trials = [whole_trials.whole_trial(store, 1, arm, key) for arm, key in whole_trials.ended_trials(store, 1)]
        runs = [run for trial in trials if trial for run in external_loggers.logged_runs(trial, study)]
        found = report(store, 1)
    runs[-1] = replace(runs[-1], state="diverged", facts={**runs[-1].facts, "diverged_at": 3.0})
    end = LoggedReport("done", json.loads(found.to_json()), found.to_markdown())
    logger = make_logger(name)
    about = LoggedStudy(**{**vars(study), "folder": str(folder)})
    assert [*logger.begin(about)] == []
    for run in runs:
        logger.log(run)
    logger.end(end)
    again = make_logger(name)
    assert sorted(again.begin(about)) == sorted(run.id for run in runs)
    again.end(end)  # a report is replaced
    return again, runs, end


def test_tensorboard_reads_the_curves_back(finished: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger, runs, _ = logged(finished, "tensorboard", tmp_path)
    assert logger.where == f"tensorboard --logdir {next((tmp_path / 'tensorboard').iterdir())}"
    run = next(run for run in runs if (run.arm, run.seed) == ("without_g", 1))
    (folder,) = tmp_path.glob(f"tensorboard/tiny-*/without_g/mqar/confirm 0/seed 1 {run.id[:6]}")
    read = EventAccumulator(str(folder))
    read.Reload()
    points = [(event.step, event.value) for event in read.Scalars("validation/accuracy")]
    assert points == [(step, pytest.approx(value)) for step, value in run.curves["validation/accuracy"]]
    assert read.Scalars("run/parameters")[0].value == run.facts["parameters"]
    (folder,) = tmp_path.glob("tensorboard/tiny-*/report")
    text = EventAccumulator(str(folder))
    text.Reload()
    (event,) = (
        text.Tensors("report/text_summary")
        if "report/text_summary" in text.Tags()["tensors"]
        else text.Tensors("report")
    )
    assert b"without_g" in event.tensor_proto.string_val[0]


def test_the_logger_of_the_guide_works(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = DOCS / "how-to" / "log-to.md"
    (code,) = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    monkeypatch.setitem(sys.modules, "my_loggers", types.SimpleNamespace(**names))
    monkeypatch.setitem(BUILTIN, "lines", "my_loggers:Lines")
    logger, runs, end = logged(finished, "lines", tmp_path)
    assert len(Path(logger.where).read_text().splitlines()) == len(runs) == RUNS
    assert Path(logger.where).with_suffix(".md").read_text() == end.markdown


@pytest.mark.slow
def test_mlflow_reads_the_curves_back(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    _, runs, end = logged(finished, "mlflow", tmp_path)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("deltalab/tiny")
    found = {run.data.tags["deltalab.run"]: run for run in client.search_runs([experiment.experiment_id])}
    assert found.keys() == {*(run.id for run in runs), "report"}
    run = runs[0]
    kept = found[run.id]
    points = client.get_metric_history(kept.info.run_id, "validation/accuracy")
    assert sorted((point.step, point.value) for point in points) == run.curves["validation/accuracy"]
    assert kept.data.params["train.lr"] == "0.01"
    assert (kept.info.status, found[runs[-1].id].info.status) == ("FINISHED", "FAILED")
    report = found["report"].data.metrics
    scores = {f"mqar/{arm['arm']}/score": pytest.approx(arm["score"]) for arm in arms_of(end.report)}
    assert {name: value for name, value in report.items() if name.endswith("score")} == scores
    assert [*tmp_path.glob("mlruns/**/report.md")]


@pytest.mark.slow
def test_wandb_keeps_the_runs_offline(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger, runs, _ = logged(finished, "wandb", tmp_path)
    assert logger.where == f"wandb sync {tmp_path}/wandb/offline-run-*"
    folders = {folder.name.split("-", 3)[3]: folder for folder in tmp_path.glob("wandb/offline-run-*")}
    assert {name for name in folders if not name.endswith("report")} == {run.id for run in runs}
    history = records(next(folders[runs[0].id].glob("*.wandb")))
    points = [(row["_step"], row["validation/accuracy"]) for row in history if "validation/accuracy" in row]
    assert points == runs[0].curves["validation/accuracy"]
    assert [*tmp_path.glob("wandb/offline-run-*-report/files/report.md")]


def records(file: Path) -> list[dict[str, Any]]:
    """The history in the file of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    # A header of 7 bytes; then blocks of 2^15 bytes of LevelDB's log: checksum, length, and whether a record goes on.
    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a full record, or its last part
            record, whole = Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


@pytest.mark.slow
def test_several_loggers_at_once_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    Path("tiny.yaml").write_text(json.dumps(STUDY))
    words = ["study", "run", "tiny.yaml", "--executor", "inline", "--json"]
    for name in ("wandb", "tensorboard"):
        words += ["--log-to", name]
    monkeypatch.setattr(sys, "argv", ["platform", *words])
    with registry.isolated(), pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 0
    assert json.loads(out)["state"] == "done"
    assert "--log-to tensorboard: tensorboard --logdir " in err
    assert "could not be logged" not in err
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == RUNS + 1
    assert len([*tmp_path.glob("tensorboard/*/logged/*")]) == RUNS


@pytest.mark.slow
def test_nothing_of_a_logger_is_loaded_into_the_driver(said: Callable[..., Any]) -> None:
    assert not {"wandb", "mlflow", "tensorboard"} & {name.partition(".")[0] for name in _loaded("kept")}


def _loaded(name: str) -> set[str]:
    import subprocess

    code = (
        "import json, sys; from deltalab.study.running.external_loggers import LogTo\n"
        f"with LogTo(['tensorboard', {name!r}]): print(json.dumps([*sys.modules]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return set(json.loads(done.stdout))
