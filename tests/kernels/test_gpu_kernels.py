"""Kernels on a GPU, held to fp64: every rule, dtype, length and width, poisoned memory, repeats, graphs and compilers.

    python3 -m pytest -m gpu tests/kernels/test_gpu_kernels.py                    # all of it
    python3 -m pytest -m gpu tests/kernels/test_gpu_kernels.py -k sharda          # a sixteenth, from a to p

Compilation takes most of the time. Cases that share kernels are in one shard, so that shards may run at once. A case
takes much memory, since its oracle keeps every state: on a GPU of 140 GiB, 12 processes ran out of it, and 8 did not. A
failure is one line with every error above its limit.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from tests.support.kernel_runs import DEVICE, cosines, error, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import deltalab
from deltalab.authoring.inputs import Inputs, draw, draw_corners, moves, parts
from deltalab.errors import InputError
from deltalab.kernel_limits import MOST_KEYS
from deltalab.kernels import sequence_parts as kernel_parts
from deltalab.ops import reference
from deltalab.ops.scan import operands
from deltalab.passes import Passes
from deltalab.rule import Operands, State, UpdateRule
from deltalab.structure import Transition

pytestmark = pytest.mark.gpu

LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
LENGTHS = [1, 15, 64, 65, 1000, 4096]
WIDTHS = [(16, 16), (16, 128), (32, 64), (48, 80), (64, 512), (128, 128), (256, 32), (256, 256)]
HEADS = 3
FIXED = {
    "kalman_linear_attention": ("a", "p", "dt"),
    "mamba3_mimo": ("m", "w"),
    "mesa_net": ("ridge",),
    "momentum_deltanet": ("eta",),
    "slstm": ("r",),
}
"""Gates that a rule takes without a time axis alone."""
CANCELS = {"abc": "d state[2]"}
"""A part of the state that is in every token's decay, so that its gradient is a sum over tokens that cancel.

The rounding of ABC's first pass alone moves it by 5e-3 in bf16, that of the second by as much (500 tokens, K = V = 64).
It is allowed twice the limit.
"""
OUT_OF_RANGE = {("mlstm g=log_gate(init=3)", torch.float16)}
"""Settings whose exact gradients do not fit a dtype.

