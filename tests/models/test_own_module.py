"""Any nn.Module as the mixer of a model: it starts from the seed, decodes, packs, stacks, matches and is exported."""

import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tests.support.own_modules
import torch
import yaml
from tests.support.studies import STUDY, planned
from torch import nn
from typer.testing import CliRunner

import deltalab
from deltalab import InputError, registry
from deltalab.cli.app import app
from deltalab.export.retrain import rebuild
from deltalab.models.costs import CostCounter
from deltalab.models.dead_parameters import dead_parameters
from deltalab.models.model import Model, build_model
from deltalab.models.spec import ModelSpec
from deltalab.own_module import OwnModule
from deltalab.study.running.run import run_study_file

SIZES: dict[str, Any] = {"vocab_size": 16, "d_model": 8, "heads": 2}
MIXERS: dict[str, Any] = {
    "a class": "own.py:Taps",
    "with arguments": {"module": "own.py:Taps", "kwargs": {"taps": 3, "gate": False}},
    "a function": {"module": "own.py:make", "kwargs": {"depth": 3}},
    "that packs": {"module": "own.py:Attends", "kwargs": {"num_heads": "$heads"}},
    "of a package": {"module": "torch.nn.Linear", "kwargs": {"in_features": "$d_model", "out_features": "$d_model"}},
}


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copy(tests.support.own_modules.__file__, tmp_path / "own.py")
    monkeypatch.chdir(tmp_path)
    with registry.isolated():
        yield tmp_path


def model(mixer: Any, **settings: Any) -> Model:
    return build_model({"mixer": mixer, **SIZES, **settings}, seed=3).double().eval()


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_tokens_one_by_one_and_packed_and_padded_are_the_whole(mixer: Any) -> None:
    net, tokens = model(mixer), torch.arange(20).reshape(2, 10) * 7 % 16
    want = net(tokens)
    logits, cache = net.step(tokens[:, :4])
    parts = [logits]
    for i in range(4, 10):
        logits, cache = net.step(tokens[:, i : i + 1], cache)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), want)
    packed = net(tokens.reshape(1, 20), cu_seqlens=torch.tensor([0, 10, 20]))
    torch.testing.assert_close(packed.reshape(want.shape), want)
    mask = torch.tensor([[1] * 10, [0] * 3 + [1] * 7])
    torch.testing.assert_close(net(tokens, attention_mask=mask)[1, 3:], net(tokens[1:, 3:])[0])
    _, caches = net.step(tokens.reshape(1, 20)[:, :13], cu_seqlens=torch.tensor([0, 10, 13]))
    after, _ = net.step(tokens[:, :2].reshape(1, 4), caches, cu_seqlens=torch.tensor([0, 2, 4]))
    whole = net(torch.cat([tokens[1, :3], tokens[1, :2]])[None])
    torch.testing.assert_close(after[0, 2:], whole[0, 3:])


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_weights_follow_from_the_seed_alone(mixer: Any) -> None:
    torch.manual_seed(5)
    first = model(mixer)
    torch.manual_seed(6)
    again = model(mixer)
    for name, value in first.named_parameters():
        assert torch.equal(value, again.get_parameter(name)), name
    other = build_model({"mixer": mixer, **SIZES}, seed=4).double()
    differ = [
        not torch.equal(value, other.get_parameter(name)) for name, value in first.named_parameters() if "inner" in name
    ]
    assert any(differ)


def test_a_start_is_that_of_the_module(own: Path) -> None:
    """Weights of the second layer, too, have the spread that torch gives a linear layer."""
    net = build_model({"mixer": "own.py:make", **SIZES, "d_model": 64})
    for block in net.blocks:
        spread = block.mixer.inner[0].weight.detach().std()
        assert float(spread) == pytest.approx((1 / 3 / 64) ** 0.5, rel=0.05)


def test_settings_that_a_module_does_not_read_make_no_other_model() -> None:
    one, other = (ModelSpec.of({"mixer": "own.py:Taps", **SIZES, **more}) for more in ({}, {"conv": 2, "heads": 4}))
    assert one == other
    heads = [ModelSpec.of({"mixer": MIXERS["that packs"], **SIZES, "heads": count, "conv": count}) for count in (2, 4)]
    assert (heads[0].heads, heads[1].heads, heads[0].conv, heads[1].conv) == (2, 4, 4, 4)


def test_layers_mix_modules_and_rules() -> None:
    layers = ["rule", {"repeat": 2, "pattern": [{"module": "own.py:Taps", "kwargs": {"taps": 2}}, "attention"]}]
    net = build_model({"rule": "comba", "layers": layers, **SIZES})
    assert [block.mixer.rule.name for block in net.blocks] == ["comba", *["own.py:Taps", "attention"] * 2]
    assert net(torch.zeros(2, 6, dtype=torch.long)).shape == (2, 6, 16)
    assert net.spec == ModelSpec.of({**SIZES, "rule": "comba", "layers": net.spec.layers})


