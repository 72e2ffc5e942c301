"""The parts of a layer around its rule, each against a plain loop."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import deltalab
from deltalab.models import layer as layers
from deltalab.models.layer import LayerCache, RuleLayer, initialize
from deltalab.ops.fused.norm import HEAD_GATES, HEAD_NORMS, HeadNorm
from deltalab.ops.rotary import angles, rotate
from deltalab.softmax import attend

D, H, K, V, T = 6, 4, 4, 3, 9


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention_loop(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Softmax attention, one query at a time; head h reads key head h // (H / G)."""
    past, groups = k.shape[2] - q.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    out = []
    for t in range(q.shape[2]):
        seen = slice(max(0, past + t - window + 1) if window else 0, past + t + 1)
        weights = (scale * (k[:, :, seen] @ q[:, :, t, :, None])).softmax(2)
        out.append((weights * v[:, :, seen]).sum(2))
    return torch.stack(out, dim=2)


@pytest.mark.parametrize("window", [0, 1, 2, 4, 5, 20])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 13])
@pytest.mark.parametrize("past", [0, 1, 3, 7])
def test_attention_is_the_sum_over_its_window(window: int, length: int, past: int) -> None:
    q, k, v = normal(2, 4, length, 3), normal(2, 2, past + length, 3, seed=1), normal(2, 2, past + length, 5, seed=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found, right = attend(q, k, v, window=window, scale=0.7), attention_loop(q, k, v, window, 0.7)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
    weights = normal(*right.shape, seed=3)
    grads = (torch.autograd.grad(o, leaves, weights) for o in (found, right))
    torch.testing.assert_close(*map(list, grads), rtol=1e-9, atol=1e-9)  # type: ignore[misc]


def test_gated_attention_is_its_statement() -> None:
    """W_o (sigmoid(W_g x) * heads), arXiv:2505.06708."""
    layer = RuleLayer("attention", D, 2, key_dim=K, conv=0, output_norm=False, output_gate="sigmoid").double()
    assert layer.gate is not None
    x = normal(2, T, D)
    q, k, v = (part.unflatten(-1, (2, K)).transpose(1, 2) for part in (x @ layer.qkv.weight.T).chunk(3, -1))
    heads = attention_loop(q, k, v, 0, K**-0.5).transpose(1, 2).flatten(2)
    want = ((x @ layer.gate.weight.T).sigmoid() * heads) @ layer.out.weight.T
    torch.testing.assert_close(layer(x), want)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("past", [0, 15])
def test_a_windows_memory_is_linear_in_the_sequence(past: int) -> None:
    sizes = []
    for length in (256, 512):
        q, k = normal(1, 1, length, 4), normal(1, 1, length + past, 4)
        with Largest() as largest:
            attend(q, k, k, window=16, scale=1.0)
        sizes.append(largest.elements)
    assert sizes[1] <= 2.1 * sizes[0]


@pytest.mark.gpu
@pytest.mark.parametrize("past", [1, 4096])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_later_queries_write_no_mask_on_a_gpu(past: int, dtype: torch.dtype, limit: float) -> None:
    """Their attention, and its gradients, are those of all queries, cut."""
    k, v, q = (normal(1, 2, 4096 + past, 64, seed=i).to("cuda", dtype).requires_grad_() for i in range(3))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = attend(q[:, :, past:], k, v, scale=0.1)
    weights = normal(*found.shape, seed=3).to(found)
    grads = torch.autograd.grad(found, [q, k, v], weights)
    assert torch.cuda.max_memory_allocated() - before < 4096 * (4096 + past)  # bytes of a mask
    whole = attend(q, k, v, scale=0.1)[:, :, past:]
    torch.testing.assert_close(found, whole, rtol=limit, atol=limit)
    torch.testing.assert_close(grads, torch.autograd.grad(whole, [q, k, v], weights), rtol=limit, atol=limit)


def layer_of(rule: str, **given: Any) -> RuleLayer:
    """A layer away from its start, where norms are one."""
    layer = RuleLayer(deltalab.get_rule(rule), D, given.pop("heads", H), key_dim=K, value_dim=V, chunk_size=4, **given)
    initialize(layer, 1)
    layer.double()
    with torch.no_grad():
        for i, value in enumerate(layer.parameters()):
            value += 0.3 * normal(*value.shape, seed=i)
    return layer


def scanned(layer: RuleLayer, x: Tensor, monkeypatch: pytest.MonkeyPatch, *given: Any) -> dict[str, Tensor]:
    """What a layer hands to its rule, and the layer's output."""
    seen = {}

    def spy(rule: Any, q: Tensor, k: Tensor, v: Tensor, gates: Any, **others: Any) -> Any:
        o, state = scan(rule, q, k, v, gates, **others)
        seen.update(gates, q=q, k=k, v=v, o=o)
        return o, state

    scan = layers.scan
    with monkeypatch.context() as patch:
        patch.setattr(layers, "scan", spy)
        seen["y"] = layer.advance(x, *given)[0]
    return seen


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_rotary_positions_multiply_complex_numbers(base: float) -> None:
    x = normal(2, T, H, 6)
    found = rotate(x, angles(torch.arange(5, 5 + T)[None], 6, base))
    for t in range(T):
        for i in range(3):
            pair = torch.complex(x[:, t, :, i], x[:, t, :, i + 3])
            turned = pair * torch.exp(1j * torch.tensor((5 + t) * base ** (-i / 3), dtype=torch.float64))
            close(found[:, t, :, i], turned.real)
            close(found[:, t, :, i + 3], turned.imag)


def test_positions_far_into_a_sequence_are_as_exact_as_at_its_begin() -> None:
    """fp32 angles of token 2^24 + 1 would be those of token 2^24."""
    q, k = normal(1, 1, 1, K).float(), normal(1, 1, 1, K, seed=1).float()
    near, far = ((rotate(q, angles(torch.tensor([[n + 1]]), K, 1e4)) * rotate(k, angles(torch.tensor([[n]]), K, 1e4)))
                 for n in (0, 2**24))  # fmt: skip
    torch.testing.assert_close(far.sum(), near.sum(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["gated_deltanet", "delta_product", "attention"])
def test_a_layer_turns_q_and_k_by_their_tokens_place(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, turned = layer_of(rule), layer_of(rule, rope=50.0)
    before, after = (scanned(layer, normal(2, T, D), monkeypatch) for layer in (plain, turned))
    steps = turned.rule.steps
    close(after["q"], rotate(before["q"], angles(torch.arange(T)[None], K, 50.0)))
    close(after["k"], rotate(before["k"], angles((torch.arange(T * steps) // steps)[None], K, 50.0)))
    close(after["v"], before["v"])


def test_attention_with_rotary_positions_sees_distances_alone() -> None:
    """The same tokens read after any number of others, which a window hides, give the same output."""
    layer = layer_of("attention", rope=100.0, conv=0)
    layer.rule = deltalab.get_rule("attention", window=4)
    x = normal(1, T, D)
    late = layer(torch.cat([normal(1, 17, D, seed=1), x], dim=1))[:, 17:]
    close(late[:, 3:], layer(x)[:, 3:])


@pytest.mark.parametrize("rule", ["gated_deltanet", "kda", "delta_product", "comba", "attention", "titans"])
@pytest.mark.parametrize(("fewer", "repeated"), [("qk_heads", "qk"), ("kv_heads", "kv")])
def test_shared_heads_are_heads_with_equal_weights(rule: str, fewer: str, repeated: str) -> None:
    grouped, plain = layer_of(rule, **{fewer: 2}), layer_of(rule)
    rest = {name: value for name, value in grouped.state_dict().items() if name not in ("qkv.weight", "conv")}
    channels, steps = plain.channels, plain.rule.steps
    sizes = {"q": (1, K), "k": (steps, K), "v": (steps, V)}

    def spread(rows: Tensor) -> Tensor:
        """Rows [C, ..] of q, k and v, those of a shared head once for each head."""
        parts = zip(sizes.items(), rows.split(grouped.channels.widths), strict=True)
        return torch.cat([
            part.unflatten(0, (n, -1, width)).repeat_interleave(2, dim=1).flatten(0, 2) if name in repeated else part
            for (name, (n, width)), part in parts
        ])  # fmt: skip

    rest |= {"qkv.weight": spread(grouped.qkv.weight), "conv": spread(grouped.conv.T).T}
    plain.load_state_dict(rest)
    assert grouped.channels.total < channels.total
    x = normal(2, T, D)
    close(grouped(x), plain(x))


def test_grouped_queries_keep_fewer_keys_and_values() -> None:
    x = normal(1, T, D)
    sizes = [layer_of("attention", conv=0, kv_heads=heads).advance(x)[1].numel() for heads in (4, 2, 1)]
    assert sizes == [T * heads * (K + V) for heads in (4, 2, 1)]


@pytest.mark.parametrize("rule", ["gated_deltanet", "mamba2", "attention"])
def test_qk_norm_comes_before_the_unit_norm(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """unit: unit(w x); silu and raw: w x / rms(x)."""
    plain, normed = layer_of(rule), layer_of(rule, qk_norm=True)
    plain.load_state_dict({n: v for n, v in normed.state_dict().items() if not n.startswith(("q_norm", "k_norm"))})
    before, after = (scanned(layer, normal(2, T, D), monkeypatch) for layer in (plain, normed))
    for name, norm in (("q", normed.q_norm), ("k", normed.k_norm)):
        assert norm is not None
        x = before[name]
        if normed.rule.features == "unit":
            right = norm.weight * x / (norm.weight * x).square().sum(-1, keepdim=True).sqrt()
        else:
            right = norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        close(after[name], right)


@pytest.mark.parametrize("last", [None, normal(2, 1, D, seed=5)])
def test_each_projection_reads_its_own_mean_of_two_tokens(last: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of("gated_deltanet", conv=0, token_shift=True), normal(2, T, D)
    assert layer.shift is not None
    assert layer.gate is not None
    cache = layer.advance(x[:, :1])[1]
    cache = None if last is None else LayerCache(cache.conv, cache.state, cache.place, last)
    found = scanned(layer, x, monkeypatch, cache)

    def mixed(name: str) -> Tensor:
        share, before = layer.shift.share[name], torch.zeros(2, D).double() if last is None else last[:, 0]
        out = []
        for t in range(T):
            out.append((1 - share) * x[:, t] + share * before)
            before = x[:, t]
        return torch.stack(out, dim=1)

    weights = layer.qkv.weight.split(layer.channels.widths)
    q, k, v = (torch.nn.functional.silu(mixed(name) @ w.T) for name, w in zip("qkv", weights, strict=True))
    unit = torch.nn.functional.normalize
    close(found["q"], unit(q.unflatten(-1, (H, K)), dim=-1))
    close(found["k"], unit(k.unflatten(-1, (H, K)), dim=-1))
    close(found["v"], v.unflatten(-1, (H, V)))
    close(found["beta"], layer.gates(mixed("gates"))["beta"])
    normed = found["o"] / (found["o"].square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
    close(found["y"], layer.out(normed.flatten(-2) * (mixed("gate") @ layer.gate.weight.T).sigmoid()))


def test_a_shift_starts_as_a_ramp_from_this_token_to_the_last() -> None:
    layer = RuleLayer(deltalab.get_rule("comba"), 5, 1, key_dim=2, value_dim=2, token_shift=True)
    assert layer.shift is not None
    assert layer.shift.share.keys() == {"q", "k", "v", "gates", "gate"}
    assert all(share.tolist() == [0, 0.25, 0.5, 0.75, 1] for share in layer.shift.share.values())
    bare = RuleLayer(deltalab.get_rule("retnet"), 5, 1, key_dim=2, value_dim=2, token_shift=True, output_gate=False)
    assert bare.shift is not None
    assert bare.shift.share.keys() == {"q", "k", "v"}, "RetNet's decay is fixed: nothing else reads x"


def rms(x: Tensor, over: tuple[int, ...] = (-1,)) -> Tensor:
    return x / (x.square().mean(over, keepdim=True) + 1e-5).sqrt()


def standard(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


NORMS: dict[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "none": lambda o, w, b: o,
    "rms": lambda o, w, b: rms(o) * w,
    "rms_unweighted": lambda o, w, b: rms(o),
    "rms_all": lambda o, w, b: rms(o, (-2, -1)) * w.view(H, V),
    "rms_all_of_silu": lambda o, w, b: rms(o / (1 + (-o).exp()), (-2, -1)) * w.view(H, V),
    "layer": lambda o, w, b: standard(o) * w + b,
    "layer_all": lambda o, w, b: (standard(o.flatten(-2)) * w + b).view(o.shape),
    "group": lambda o, w, b: standard(o) * w.view(H, V) + b.view(H, V),
}
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: torch.ones_like(z),
    "sigmoid": lambda z: 1 / (1 + (-z).exp()),
    "silu": lambda z: z / (1 + (-z).exp()),
    "linear": lambda z: z,
}


@pytest.mark.parametrize("gate", HEAD_GATES)
@pytest.mark.parametrize("norm", HEAD_NORMS)
def test_output_norms_and_gates(norm: str, gate: str) -> None:
    module, o, z = HeadNorm(V, heads=H, norm=norm, gate=gate).double(), normal(2, T, H, V), normal(2, T, H * V, seed=1)
    with torch.no_grad():
        for i, value in enumerate(module.parameters()):
            value += normal(*value.shape, seed=i)
    normed, factor = NORMS[norm], GATES[gate.removesuffix("_before_norm")](z).view(o.shape)
    w, b = module.weight, module.bias
    right = normed(o * factor, w, b) if gate.endswith("before_norm") else normed(o, w, b) * factor
    close(module(o, None if gate == "none" else z), right.flatten(-2))
    widths = {"rms_all": H * V, "rms_all_of_silu": H * V, "layer_all": H * V, "group": H * V, "rms": V, "layer": V}
    assert math.prod(w.shape if w is not None else ()) == widths.get(norm, 1)


def test_a_gate_of_low_rank_is_the_product_of_its_matrices() -> None:
    low, full = layer_of("gla", gate_rank=2), layer_of("gla")
    assert isinstance(low.gate, torch.nn.Sequential)
    first, second = (one.weight for one in low.gate)
    rest = {name: value for name, value in low.state_dict().items() if not name.startswith("gate.")}
    full.load_state_dict({**rest, "gate.weight": second @ first})
    close(low(normal(2, T, D)), full(normal(2, T, D)))


KNOBS: dict[str, dict[str, Any]] = {
    "rope": {"rope": 100.0},
    "grouped values": {"qk_heads": 2},
    "grouped queries": {"kv_heads": 2},
    "qk norm": {"qk_norm": True},
    "token shift": {"token_shift": True},
    "silu before a norm of all": {"output_norm": "rms_all", "output_gate": "silu_before_norm"},
    "group norm": {"output_norm": "group"},
    "a gate of low rank": {"gate_rank": 2},
    "all": {
        "rope": 100.0,
        "qk_heads": 2,
        "qk_norm": True,
        "token_shift": True,
        "output_norm": "layer",
        "output_gate": "silu",
    },
}


@pytest.mark.parametrize("rule", ["kda", "attention"])
@pytest.mark.parametrize("given", KNOBS.values(), ids=KNOBS)
def test_gradients_are_those_of_finite_differences(rule: str, given: dict[str, Any]) -> None:
    layer = layer_of(rule, **given)
    names = [name for name, _ in layer.named_parameters()]

    def output(x: Tensor, *values: Tensor) -> Tensor:
        y: Tensor = functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return y

    inputs = (normal(1, 5, D).requires_grad_(), *(value.detach().requires_grad_() for value in layer.parameters()))
    assert torch.autograd.gradcheck(output, inputs, fast_mode=True)


@pytest.mark.parametrize("rule", ["kda", "attention"])
@pytest.mark.parametrize("given", KNOBS.values(), ids=KNOBS)
def test_stacked_layers_are_what_they_are_alone(rule: str, given: dict[str, Any]) -> None:
    layer, x = layer_of(rule, **given), normal(2, 2, T, D)
    runs = [{name: value + 0.1 * seed for name, value in layer.named_parameters()} for seed in (0, 1)]
    stacked = {name: torch.stack([run[name] for run in runs]) for name in runs[0]}
    together = vmap(lambda weights, x: functional_call(layer, weights, (x,)))(stacked, x)
    for one, run, inputs in zip(together, runs, x, strict=True):
        close(one, functional_call(layer, run, (inputs,)))


@pytest.mark.parametrize("given", KNOBS.values(), ids=KNOBS)
def test_training_in_bf16_takes_every_part(given: dict[str, Any]) -> None:
    layer, x = layer_of("kda", **given).float(), normal(2, T, D).float()
    with torch.autocast("cpu", torch.bfloat16):
        y, cache = layer.advance(x)
        rest = layer.advance(x[:, :1], cache)[0]
    assert (y.dtype, rest.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(y.float(), layer(x), rtol=0.1, atol=0.1)
    y.float().square().mean().backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in layer.parameters())