The one here has a denominator of 2e-5, so that the gradient of what it divides reaches 8e5. fp16 ends at 65504.
"""
TOKEN_BY_TOKEN = 300
"""The longest sequence whose oracle is `recurrent`. Longer ones take `chunked`, which a test holds equal to it."""


# Cases: a rule for each path through the kernels, and shards that keep the compilations of one path together.


def _given(rule: UpdateRule) -> tuple[str, ...]:
    """The operands that a rule of the algebra has, on which kernels branch."""
    x = draw(rule, batch=1, length=1, heads=1, key_dim=16, value_dim=16)
    tensors = operands(rule, x.q, x.k, x.v, x.gates)
    names = [f.name for f in dataclasses.fields(tensors) if isinstance(getattr(tensors, f.name), Tensor)]
    fit = tensors.fit
    more = [] if fit is None else [f.name for f in dataclasses.fields(fit) if isinstance(getattr(fit, f.name), Tensor)]
    return *names, "" if fit is None else fit.residual.loss, *more


def path(rule: UpdateRule) -> tuple[object, ...]:
    """Equal for rules that run the same compiled kernels."""
    if rule.transition is None:
        return rule.name, *(v for v in rule.knobs().values() if isinstance(v, bool | int | float | str))
    return dataclasses.replace(rule.transition, name=""), *_given(rule)


def _has_kernel(rule: UpdateRule) -> bool:
    k = v = torch.empty(1, 1, 1, 16, device=DEVICE)
    return rule.transition is not None or (rule.brings_kernel and rule.lacks_kernel(k, v) is None)


VARIANTS = [
    (f"{name} {rule.turned(variant)}", variant)
    for name in deltalab.list_rules()
    for rule in [deltalab.get_rule(name)]
    for variant in rule.variants()
    if _has_kernel(variant)
]
PATHS = [*{path(rule): (name, rule) for name, rule in reversed(VARIANTS)}.values()]
STRUCTURES = [
    (name, deltalab.get_rule(name))
    for name in ("sgla", "comba", "delta_product", "rdn", "gla", "kda", "rwkv7", "gka")
    if _has_kernel(deltalab.get_rule(name))
]


SHARDS: dict[object, str] = {}


def case(
    name: str,
    rule: UpdateRule,
    dtype: torch.dtype,
    *rest: object,
    widths: tuple[int, int] = (64, 64),
    marks: Sequence[pytest.MarkDecorator] = (),
):
    shard = SHARDS.setdefault((path(rule), dtype, widths), "abcdefghijklmnop"[len(SHARDS) % 16])
    label = ", ".join([name, str(dtype).removeprefix("torch."), *map(str, rest)])
    return pytest.param(rule, dtype, *rest, id=f"{label}, shard{shard}", marks=marks)


def _setting(name: str, rule: UpdateRule, dtype: torch.dtype):
    reason = "its gradients are beyond the dtype's range"
    beyond = [pytest.mark.xfail(strict=True, reason=reason)] if (name, dtype) in OUT_OF_RANGE else []
    return case(name, rule, dtype, marks=beyond)


# Method: NaN around inputs, NaN in unwritten memory, and the errors of rounding alone.


def inputs(
    rule: UpdateRule, dtype: torch.dtype, length: int, key_dim: int, value_dim: int, *, state: bool, batch: int = 2
) -> Inputs:
    """On the device: q, k, v and gates with channels in dtype, other gates and the state in fp32.

    The heads forget after a few tokens, tens and hundreds. Gates per head are given per token: their own gradients
    are sums that cancel, and say little about what is summed. Features of 64 channels may be wider than a kernel takes:
    based and rebased have 16.
    """
    key_dim = key_dim if rule.key_width(key_dim) <= MOST_KEYS else 16
    shape = {"batch": batch, "heads": HEADS, "key_dim": key_dim, "value_dim": value_dim}
    x = draw(rule, length=length, **shape)
    gates = {}
    for name, gate in x.gates.items():
        stays = moves(gate) or name in FIXED.get(rule.name, ())
        kept = gate if stays else gate.expand(batch, length, *gate.shape).clone()
        slower = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64).unflatten(0, (-1, *[1] * (kept.dim() - 3)))
        gates[name] = kept * slower if name == "g" else kept
    x = dataclasses.replace(x, gates=gates)
    if state:
        before = draw(rule, length=16, seed=1, **shape)
        _, past = deltalab.scan(rule, before.q, before.k, before.v, before.gates, backend="chunked")
        x = dataclasses.replace(x, state=past)
    return rounded(rule, x, dtype)


def rounded(rule: UpdateRule, x: Inputs, dtype: torch.dtype) -> Inputs:
    """In the dtypes in which a layer passes them on."""
    wide = x.map(lambda part: part.to(DEVICE, torch.float32))
    narrow = {name: gate.to(dtype) for name, gate in wide.gates.items() if rule.gates[name].per == "channel"}
    return Inputs(wide.q.to(dtype), wide.k.to(dtype), wide.v.to(dtype), {**wide.gates, **narrow}, wide.state)


def _off_the_clip(rule: UpdateRule, x: Inputs, cu_seqlens: Tensor | None = None) -> Inputs:
    """Moves v where a residual of it is next to huber's clip, because rounding turns its gradient on or off there.

    One such element in 10000 makes an error of 1e-2 in the gradient of v, which is not the kernel's. The i-th residual
    is v less what the first i states predict.
    """
    if "huber" not in (getattr(rule, "loss", None), getattr(rule, "residual", None)):
        return x
    clip = getattr(rule, "clip", 1.0)
    moved = []
    for i, (start, stop) in enumerate(pairwise([0, x.q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist())):
        state = x.state if cu_seqlens is None or x.state is None else tuple(part[i : i + 1] for part in x.state)
        for t in range(start, stop):
            now = x.span(t, t + 1, state).map(torch.Tensor.double)
            states = () if state is None else now.state[:-1]
            seen = list(accumulate(torch.einsum("bthk,bhkv->bthv", now.k, S) for S in states)) or [
                torch.zeros_like(now.v)
            ]
            v = now.v
            while (near := sum(((v - part).abs() - clip).abs() < 0.05 for part in seen) > 0).any():
                v = torch.where(near, v + 0.1, v)
            v = v.to(x.v.dtype)
            _, state = deltalab.scan(rule, now.q, now.k, v.double(), now.gates, state=now.state, backend="recurrent")
            moved.append(v)
    return dataclasses.replace(x, v=torch.cat(moved, dim=1))


def embedded(x: Tensor) -> Tensor:
    """A copy of x between NaN, so that a read beyond it shows."""
    room = torch.full((x.numel() + 1024,), math.nan, dtype=x.dtype, device=x.device)
    room[512:-512] = x.flatten()
    return room[512:-512].view(x.shape)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills new memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class RoundedProducts(TorchDispatchMode):
    """Rounds operands of matrix products to a dtype and leaves all else exact: the error that no kernel can avoid."""

    PRODUCTS = frozenset({torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm})

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in self.PRODUCTS:
            args = [*args[:-2], *(x.to(self.dtype).to(x.dtype) for x in args[-2:])]
        return func(*args, **(kwargs or {}))


def _floor(
    rule: UpdateRule,
    x: Inputs,
    exact: Inputs,
    wanted: dict[str, Tensor],
    dtypes: dict[str, torch.dtype],
    **more: Tensor,
) -> dict[str, float]:
    """The errors of rounding alone, that of operands or of the parallel form in x's dtype, whichever is larger.

    Vectors that a rule computes from its gates (RWKV-7's erasing ones) are operands too: kernels get them rounded. A
    rule that computes its operands in 16 bits (Rodimus) has that error in any form. What a pass gives to the next is an
    operand of it. For a rule of neither, the largest error of the parallel form counts.
    """
    parallel = run(rule, x.map(lambda part: part.detach().requires_grad_()), "chunked", **more)
    errors = {name: error(parallel[name].to(kind), wanted[name]) for name, kind in dtypes.items()}
    is_algebraic = rule.transition is not None or isinstance(rule, Passes)
    if is_algebraic:
        chunked = reference.chunked

        def of_rounded(transition: Transition, y: Operands, **how: Any) -> tuple[Tensor, State]:
            vectors = {name: getattr(y, name) for name in ("r", "k", "u", "a", "b")}
            vectors = {name: v.to(x.q.dtype).to(v) for name, v in vectors.items() if v is not None}
            return chunked(transition, dataclasses.replace(y, **vectors), **how)

        with RoundedProducts(x.q.dtype), pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "chunked", of_rounded)
            inexact = run(rule, exact, "chunked", **more)
        errors = {name: max(errors[name], error(inexact[name].to(kind), wanted[name])) for name, kind in dtypes.items()}
    return errors if is_algebraic else dict.fromkeys(errors, max(errors.values()))


def hold(rule: UpdateRule, x: Inputs, *, slack: float = 1.0, **more: Tensor) -> None:
    """Asserts that output, last state and every gradient are within the limit of x's dtype of fp64.

    Rounded operands alone exceed the limit if an update keeps its norm (DeltaProduct's reflections), and fp32 exceeds
    it if a regression is ill-conditioned. 1.5 times that error is then allowed, with a warning.
    """
    x = _off_the_clip(rule, x, **more)
    exact = x.map(lambda part: part.detach().double().requires_grad_())
    wanted = run(rule, exact, "recurrent" if x.q.shape[1] <= TOKEN_BY_TOKEN else "chunked", **more)
    with poisoned():
        actual = run(rule, x.map(lambda part: embedded(part).requires_grad_()), "triton", **more)
    assert [name for name in wanted if wanted[name] is None] == [name for name in actual if actual[name] is None]
    judge(rule, x, exact, wanted, actual, slack=slack, **more)


def judge(
    rule: UpdateRule,
    x: Inputs,
    exact: Inputs,
    wanted: dict[str, Tensor],
    actual: dict[str, Tensor],
    *,
    slack: float = 1.0,
    **more: Tensor,
) -> None:
    """Fails in one line if `actual` is further from `wanted` than the limit and than rounding explains."""
    dtype = x.q.dtype
    limit = slack * LIMITS[dtype]
    errors = {name: error(actual[name], right) for name, right in wanted.items() if right is not None}
    if "d g" in errors and _nothing(exact, wanted, actual, dtype):
        del errors["d g"]
    missed = {name: it for name, it in errors.items() if not it <= limit * (1 + (CANCELS.get(rule.name) == name))}
    if missed:
        floor = _floor(rule, x, exact, wanted, {name: actual[name].dtype for name in missed}, **more)
        for name in [name for name, it in missed.items() if it <= 1.5 * floor[name]]:
            warnings.warn(f"{name}: {missed.pop(name):.1e}, and {floor[name]:.1e} by rounding", stacklevel=2)
    if missed:
        errors_text = ", ".join(f"{name} {it:.1e}" for name, it in missed.items())
        pytest.fail(
            f"above {limit:.0e}: {errors_text}  ({rule.name}, {dtype}, {list(x.q.shape)}, V={x.v.shape[-1]})", False
        )


def _nothing(exact: Inputs, wanted: dict[str, Tensor], actual: dict[str, Tensor], dtype: torch.dtype) -> bool:
    """Whether d g is 0 (as if each step forgets all), and the actual d g is small beside the terms that cancel in it.

    These terms are q * d q and k * d k, which are summed in fp32 or in two parts of 16 bits.
    """
    read_and_written = [(part, wanted[name]) for name, part in (("d q", exact.q), ("d k", exact.k))]
    terms = sum(float((part * grad).detach().norm()) for part, grad in read_and_written if grad is not None)
    right, ours = (float(grads["d g"].double().norm()) for grads in (wanted, actual))
    return right <= 1e-12 * terms and ours <= max(LIMITS[torch.float32], torch.finfo(dtype).eps ** 2) * terms


# Tests.


@pytest.fixture(autouse=True)
def _memory_of_one_case():
    """Gives a case's memory back to the GPU, which several processes share."""
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("rule", "dtype"), [_setting(*named_rule, dtype) for named_rule in VARIANTS for dtype in LIMITS]
)
def test_every_setting_of_every_rule(rule, dtype):
    hold(rule, inputs(rule, dtype, 65, 64, 64, state=True))


@pytest.mark.parametrize(
    ("rule", "dtype", "length"),
    [
        case(*named_rule, dtype, length)
        for named_rule in PATHS
        for dtype in LIMITS
        for length in LENGTHS
        if length != 65
    ],
)
def test_every_length(rule, dtype, length):
    hold(rule, inputs(rule, dtype, length, 64, 64, state=length % 64 > 0))


@pytest.mark.parametrize(
    ("rule", "dtype", "key_dim", "value_dim", "length"),
    [
        case(*named_rule, dtype, *widths, length, widths=widths)
        for named_rule in STRUCTURES
        for widths in WIDTHS
        for dtype, lengths in ((torch.bfloat16, (65, 128)), (torch.float16, (65,)), (torch.float32, (65,)))
        if dtype != torch.float16 or widths == (128, 128)
        for length in lengths
    ],
)
def test_every_width(rule, dtype, key_dim, value_dim, length):
    x = inputs(rule, dtype, length, key_dim, value_dim, state=length == 65)
    if rule.transition is None and rule.lacks_kernel(x.k, x.v):
        with pytest.raises(InputError, match=f"K up to 128, not {key_dim}"):
            deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="triton")
    else:
        hold(rule, x)