def test_costs_are_counted() -> None:
    spec = ModelSpec.of({"mixer": "own.py:Taps", **SIZES, "mlp": False, "layers": 3})
    costs = CostCounter().costs(spec, 40)
    assert costs.parameters == sum(p.numel() for p in build_model(spec).parameters())
    assert costs.cache.state == 3 * 3 * 8
    assert costs.flops_per_token == pytest.approx(3 * 2 * (2 * 8 * 8 + 8 * 4), rel=0.1)
    assert dead_parameters(spec, 40) == 0
    lstm = {"module": "torch.nn.LSTM", "kwargs": {"input_size": 8, "hidden_size": 8, "batch_first": True}}
    assert CostCounter().costs(ModelSpec.of({"mixer": lstm, **SIZES}), 40).cache.state == 2 * (8 + 8)
    assert CostCounter().costs(ModelSpec.of({"mixer": "own.py:Remembers", **SIZES}), 40).cache.state == 2 * 8
    assert CostCounter().costs(ModelSpec.of({"mixer": "own.py:Writes", **SIZES}), 40).cache.state == 2 * 2 * 40 * 8
    unknown = CostCounter().costs(ModelSpec.of({"mixer": "own.py:make", **SIZES}), 40)
    assert unknown.cache.state != unknown.cache.state  # not known


@pytest.mark.parametrize("given", ["", "length", "sequence_length=7", "**more"])
def test_a_module_says_its_state_in_any_form(given: str, own: Path) -> None:
    body = "more['sequence_length']" if given == "**more" else given.partition("=")[0] or "40"
    method = f"    def state_size(self{', ' if given else ''}{given}):\n        return 2 * {body}\n"
    text = (
        "from torch import nn\n\n\nclass Counts(nn.Linear):\n"
        "    def __init__(self, dim):\n        super().__init__(dim, dim)\n\n"
    )
    (own / "counts.py").write_text(text + method)
    assert CostCounter().costs(ModelSpec.of({"mixer": "counts.py:Counts", **SIZES}), 40).cache.state == 2 * 2 * 40


def test_a_rule_of_a_module_lasts_through_pickles_and_hashes() -> None:
    rule = deltalab.get_rule("own.py:Taps", taps=2)
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert rule.turned(deltalab.get_rule("own.py:Taps", taps=3)) == "taps=3"
    assert "own.py:Taps" not in deltalab.list_rules()


def test_a_package_of_the_folder_is_found(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "my_package").mkdir()
    (own / "my_package" / "__init__.py").write_text("from my_package.inner import Taps\n")
    shutil.copy(own / "own.py", own / "my_package" / "inner.py")
    before = registry.rule_plugin("my_package.Taps")
    assert build_model({"mixer": "my_package.Taps", **SIZES}).blocks[0].mixer.rule.name == "my_package.Taps"
    monkeypatch.chdir(own.parent)
    for name in [name for name in sys.modules if name.startswith("my_package")]:
        monkeypatch.delitem(sys.modules, name)
    registry.refresh()
    with pytest.raises(InputError, match="no package 'my_package' is installed"):
        registry.rule_plugin("my_package.Taps")
    assert registry.add_module("my_package.Taps", before.file).hash == before.hash


def test_another_source_is_another_module(own: Path) -> None:
    before = registry.rule_plugin("own.py:Taps").hash
    (own / "own.py").write_text((own / "own.py").read_text() + "\nX = 1\n")
    with registry.isolated():
        assert registry.rule_plugin("own.py:Taps").hash != before
    assert registry.rule_plugin("torch.nn.Linear").package.startswith("torch ")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rule": "comba", "mixer": "own.py:Taps"}, "model.mixer stands in place of a rule"),
    ({"mixer": {"module": "own.py:Taps", "args": {}}}, "model.mixer: unknown key 'args'; did you mean 'kwargs'?"),
    ({"mixer": {"module": "comba"}}, "model.mixer.module must be file.py:Name or package.Name, not 'comba'"),
    ({"mixer": 3}, "model.mixer must be"),
    ({"mixer": {"module": "own.py:Taps", "kwargs": [1]}}, "model.mixer.kwargs must be a mapping"),
    ({"mixer": "own.py:Taps", "base_width": 4}, "model.base_width scales matrices of deltalab"),
    (
        {"rule": "comba", "layers": ["rule", {"name": "own.py:Taps", "layer": {"conv": 2}}]},
        "model.layers: module 'own.py:Taps' has no conv of a layer: give it kwargs",
    ),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        ModelSpec.of({**SIZES, **settings})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_module_of_another_width_says_so() -> None:
    with pytest.raises(InputError, match=r"'own.py:Wide' returns \[1, 4, 16\] for x \[1, 4, 8\]"):
        model("own.py:Wide")(torch.zeros(1, 4, dtype=torch.long))


@pytest.fixture
def unchecked_studies() -> None:
    """The studies of this file check their modules."""


