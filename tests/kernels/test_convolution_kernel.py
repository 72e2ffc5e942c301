"""Short convolution, SiLU and unit norm as one kernel, against fp64; in Triton's interpreter without a GPU."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import deltalab
from deltalab.kernels.step import convolution as kernels
from deltalab.models.layer import LayerCache, RuleLayer, initialize
from deltalab.ops.backends import NONE, available
from deltalab.ops.fused.convolution import Channels, features
from deltalab.ops.packing import Sequences

# What PyTorch has no rule for, `vmap` does run by run.
pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Of the whole, by the norm; Triton's interpreter truncates where a GPU rounds to bf16.
ROUNDING = {BF16: 2e-3 if DEVICE == "cuda" else 4e-3, FP16: 3e-4, FP32: 3e-6}


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalab.ops.fused.convolution.automatic", available)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def cosines(x: Tensor) -> Tensor:
    """Upstream gradients that are exact in bf16."""
    return torch.arange(x.numel(), dtype=FP32, device=x.device).cos().bfloat16().view_as(x)


def error(actual: Tensor, right: Tensor) -> float:
    return float((actual.detach().double() - right.detach()).norm() / right.detach().norm().clamp_min(1e-9))


def oracle(
    x: Tensor,
    w: Tensor | None,
    past: Tensor | None,
    widths: list[int],
    key_dim: int,
    silu: int,
    unit: bool,
    place: Tensor | None = None,
) -> list[Tensor]:
    """Run by run, with PyTorch's own depthwise convolution; sequence by sequence where rows hold several."""
    if place is not None:
        starts = (place.flatten(0, 1).amax(0) == 0).nonzero().flatten().tolist()
        assert (place[..., starts] == 0).all()
        parts = x.split([b - a for a, b in pairwise([*starts, x.shape[2]])], dim=2)
        actual = [oracle(part, w, None, widths, key_dim, silu, unit) for part in parts]
        return [torch.cat(tensor, dim=2) for tensor in zip(*actual, strict=True)]
    qkv, rest = x.split([sum(widths[:3]), sum(widths[3:])], dim=-1)
    if w is not None:
        before = x.new_zeros(*x.shape[:2], w.shape[1] - 1, w.shape[2]) if past is None else past
        padded = torch.cat([before, qkv], dim=2).mT
        runs = [F.conv1d(tensor, taps.T[:, None], groups=len(taps.T)) for tensor, taps in zip(padded, w, strict=True)]
        qkv = torch.stack(runs).mT
    q, k, v = (F.silu(z) if i < silu else z for i, z in enumerate(qkv.split(widths[:3], dim=-1)))
    if unit:
        q, k = (F.normalize(z.unflatten(-1, (-1, key_dim)), dim=-1, eps=1e-6).flatten(-2) for z in (q, k))
    return [q, k, v, *rest.split(widths[3:], dim=-1)]


def compare(
    x: Tensor, w: Tensor | None, past: Tensor | None, *how: Any, limits: dict[torch.dtype, float] = ROUNDING
) -> None:
    """Outputs and all gradients."""
    given = [None if tensor is None else tensor.detach().requires_grad_() for tensor in (x, w, past)]
    exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in given]
    actual, wanted = list(kernels.convolve(*given, *how)), oracle(*exact, *how)
    assert [tensor.dtype for tensor in actual] == [x.dtype] * 4 + [FP32]
    for i, (tensor, right) in enumerate(zip(actual, wanted, strict=True)):
        assert tensor.shape == (right.shape if how[0][i] else (x.shape[0], 0))
    actual, wanted = ([tensor for tensor in part if tensor.numel()] for part in (actual, wanted))
    for outputs, leaves in ((actual, given), (wanted, exact)):
        outputs += torch.autograd.grad(
            outputs,
            [tensor for tensor in leaves if tensor is not None],
            [cosines(tensor).to(tensor.dtype) for tensor in outputs],
        )
    for i, (tensor, right) in enumerate(zip(actual, wanted, strict=True)):
        assert tensor.shape == right.shape
        assert error(tensor, right) <= limits[tensor.dtype], (i, error(tensor, right))