@pytest.mark.parametrize(
    ("rule", "dtype"), [case(*named_rule, torch.bfloat16, widths=(128, 128)) for named_rule in STRUCTURES]
)
def test_long_and_wide(rule, dtype):
    hold(rule, inputs(rule, dtype, 4096, 128, 128, state=False))


SPLIT = [
    (name, deltalab.get_rule(name))
    for name in ("linear_attention", "sgla", "deltanet", "gated_deltanet", "comba", "delta_product", "rla", "rdn")
]


@pytest.mark.parametrize(
    ("rule", "dtype", "width"),
    [
        case(*named_rule, dtype, width, widths=(width, width))
        for named_rule in SPLIT
        for dtype, width in ((torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 64))
    ],
)
def test_one_sequence_in_parts(rule, dtype, width, monkeypatch):
    x = inputs(rule, dtype, 4096, width, width, state=True, batch=1)
    monkeypatch.setattr(kernel_parts, "SHORTEST", 4)
    monkeypatch.setattr("deltalab.kernels.launch._plans", {})
    hold(rule, x)
    leaves = x.map(lambda part: part.requires_grad_())
    split, again = run(rule, leaves, "triton"), run(rule, leaves, "triton")
    assert all(torch.equal(it, again[name]) for name, it in split.items() if it is not None)
    monkeypatch.setattr(kernel_parts, "MOST", 1)
    monkeypatch.setattr("deltalab.kernels.launch._plans", {})
    assert not torch.equal(split["o"], run(rule, leaves, "triton")["o"]), "the sequence was not cut in parts"


