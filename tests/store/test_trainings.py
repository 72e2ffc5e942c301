"""A training stands in the ledger as its run's folder has it, beside the study that it comes from."""

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from rich.console import Console
from sqlalchemy import text
from streamlit.testing.v1 import AppTest

import deltalab_dashboard
from deltalab.cli.app import main
from deltalab.errors import InputError
from deltalab.store import ArmRecord, RuleRecord, Store, TrialRecord, database
from deltalab.store.trainings import add_evaluations, curves, measured, record, require_run, trainings
from deltalab.study.reports.lines import training_cells
from deltalab.study.reports.report import report

APP = Path(deltalab_dashboard.__file__).parent / "app.py"
ABOUT: dict[str, Any] = {
    "export": "/elsewhere/exported",
    "rule": "comba",
    "study": "ablation",
    "arm": "no_d",
    "provenance": {"study": "ablation", "arm": "no_d"},
    "engine": "torchtitan",
    "command": ["platform", "--db", "postgresql://me:SECRET@h/l"],
    "gpus": 2,
    "nodes": 1,
    "parameters": 394_000_000,
    "recipe": {"batch": {"sequences": 8, "length": 16}, "steps": 40},
    "started": "2026-11-22T10:00:00+00:00",
}


def run_folder(folder: Path, run: str = "r1", steps: int = 4, **given: Any) -> Path:
    """A run of 128 tokens a step at 256 tokens a second, whose loss falls by 0.1 a step from 5."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"id": run, **ABOUT, **given}))
    lines = [(step, "train", "loss", 5 - step / 10) for step in range(1, steps + 1)]
    lines += [(step, "train", "tokens_per_second", 256.0) for step in range(1, steps + 1)]
    lines.append((steps, "validation", "loss", 4.75))
    write_metrics(folder, lines, "w")
    return folder


def write_metrics(folder: Path, lines: list[tuple[int, str, str, float | None]], mode: str = "a") -> None:
    with (folder / "metrics.jsonl").open(mode) as file:
        for step, split, name, value in lines:
            file.write(json.dumps({"step": step, "split": split, "name": name, "value": value}) + "\n")


def begin(store: Store, name: str = "ablation", profile: str | None = None) -> int:
    arms = [ArmRecord("base", True, {}, {}), ArmRecord("no_d", False, {}, {})]
    tasks = {"mqar": {"metric": "accuracy", "maximize": True, "chance": 0.1, "version": 1}}
    study = store.begin_study(name, profile, f"{name} {profile}", {"seeds": 1}, arms, {"tasks": tasks, "git": {}})
    trial = TrialRecord(
        f"key {profile}", "mqar", 1, "confirm", {}, "done", 0.0, 1.0, 1.0, RuleRecord("comba", "9f", "..."), runs=[]
    )
    store.record_trial(study, "no_d", trial, 0, {})
    return study


def test_a_run_is_read_back_as_its_folder_has_it(store: Store, tmp_path: Path) -> None:
    record(store, run_folder(tmp_path / "comba-340M"))
    [row] = trainings(store)
    assert (row.run, row.name, row.study, row.arm, row.rule) == ("r1", "comba-340M", "ablation", "no_d", "comba")
    assert (row.parameters, row.steps, row.tokens) == (394_000_000, 4, 512)
    assert row.losses == {"train": 4.6, "validation": 4.75}
    assert row.tokens_per_second == 256
    assert row.started_at.isoformat() == ABOUT["started"]
    assert row.about["recipe"] == ABOUT["recipe"]
    assert "SECRET" not in repr(row)
    assert measured(store) == [("train", "loss"), ("train", "tokens_per_second"), ("validation", "loss")]
    points = curves(store, [row.id], "train", "loss")
    assert [(p.step, p.tokens, p.seconds) for p in points] == [(s, 128 * s, s / 2) for s in (1, 2, 3, 4)]
    assert [p.value for p in points] == [4.9, 4.8, 4.7, 4.6]
    assert [p.step for p in curves(store, [row.id], "train", "loss", max_points=2)] == [2, 4]


def test_recording_again_updates_and_never_doubles(store: Store, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    first = record(store, folder)
    assert record(store, folder) == first
    # A resumed run repeats step 3 and goes on; what a kill left half written is no line yet.
    write_metrics(folder, [(3, "train", "loss", 4.0), (5, "train", "loss", 3.5), (6, "train", "loss", None)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "split": "tra')
    evaluations = [{"step": 4, "task": "arc", "metric": "acc", "value": 0.25}]
    (folder / "evaluations.json").write_text(json.dumps({"evaluations": evaluations}))
    assert record(store, folder) == first
    [row] = trainings(store)
    assert [p.value for p in curves(store, [first], "train", "loss")] == [4.9, 4.8, 4.0, 4.6, 3.5]
    assert (row.steps, row.losses["train"]) == (5, 3.5)
    assert row.evaluations == {"arc acc": 0.25}
    assert ("evaluation", "arc acc") not in measured(store)


def test_a_result_keeps_its_standard_error_and_never_that_of_an_earlier_value(store: Store, tmp_path: Path) -> None:
    result = {"step": 4, "task": "arc", "metric": "acc", "value": 0.25, "stderr": 0.05}
    folder = run_folder(tmp_path / "run")
    (folder / "evaluations.json").write_text(json.dumps({"evaluations": [result]}))
    record(store, folder)
    [row] = trainings(store)
    assert (row.evaluations, row.stderrs) == ({"arc acc": 0.25}, {"arc acc": 0.05})
    assert training_cells(row)[-1] == "arc acc 0.25 ± 0.05"
    assert {split for split, _ in measured(store)} == {"train", "validation"}
    for later in ({**result, "stderr": None}, result, {**result, "step": 6, "stderr": None}):
        assert add_evaluations(store, row.run, [later])
        assert trainings(store)[0].stderrs == ({"arc acc": 0.05} if later is result else {})


def test_what_is_no_run_is_one_line(store: Store, tmp_path: Path) -> None:
    def refused(saying: str) -> None:
        with pytest.raises(InputError, match=saying) as error:
            record(store, tmp_path / "run")
        assert "\n" not in str(error.value)
        assert trainings(store) == []

    refused(r"run: is no run of `deltalab train`: run\.json: No such file")
    run_folder(tmp_path / "run", recipe={})
    refused(r"run\.json: is not that of a run: KeyError: 'batch'")
    run_folder(tmp_path / "run")
    write_metrics(tmp_path / "run", [("x", "train", "loss", 1.0)])  # type: ignore[list-item]
    refused(r"metrics\.jsonl:10: is no metric: ValueError")
    (tmp_path / "run" / "run.json").write_text("{")
    refused(r"run\.json: is not JSON")


@pytest.mark.parametrize("what", ["pipe", "device", "deep", "long"])
def test_a_hostile_run_is_one_line_and_takes_no_time(what: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    if what == "pipe":
        os.mkfifo(file)
    elif what == "device":
        file.symlink_to("/dev/zero")
    else:
        file.write_text("[" * 10**6 if what == "deep" else " " * (2**24 + 1))
    with pytest.raises(InputError, match=r"run\.json: (cannot be read|is not JSON)") as told:
        require_run(tmp_path)
    assert "\n" not in str(told.value)


def test_a_study_shows_its_own_trainings_alone(store: Store, tmp_path: Path) -> None:
    gpu, plain = begin(store, profile="gpu"), begin(store)
    record(store, run_folder(tmp_path / "plain", "r1"))
    record(store, run_folder(tmp_path / "gpu", "r2", study="ablation:gpu"))
    record(store, run_folder(tmp_path / "trial", "r3", provenance={"trial": "key None"}))
    record(store, run_folder(tmp_path / "other_trial", "r4", provenance={"trial": "key gpu"}))
    record(store, run_folder(tmp_path / "elsewhere", "r5", provenance={"trial": "of another ledger"}))
    record(store, run_folder(tmp_path / "other", "r6", study="other"))
    names = {study: [row.name for row in trainings(store, store.study(study))] for study in (gpu, plain)}
    assert names == {gpu: ["gpu"], plain: ["plain", "trial", "elsewhere"]}
    assert len(trainings(store)) == 6


def test_the_report_ends_with_the_trainings(store: Store, tmp_path: Path) -> None:
    study = begin(store)
    without = {form: getattr(report(store, study), f"to_{form}")() for form in ("csv", "markdown", "json")}
    assert "Trainings" not in without["csv"] + without["markdown"]
    record(store, run_folder(tmp_path / "comba-340M"))
    found = report(store, study)
    figures = ["comba-340M", "no_d", "comba", "394,000,000", "4", "512", "4.6000", "4.7500", "256", ""]
    assert found.to_markdown().rstrip().endswith("| " + " | ".join(figures) + " |")
    own, of_trainings = found.to_csv().split("\n\n")
    assert own + "\n" == without["csv"]
    [row] = csv.DictReader(io.StringIO(of_trainings))
    assert (row["train_loss"], row["validation_loss"], row["tokens"]) == ("4.6", "4.75", "512")
    [row] = json.loads(found.to_json())["trainings"]
    assert (row["losses"], row["started_at"]) == ({"train": 4.6, "validation": 4.75}, ABOUT["started"])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(found)
    said = console.export_text()
    assert said.index("Trainings of exported folders") < said.index("394,000,000")


def compared(folder: Path) -> Path:
    """The folder of a run with an evaluation that was compared with another run's."""
    result = {"step": 4, "task": "arc", "metric": "acc", "value": 0.25}
    other = {"step": 4, "task": "arc", "metric": "acc", "reference": "r0", "reference_step": 8, "is_log": False}
    figures = {"difference": -0.05, "low": -0.08, "high": -0.02, "p": 0.0125, "items": 1200, "family": 6}
    content = {"evaluations": [result], "comparisons": [{**other, **figures}]}
    (folder / "evaluations.json").write_text(json.dumps(content))
    return folder