# --- the kernels ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=5, deadline=None)  # The interpreter takes a second for each.
@example(
    runs=2,
    batch=2,
    length=2,
    width=4,
    heads=1,
    key_dim=7,
    steps=2,
    value=3,
    gate=5,
    rest=3,
    how=(3, True),
    past=True,
)
@given(
    runs=st.integers(1, 2), batch=st.integers(1, 3), length=st.integers(1, 9), width=st.integers(0, 5),
    heads=st.integers(1, 2), key_dim=st.sampled_from([3, 4, 7, 16]), steps=st.integers(1, 2), value=st.integers(1, 9),
    gate=st.integers(0, 5), rest=st.integers(0, 9), past=st.booleans(),
    how=st.sampled_from([(3, True), (2, True), (3, False), (2, False), (0, False)]),
)  # fmt: skip
def test_a_fused_convolution_is_that_in_fp64(
    runs: int, batch: int, length: int, width: int, heads: int, key_dim: int, steps: int, value: int, gate: int,
    rest: int, how: tuple[int, bool], past: bool,
) -> None:  # fmt: skip
    widths = [heads * key_dim, steps * heads * key_dim, value, gate, rest]
    x, channels = normal(1, runs, batch, length, sum(widths)), sum(widths[:3])
    w = normal(2, runs, width, channels) if width else None
    before = normal(3, runs, batch, width - 1, channels) if width and past else None
    compare(x, w, before, widths, key_dim, *how)


def places(runs: int, batch: int, lengths: list[int]) -> Tensor:
    """The places of the tokens of rows that all hold sequences of these lengths."""
    tensor = torch.cat([torch.arange(length, dtype=torch.int32, device=DEVICE) for length in lengths])
    return tensor.expand(runs, batch, -1)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@example(lengths=[1, 2, 5, 1], width=4, key_dim=7, how=(3, True), batch=2, runs=2)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), width=st.integers(0, 5), batch=st.integers(1, 2),
    key_dim=st.sampled_from([3, 4]), how=st.sampled_from([(3, True), (2, False), (0, False)]), runs=st.integers(1, 2),
)  # fmt: skip
def test_the_convolution_of_a_packed_sequence_sees_no_other(
    lengths: list[int], width: int, key_dim: int, how: tuple[int, bool], batch: int, runs: int
) -> None:
    widths = [key_dim, 2 * key_dim, 5, 3, 2]
    x, w = normal(1, runs, batch, sum(lengths), sum(widths)), normal(2, runs, width, 3 * key_dim + 5)
    compare(x, w if width else None, None, widths, key_dim, *how, places(runs, batch, lengths))


def test_a_packed_sequence_may_be_walked_by_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TILE", 512)
    monkeypatch.setattr("deltalab.kernels.launch._plans", {})
    widths, lengths = [8, 8, 8, 0, 3], [3, 1, 6, 5, 2]
    x, w = normal(1, 1, 1, 17, sum(widths)), normal(2, 1, 4, 24)
    assert kernels.Tiling.of(x, w, widths, 4, 3, True).segments == 3
    compare(x, w, None, widths, 4, 3, True, places(1, 1, lengths))


@pytest.mark.parametrize(("dtype", "taps"), [(BF16, FP32), (FP16, FP16)])
def test_only_what_is_stored_is_rounded(dtype: torch.dtype, taps: torch.dtype) -> None:
    widths = [32, 32, 16, 8, 8]
    x, w, past = normal(1, 1, 2, 4, sum(widths)), normal(2, 1, 3, 80), normal(3, 1, 2, 2, 80)
    compare(x.to(dtype), w.to(taps), past.to(dtype), widths, 16, 3, True)


def test_many_blocks_of_channels_and_programs_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TILE", 512)
    monkeypatch.setattr("deltalab.kernels.launch._plans", {})
    widths = [66, 33, 70, 0, 3]
    x, w = normal(1, 1, 2, 9, sum(widths)), normal(2, 1, 2, 169)
    launch = kernels.Tiling.of(x, w, widths, 33, 3, True)
    assert (launch.segments, launch.rows, launch.programs, launch.grid[0]) == (2, 2, 2, 12)
    compare(x, w, None, widths, 33, 3, True)