@pytest.mark.parametrize(("rule", "dtype"), [case(*named_rule, torch.bfloat16) for named_rule in SPLIT])
def test_extreme_gates_in_parts(rule, dtype, monkeypatch):
    monkeypatch.setattr(kernel_parts, "SHORTEST", 1)
    monkeypatch.setattr("deltalab.kernels.launch._plans", {})
    hold(rule, rounded(rule, draw_corners(rule, batch=2, length=256, key_dim=64, value_dim=64), dtype), slack=2)


@pytest.mark.parametrize("given", [True, False], ids=["given", "empty"])
@pytest.mark.parametrize(("rule", "dtype"), [case(*named_rule, dtype) for named_rule in VARIANTS for dtype in LIMITS])
def test_one_token_without_gradients(rule, dtype, given):
    x = inputs(rule, dtype, 1, 64, 64, state=given)
    exact = x.map(lambda part: part.double().requires_grad_())
    o, state = deltalab.scan(rule, exact.q, exact.k, exact.v, exact.gates, state=exact.state, backend="recurrent")
    with poisoned(), torch.no_grad():
        y = x.map(embedded)
        actual, after = deltalab.scan(rule, y.q, y.k, y.v, y.gates, state=y.state, backend="triton")
    wanted, actual = (
        {"o": y, **{f"last {name}": part for name, part in parts(s).items()}} for y, s in ((o, state), (actual, after))
    )
    judge(rule, x, exact, wanted, actual)


