"""A study trains rules that have passed their checks: each is checked once, and a verdict is kept by its source."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltalab import list_rules, registry
from deltalab.authoring import verdict
from deltalab.authoring.files.scaffold import new_rule
from deltalab.cli.app import main

STUDY = """
name: small
task: {mqar: {length: 8, pairs: 2, vocab_size: 16}}
base:
  rule: mine
  model: {d_model: 8, layers: 1, heads: 1, mlp: false}
  train: {steps: 2, batch_size: 2, lr: 1e-2, evaluations: 1, eval_batches: 1}
arms: {linear: {rule: linear_attention}}
seeds: 2
"""
RUN = ("study", "run", "study.yaml", "--executor", "inline")


@pytest.fixture
def unchecked_studies() -> None:
    """The studies of this module do check their rules."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a rule `mine` in ./plugins, a study of it, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with registry.isolated():
        new_rule("mine")
        (tmp_path / "study.yaml").write_text(STUDY)
        yield tmp_path


@pytest.fixture
def platform(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs the command in this process, which forgets the plugins before; returns exit code, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["platform", *map(str, words)])
        with registry.isolated(), pytest.raises(SystemExit) as ended:
            main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rules that are checked from now on, none of which takes time: those whose file says BROKEN fail."""
    found: list[str] = []

    def checked(rule: str, *, quick: bool = False) -> list[Any]:
        found.append(rule)
        broken = "BROKEN" in registry.rule_plugin(rule).source
        return [verdict.CheckResult("backends", not broken, 1.0, f"{rule}: chunked is not recurrent")]

    monkeypatch.setattr(verdict, "checked", checked)
    return found


def change(name: str = "mine", text: str = "# BROKEN\n") -> None:
    with Path("plugins", f"{name}.py").open("a") as file:
        file.write(text)


@pytest.mark.slow
def test_a_study_refuses_a_rule_that_fails_its_checks(platform: Callable[..., Any], here: Path) -> None:
    file = here / "plugins" / "mine.py"
    file.write_text(file.read_text().replace("u=v,", "u=v.flip(1),"))  # the token at t writes a later value
    code, out, err = platform(*RUN)
    assert (code, out) == (2, "")
    line = err.splitlines()[-1]
    assert line.startswith(f"error: rule 'mine' ({file}) fails ")
    assert "`deltalab rule check mine` says more" in line
    assert not (here / "deltalab.db").exists()


def test_each_version_of_a_rule_is_checked_once(platform: Callable[..., Any], checks: list[str]) -> None:
    assert platform(*RUN)[0] == 0
    assert checks == ["mine"], "the verdict on linear_attention is shipped"
    assert platform(*RUN)[0] == 0
    assert checks == ["mine"]
    change(text="# the same rule\n")
    assert platform(*RUN)[0] == 0
    assert checks == ["mine", "mine"]


def test_a_failed_verdict_is_kept_too(platform: Callable[..., Any], checks: list[str]) -> None:
    change()
    first, again = platform(*RUN), platform(*RUN)
    assert first[0] == again[0] == 2
    assert checks == ["mine"]
    assert "rule 'mine'" in again[2]


def test_each_failing_rule_is_one_line(platform: Callable[..., Any], here: Path, checks: list[str]) -> None:
    new_rule("other")
    change()
    change("other")
    (here / "study.yaml").write_text(STUDY.replace("arms: {", "arms: {other: {rule: other}, "))
    code, _, err = platform(*RUN)
    assert code == 2
    wrong = [line.partition(" (")[0] for line in err.splitlines() if line.startswith("error")]
    assert wrong == ["error: rule 'mine'", "error: rule 'other'"]
    assert "checking rule 'other', 2 of 2: up to a minute, once for each version of its file" in err


def test_a_rule_that_is_searched_is_checked(platform: Callable[..., Any], here: Path, checks: list[str]) -> None:
    new_rule("other")
    change("other")
    study = STUDY.replace(
        "seeds: 2", "search: {rule: {choice: [mine, {name: other}]}, trials: 2, finalists: 1}\nseeds: 2"
    )
    (here / "study.yaml").write_text(study.replace("arms: {linear: {rule: linear_attention}}", ""))
    code, _, err = platform(*RUN)
    assert (code, checks) == (2, ["mine", "other"])
    assert "rule 'other'" in err


def test_an_unchecked_rule_is_named_by_the_report(platform: Callable[..., Any], checks: list[str]) -> None:
    code, out, _ = platform(*RUN, "--unchecked", "--json")
    assert (code, checks) == (0, [])
    [warning] = json.loads(out)["warnings"]
    assert warning.startswith("rule 'mine': not checked (the study ran with --unchecked)")
    code, out, _ = platform("study", "report", "small", "--markdown")
    assert out.splitlines()[4] == f"- **{warning}**"
    change()
    platform("rule", "check", "mine")
    _, out, _ = platform(*RUN, "--unchecked", "--json")
    assert json.loads(out)["warnings"][0].startswith("rule 'mine': fails backends")


def test_a_study_of_checked_rules_warns_of_nothing(platform: Callable[..., Any], checks: list[str]) -> None:
    platform("rule", "check", "mine")
    _, out, _ = platform(*RUN, "--unchecked", "--json")
    assert json.loads(out)["warnings"] == []


def test_rule_check_gives_the_verdict_and_always_checks(platform: Callable[..., Any], checks: list[str]) -> None:
    assert platform("rule", "check", "mine")[0] == 0
    assert platform("rule", "check", "mine")[0] == 0
    assert checks == ["mine", "mine"]
    assert platform(*RUN)[0] == 0
    assert checks == ["mine", "mine"]


def test_a_quick_check_is_no_verdict(platform: Callable[..., Any], checks: list[str]) -> None:
    assert platform("rule", "check", "mine", "--quick")[0] == 0
    assert platform(*RUN)[0] == 0
    assert checks == ["mine", "mine"]


def test_a_plan_names_what_is_not_checked(platform: Callable[..., Any], checks: list[str]) -> None:
    plan = ("study", "plan", "study.yaml", "--json")
    assert "not checked yet: mine; `deltalab study run` checks it first" in json.loads(platform(*plan)[1])["notes"]
    platform("rule", "check", "mine")
    assert not [note for note in json.loads(platform(*plan)[1])["notes"] if "check" in note]
    assert checks == ["mine"]


def test_a_cache_that_cannot_be_written_is_said(
    platform: Callable[..., Any], here: Path, checks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (here / "cache").write_text("a file")
    assert platform(*RUN)[0] == 0
    assert "the verdict on 'mine' cannot be kept" in caplog.text


def test_the_shipped_rules_have_passed() -> None:
    """test_rules.py checks the rules of plugins/deltalab_rules; the shipped verdicts must be on their present files."""
    ours = [rule for rule in list_rules() if registry.rule_plugin(rule).kind.__module__.startswith("deltalab_rules.")]
    shipped = json.loads(Path(registry.rule_plugin("comba").file).with_name(verdict.SHIPPED).read_text())
    wrong = [rule for rule in ours if shipped.get(rule) != registry.rule_plugin(rule).hash]
    how = "python -c \"from deltalab.authoring.verdict import ship; print(ship('deltalab_rules'))\""
    assert (wrong, sorted(set(shipped) - set(ours))) == ([], []), f"check them and write the file again: {how}"