def test_where_there_is_enough_to_do_rows_walk_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    monkeypatch.setattr(kernels, "TILE", 4096)
    monkeypatch.setattr("deltalab.kernels.launch._plans", {})
    widths = [16, 16, 16, 0, 0]
    x, w = normal(1, 1, 5, 12, 48), normal(2, 1, 2, 48)
    assert kernels.Tiling.of(x, w, widths, 16, 3, True).segments == 2
    compare(x, w, None, widths, 16, 3, True)
    for batch, length, segments in ((99, 12, 1), (9, 1000, 16), (1, 1, 1)):
        x = torch.empty(1, 1, 1, 48).expand(1, batch, length, 48)
        assert kernels.Tiling.of(x, w, widths, 16, 3, True).segments == segments


@pytest.mark.parametrize("scale", [0.0, 1e-9])
def test_norms_below_the_least_one(scale: float) -> None:
    x, w = normal(1, 1, 1, 2, 24), normal(2, 1, 1, 24)
    x[..., :4] *= scale
    compare(x, w, None, [8, 8, 8, 0, 0], 4, 3, True)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(0, 0), (1, None), (None, 0)])
def test_vmap_makes_runs_of_what_it_maps_over(dims: tuple[int | None, int | None]) -> None:
    how = ([8, 8, 8, 4, 2], 4, 3, True)
    x, w = normal(1, 2, 2, 2, 30), normal(2, 2, 2, 24)
    given = [None if dim is None else tensor[:, None].movedim(0, dim) for tensor, dim in zip((x, w), dims, strict=True)]
    given = [tensor[:1] if part is None else part for tensor, part in zip((x, w), given, strict=True)]
    given = [tensor.requires_grad_() for tensor in given]
    together = vmap(lambda x, w: kernels.convolve(x, w, None, *how), dims)(*given)
    runs = [
        tensor.expand(2, *tensor.shape[1:]) if dim is None else tensor.squeeze(1 - dim)
        for tensor, dim in zip(given, dims, strict=True)
    ]
    wanted = kernels.convolve(*runs, None, *how)
    for actual, tensor in zip(together, wanted, strict=True):
        torch.testing.assert_close(actual.squeeze(1), tensor)
    grads = [
        torch.autograd.grad(actual, given, [cosines(tensor) for tensor in actual]) for actual in (together, wanted)
    ]
    for actual, tensor in zip(*grads, strict=True):
        torch.testing.assert_close(actual, tensor)


@pytest.mark.slow
def test_the_operators_say_what_they_return() -> None:
    """The fake operators, which torch.compile asks for shapes."""
    x, w, past = normal(1, 2, 1, 2, 14).bfloat16(), normal(2, 2, 2, 12), normal(3, 2, 1, 1, 12).bfloat16()
    how = ([4, 4, 4, 2, 0], 4, 3, True)
    checks = ("test_schema", "test_faketensor")
    for taps, before, place in ((w, past, None), (None, None, None), (w, None, places(2, 1, [1, 1]))):
        given = (x, taps, before, *how, place)
        torch.library.opcheck(kernels.convolve, given, test_utils=checks)
        d_outs = kernels.convolve(*given)
        torch.library.opcheck(kernels._backward, (x, taps, before, *d_outs, *how, place), test_utils=checks)


# --- layers -----------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(op.name())
        return op(*args, **(kwargs or {}))


LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "unit": ("comba", {}),
    "shared q and k": ("mamba2", {"qk_heads": 1, "value_dim": 6}),
    "grouped values": ("gated_deltanet", {"heads": 4, "qk_heads": 2, "qk_norm": True, "rope": 100.0}),
    "grouped queries": ("delta_product", {"heads": 4, "kv_heads": 2, "output_norm": "group", "output_gate": "silu"}),
    "steps": ("delta_product", {}),
    "a channel's gates": ("kda", {}),
    "a low rank": ("gla", {"key_dim": 5}),
    "a gate of low rank": ("gla", {"gate_rank": 3}),
    "raw": ("attention", {"conv": 3}),
    "no convolution": ("comba", {"conv": 0}),
    "v without SiLU": ("rla", {"knobs": {"silu": "qk"}}),
    "no norm, v without SiLU": ("comba", {"knobs": {"silu": "qk", "normalize": False}}),
    "no gates, a convolution of one": ("linear_attention", {"output_gate": False, "conv": 1}),
}


def layer_of(name: str, seed: int = 1) -> RuleLayer:
    rule, given = LAYERS[name]
    given = {"key_dim": 4, "value_dim": 4, "knobs": {}, **given}
    made = deltalab.get_rule(rule, **given.pop("knobs"))
    layer = RuleLayer(made, 12, given.pop("heads", 2), chunk_size=8, **given)
    initialize(layer, seed)
    return layer.to(DEVICE)


def results(layer: RuleLayer, x: Tensor) -> dict[str, Tensor]:
    """A layer's outputs and gradients for whole sequences, and its outputs where a few more tokens follow."""
    x = x.detach().requires_grad_()
    y, cache = layer.advance(x)
    names, leaves = zip(("x", x), *layer.named_parameters(), strict=True)
    actual = {"y": y, "conv": cache.conv}
    grads = torch.autograd.grad(y, leaves, cosines(y), allow_unused=True)
    actual.update((f"d {n}", tensor) for n, tensor in zip(names, grads, strict=True) if tensor is not None)
    with torch.no_grad():
        cache = None
        for i, part in enumerate(x.split([2, 1, 4], dim=1)):
            actual[f"part {i}"], cache = layer.advance(part, cache)
            assert isinstance(cache, LayerCache)
            actual[f"conv {i}"] = cache.conv
    return actual


LARGE = pytest.mark.parametrize("large", [2**24, 1], ids=["one product", "the gate apart"])
"""From how many numbers on the output gate's projection is a product of its own."""