def test_the_report_shows_what_evaluations_were_compared_with(store: Store, tmp_path: Path) -> None:
    study = begin(store)
    record(store, compared(run_folder(tmp_path / "comba")))
    cells = ["comba", "r0 step-8", "arc acc", "-0.05 [-0.08, -0.02]", "0.013", "1,200"]
    found = report(store, study)
    assert "| " + " | ".join(cells) + " |" in found.to_markdown()
    [of_training] = json.loads(found.to_json())["trainings"]
    assert of_training["comparisons"][0]["high"] == -0.02
    row = found.to_frame("comparisons").iloc[0]
    assert (row["training"], row["difference"], row["items"]) == ("comba", -0.05, 1200)
    *_, of_comparisons = found.to_csv().split("\n\n")
    assert next(csv.DictReader(io.StringIO(of_comparisons)))["low"] == "-0.08"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(found)
    said = console.export_text()
    assert " ".join(cells) in " ".join(said[said.index("compared item by item") :].split())
    record(store, run_folder(tmp_path / "reference", "r0"))
    assert trainings(store)[0].comparisons[0].reference == "reference step-8", "by its name, once the ledger knows it"
    assert list(shown().table[1].value["compared with"]) == ["reference step\\-8"]


def test_a_narrow_terminal_shows_whole_headings_and_figures_of_a_training(store: Store, tmp_path: Path) -> None:
    study = begin(store)
    record(store, run_folder(tmp_path / "comba-340M-with-a-long-name"))
    add_evaluations(store, "r1", [{"step": 4, "task": "loss", "metric": "bits_per_byte@2048", "value": 1.25}])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report(store, study))
    said = console.export_text()
    words = said[said.index("Trainings of exported folders") :].split()
    assert {"parameters", "tokens", "validation", "tokens/s", "394,000,000", "4.7500"} <= set(words)
    assert "- comba-340M-with-a-long-name: loss bits_per_byte@2048 1.25" in said