@pytest.mark.parametrize(
    ("rule", "dtype"), [case(*named_rule, torch.float32) for named_rule in VARIANTS if named_rule[1].transition]
)
def test_the_oracle_of_long_sequences_is_the_recurrence(rule, dtype):
    x = inputs(rule, dtype, 65, 32, 32, state=True).map(lambda part: part.double().requires_grad_())
    wanted, actual = (run(rule, x, backend) for backend in ("recurrent", "chunked"))
    assert all(error(actual[name], right) < 1e-9 for name, right in wanted.items() if right is not None)


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [case(*named_rule, dtype) for named_rule in STRUCTURES for dtype in (torch.bfloat16, torch.float32)],
)
def test_extreme_gates(rule, dtype):
    """A head for each combination: decays of 0, -1000 and -inf, strengths at both ends of their ranges."""
    x = draw_corners(rule, batch=2, length=70, key_dim=64, value_dim=64)
    hold(rule, rounded(rule, x, dtype), slack=2)


@pytest.mark.parametrize(("rule", "dtype"), [case(*named_rule, torch.bfloat16) for named_rule in STRUCTURES])
@pytest.mark.parametrize("g", [-1000.0, 0.0])
def test_nothing_or_everything_is_kept(rule, dtype, g):
    x = inputs(rule, dtype, 130, 64, 64, state=True)
    if "g" not in x.gates:
        pytest.skip("does not decay")
    hold(rule, dataclasses.replace(x, gates={**x.gates, "g": torch.full_like(x.gates["g"], g)}))


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [case(*named_rule, dtype) for named_rule in STRUCTURES for dtype in (torch.bfloat16, torch.float32)],
)
def test_packed_sequences_are_each_for_itself(rule, dtype):
    bounds = torch.tensor([0, 3, 20, 84, 148, 149, 200], device=DEVICE)
    x = inputs(rule, dtype, 200, 64, 64, state=False, batch=1)
    batch = inputs(rule, dtype, 1, 64, 64, state=True, batch=6)
    hold(rule, dataclasses.replace(x, state=batch.state), cu_seqlens=bounds)


