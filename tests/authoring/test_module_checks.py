"""A module that declares nothing is held to what a study relies on; each broken one fails the check that it aims at."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tests.support.own_modules
from typer.testing import CliRunner

import deltalab
from deltalab import InputError, registry
from deltalab.authoring.card import card
from deltalab.authoring.module_checks import module_measurements
from deltalab.authoring.module_checks.module_suite import check_module
from deltalab.cli.app import app
from deltalab.models.spec import ModelSpec
from deltalab.own_module import OwnModule

GOOD: dict[str, dict[str, Any]] = {
    "Taps": {},
    "Attends": {"num_heads": "$heads"},
    "RunsAlone": {},
    "Drops": {},
    "make": {"depth": 1},
    "Remembers": {},
    "Writes": {},
}
BROKEN = {
    "Peeks": "causality",
    "Halves": "prefixes",
    "Mixes": "rows",
    "Norms": "causality",
    "Keeps": "repetition",
    "Slopes": "gradients",
    "Rounds": "precisions",
    "Leaks": "packing",
    "Forgets": "decoding",
    "Draws": "starts",
    "Wide": "runs",
    "Divides": "runs",
    "Needs": "runs",
}


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    shutil.copy(tests.support.own_modules.__file__, tmp_path / "own.py")
    monkeypatch.chdir(tmp_path)
    with registry.isolated():
        yield


@pytest.fixture
def module() -> Callable[..., OwnModule]:
    def make(name: str, **kwargs: Any) -> OwnModule:
        rule = deltalab.get_rule(f"own.py:{name}", **kwargs)
        assert isinstance(rule, OwnModule)
        return rule

    return make


@pytest.mark.parametrize("name", GOOD)
def test_a_good_module_passes(name: str, module: Callable[..., OwnModule]) -> None:
    results = check_module(module(name, **GOOD[name]))
    assert [result.message for result in results if not result.passed] == []
    assert len(results) == 10
    alone = "its runs train one by one" in results[0].message
    assert alone == (name == "RunsAlone")
    [decoding] = [result for result in results if result.name == "decoding"]
    assert (decoding.figure is not None) == (name in ("Remembers", "Writes"))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_module_fails_the_check_of_what_it_breaks(name: str, module: Callable[..., OwnModule]) -> None:
    kwargs = {"num_heads": "$heads"} if name == "Leaks" else {}
    failed = [result for result in check_module(module(name, **kwargs)) if not result.passed]
    assert failed[0].name == BROKEN[name]
    assert f"own.py:{name}" in failed[0].message


IMAGES: dict[str, Any] = {"vocab_size": 2, "d_model": 8, "patches": [4, 4, 3]}


@pytest.mark.parametrize("name", ["Sees", "SeesSixteen"])
def test_a_good_module_that_is_not_causal_passes_at_the_patches_of_its_images(
    name: str, module: Callable[..., OwnModule]
) -> None:
    rule = module(name)
    results = check_module(rule, ModelSpec.of({**IMAGES, "rule": rule.spec()}))
    assert [result.message for result in results if not result.passed] == []
    names = [result.name for result in results]
    assert names == ["runs", "repetition", "reach", "rows", "gradients", "precisions", "starts"]
    assert "at 16 tokens" in results[0].message
    quick = check_module(rule, ModelSpec.of({**IMAGES, "rule": rule.spec()}), quick=True)
    assert [result.name for result in quick] == ["runs", "repetition", "reach", "rows"]


def test_a_module_of_images_of_one_size_is_tried_at_that_size() -> None:
    words = ["module", "check", "own.py:SeesSixteen", "--model"]
    assert CliRunner().invoke(app, [*words, "patches=[2,8,3]"]).exit_code == 0
    assert CliRunner().invoke(app, [*words, "d_model=8"]).exit_code == 1


@pytest.mark.parametrize(
    ("name", "check"),
    [("SeesNothing", "reach"), ("SeesRows", "rows"), ("SeesBefore", "repetition"), ("SeesWrongly", "gradients")],
)
def test_a_broken_module_that_is_not_causal_fails_the_check_of_what_it_breaks(
    name: str, check: str, module: Callable[..., OwnModule]
) -> None:
    failed = [result.name for result in check_module(module(name)) if not result.passed]
    assert failed[0] == check


def test_a_module_for_bf16_alone_is_not_held_to_fp32(
    module: Callable[..., OwnModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_measurements, "_runs_in_fp32", lambda *_: False)
    [found] = [result for result in check_module(module("Taps")) if result.name == "precisions"]
    assert (found.passed, found.figure) == (True, None)
    assert found.message == "own.py:Taps: nothing measured: the module does not run in fp32"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    run = CliRunner().invoke(app, ["module", "check", "own.py:Taps", "taps=2", "--model", "d_model=16", "--json"])
    found = json.loads(run.stdout)
    assert (run.exit_code, found["module"], {check["passed"] for check in found["checks"]}) == (
        0,
        "own.py:Taps",
        {True},
    )
    run = CliRunner().invoke(app, ["module", "check", "own.py:Needs"])
    assert run.exit_code == 1
    assert "needs a GPU, and there is none here" in run.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["own.py:Tops"], "own.py: unknown module 'Tops'; did you mean 'Taps'?"),
        (["own.py:Taps", "tap=2"], "unknown argument 'tap'; did you mean 'taps'?"),
        (["own.py:Taps", "taps=$head"], "unknown setting of the model '$head'; did you mean '$heads'?"),
        (["own.py:Attends"], "module 'own.py:Attends' needs num_heads: give kwargs {num_heads: ...}"),
        (["own.py:text"], "'own.py:text' makes a str, and not a torch.nn.Module"),
        (["own.py:Frozen"], "'linear.weight' does not train: register it as a buffer"),
        (["none.py:Taps"], "none.py: no such plugin file"),
        (["no_such_package.Layer"], "no package 'no_such_package' is installed; for a module of a file, say"),
        (["comba"], "must be file.py:Name or package.Name, not 'comba'"),
        (["own.py:Taps", "taps=0"], "own.py:Taps"),
    ],
)  # fmt: skip
def test_a_wrong_module_is_one_line(words: list[str], message: str) -> None:
    run = CliRunner().invoke(app, ["module", "check", *words])
    text = str(run.exception) if run.exit_code != 1 or not run.stdout else run.stdout
    assert message in text


@pytest.mark.parametrize("command", ["show", "check", "bench"])
@pytest.mark.parametrize("name", ["own.py:Taps", "torch.nn.Linear"])
def test_a_module_is_no_rule(command: str, name: str) -> None:
    run = CliRunner().invoke(app, ["rule", command, name])
    assert f"deltalab module check {name}" in str(run.exception)


def test_a_module_has_no_card() -> None:
    with pytest.raises(InputError, match="declares no card"):
        card("own.py:Taps")
