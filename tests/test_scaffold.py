"""The file of a new rule, task or study works as it stands, and no existing file is overwritten."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deltalab import check_rule, check_task, list_rules, registry
from deltalab.authoring.scaffold import new_rule, new_study, new_task
from deltalab.authoring.shipped import shipped_studies, study_file
from deltalab.errors import InputError
from deltalab.study.plan import make_plan
from deltalab.study.spec import load_study

torch.set_num_threads(1)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory with its own plugins."""
    monkeypatch.chdir(tmp_path)
    with registry.isolated():
        yield tmp_path


def test_a_rule_passes_every_check_as_it_stands(here):
    file = new_rule("my_first_rule")
    assert file == here.relative_to(here) / "plugins/my_first_rule.py"
    registry.refresh()
    rule = registry.get_rule("my_first_rule")
    results = check_rule(rule)
    assert [f"{result.name}: {result.message}" for result in results if not result.passed] == []
    assert type(rule).__name__ == "MyFirstRule"
    assert len(rule.gates) == 2
    assert len(rule.options()) == 3
    rule.without("write")


def test_a_task_passes_every_check_as_it_stands(here):
    new_task("my_first_task")
    registry.refresh()
    task = registry.get_task("my_first_task", **registry.task_plugin("my_first_task").kind.example)
    assert [f"{result.name}: {result.message}" for result in check_task(task) if not result.passed] == []
    assert type(task).__name__ == "MyFirstTask"


def test_a_study_can_be_planned_as_it_stands(here):
    file = new_study("my_first_study")
    assert file == here.relative_to(here) / "studies/my_first_study.yaml"
    assert "NAME" not in file.read_text()
    for profile in (None, "longer"):
        plan = make_plan(load_study(file, profile=profile), profile=profile, where=str(file))
        assert plan.spec.name == "my_first_study"
        assert plan.names == ["base", "without_g", "linear_attention", "one_head"]


def test_a_name_that_no_study_can_have(here):
    for name, says in (("My_study", "take lower case, as in my_study"), ("a b", "cannot name a study")):
        with pytest.raises(InputError, match=says):
            new_study(name)
    with pytest.raises(InputError, match="there is a study 'quickstart' already"):
        new_study("quickstart")


def test_a_shipped_study_is_found_by_its_name_from_any_folder(here):
    assert {"quickstart", "comba_ablation"} <= set(shipped_studies())
    assert load_study("quickstart").name == "quickstart"
    with pytest.raises(InputError, match="unknown study 'quickstar'; did you mean 'quickstart'"):
        study_file("quickstar")


def test_a_file_goes_before_a_shipped_study_of_its_name(here):
    (here / "quickstart").write_text("a study without an ending")
    assert study_file("quickstart") == here.relative_to(here) / "quickstart"
    assert study_file("missing.yaml").name == "missing.yaml", "its reader says that it is missing"


def test_a_study_of_ones_own_is_found_by_its_name(here):
    new_study("mine")
    assert study_file("mine") == Path("studies/mine.yaml")


@pytest.mark.parametrize("new", [new_rule, new_task])
def test_it_is_a_tidy_file(here, new):
    new("tidy")
    text = (here / "plugins/tidy.py").read_text()
    assert len(text.splitlines()) < 60
    assert "NAME" not in text
    assert "CLASS" not in text
    for command in (
        ["check", "--select", "E,F,I,UP,B", "--config", "lint.isort.known-first-party=['deltalab']"],
        ["format", "--check"],
    ):
        run = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--line-length", "120", "plugins/tidy.py"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("name", ["gate", "update_rule", "operands", "tensor", "Étude", "a1"])
def test_any_name_makes_a_rule_that_imports(here, name):
    (plugin,) = registry.add_plugin(new_rule(name))
    assert plugin.kind.name == name
    assert plugin.kind().gates["erase"].high == 1


@pytest.mark.parametrize("name", ["batch", "task", "random", "map", "a1"])
def test_any_name_makes_a_task_that_imports(here, name):
    (plugin,) = registry.add_plugin(new_task(name))
    assert plugin.kind.name == name
    assert plugin.kind(tokens=4).length == 8


@pytest.mark.parametrize("name", ["", "my-rule", "2nd", "class", "_hidden", "a/b", "../up", "a b"])
def test_an_invalid_name_is_refused(here, name):
    with pytest.raises(InputError, match="cannot name a rule: take letters, digits and _"):
        new_rule(name)
    assert not list(here.iterdir())


def test_a_taken_name_is_refused(here):
    assert "comba" in list_rules()
    with pytest.raises(InputError, match="there is a rule 'comba' already"):
        new_rule("comba")
    (here / "plugins").mkdir()
    (here / "plugins/notes.py").write_text("kept = True\n")
    with pytest.raises(InputError, match=r"plugins/notes.py exists already"):
        new_rule("notes")
    assert (here / "plugins/notes.py").read_text() == "kept = True\n"


def test_an_unwritable_folder_is_refused(here, monkeypatch):
    (here / "plugins").write_text("a file\n")
    with pytest.raises(InputError, match=r"plugins/mine.py: cannot be written: (File exists|Not a directory)"):
        new_rule("mine")
    (here / "plugins").unlink()

    def full(self, text, encoding):
        os.close(os.open(self, os.O_CREAT))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(InputError, match="No space left on device"):
        new_rule("mine")
    assert not list((here / "plugins").iterdir())