REPEATED = ["comba", "gated_deltanet", "gla", "kda", "rwkv7", "rdn", "gka"]
REPEATED = [(name, deltalab.get_rule(name)) for name in REPEATED if _has_kernel(deltalab.get_rule(name))]


@pytest.mark.parametrize(
    ("rule", "dtype"), [case(*named_rule, torch.bfloat16, widths=(128, 128)) for named_rule in REPEATED]
)
def test_200_repeats_are_the_same_to_the_bit(rule, dtype):
    """A result that changes is a race."""
    x = inputs(rule, dtype, 1024, 128, 128, state=False).map(lambda part: part.requires_grad_())
    first = run(rule, x, "triton")
    for _ in range(199):
        again = run(rule, x, "triton")
        moved = [name for name, it in first.items() if it is not None and not torch.equal(it, again[name])]
        assert not moved


# Kernels under vmap, torch.compile and CUDA graphs, as a training uses them.

TRAINED = [case(name, deltalab.get_rule(name), dtype) for name in ("comba", "gla") for dtype in (torch.bfloat16,)]


def _o(rule: UpdateRule, x: Inputs, leaves: list[Tensor]) -> Tensor:
    q, k, v, *gates = leaves
    return deltalab.scan(rule, q, k, v, dict(zip(x.gates, gates, strict=True)))[0]


@pytest.mark.parametrize(("rule", "dtype"), TRAINED)
def test_vmap_is_a_loop(rule, dtype):
    x = inputs(rule, torch.float32, 100, 64, 64, state=False)
    leaves = [torch.stack([part, part.flip(0)]).requires_grad_() for part in x.named().values()]
    together = torch.func.vmap(lambda *parts: _o(rule, x, list(parts)))(*leaves)
    alone = torch.stack([_o(rule, x, [part[i] for part in leaves]) for i in range(2)])
    assert error(together, alone) <= 1e-6
    grads = [torch.autograd.grad((y * cosines(y).float()).sum(), leaves) for y in (together, alone)]
    assert max(map(error, *grads)) <= 1e-6


