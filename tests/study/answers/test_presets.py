"""What a report says of presets is what the rules say now, though it is kept."""

from pathlib import Path
from typing import Any

import pytest

from deltalab import registry
from deltalab.models import published
from deltalab.models.spec import ModelSpec
from deltalab.study.answers import presets
from deltalab.study.answers.presets import preset_text

RULE = '''
from dataclasses import dataclass
from typing import ClassVar
from deltalab.rule import UpdateRule, knob

@dataclass(frozen=True, kw_only=True)
class Mine(UpdateRule):
    """S_t = S_{t-1} + k_t v_t^T"""

    name: ClassVar[str] = "mine"
    paper: ClassVar[str] = "none"
    published = {"source": "here", "layer": {"skip": SKIP}}
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    registry.refresh()
    return tmp_path


def config(rule: str, **layer: Any) -> dict[str, Any]:
    knobs, model = published.written_out(rule, {"vocab_size": 16, "d_model": 32, "layers": 1, "heads": 2, **layer})
    return {"rule": ModelSpec.of({"rule": knobs, **model}).make_rule().spec(), "model": model}


def unavailable(config: object) -> None:
    raise AssertionError("the rules were asked")


def test_what_was_found_is_said_again_without_asking_the_rules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"base": config("mamba2@published"), "plain": config("mamba2"), "other": config("linear_attention")}
    said = preset_text(arms)
    assert said.startswith("As published: base. Not as published: plain in ")
    monkeypatch.setattr(published, "differences", unavailable)
    assert preset_text(arms) == said
    with pytest.raises(AssertionError, match="were asked"):
        preset_text({"new": config("mamba2", skip=True)})


def test_a_rule_whose_preset_was_edited_is_asked_again(folder: Path) -> None:
    """Its hash as a plugin is the same: no trial depends on a preset."""
    file = folder / "plugins" / "mine.py"
    file.parent.mkdir()
    said = []
    for skip in (True, False):
        file.write_text(RULE.replace("SKIP", str(skip)), encoding="utf-8")
        with registry.isolated():
            said.append(preset_text({"arm": config("mine")}))
    assert said == ["Not as published: arm in model.skip.", "As published: arm."]


def test_a_rule_of_the_same_name_in_another_folder_is_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for skip in (True, False):
        at = folder / str(skip)
        (at / "plugins").mkdir(parents=True)
        (at / "plugins" / "mine.py").write_text(RULE.replace("SKIP", str(skip)), encoding="utf-8")
        monkeypatch.chdir(at)
        with registry.isolated():
            said.append(preset_text({"arm": config("mine")}))
    assert said == ["Not as published: arm in model.skip.", "As published: arm."]


def test_a_rule_of_the_same_name_in_another_named_file_is_another(folder: Path) -> None:
    said = []
    for skip in (True, False):
        file = folder / f"{skip}.py"
        file.write_text(RULE.replace("SKIP", str(skip)), encoding="utf-8")
        with registry.isolated():
            registry.add_plugin(file)
            said.append(preset_text({"arm": config("mine")}))
    assert said == ["Not as published: arm in model.skip.", "As published: arm."]


def test_a_rule_that_is_not_found_is_looked_for_again(folder: Path) -> None:
    arm = {"rule": {"name": "gone"}, "model": {}}
    assert preset_text({"arm": arm, "base": config("mamba2@published")}) == "As published: base."
    assert len(list((folder / "cache").rglob("*.json"))) == 1


def test_a_file_that_was_cut_off_is_written_again(folder: Path) -> None:
    arms = {"plain": config("mamba2")}
    said = preset_text(arms)
    [kept] = (folder / "cache" / "deltalab" / "presets").iterdir()
    whole = kept.read_text(encoding="utf-8")
    kept.write_text(whole[:20], encoding="utf-8")
    assert (preset_text(arms), kept.read_text(encoding="utf-8")) == (said, whole)


def test_a_folder_that_cannot_be_written_costs_the_time_and_not_the_answer(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "cache").write_text("a file where the folder would be", encoding="utf-8")
    assert preset_text({"base": config("mamba2@published")}) == "As published: base."
    assert "cannot be kept" in caplog.text


def test_what_is_read_is_code_that_exists() -> None:
    package = Path(presets.__file__).parents[2]
    assert all((package / name).exists() for name in presets.READS)