@pytest.mark.slow(keep="Taps")
@pytest.mark.parametrize("name", ["Taps", "RunsAlone"])
def test_a_study_trains_matches_and_exports_a_module(name: str, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalab.authoring.verdict.demand", lambda rules, quiet=False: None)
    arms = {
        "mine": {"model": {"mixer": {"module": f"own.py:{name}"}}},
        "hybrid": {"model": {"layers": ["rule", {"module": f"own.py:{name}"}]}},
    }
    study = {key: value for key, value in STUDY.items() if key != "ablate"} | {"arms": arms}
    (own / "s.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    result = run_study_file(own / "s.yaml", executor="inline", db=own / "s.db", quiet=True)
    assert (result.trials, result.failed) == (6, 0)
    run = CliRunner().invoke(app, ["export", "s", "out", "--arm", "hybrid", "--db", "s.db"], catch_exceptions=False)
    assert run.exit_code == 0
    files = {file.name for file in (own / "out").iterdir()}
    assert f"rule_own_py_{name}.py" in files
    losses = rebuild(own / "out", steps=3)
    (own / "own.py").unlink()
    with registry.isolated():
        assert rebuild(own / "out", steps=3) == losses


def test_an_arm_is_matched(own: Path) -> None:
    base = {**STUDY["base"], "model": {**STUDY["base"]["model"], "d_model": 64}}
    mixer = {"module": "own.py:Attends", "kwargs": {"num_heads": "$heads"}}
    arms = {"mine": {"model": {"mixer": mixer}, "match": {"parameters": "model.mlp_width"}}}
    study = {
        "name": "s",
        "task": STUDY["task"],
        "base": {**base, "model": {**base["model"], "mlp": True}},
        "arms": arms,
    }
    (own / "s.yaml").write_text(yaml.safe_dump({**study, "seeds": 2}, sort_keys=False))
    theirs, mine = planned(own / "s.yaml").models()
    counted = [sum(p.numel() for p in build_model(spec).parameters()) for spec in (theirs, mine)]
    assert counted[1] == pytest.approx(counted[0], rel=0.02)


SWITCHES = """
from torch import nn


class Switches(nn.Module):
    def __init__(self, dim, shift=True, scale=2.0):
        super().__init__()
        self.linear, self.shift, self.scale = nn.Linear(dim, dim), shift, scale

    def forward(self, x):
        return self.scale * self.linear(x) + self.shift
"""


def test_an_argument_that_is_true_can_be_ablated(own: Path) -> None:
    (own / "switches.py").write_text(SWITCHES)
    base = {**STUDY["base"], "rule": "switches.py:Switches"}
    study = {"name": "s", "task": STUDY["task"], "base": base, "ablate": ["shift"], "seeds": 2}
    (own / "s.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    theirs, mine = (spec.make_rule() for spec in planned(own / "s.yaml").models())
    assert isinstance(theirs, OwnModule)
    assert isinstance(mine, OwnModule)
    assert mine.knobs() == {**theirs.knobs(), "shift": False}
    (own / "s.yaml").write_text(yaml.safe_dump({**study, "ablate": ["scale"]}, sort_keys=False))
    with pytest.raises(
        InputError, match=r"ablate: unknown part 'scale'; allowed: shift, mlp, mlp_shift, first_norm, canon"
    ):
        planned(own / "s.yaml")


def test_an_arm_without_the_tuned_argument_is_named(own: Path) -> None:
    (own / "switches.py").write_text(SWITCHES)
    base, tune = {**STUDY["base"], "rule": "switches.py:Switches"}, {"rule.scale": {"choice": [1.0, 2.0]}, "trials": 2}
    study = {"name": "s", "task": STUDY["task"], "base": base, "arms": {"gdn": {"rule": "gla"}}, "tune": tune}
    (own / "s.yaml").write_text(yaml.safe_dump({**study, "seeds": 2}, sort_keys=False))
    with pytest.raises(InputError, match=r"tune: arm 'gdn': unknown setting 'rule\.scale'"):
        planned(own / "s.yaml")


def test_a_module_that_is_wrong_is_refused_before_anything_trains(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalab.authoring.verdict.demand", lambda rules, quiet=False: None)
    study = {key: value for key, value in STUDY.items() if key != "ablate"}
    study["arms"] = {"mine": {"model": {"mixer": {"module": "own.py:Peeks"}}}}
    (own / "s.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    with pytest.raises(InputError, match=r"module 'own\.py:Peeks' fails the check 'causality'"):
        run_study_file(own / "s.yaml", executor="inline", db=own / "s.db", quiet=True)
    assert not (own / "s.db").exists()


def test_a_module_starts_on_the_meta_device_and_later() -> None:
    with torch.device("meta"):
        net = Model(ModelSpec.of({"mixer": "own.py:Taps", **SIZES}))
    assert all(parameter.is_meta for parameter in net.parameters())
    net.to_empty(device="cpu")
    deltalab.initialize(net, 3)
    want = dict(model("own.py:Taps").float().named_parameters())
    assert all(torch.equal(value, want[name]) for name, value in net.named_parameters())
    assert isinstance(net, nn.Module)