@pytest.mark.parametrize(("rule", "dtype"), TRAINED)
def test_compiled_it_is_the_same(rule, dtype):
    x = inputs(rule, dtype, 100, 64, 64, state=False)
    leaves = [part.detach().clone().requires_grad_() for part in x.named().values()]
    eager = _o(rule, x, leaves)
    compiled = torch.compile(lambda *parts: _o(rule, x, list(parts)), fullgraph=True)(*leaves)
    assert error(compiled, eager) <= 1e-3
    weights = cosines(eager).to(dtype)
    grads = [torch.autograd.grad(y, leaves, weights) for y in (eager, compiled)]
    assert max(map(error, *grads)) <= 1e-3


@pytest.mark.parametrize(("rule", "dtype"), TRAINED)
def test_a_captured_graph_replays_on_new_inputs(rule, dtype):
    x = inputs(rule, dtype, 100, 64, 64, state=False)
    leaves = [part.detach().clone().requires_grad_() for part in x.named().values()]
    weights = cosines(x.v).to(dtype)

    def step() -> list[Tensor]:
        o = _o(rule, x, leaves)
        return [o, *torch.autograd.grad(o, leaves, weights)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(leaf.flip(0))
    graph.replay()
    eager = step()
    assert all(map(torch.equal, captured, eager))


# Inputs.


@pytest.mark.parametrize(("rule", "dtype"), TRAINED)
def test_inputs_may_lie_anywhere(rule, dtype):
    """Transposed, sliced out of a projection, or at an address that no descriptor takes."""
    x = inputs(rule, dtype, 65, 64, 64, state=False).map(lambda part: part.requires_grad_())
    plain = run(rule, x, "triton")

    def transposed(part: Tensor) -> Tensor:
        return part.transpose(0, 1).contiguous().transpose(0, 1)

    def sliced(part: Tensor) -> Tensor:
        return torch.cat([part, part], dim=-1)[..., : part.shape[-1]]

    def odd(part: Tensor) -> Tensor:
        return torch.cat([part.new_zeros(1), part.flatten()])[1:].view(part.shape)

    for place in (transposed, sliced, odd):
        placed = run(rule, x.map(lambda part: place(part.detach()).requires_grad_()), "triton")  # noqa: B023
        assert all(torch.equal(placed[name], right) for name, right in plain.items()), place.__name__


@pytest.mark.parametrize(("rule", "dtype"), TRAINED[:1])
def test_wrong_tensors_are_named(rule, dtype):
    x = inputs(rule, dtype, 4, 32, 32, state=True)
    for change, says in [
        ({"k": x.k.half()}, "q, k and v must share dtype and device"),
        ({"v": x.v.cpu()}, "q, k and v must share dtype and device"),
        ({"v": x.v[:, 1:]}, r"v \[B, T, H, V\]"),
        ({"gates": {**x.gates, "g": x.gates["g"].cpu()}}, "gate 'g'"),
        ({"gates": {**x.gates, "g": x.gates["g"].abs() + 1}}, "g is a log-decay and at most 0"),
        ({"state": (x.state[0].cpu(),)}, "state of rule 'comba'"),
        ({"state": (x.state[0][:, :, :16],)}, "state of rule 'comba'"),
    ]:
        y = dataclasses.replace(x, **change)
        with pytest.raises(InputError, match=says):
            deltalab.scan(rule, y.q, y.k, y.v, y.gates, state=y.state, backend="triton")


@pytest.mark.parametrize(("rule", "dtype"), TRAINED[:1])
def test_inputs_without_a_kernel_take_the_parallel_form(rule, dtype):
    """These are fp64, and keys wider than 256."""
    for kind, key_dim in ((torch.float64, 32), (dtype, 272)):
        x = draw(rule, batch=1, length=9, heads=1, key_dim=key_dim, value_dim=16)
        x = x.map(lambda part: part.to(DEVICE, kind if part.dim() == 4 else torch.float32))  # noqa: B023
        auto, chunked = (
            deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend=backend)[0] for backend in ("auto", "chunked")
        )
        assert torch.equal(auto, chunked)