def test_a_ledger_of_the_first_revision_is_upgraded_and_keeps_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "old.db"
    with Store.open(file) as store:
        study = begin(store)
    engine = database.connect(database.address(file), migrating=True)
    with engine.execution_options(writes=True).begin() as connection:
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(database.MIGRATIONS))
        command.downgrade(config, "0001")
        assert connection.execute(text("SELECT name FROM sqlite_master WHERE name LIKE 'training%'")).all() == []
    engine.dispose()
    with pytest.raises(InputError, match="revision '0001' is old; run `deltalab db upgrade` first"):
        Store.open(file)
    Store.upgrade(file)
    with Store.open(file) as store:
        assert [row.key for row in store.trials(study)] == ["key None"]
        record(store, run_folder(tmp_path / "run"))
        assert len(trainings(store, store.study(study))) == 1


def test_runs_of_another_machine_are_imported_by_a_command(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def platform(*arguments: object) -> int:
        monkeypatch.setattr("sys.argv", ["platform", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    folders = [run_folder(tmp_path / name, name) for name in ("a", "b")]
    for _ in range(2):
        assert platform("db", "import", *folders, "--db", tmp_path / "lab.db") == 0
    assert [row.name for row in trainings(store)] == ["a", "b"]
    capsys.readouterr()
    assert platform("db", "import", tmp_path, "--db", tmp_path / "lab.db") == 2
    assert "is no run of `deltalab train`" in capsys.readouterr().err


def shown(**query: str) -> AppTest:
    app = AppTest.from_file(APP, default_timeout=60)
    app.query_params.update(query)
    app.switch_page("views/trainings.py").run()
    assert not app.exception
    return app


def test_the_page_draws_the_chosen_studys_trainings_and_others_when_asked(store: Store, tmp_path: Path) -> None:
    begin(store)
    for name, study in (("comba", "ablation"), ("transformer", "ablation"), ("stray", "not here")):
        record(store, run_folder(tmp_path / name, name, study=study, arm=None if name == "stray" else "no_d"))
    app = shown()
    table = app.table[0].value
    assert list(table["training"]) == ["no\\_d, comba", "no\\_d, transformer"]
    [chart] = [json.loads(chart.proto.spec) for chart in app.get("vega_lite_chart")]
    encoding = chart["layer"][0]["encoding"]
    assert (encoding["x"]["title"], encoding["x"]["field"], encoding["y"]["title"]) == (
        "tokens",
        "tokens",
        "loss, train",
    )
    assert encoding["color"]["scale"]["domain"] == ["no_d, comba", "no_d, transformer", "comba, stray"]
    app.multiselect(key="trainings").set_value(["comba, stray"]).run()
    assert list(app.table[0].value["training"]) == ["comba, stray"]
    app.selectbox(key="axis").set_value("seconds of training").run()
    assert not app.exception
    assert any("by the measured tokens per second" in caption.value for caption in app.caption)


def test_the_page_shows_trainings_of_a_ledger_without_studies(store: Store, tmp_path: Path) -> None:
    assert any("deltalab db import" in element.value for element in shown().markdown)
    record(store, run_folder(tmp_path / "run", "r1"))
    record(store, run_folder(tmp_path / "more" / "run", "r2", steps=1))
    assert list(shown().table[0].value["training"]) == ["no\\_d, run r1", "no\\_d, run r2"]
