"""The command as a program uses it: JSON on stdout, errors and progress as JSON on stderr, exit codes that tell."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from tests.support.command import Platform

import deltalab
from deltalab.cli.app import app
from deltalab.errors import InputError, unknown

FIELDS = {"kind", "where", "key", "allowed", "nearest", "mend", "message"}


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command of the application, with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield " ".join((*words, name)), command


COMMANDS = dict(commands(typer.main.get_command(app)))

RESULTS = {
    "version": "",
    "study plan": "study.yaml --sd 0.1",
    "study report": "tiny",
    "study trace": "tiny",
    "study calibrate": "tiny --repeats 2",
    "study schema": "--out schema.json",
    "study new": "mine",
    "study import": "mad mad.yml",
    "study list": "",
    "study diff": "tiny study.yaml:longer",
    "study tag": "tiny good",
    "study note": "tiny words",
    "study hide": "tiny",
    "study unhide": "tiny",
    "study delete": "tiny --yes",
    "rule list": "",
    "rule show": "deltanet",
    "rule new": "mine",
    "task list": "",
    "task show": "mqar length=8 pairs=2",
    "task new": "mine",
    "model list": "",
    "model show": "qwen3_next d_model=16 heads=2 layers=4",
    "data pack": "text.txt --out packed",
    "data tokenizer": "text.txt --out tokenizer.json --vocab 260",
    "db upgrade": "",
    "db export": "copy.db",
    "db backup": "saved.db",
    "db import": "deltalab.db --db other.db",
    "db vacuum": "",
    "trust": ".",
}
"""What follows each command that ends in seconds."""

LONGER = {
    "study run", "study restore", "study export-optuna", "rule check", "rule bench", "rule from-search", "module check",
    "task check", "data show", "export", "train", "eval", "doctor", "dashboard", "mcp", "place", "score",
}  # fmt: skip
"""Commands whose results other tests read, here or in test_commands.py."""


def test_every_command_is_tried() -> None:
    assert RESULTS.keys() | LONGER == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_json_and_says_what_is_wrong_in_it(name: str, platform: Platform) -> None:
    assert any("--json" in option.opts for option in COMMANDS[name].params)
    said = platform(*name.split(), "--no-such-option", "--json")
    assert (said.code, said.out) == (2, "")
    error = json.loads(said.err)["error"]
    assert error.keys() == FIELDS
    assert (error["kind"], error["key"]) == ("usage", "--no-such-option")


def test_an_argument_that_lacks_is_named(platform: Platform, here: Path) -> None:
    assert error_of(platform("study", "plan", "--json"))["key"] == "FILE|NAME"
    assert error_of(platform("study", "plan", "study.yaml", "--workers", "0", "--json"))["key"] == "--workers"
    near = error_of(platform("study", "plan", "study.yaml", "--wrkers", "1", "--json"))
    assert (near["key"], near["nearest"]) == ("--wrkers", "--workers")


@pytest.mark.parametrize("name", RESULTS)
def test_nothing_but_json_is_on_stdout(name: str, platform: Platform, done: Path) -> None:
    (done / "text.txt").write_text("some words of a text\n" * 200)
    (done / "mad.yml").write_text("task: in-context-recall\nvocab_size: 16\nseq_len: 32\n")
    said = platform(*name.split(), *RESULTS[name].split(), "--json")
    assert said.code == 0, said
    assert json.loads(said.out) != ""


def test_a_result_names_the_file_that_was_written(platform: Platform, here: Path) -> None:
    for kind in ("rule", "task", "study"):
        result = json.loads(platform(kind, "new", f"my_{kind}", "--json").out)
        assert result["name"] == f"my_{kind}"
        assert Path(result["file"]).is_file()
    assert json.loads(platform("study", "schema", "--json").out)["title"] == "StudySpec"


def test_search_commands_and_a_restored_study(platform: Platform, done: Path) -> None:
    deleted = json.loads(platform("study", "delete", "tiny", "--yes", "--json").out)
    assert deleted == {"id": 1, "study": "tiny", "deleted": True}
    restored = json.loads(platform("study", "restore", "tiny", "--json").out)
    assert restored == {"id": 1, "study": "tiny", "deleted": False}


def test_an_export_and_its_trial_are_told(platform: Platform, done: Path) -> None:
    told = json.loads(platform("export", "tiny", "out", "--arm", "base", "--json").out)
    assert (told["folder"], told["form"], told["trained"]) == ("out", "hf", True)
    assert told["parameters"] > 0
    losses = json.loads(platform("train", "out", "--trial", "--json").out)["losses"]
    assert len(losses) == 4
    scales = {row["scale"] for row in json.loads(platform("export", "--recipes", "--json").out)}
    assert "2.7B" in scales
    suites = json.loads(platform("eval", "--json", "--suites").out)
    assert "zero_shot/piqa" in [row["name"] for row in suites]


@pytest.mark.parametrize("status", [0, 1])
def test_a_training_tells_its_progress_on_stderr_and_its_end_on_stdout(
    status: int, platform: Platform, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(launch: Any, *, say: Any, record: Any) -> int:
        say("step 1/4, loss 2.0")
        return status

    monkeypatch.setattr("deltalab.engines.preparation.prepare", lambda *_, **__: SimpleNamespace(run=here / "run"))
    monkeypatch.setattr("deltalab.engines.launch.start", start)
    monkeypatch.setattr("deltalab.engines.outcome.last_error", lambda run: "out of memory")
    said = platform("train", "out", "--data", "packed", "--json", "--progress", "json")
    assert said.code == status
    assert json.loads(said.err) == {"progress": {"text": "step 1/4, loss 2.0"}}
    result = json.loads(said.out)
    assert (result["state"], result.get("error")) == (("done", None), ("failed", "out of memory"))[status]
    said = platform("train", "out", "--data", "packed")
    assert said.out.startswith("step 1/4, loss 2.0\n"), "for people, on stdout"


@pytest.mark.slow
def test_the_dashboard_tells_its_address_and_nothing_else(done: Path) -> None:
    command = [sys.executable, "-m", "deltalab", "dashboard", "--port", "18765", "--no-browser", "--json"]
    with subprocess.Popen(command, cwd=done, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            assert json.loads(child.stdout.readline()) == {"address": "http://127.0.0.1:18765"}
            while b"18765" not in child.stderr.readline():
                assert child.poll() is None, "Streamlit says where it serves"
        finally:
            child.terminate()
        assert child.stdout.read() == b""


def error_of(said: Any) -> dict[str, Any]:
    """The error, which is the last line of stderr."""
    assert said.out == ""
    return json.loads(said.err.splitlines()[-1])["error"]


def test_an_unknown_name_is_told_with_what_is_allowed(platform: Platform, here: Path) -> None:
    error = error_of(platform("rule", "show", "comb", "--json"))
    assert (error["kind"], error["key"], error["nearest"]) == ("unknown", "comb", "comba")
    assert "gla" in error["allowed"]
    assert "rule 'comb'" in error["message"]

    (here / "study.yaml").write_text((here / "study.yaml").read_text().replace("steps: 4", "stepss: 4"))
    error = error_of(platform("study", "plan", "study.yaml", "--json"))
    assert (error["kind"], error["key"], error["nearest"]) == ("unknown", "stepss", "steps")
    assert error["where"].startswith("study.yaml: base")


def test_an_override_is_told_with_the_fields_of_what_it_causes(platform: Platform, here: Path) -> None:
    error = error_of(platform("study", "plan", "study.yaml", "train.stps=3", "--json"))
    assert (error["kind"], error["key"], error["nearest"]) == ("unknown", "stps", "steps")
    assert error["where"] == "study.yaml: command line: train.stps=3: base"


def test_an_error_has_the_fields_of_another_only_if_it_quotes_it() -> None:
    try:
        try:
            raise unknown("rule", "comb", ["comba"])
        except InputError:
            raise InputError("study.yaml: something else is wrong") from None
    except InputError as error:
        fields = error.fields()
    assert (fields["kind"], fields["key"], fields["where"]) == ("input", None, "study.yaml")


def test_a_key_that_pydantic_refuses_is_told_with_its_place(platform: Platform, here: Path) -> None:
    text = (here / "study.yaml").read_text()
    (here / "study.yaml").write_text(text.replace("seeds: 2", "seedz: 2"))
    error = error_of(platform("study", "plan", "study.yaml", "--json"))
    assert (error["where"], error["key"], error["nearest"]) == ("study.yaml", "seedz", "seeds")
    (here / "study.yaml").write_text(text.replace("name: tiny", "name: [1]"))
    error = error_of(platform("study", "plan", "study.yaml", "--json"))
    assert (error["where"], error["key"]) == ("study.yaml", "name")


@pytest.mark.parametrize(
    ("words", "kind", "where"),
    [
        (("study", "plan", "study.yaml", "--workers", "0"), "usage", None),
        (("study", "report", "--csv"), "input", "--json"),
        (("study", "plan"), "usage", None),
        (("study", "pla", "study.yaml"), "usage", None),
        ((), "usage", None),
        (("study",), "usage", None),
        (("study", "run", "study.yaml", "--progress", "jsn"), "unknown", "--progress"),
        (("study", "schema", "--out", "study.yaml/schema.json"), "file", "study.yaml/schema.json"),
    ],
)
def test_an_error_says_its_kind_and_place(words, kind, where, platform: Platform, here: Path) -> None:
    said = platform(*words, "--json")
    assert said.code == 2
    assert said.err.count("\n") == 1
    error = error_of(said)
    assert (error["kind"], error["where"]) == (kind, where)


def test_a_word_after_two_dashes_is_no_option(platform: Platform, here: Path) -> None:
    said = platform("rule", "show", "--", "--json")
    assert said.err.startswith("error: ")


def test_a_defect_of_ours_is_told_after_its_traceback(platform: Platform, here: Path, monkeypatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("deltalab.authoring.files.scaffold.new_rule", broken)
    said = platform("rule", "new", "mine", "--json")
    assert said.code == 1
    assert "Traceback" in said.err
    assert error_of(said)["kind"] == "internal"


def test_progress_comes_as_lines_of_json(platform: Platform, here: Path) -> None:
    said = platform("study", "run", "study.yaml", "--executor", "inline", "--json", "--progress", "json")
    assert said.code == 0, said
    assert json.loads(said.out)["study"] == "tiny"
    lines = [json.loads(line) for line in said.err.splitlines()]
    told = [line["progress"] for line in lines if "progress" in line]
    assert [one["done"] for one in told if "done" in one][-1] == 4
    assert told[-1]["total"] == 4
    assert all("text" in one for one in told)


def test_warnings_are_notes_where_progress_is_json(platform: Platform, here: Path) -> None:
    platform("study", "calibrate", "none", "--progress", "json")
    handlers = len(logging.getLogger().handlers)
    platform("study", "calibrate", "none", "--progress", "json")
    assert len(logging.getLogger().handlers) == handlers


def test_a_trace_lists_trials_and_shows_one(platform: Platform, done: Path) -> None:
    trials = json.loads(platform("study", "trace", "tiny", "--json").out)
    assert {trial["arm"] for trial in trials} == {"base", "without_d"}
    key = trials[0]["key"]
    trace = json.loads(platform("study", "trace", "tiny", key[:12], "--points", "1", "--json").out)
    assert (trace["key"], trace["state"], trace["rule"]) == (key, "done", "comba")
    assert [seed["seed"] for seed in trace["seeds"]] == [int(seed) for seed in trace["curves"]["train/loss"]]
    assert all(len(curve) == 1 for curve in trace["curves"]["train/loss"].values())
    assert f"seed {trace['seeds'][0]['seed']}: done: " in platform("study", "trace", "tiny", key).out
    assert key in platform("study", "trace", "tiny").out
    assert error_of(platform("study", "trace", "tiny", "nokey", "--json"))["kind"] == "input"


def test_a_process_ends_with_one_line_of_json(done: Path) -> None:
    """Not only in this process: nothing that is loaded prints beside it."""
    command = [sys.executable, "-m", "deltalab", "study", "report", "other", "--json"]
    said = subprocess.run(command, cwd=done, capture_output=True, text=True, env=dict(os.environ))
    assert (said.returncode, said.stdout) == (2, "")
    assert json.loads(said.stderr)["error"]["kind"]
    assert deltalab.__version__
