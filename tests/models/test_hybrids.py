"""Published hybrids: their layers are those of transformers' configurations, they train, and studies size them."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.support.studies import STUDY, planned
from typer.testing import CliRunner

from deltalab import InputError
from deltalab.cli.app import app
from deltalab.models.hybrids import HYBRIDS, with_hybrid
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec

SIZES: dict[str, Any] = {"vocab_size": 16, "d_model": 32, "heads": 4}
OF_TRANSFORMERS = {
    "qwen3_next": ("Qwen3NextConfig", 8),
    "jamba": ("JambaConfig", 16),
    "griffin": ("RecurrentGemmaConfig", 6),
    "olmo_hybrid": ("OlmoHybridConfig", 8),
}


def kinds(name: str, layers: int) -> list[bool]:
    """Whether each layer is attention."""
    entries = with_hybrid({"preset": name, "layers": layers})["layers"]
    return [entry != "rule" for entry in entries]


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_the_layers_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config, layers = OF_TRANSFORMERS[name]
    types = getattr(transformers, config)(num_hidden_layers=layers).layer_types
    assert kinds(name, layers) == ["attention" in kind and "linear" not in kind for kind in types]


def test_the_layers_of_the_papers() -> None:
    assert kinds("kimi_linear", 8) == [False, False, False, True] * 2
    assert kinds("samba", 4) == [False, True] * 2
    letters = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"  # of Nemotron-H-8B
    assert kinds("nemotron_h", 28) == [letter == "*" for letter in letters if letter != "-"]
    assert [i for i, is_attention in enumerate(kinds("jet_nemotron", 28)) if is_attention] == [15, 20, 21, 22]


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_runs_decodes_and_learns(name: str) -> None:
    model = build_model({"preset": name, **SIZES, "layers": 6}, seed=0)
    tokens = torch.arange(24).reshape(2, 12) * 5 % 16
    logits, cache = model.step(tokens[:, :7])
    rest, _ = model.step(tokens[:, 7:], cache)
    torch.testing.assert_close(torch.cat([logits, rest], 1), model(tokens), rtol=1e-4, atol=1e-4)
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    assert ModelSpec.of({**SIZES, **_fields(model.spec)}) == model.spec


def _fields(spec: ModelSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(ModelSpec)}


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    def made(**changes: Any) -> Any:
        study = {key: value for key, value in STUDY.items() if key not in ("ablate", "tune")}
        (tmp_path / "s.yaml").write_text(yaml.safe_dump({**study, **changes}, sort_keys=False))
        return planned(tmp_path / "s.yaml")

    return made


def test_an_arm_has_as_many_layers_as_the_base(plan: Any) -> None:
    base = {**STUDY["base"], "model": {"d_model": 16, "heads": 2, "layers": 3}}
    made = plan(base=base, arms={"griffin": {"model": {"preset": "griffin"}}, "jamba": {"model": {"preset": "jamba"}}})
    models = made.models()
    assert [model.depth for model in models] == [3, 3, 3]
    assert [block.make_rule().name for block in map(models[1].at, range(3))] == ["rg_lru", "rg_lru", "attention"]
    assert models[1].output_gate == "silu"


def test_a_base_may_be_a_hybrid_at_several_sizes(plan: Any) -> None:
    base = {"model": {"preset": "kimi_linear", "d_model": 16, "heads": 2}, "train": STUDY["base"]["train"]}
    arms = {"comba": {"rule": "comba"}}
    models = plan(base=base, arms=arms).models()
    names = [[block.make_rule().name for block in map(model.at, range(4))] for model in models]
    assert names == [["kda"] * 3 + ["attention"], ["comba"] * 3 + ["attention"]]
    sized = plan(base=base, arms=arms, scales={"model.layers": [4, 8]}).models()
    assert [model.depth for model in sized] == [4, 4, 8, 8]
    assert [model.at(7).make_rule().name for model in sized[2:]] == ["attention"] * 2
    wide = plan(base=base, arms=arms, scales={"model.d_model": [16, 64], "model.heads": [2, 4]}).models()
    assert [model.at(3).kv_rank for model in wide] == [2, 2, 8, 8]
    assert [model.at(3).head_dims for model in wide] == [(12, 8)] * 2 + [(24, 16)] * 2
    with pytest.raises(InputError, match=r"scales\.model\.d_model: "):
        plan(base=base, arms=arms, scales={"model.d_model": [16, 33]})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"preset": "qwen3"}, "model.preset: unknown preset 'qwen3'; did you mean 'qwen3_next'?"),
    ({"preset": "jamba", "rule": "comba"}, "model.preset names the rules of its layers: leave rule out"),
    ({"preset": "jamba", "window": 4}, "model.window: model.preset 'jamba' says which layers are attention"),
    ({"preset": "jamba", "layers": ["rule"]}, "model.layers beside model.preset must be a whole number"),
    ({"preset": "samba", "heads": 0}, "model.heads beside model.preset must be a whole number"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_presets_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        ModelSpec.of({"vocab_size": 16, "d_model": 32, **settings})
    assert message in str(raised.value)


def test_the_commands() -> None:
    run = CliRunner().invoke(app, ["model", "list", "--json"])
    assert all(name in run.stdout for name in HYBRIDS)
    run = CliRunner().invoke(app, ["model", "show", "jamba", "d_model=64", "heads=4", "layers=8"])
    shown = yaml.safe_load(run.stdout)
    model = build_model({"preset": "jamba", "vocab_size": 1, "d_model": 64, "heads": 4, "layers": 8})
    assert shown["parameters without embedding"] == sum(p.numel() for p in model.parameters()) - 64
    assert len(shown["model"]["layers"]) == 8