@pytest.mark.slow(keep="steps-one product")
@LARGE
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_the_same_with_and_without_the_kernels(
    name: str, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltalab.ops.fused.convolution.APART", large)
    layer, x = layer_of(name), normal(1, 8, 7, 12)
    monkeypatch.setattr("deltalab.ops.fused.convolution.automatic", lambda device: NONE)
    right = results(layer, x)
    monkeypatch.setattr("deltalab.ops.fused.convolution.automatic", available)
    with Calls() as calls:
        actual = results(layer, x)
    assert calls.seen.count("deltalab::convolve") == 4
    assert calls.seen.count("deltalab::convolve_backward") == 1
    assert actual.keys() == right.keys()
    for key, tensor in right.items():
        assert actual[key].shape == tensor.shape
        assert not tensor.numel() or error(actual[key], tensor) < 2e-5, (key, error(actual[key], tensor))
    torch.testing.assert_close(torch.cat([actual[f"part {i}"] for i in range(3)], dim=1), actual["y"])


@pytest.mark.parametrize("name", ["unit", "steps", "a low rank", "no convolution", "raw"])
def test_packed_layers_are_the_same_with_and_without_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, bounds = layer_of(name), normal(1, 1, 12, 12), torch.tensor([0, 1, 6, 8, 12], device=DEVICE)
    actual: dict[bool, list[Tensor]] = {}
    for kernel in (True, False):
        monkeypatch.setattr("deltalab.ops.fused.convolution.automatic", available if kernel else lambda device: NONE)
        given = x.clone().requires_grad_()
        y, cache = layer.advance(given, cu_seqlens=bounds)
        leaves = [given, *layer.parameters()]
        grads = torch.autograd.grad(y, leaves, cosines(y), allow_unused=True)
        actual[kernel] = [y, cache.conv, *(tensor for tensor in grads if tensor is not None)]
    assert cache.conv.shape[0] == 4
    for tensor, right in zip(actual[True], actual[False], strict=True):
        assert not tensor.numel() or error(tensor, right) < 2e-5


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize("needs", ["x", "a weight"])
def test_products_apart_give_the_gradients_that_are_asked_for(needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalab.ops.fused.convolution.APART", 1)
    layer, x = layer_of("unit").requires_grad_(False), normal(1, 8, 7, 12)
    leaf = (x if needs == "x" else layer.qkv.weight).requires_grad_()
    (actual,) = torch.autograd.grad(layer(x).sum(), leaf)
    monkeypatch.setattr("deltalab.ops.fused.convolution.APART", 2**24)
    torch.testing.assert_close(actual, torch.autograd.grad(layer(x).sum(), leaf)[0])


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize(("name", "tokens", "products"), [("unit", 56, 2), ("a low rank", 56, 3), ("unit", 7, 5)])
def test_many_tokens_are_multiplied_once(name: str, tokens: int, products: int) -> None:
    """All projections of x are one product; the output and the second matrix of a low rank take one more each."""
    layer = layer_of(name)
    with Calls() as calls, torch.no_grad():
        layer(normal(1, tokens // 7, 7, 12))
    assert calls.seen.count("aten::mm") == products


@pytest.mark.slow
@LARGE
@pytest.mark.usefixtures("launching")
def test_stacked_layers_are_what_they_are_alone(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalab.ops.fused.convolution.APART", large)
    layer, x = layer_of("unit"), normal(1, 2, 8, 7, 12)
    runs = [dict(layer_of("unit", seed).named_parameters()) for seed in (1, 2)]
    weights = {key: torch.stack([run[key].detach() for run in runs]).requires_grad_() for key in runs[0]}
    with Calls() as calls:
        together = vmap(lambda w, x: functional_call(layer, w, (x,)))(weights, x)
        grads = torch.autograd.grad(together, list(weights.values()), cosines(together))
    assert calls.seen.count("deltalab::convolve") == calls.seen.count("deltalab::convolve_backward") == 1
    alone = torch.stack([functional_call(layer, run, (tensor,)) for run, tensor in zip(runs, x, strict=True)])
    torch.testing.assert_close(together, alone)
    for i, run in enumerate(runs):
        wanted = torch.autograd.grad(alone, list(run.values()), cosines(alone), retain_graph=True)
        for actual, tensor in zip(grads, wanted, strict=True):
            assert error(actual[i], tensor) < 2e-5


def test_what_the_kernels_do_not_take_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp64, a convolution that is too wide, and a layer with nothing to fuse do without the kernel."""
    monkeypatch.setattr("deltalab.ops.fused.convolution.automatic", available)
    wide = RuleLayer(deltalab.get_rule("comba"), 8, 1, key_dim=4, value_dim=4, conv=9).to(DEVICE)
    idle = RuleLayer(deltalab.get_rule("attention"), 8, 1, key_dim=4, value_dim=4, conv=0).to(DEVICE)
    double = RuleLayer(deltalab.get_rule("comba"), 8, 1, key_dim=4, value_dim=4).to(DEVICE).double()
    for layer in (wide, idle, double):
        with Calls() as calls:
            layer(normal(1, 1, 20, 8).to(layer.out.weight.dtype))
        assert "deltalab::convolve" not in calls.seen


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_mixed_and_low_precision_reach_the_rule_as_they_should(dtype: torch.dtype) -> None:
    """Dtypes under autocast with fp32 weights, and with all weights in bf16."""
    layer, x = layer_of("a low rank").to(dtype), normal(1, 8, 7, 12).to(dtype)
    with torch.autocast(DEVICE, BF16, enabled=dtype == FP32):
        y, cache = layer.advance(x)
    y.float().sum().backward()
    assert (y.dtype, cache.conv.dtype) == (BF16, BF16)
    assert all(p.grad is not None and p.grad.dtype == dtype and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("launching")
@pytest.mark.filterwarnings("ignore:.*torch.compile")
def test_a_compiler_takes_it_as_one_graph() -> None:
    layer, x = layer_of("no gates, a convolution of one"), normal(1, 8, 7, 12).requires_grad_()
    actual, wanted = torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x)
    torch.testing.assert_close(actual, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (actual, wanted)))


@pytest.mark.parametrize("silu", [2, 3])
def test_without_kernels_it_is_what_pytorch_has(silu: int) -> None:
    x, w, past = normal(1, 2, 7, 24).double(), normal(2, 4, 24).double(), normal(3, 2, 3, 24).double()
    channels = Channels(2, 2, 4, 4, 1, "unit", silu == 3)
    packed = Sequences.of(torch.tensor([0, 1, 7]), x[:1])
    *actual, tail = features(x[:1], w, None, channels, packed)
    for tensor, right in zip(
        actual, oracle(x[None, :1], w[None], None, [8, 8, 8, 0, 0], 4, silu, True, packed.place[None]), strict=False
    ):
        torch.testing.assert_close(tensor.flatten(-2), right[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(tail, torch.stack([F.pad(x[0, :1], (0, 0, 2, 0)), x[0, 4:]]))
    for before in (None, past):
        *actual, tail = features(x, w, before, channels)
        batched = (None if before is None else before[None], [8, 8, 8, 0, 0], 4, silu, True)
        for tensor, right in zip(actual, oracle(x[None], w[None], *batched), strict=False):
            torch.testing.assert_close(tensor.flatten(-2), right[0], rtol=1e-12, atol=1e-12)
        assert torch.equal(tail, x[:, -3:])


# --- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("shape", "widths", "key_dim"),
    [
        ((8, 256, 256), [128, 128, 128, 128, 8], 64),
        ((1, 256, 256), [128, 128, 128, 128, 8], 64),
        ((16, 512, 64), [64, 64, 64, 64, 8], 64),
        ((2, 16, 1001), [128, 256, 256, 128, 24], 128),
        ((1, 8, 4096), [512, 512, 512, 512, 16], 256),
        ((1, 33, 257), [60, 60, 90, 45, 9], 20),
    ],
    ids=str,
)
def test_real_sizes_are_those_in_fp64(
    shape: tuple[int, int, int], widths: list[int], key_dim: int, dtype: torch.dtype
) -> None:
    """The oracle run by run, since it needs much memory."""
    x, w = normal(1, *shape, sum(widths)).to(dtype), normal(2, shape[0], 4, sum(widths[:3]))
    how = (widths, key_dim, 3, True)
    x.requires_grad_(), w.requires_grad_()
    outputs = kernels.convolve(x, w, None, *how)
    above = [cosines(tensor).to(tensor.dtype) for tensor in outputs]
    d_x, d_w = torch.autograd.grad(outputs, [x, w], above)
    limits = {BF16: 2e-3, FP32: 1e-5}
    for i in range(shape[0]):
        given = [tensor[i : i + 1].detach().double().requires_grad_() for tensor in (x, w)]
        wanted = oracle(*given, None, *how)
        wanted += torch.autograd.grad(wanted, given, [tensor[i : i + 1].double() for tensor in above])
        for name, tensor, right in zip(
            ("q", "k", "v", "gate", "rest", "d x", "d w"), (*outputs, d_x, d_w), wanted, strict=True
        ):
            assert error(tensor[i : i + 1], right) <= limits[tensor.dtype], (name, i, error(tensor[i : i + 1], right))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("lengths", [[1, 2, 3, 700, 1, 1, 64, 65, 1000, 5], [8192, 4096, 3, 4093], [1] * 513])
def test_packed_sequences_of_real_sizes_are_those_in_fp64(lengths: list[int], dtype: torch.dtype) -> None:
    widths = [512, 512, 512, 512, 16]
    x, w = normal(1, 1, 1, sum(lengths), sum(widths)).to(dtype), normal(2, 1, 4, 1536)
    compare(x, w, None, widths, 128, 3, True, places(1, 1, lengths), limits={BF16: 2e-3, FP32: 1e-5})


@pytest.mark.gpu
def test_one_sequence_is_the_same_packed_and_not() -> None:
    """Products are added in another order."""
    widths = [128, 128, 128, 0, 8]
    x, w = normal(1, 1, 1, 3000, 392).requires_grad_(), normal(2, 1, 4, 384).requires_grad_()
    actual, right = (kernels.convolve(x, w, None, widths, 64, 3, True, at) for at in (places(1, 1, [3000]), None))
    for tensor, other in zip(actual, right, strict=True):
        torch.testing.assert_close(tensor, other)
    above = [cosines(tensor) for tensor in right]
    for tensor, other in zip(*(torch.autograd.grad(y, [x, w], above) for y in (actual, right)), strict=True):
        assert error(tensor, other) < 1e-5


@pytest.mark.gpu
def test_gradients_are_the_same_bits_every_time() -> None:
    x, w = normal(1, 2, 64, 256, 392).bfloat16().requires_grad_(), normal(2, 2, 4, 384).requires_grad_()

    def gradients() -> tuple[Tensor, ...]:
        q, k, v, *_ = kernels.convolve(x, w, None, [128, 128, 128, 0, 8], 64, 3, True)
        return torch.autograd.grad([q, k, v], [x, w], [cosines(tensor) for tensor in (q, k, v)])

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(tensor, other) for tensor, other in zip(first, gradients(), strict=True))


@pytest.mark.gpu
def test_offsets_go_beyond_32_bits() -> None:
    widths = [128, 128, 128, 0, 8]
    x = torch.ones(1, 11000, 512, 392, device=DEVICE, dtype=BF16)
    assert x.numel() > 2**31
    x[:, -1] = normal(1, 512, 392).to(BF16)
    w = normal(2, 1, 4, 384).requires_grad_()
    actual = kernels.convolve(x.requires_grad_(), w, None, widths, 64, 3, True)
    last = x[:, -1:].detach().requires_grad_()
    right = kernels.convolve(last, w, None, widths, 64, 3, True)
    for i in (0, 1, 2, 4):
        torch.testing.assert_close(actual[i][:, -1:], right[i], rtol=1e-6, atol=0)
    (d_x,) = torch.autograd.grad([actual[2][:, -1:].float().sum(), actual[0][:, -1:, :, 0].float().sum()], [x])
    (d_last,) = torch.autograd.grad([right[2].float().sum(), right[0][..., 0].float().sum()], [last])
    torch.testing.assert_close(d_x[:, -1:], d_last)


@pytest.mark.gpu
def test_another_batch_or_length_compiles_nothing() -> None:
    widths = [64, 64, 64, 64, 8]
    w = normal(2, 1, 4, 192).requires_grad_()

    def compiled() -> int:
        device = torch.cuda.current_device()
        return sum(len(kernel.device_caches[device][0]) for kernel in (kernels.forward, kernels.backward))

    seen = []
    for batch, length in ((1, 1), (2, 16), (3, 17), (64, 64), (16, 256), (5, 1000)):
        x = normal(1, 1, batch, length, 264).bfloat16().requires_grad_()
        sum(tensor.float().sum() for tensor in kernels.convolve(x, w, None, widths, 64, 3, True)).backward()
        seen.append(compiled())
    assert len(set(seen)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_under_autocast_is_as_near_with_the_kernels_as_without(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = layer_of(name), normal(1, 4, 64, 12)

    def all_of(layer: RuleLayer, x: Tensor, *, kernel: bool, narrow: bool) -> Tensor:
        monkeypatch.setattr("deltalab.ops.fused.convolution.automatic", available if kernel else lambda device: NONE)
        with torch.autocast("cuda", BF16, enabled=narrow):
            y = layer(x)
        grads = torch.autograd.grad(y, list(layer.parameters()), cosines(y).to(y.dtype), allow_unused=True)
        return torch.cat([tensor.double().flatten() for tensor in (y, *grads) if tensor is not None])

    exact = all_of(copy.deepcopy(layer).double(), x.double(), kernel=False, narrow=False)
    without, with_kernels = (error(all_of(layer, x, kernel=kernel, narrow=True), exact) for kernel in (False, True))
    assert with_kernels < 1.5 * without + 1e-2
