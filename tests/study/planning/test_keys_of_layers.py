"""Keys of trials whose list of layers has the preset of a rule, which writes out every setting of a layer."""

from pathlib import Path
from typing import Any

import yaml

from deltalab.study.planning.make import make_plan
from deltalab.study.specs.study_file import load_study

RECORDED = "1e4d4f716347405522da7614eb70caae61df059fdc68d71ac4b4b771ea258cb6"
"""The key of the base below, of a version whose layers had no `bonus`."""


def key(folder: Path, **model: Any) -> str:
    sizes = {"d_model": 32, "heads": 2, "layers": ["rule", {"name": "mamba2@published"}]}
    base = {"rule": "gated_deltanet", "model": {**sizes, **model}, "train": {"steps": 10, "batch_size": 4, "lr": 1e-3}}
    study = {"name": "k", "task": {"mqar": {"length": 32, "pairs": 4, "vocab_size": 64}}, "base": base, "seeds": 2}
    (folder / "k.yaml").write_text(yaml.safe_dump({**study, "arms": {"other": {"rule": "gla"}}}))
    plan = make_plan(load_study(folder / "k.yaml"))
    return plan.job(plan.arms[0], "confirm", 0, {}).key


def test_later_settings_of_layers_leave_a_recorded_key_as_it_is(tmp_path: Path) -> None:
    assert key(tmp_path) == RECORDED


def test_an_entry_that_takes_a_models_setting_back_has_a_key_of_its_own(tmp_path: Path) -> None:
    without = [{"name": "gla", "layer": {"bonus": given}} for given in (True, False)]
    keys = [key(tmp_path, bonus=True, layers=["rule", entry]) for entry in (*without, "gla")]
    assert len({*keys}) == 3
