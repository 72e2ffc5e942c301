"""Tests presets: what `rule: NAME@published` sets, what wins beside it, and that each preset is held to a block."""

import re
from pathlib import Path

import pytest

from deltalab.errors import InputError
from deltalab.models.published import differences, presets, settings, written_out
from deltalab.models.spec import ModelSpec
from deltalab.study.specs.method_settings import resolve
from deltalab.tasks.mqar import MQAR


def test_every_preset_has_its_block():
    files = Path(__file__).parent.glob("test_published_*.py")
    held = [rule for file in files for rule in re.findall(r'^    rule = "(\w+)"$', file.read_text(), re.MULTILINE)]
    assert sorted(held) == sorted(presets())


def test_what_stands_beside_a_preset_stays():
    rule, model = written_out({"name": "mamba2@published", "beta": 1}, {"conv": 2, "d_model": 8})
    assert (rule["name"], rule["beta"]) == ("mamba2", 1)
    assert (model["conv"], model["d_model"], model["conv_bias"]) == (2, 8, True)


def test_a_configuration_says_in_what_it_differs():
    task = MQAR(length=32, pairs=4, vocab_size=64)
    config = {
        "rule": {"name": "mamba2@published"},
        "model": {"d_model": 16},
        "train": {"steps": 10, "batch_size": 1, "lr": 0.1},
    }
    assert differences(resolve(config, task)) == []
    config["model"] = {"d_model": 16, "skip": False, "scale": 1.0}  # the scale is the preset's, said in another way
    assert differences(resolve(config, task)) == ["model.skip"]
    config["rule"] = {"name": "algebra"}
    assert differences(resolve(config, task)) is None


def test_a_layer_of_a_pattern_may_be_a_preset():
    spec = ModelSpec.of(
        {"vocab_size": 8, "rule": "deltanet", "d_model": 16, "layers": ["rule", {"name": "mamba2@published"}]}
    )
    assert (spec.at(0).skip, spec.at(1).skip) == (False, True)
    assert spec.at(1).make_rule() == ModelSpec.of({"vocab_size": 8, "rule": settings("mamba2")["rule"]}).make_rule()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("algebra@published", "rule 'algebra' has no preset 'published'"),
        ("mamba2@publishd", "rule 'mamba2': unknown preset 'publishd'; did you mean 'published'?"),
        ("mamba3x@published", "unknown rule 'mamba3x'"),
    ],
)
def test_refuses(name, message):
    with pytest.raises(InputError) as error:
        ModelSpec.of({"vocab_size": 8, "rule": name})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
