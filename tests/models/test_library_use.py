"""deltalab's layers in somebody's own model: they start as torch's do, and last through copies, pickles and shards."""

import copy
import dataclasses
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deltalab
from deltalab import gates, registry
from deltalab.gates import Gate
from deltalab.models.layer import RuleLayer, initialize
from deltalab.models.start import Linear
from deltalab.ops.fused.norm import HeadNorm
from deltalab.structure import IPLR, Transition
from deltalab.study.specs.study_file import load_study

D, H, K = 12, 2, 4
RULES = {
    "comba iplr": ("comba", {"transition": "iplr"}),
    "low rank": ("gla", {}),
    "shared projection": ("mamba2", {}),
    "no gates": ("attention", {}),
    "gate per channel": ("kda", {}),
    "vectors": ("path_attention", {}),
    "several steps": ("delta_product", {}),
}


def layer_of(name: str = "comba", **given: Any) -> RuleLayer:
    rule, knobs = RULES.get(name, (name, {}))
    settings = {"token_shift": True, "gate_rank": 2, "qk_norm": True, **given}
    return RuleLayer(deltalab.get_rule(rule, **knobs), D, H, key_dim=K, value_dim=K, **settings)


class Own(nn.Module):
    """A model of the user's, with two layers and a parameter that deltalab knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer_of(), layer_of("vectors")
        self.own = nn.Parameter(torch.full((3,), 7.0))


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def spoil(module: nn.Module) -> None:
    with torch.no_grad():
        for value in module.parameters():
            value.fill_(torch.nan)


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


# --- starts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_a_new_layer_is_random_and_torchs_seed_makes_it_again(name: str) -> None:
    layer = seeded(lambda: layer_of(name))
    assert equal(values(layer), values(seeded(lambda: layer_of(name))))
    other = layer_of(name)
    for key in ("qkv.weight", "conv", "gate.0.weight", "gate.1.weight", "out.weight"):
        mine = layer.get_parameter(key)
        assert not torch.equal(mine, other.get_parameter(key)), f"{key} of two layers"
        assert len(mine.unique(dim=0)) == len(mine), f"rows of {key}"
        assert not torch.equal(layer.qkv.weight[: len(mine)], mine) or key == "qkv.weight"


def test_a_new_layers_weights_have_the_spread_of_a_seeded_one() -> None:
    torch.manual_seed(0)
    layer = RuleLayer(deltalab.get_rule("comba"), 256, 4, key_dim=64, value_dim=64, out_std=0.01)
    for name, std in {
        "qkv.weight": 256**-0.5,
        "conv": 4**-0.5 / 3**0.5,
        "gate.weight": 256**-0.5,
        "out.weight": 0.01,
    }.items():
        assert layer.get_parameter(name).std().item() == pytest.approx(std, rel=0.05)


def test_resetting_draws_from_torchs_generator_and_starts_every_parameter() -> None:
    layer = seeded(layer_of)
    spoil(layer)
    seeded(layer.reset_parameters, 1)
    first = values(layer)
    assert all(value.isfinite().all() for value in first.values())
    layer.reset_parameters()
    assert not equal(values(layer), first)
    seeded(layer.reset_parameters, 1)
    assert equal(values(layer), first)


def test_every_module_with_parameters_can_reset_its_own() -> None:
    """FSDP2 and other tools walk the modules of a model and call `reset_parameters` of each."""
    model = deltalab.build_model({"rule": "comba", "vocab_size": 16, "d_model": 8, "readout": "last"})
    spoil(model)
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()
    assert all(value.isfinite().all() for value in model.parameters())


def test_initialize_depends_on_the_seed_and_the_name_alone() -> None:
    one, two = seeded(Own, 1), seeded(Own, 2)
    for module in (one, two):
        initialize(module, 5)
    assert equal(values(one), values(two))
    before = torch.get_rng_state()
    initialize(two, 6)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one.first.qkv.weight, two.first.qkv.weight)
    assert not torch.equal(one.first.qkv.weight[:D], one.first.out.weight[:, :D])
    assert (two.own == 7).all(), "a parameter of the user's stays"


def test_initialize_starts_the_wanted_parameters_alone() -> None:
    layer, right = layer_of(output_norm="layer"), layer_of(output_norm="layer")
    initialize(right, 5)
    spoil(layer)
    wanted = {id(layer.qkv.weight), id(layer.norm.bias)}
    initialize(layer, 5, wanted=lambda value: id(value) in wanted)
    for name, value in layer.named_parameters():
        assert torch.equal(value, right.get_parameter(name)) if id(value) in wanted else value.isnan().all(), name


def test_initialize_gives_a_tied_weight_the_start_of_its_first_name() -> None:
    tied, plain = (nn.ModuleDict({"a": Linear(4, 4, 1.0), "b": Linear(4, 4, 1.0)}) for _ in range(2))
    tied["b"].weight = tied["a"].weight
    for module in (tied, plain):
        initialize(module, 0)
    assert torch.equal(tied["b"].weight, plain["a"].weight)


@pytest.mark.slow
def test_initialize_sees_through_compilation_and_checkpointing() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = Own()
    for wrap in (torch.compile, checkpoint_wrapper):
        wrapped = Own()
        wrapped.first = wrap(wrapped.first)
        for module in (plain, wrapped):
            initialize(module, 3)
        assert torch.equal(plain.first.qkv.weight, wrapped.first.qkv.weight)


@pytest.mark.parametrize("name", ["comba iplr", "vectors", "several steps"])
def test_a_layer_made_on_the_meta_device_starts_once_it_has_memory(name: str) -> None:
    right = layer_of(name, output_norm="group")
    with torch.device("meta"):
        layer = layer_of(name, output_norm="group")
    assert all(value.is_meta for value in layer.parameters())
    layer.to_empty(device="cpu")
    spoil(layer)
    for module in (layer, right):
        initialize(module, 4)
    assert equal(values(layer), values(right))
    spoil(layer)
    for module in (layer, right):
        seeded(module.reset_parameters)
    assert equal(values(layer), values(right))


def test_rules_that_compute_numbers_are_found_on_the_meta_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "mine.py").write_text(f"{PLUGIN}\nimport torch\n\nHALF = torch.tensor(0.5).item()\n")
    monkeypatch.chdir(tmp_path)
    with registry.isolated(), torch.device("meta"):
        assert RuleLayer("mine", D, H).qkv.weight.is_meta
    with torch.device("meta"):
        assert deltalab.get_rule("log_linear_attention", strength={"level_strength": {"levels": 4}}).gates


def test_initialize_keeps_a_parameters_dtype() -> None:
    layer, right = layer_of().bfloat16(), layer_of()
    for module in (layer, right):
        initialize(module, 4)
    assert layer.qkv.weight.dtype == torch.bfloat16
    assert torch.equal(layer.qkv.weight, right.qkv.weight.bfloat16())


def test_head_norms_start_at_one_and_zero() -> None:
    norm = HeadNorm(3, heads=2, norm="layer")
    spoil(norm)
    norm.reset_parameters()
    assert (norm.weight == 1).all()
    assert (norm.bias == 0).all()


def test_layers_in_a_sequence_train_the_same_from_the_same_seed() -> None:
    def trained() -> tuple[dict[str, Tensor], list[float]]:
        net = nn.Sequential(nn.Linear(3, D), layer_of(), nn.RMSNorm(D), layer_of("vectors"), nn.Linear(D, 1))
        x, losses = torch.randn(4, 9, 3), []
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for _ in range(10):
            loss = (net(x)[..., 0] - x.cumsum(1)[..., 0].sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return values(net), losses

    one, two = seeded(trained), seeded(trained)
    assert equal(one[0], two[0])
    assert one[1][-1] < 0.9 * one[1][0]
    assert not equal(one[0], trained()[0])


# --- copies and pickles -------------------------------------------------------------------------------------


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)), "torch.save": saved}


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("name", RULES)
def test_a_copied_layer_computes_the_same_and_starts_the_same(name: str, again: Callable[[Any], Any]) -> None:
    layer, x = layer_of(name), torch.randn(1, 9, D)
    other = again(layer)
    assert equal(values(layer), values(other))
    spoil(layer)
    initialize(layer, 9)
    assert not equal(values(layer), values(other)), "the copy has memory of its own"
    initialize(other, 9)
    assert equal(values(layer), values(other))
    torch.testing.assert_close(other(x), layer(x), rtol=0, atol=0)


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
def test_a_copied_model_computes_the_same(again: Callable[[Any], Any]) -> None:
    model = deltalab.build_model({"rule": "comba", "vocab_size": 16, "d_model": 8, "layers": ["rule", "attention"]})
    tokens = torch.arange(12).view(1, 12)
    torch.testing.assert_close(again(model)(tokens), model(tokens), rtol=0, atol=0)


@pytest.mark.parametrize("name", deltalab.list_rules())
def test_every_rule_pickles_in_all_its_variants(name: str) -> None:
    for rule in deltalab.get_rule(name).variants():
        other = pickle.loads(pickle.dumps(rule))
        assert other == rule
        assert other.transition == rule.transition
        for field in dataclasses.fields(rule):  # a rule may ask whether its transition `is` SPLR
            value = getattr(rule, field.name)
            if any(value is option for option in field.metadata.get("options", (field.default,))):
                assert getattr(other, field.name) is value or not isinstance(value, Transition)
        assert other.spec() == rule.spec()
        for symbol, gate in rule.gates.items():
            assert pickle.loads(pickle.dumps(gate)) == gate, symbol


def test_a_rule_keeps_its_own_transition_when_it_is_copied() -> None:
    """Comba asks whether its transition `is` IPLR."""
    rule = deltalab.get_rule("comba", transition="iplr")
    for again in COPIES.values():
        assert again(rule).transition is IPLR


def test_a_pickled_gate_keeps_its_numbers_and_where_its_value_comes_from() -> None:
    gate = deltalab.get_rule("kda", g={"mamba2_decay": {"a_max": 3}}).gates["g"]
    other = pickle.loads(pickle.dumps(gate))
    assert (other.per, other.options) == ("channel", gate.options)
    z, given = torch.randn(2, 3), {"log_a": torch.randn(3), "dt_bias": torch.randn(3)}
    assert torch.equal(other.value(z, given), gate.value(z, given))


def test_a_gate_without_a_parameterization_says_that_it_cannot_be_pickled() -> None:
    gate = Gate(per="token", low=0, high=1, value=lambda z, p: z.sigmoid())
    with pytest.raises(pickle.PicklingError, match="a gate pickles if @parameterization made it"):
        pickle.dumps(gate)
    assert copy.deepcopy(gate) is gate
    assert pickle.loads(pickle.dumps(gates.sigmoid(max=2))).high == 2


PLUGIN = '''
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import SPLR, Transition


@gates.parameterization
def odd(most: float = 2.0) -> Gate:
    """most sigmoid(W x)."""
    return Gate(per="token", low=0.0, high=most, value=lambda z, p: most * z.sigmoid())


@dataclass(frozen=True, kw_only=True)
class Mine(UpdateRule):
    """A rule of the user's."""

    name: ClassVar[str] = "mine"
    transition: Transition = knob(SPLR)
    g: Gate = knob(gates.mamba2_decay())
    beta: Gate = knob(odd())

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (-1.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, g=g, e=beta)
'''


@pytest.fixture
def pickled(tmp_path: Path) -> bytes:
    """A layer with the rule of a plugin's file, pickled by another process."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    with registry.isolated():
        registry.add_plugin(tmp_path / "mine.py")
        return pickle.dumps(RuleLayer(deltalab.get_rule("mine"), D, H, key_dim=K, value_dim=K))


def test_the_rule_of_a_plugins_file_is_unpickled_where_the_file_is_known(
    pickled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.py").write_text(PLUGIN)
    for file in (tmp_path / "mine.py", tmp_path / "elsewhere" / "mine.py"):
        with registry.isolated():
            registry.add_plugin(file)
            rule = pickle.loads(pickled).rule
            assert rule == deltalab.get_rule("mine")
            assert type(rule) is type(deltalab.get_rule("mine"))
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "mine.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    with registry.isolated():
        assert pickle.loads(pickled).rule.name == "mine"


def test_the_rule_of_an_unknown_plugin_is_asked_for_by_its_file(pickled: bytes) -> None:
    with registry.isolated(), pytest.raises(ModuleNotFoundError) as raised:
        pickle.loads(pickled)
    assert str(raised.value) == (
        "needs the plugin file mine.py, which is not known here: call deltalab.registry.add_plugin(FILE) first"
    )


# --- shards -------------------------------------------------------------------------------------------------

SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import deltalab
from deltalab.models.layer import initialize, shard_gates
from deltalab.models.model import Model
from deltalab.models.spec import ModelSpec

rank, world, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
# Odd widths, so that the shards are unequal.
spec = ModelSpec(rule="comba", vocab_size=17, d_model=9, heads=3, layers=1, output_norm="layer", token_shift=True)
right = Model(spec)
with torch.device("meta"):
    model = Model(spec)
shard_gates(model, mesh=mesh)
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")


def compare() -> None:
    for (name, value), want in zip(model.named_parameters(), right.parameters(), strict=True):
        assert type(value.data).__name__ == "DTensor"
        torch.testing.assert_close(value.full_tensor(), want, rtol=0, atol=0, msg=name)


for seed in (3, 4):
    for one in (right, model):
        initialize(one, seed)
    compare()
for one in (right, model):
    torch.manual_seed(7)
    one.reset_parameters()
compare()
tokens = torch.arange(10).view(1, 10)
torch.testing.assert_close(model(tokens), right(tokens))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_sharded_by_fsdp2_starts_as_a_whole_one(world: int, tmp_path: Path) -> None:
    (tmp_path / "shard.py").write_text(SHARDED)
    group = str(tmp_path / "group")
    command = [sys.executable, str(tmp_path / "shard.py")]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world), group], stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors


# --- names and mappings as arguments ------------------------------------------------------------------------


def test_a_layer_takes_a_rules_name_and_finds_its_widths() -> None:
    layer = deltalab.RuleLayer("comba", 8, 2)
    assert layer.rule == deltalab.get_rule("comba")
    assert (layer.key_dim, layer.value_dim) == (4, 4)
    assert deltalab.RuleLayer("comba", 8, 2, key_dim=3).value_dim == 3
    with pytest.raises(deltalab.InputError, match="d_model 9 must be a multiple of heads 2, or give key_dim"):
        deltalab.RuleLayer("comba", 9, 2)


def test_scan_takes_a_rules_name() -> None:
    q, k, v = (torch.nn.functional.normalize(torch.randn(1, 5, H, K), dim=-1) for _ in range(3))
    given = {"g": torch.zeros(1, 5, H), "beta": torch.ones(1, 5, H)}
    named = deltalab.scan("gated_deltanet", q, k, v, given, chunk_size=4)
    made = deltalab.scan(deltalab.get_rule("gated_deltanet"), q, k, v, given, chunk_size=4)
    assert torch.equal(named[0], made[0])


def test_equal_knobs_make_one_rule() -> None:
    one = deltalab.get_rule("algebra", micro_steps=1, d={"head": {"init": 1.0}})
    assert deltalab.get_rule("algebra", d={"head": {"init": 1.0}}, micro_steps=1) is one
    assert deltalab.get_rule("algebra", micro_steps=1, d={"head": {"init": 2.0}}) != one
    with pytest.raises(deltalab.InputError, match="unknown option 'True'"):
        deltalab.get_rule("algebra", micro_steps=True, d={"head": {"init": 1.0}})


def test_check_rule_takes_a_rules_name() -> None:
    results = deltalab.check_rule("linear_attention", quick=True)
    assert results
    assert all(result.passed for result in results)


@pytest.mark.parametrize(
    "use",
    [deltalab.check_rule, lambda rule: deltalab.scan(rule, *3 * [torch.ones(1, 2, 1, 4)], {}),
     lambda rule: deltalab.RuleLayer(rule, 8, 2)],
    ids=["check_rule", "scan", "RuleLayer"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("given", "says"),
    [("comb", "unknown rule 'comb'; did you mean 'comba'?"),
     (3, "takes a rule or the name of one, such as 'abc', not 3"),
     (type(deltalab.get_rule("comba")), "not <class 'deltalab_rules.comba.Comba'>; make one: Comba()")],
)  # fmt: skip
def test_what_is_no_rule_is_refused_in_one_line(use: Callable[[Any], Any], given: Any, says: str) -> None:
    with pytest.raises(deltalab.InputError) as raised:
        use(given)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_check_task_takes_a_name_where_no_parameter_is_due() -> None:
    with pytest.raises(deltalab.InputError, match="task 'mqar': needs length, pairs"):
        deltalab.check_task("mqar")
    with pytest.raises(deltalab.InputError, match="takes a task or the name of one"):
        deltalab.check_task(3)  # type: ignore[arg-type]


def study() -> dict[str, Any]:
    return {
        "name": "mapped",
        "task": {"mqar": {"length": 8, "pairs": 2, "vocab_size": 16}},
        "base": {
            "rule": "deltanet",
            "model": {"d_model": 8, "layers": 1, "heads": 1},
            "train": {"steps": 2, "lr": 0.1, "batch_size": 2, "evaluations": 1, "eval_batches": 1},
        },
        "seeds": 1,
        "profiles": {"longer": {"seeds": 2}},
    }


@pytest.mark.slow
def test_run_study_takes_the_mapping_that_a_file_would_hold(tmp_path: Path) -> None:
    given = study()
    result = deltalab.run_study(given, db=tmp_path / "ledger.db", executor="inline", unchecked=True)
    assert (result.name, result.trials, result.failed) == ("mapped", 1, 0)
    assert given == study(), "the mapping is left as it was"
    (tmp_path / "mapped.yaml").write_text(json.dumps(given))
    again = deltalab.run_study(tmp_path / "mapped.yaml", db=tmp_path / "ledger.db", executor="inline", unchecked=True)
    assert again.known == 1, "it is the same study"
    assert load_study(given, profile="longer").seeds == 2


def test_run_study_says_what_it_takes() -> None:
    with pytest.raises(deltalab.InputError, match="a study is a file, the name of a shipped study or a mapping, not 3"):
        deltalab.run_study(3)  # type: ignore[arg-type]
    with pytest.raises(deltalab.InputError, match=r"study: unknown key 'arm'; did you mean 'arms'\?"):
        deltalab.run_study({**study(), "arm": {}})


# --- wrong settings and inputs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"heads": 0}, "heads must be a whole number of at least 1, not 0"),
        ({"heads": 2.0}, "heads must be a whole number of at least 1, not 2.0"),
        ({"d_model": -8}, "d_model must be a whole number of at least 1, not -8"),
        ({"key_dim": 0}, "key_dim must be a whole number of at least 1, not 0"),
        ({"value_dim": 0}, "value_dim must be a whole number of at least 1, not 0"),
        ({"conv": -1}, "conv must be a whole number of at least 0, not -1"),
        ({"gate_rank": -1}, "gate_rank must be a whole number of at least 0, not -1"),
        ({"chunk_size": 0}, "chunk_size must be a whole number of at least 1, not 0"),
        ({"qk_heads": 3}, "qk_heads must divide heads 2, not be 3"),
        ({"qk_heads": 1, "kv_heads": 1}, "qk_heads 1 and kv_heads 1: at most one may be less than heads 2"),
        ({"output_norm": "RMS"}, "unknown output_norm 'RMS'; allowed: none, rms"),
        ({"output_gate": "silo"}, "unknown output_gate 'silo'; did you mean 'silu'?"),
        ({"features": "units"}, "unknown features 'units'; did you mean 'unit'?"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; allowed: auto, recurrent, chunked, triton"),
        ({"rope": -1.0}, "rope takes a base above 1 and an even key_dim, not -1.0 and 4"),
        ({"rope": 1e4, "key_dim": 3}, "rope takes a base above 1 and an even key_dim, not 10000.0 and 3"),
        ({"norm_eps": -1.0}, "norm_eps must be at least 0, not -1.0"),
    ],
)
def test_settings_that_make_no_layer_are_refused_in_one_line(given: dict[str, Any], says: str) -> None:
    with pytest.raises(deltalab.InputError) as raised:
        RuleLayer("comba", **{"d_model": 8, "heads": 2, **given})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


X, ROW = torch.ones(2, 5, 8), torch.ones(1, 5, 8)


@pytest.mark.parametrize(
    ("x", "given", "says"),
    [
        (X[..., 1:], {}, "x must be a non-empty floating tensor [B, T, 8], not torch.float32 [2, 5, 7]"),
        (X[0], {}, "[B, T, 8], not torch.float32 [5, 8]"),
        (X[None], {}, "[B, T, 8], not torch.float32 [1, 2, 5, 8]"),
        (X.long(), {}, "[B, T, 8], not torch.int64 [2, 5, 8]"),
        (X[:0], {}, "[B, T, 8], not torch.float32 [0, 5, 8]"),
        (X[:, :0], {}, "[B, T, 8], not torch.float32 [2, 0, 8]"),
        ([1.0], {}, "[B, T, 8], not a list"),
        (ROW, {"cu_seqlens": torch.tensor([0, 2, 4])}, "cu_seqlens must rise from 0 to the number of tokens, 5"),
        (ROW, {"cu_seqlens": [0, 2, 5]}, "cu_seqlens must be a tensor of whole numbers [N + 1], not a list"),
        (X, {"cu_seqlens": torch.tensor([0, 2, 5])}, "not torch.int64 [3] on cpu beside a batch of 2"),
        (X, {"attention_mask": X[:, 1:, 0]}, "attention_mask must be [B, T] = [2, 5] on cpu, not [2, 4] on cpu"),
        (X, {"attention_mask": [[1] * 5] * 2}, "attention_mask must be a tensor [B, T], not a list"),
        (X, {"attention_mask": torch.zeros(2, 5)}, "attention_mask holds no token"),
    ],
)  # fmt: skip
def test_inputs_that_a_layer_does_not_take_are_refused_in_one_line(x: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(deltalab.InputError) as raised:
        RuleLayer("comba", 8, 2)(x, **given)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_cache_of_another_batch_is_refused() -> None:
    layer = RuleLayer("comba", 8, 2)
    _, cache = layer.advance(ROW)
    with pytest.raises(deltalab.InputError, match="the cache is of 1 sequences, but x holds 2"):
        layer.advance(X, cache)


@pytest.mark.parametrize(
    "tokens", [torch.zeros(5, dtype=torch.long), torch.zeros(2, 5), torch.zeros(2, 0, dtype=torch.long), [[1, 2]]]
)
def test_a_model_refuses_what_is_no_batch_of_tokens(tokens: Any) -> None:
    model = deltalab.build_model({"rule": "comba", "vocab_size": 16, "d_model": 8})
    for use in (model, model.step):
        with pytest.raises(deltalab.InputError, match=r"tokens must be a non-empty tensor \[B, T\] of whole numbers"):
            use(tokens)


def test_a_loss_refuses_targets_of_another_shape() -> None:
    """Targets beyond the tokens would be left out silently."""
    model = deltalab.build_model({"rule": "comba", "vocab_size": 16, "d_model": 8})
    tokens = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(deltalab.InputError, match=r"targets must be \[2, 5\], one for each token, not \[2, 6\]"):
        model.loss(tokens, torch.zeros(2, 6, dtype=torch.long))


# --- precisions, devices and compilers ----------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 0.01), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("rule", ["comba", "attention", "kda"])
def test_layers_train_in_half_precision_and_under_autocast(rule: str, dtype: torch.dtype, most: float) -> None:
    layer, x = seeded(lambda: RuleLayer(rule, 16, 2)), torch.randn(2, 70, 16)
    right = layer(x)
    low = copy.deepcopy(layer).to(dtype)
    with torch.autocast("cpu", dtype):
        mixed = layer(x)
    for y, used in ((low(x.to(dtype)), low), (mixed, layer)):
        assert y.dtype == dtype
        assert (y - right).norm() < most * right.norm()
        y.float().square().mean().backward()
        assert all(value.grad is not None and value.grad.isfinite().all() for value in used.parameters())


def test_the_meta_device_gives_shapes() -> None:
    with torch.device("meta"):
        layer = RuleLayer("comba", 8, 2)
        assert layer(torch.empty(2, 5, 8)).shape == (2, 5, 8)


def test_an_output_projection_may_start_at_zero() -> None:
    assert not RuleLayer("comba", 8, 2, out_std=0.0).out.weight.any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.compile")
@pytest.mark.parametrize("rule", ["comba", "abc"])
def test_a_compiled_model_has_the_gradients_of_the_model(rule: str) -> None:
    """AOT autograd fixes strides when it traces. A rule of passes differentiates within its forward pass."""
    model = deltalab.build_model({"rule": rule, "vocab_size": 16, "d_model": 8, "layers": 1, "mlp": False})
    tokens = torch.arange(40).view(2, 20) % 16
    found = []
    for one in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        one(tokens).square().mean().backward()
        found.append({name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None})
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
