"""What rules of the algebra can say beyond vectors of one token: signs, reads before the write, a carry, other widths.

Each rule here is written twice: as operands, and as the loop over tokens that it stands for.
"""

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import deltalab
from deltalab import gates
from deltalab.authoring.inputs import Inputs, draw
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.models.layer import RuleLayer, initialize
from deltalab.ops.lowering import for_kernels, lowered
from deltalab.ops.recurrence import packs, recurrence
from deltalab.ops.reference import recurrent
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import ADDITIVE, DECAY, DIAGONAL, Transition

B, T, H, K, V = 2, 11, 3, 4, 5


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scan(rule: UpdateRule, x: Inputs, backend: str, **how):
    return deltalab.scan(rule, x.q, x.k, x.v, x.gates, state=x.state, backend=backend, chunk_size=4, **how)


# --- signs and reads before the write ------------------------------------------------------------------------


def transitions() -> list[Transition]:
    found = []
    for decay in ("scalar", "diagonal"):
        for low_rank in ("none", "tied", "free"):
            for reads in ("state", "decayed_state"):
                for output in ("after", "before"):
                    name = f"{decay}-{low_rank}-{reads}-{output}"
                    found.append(Transition(name=name, decay=decay, low_rank=low_rank, reads=reads, output=output))
    return found


def operands(transition: Transition, steps: int = 1) -> Operands:
    rows = steps * T
    r, k, u = (
        normal(B, T, H, K, seed=1),
        F.normalize(normal(B, rows, H, K, seed=2), dim=-1),
        normal(B, rows, H, V, seed=3),
    )
    g = -normal(B, rows, H, *([K] if transition.decay == "diagonal" else []), seed=4).abs()
    x = Operands(r=r, k=k, u=u, g=g, sign=normal(*g.shape, seed=5).sign(), beta=normal(B, rows, H, seed=6))
    if transition.low_rank == "tied":
        x = replace(x, e=normal(B, rows, H, seed=7).sigmoid())
    if transition.low_rank == "free":
        x = replace(x, a=-0.5 * k, b=F.normalize(normal(B, rows, H, K, seed=8), dim=-1))
    if transition.output == "before":
        x = replace(x, bonus=normal(B, T, H, seed=9))
    elif steps == 1:
        x = replace(x, d=normal(B, T, H, seed=10))
    return x


@pytest.mark.parametrize("transition", transitions(), ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["empty", "state"])
def test_the_rewritten_recurrence_is_the_declared_one(transition: Transition, given: bool) -> None:
    x, state = operands(transition), (normal(B, H, K, V, seed=11),) if given else None
    want = recurrent(transition, x, scale=0.7, state=state)
    got = recurrence(transition, x, dtype=torch.float64, scale=0.7, state=state, backend="chunked", chunk_size=4)
    torch.testing.assert_close(got[0], want[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(got[1][0], want[1][0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("steps", [2, 3])
def test_signs_of_several_steps_per_token(steps: int) -> None:
    transition = Transition(name="steps", decay="scalar", low_rank="tied", steps=steps)
    x = operands(transition, steps)
    want = recurrent(transition, x, scale=1.0, state=None)
    got = recurrence(transition, x, dtype=torch.float64, scale=1.0, backend="chunked", chunk_size=4)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_a_rewritten_recurrence_has_neither_signs_nor_an_early_read() -> None:
    transition = transitions()[3]
    low = lowered(transition, operands(transition))
    assert (low.operands.sign, low.operands.bonus, low.transition.output) == (None, None, "after")


@pytest.mark.slow(keep="scalar-tied-state")
@pytest.mark.parametrize("transition", [t for t in transitions() if t.output == "before"], ids=str)
@pytest.mark.parametrize("signed", [False, True], ids=["", "signed"])
def test_kernels_take_the_rewritten_recurrence(transition: Transition, signed: bool) -> None:
    pytest.importorskip("triton")
    x = operands(transition)
    x = x if signed else replace(x, sign=None)
    names = [field.name for field in fields(x) if isinstance(getattr(x, field.name), Tensor) and field.name != "sign"]
    results = []
    for backend in ("recurrent", "triton"):
        leaves = {name: getattr(x, name).clone().requires_grad_() for name in names}
        start = normal(B, H, K, V, seed=11).requires_grad_()
        o, (last,) = recurrence(
            transition, replace(x, **leaves), dtype=torch.float32, scale=0.7, state=(start,), backend=backend
        )  # fmt: skip
        o, last = o.double(), last.double()
        ((o * o.detach().cos()).sum() + (last * last.detach().sin()).sum()).backward()
        grads = {f"d {name}": leaf.grad for name, leaf in leaves.items()}
        results.append({"o": o, "last": last, **grads, "d state": start.grad})
    want, got = results
    for name, right in want.items():
        torch.testing.assert_close(
            got[name], right, rtol=1e-4, atol=1e-4, msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.mark.parametrize("transition", transitions(), ids=str)
def test_one_row_later_is_only_where_no_kernel_reads_early(transition: Transition) -> None:
    """A low rank that reads the decayed state of a decay by channel has one factor for both reads."""
    low = for_kernels(transition, operands(transition))
    by_channel = low.transition.decay == "diagonal"
    apart = by_channel and transition.low_rank != "none" and transition.reads == "decayed_state"
    assert low.later == (transition.output == "before" and apart)
    pytest.importorskip("triton")
    packed = packs(transition, replace(operands(transition), sign=None), torch.float32, "triton")
    assert packed == (not low.later)


# --- a carry, other widths, vectors --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Widened(UpdateRule):
    """S_t = alpha_t S_{t-1} + c_t [k_t, k_t^2, k_t] [m_t v_t, 1]^T, o_t = n_t S_t^T [q_t, q_t, w_t] without its last.

    n_t is the number of tokens so far, c_t the first channel of k_{t-1}.
    """

    name: ClassVar[str] = "widened_test"
    transition: Transition = DECAY
    g: Gate = knob(gates.metala_decay())
    w: Gate = knob(gates.unit_vector())
    m: Gate = knob(gates.value_sigmoid(rank=2))

    def key_width(self, key_dim: int) -> int:
        return 3 * key_dim

    def value_width(self, value_dim: int) -> int:
        return value_dim + 1

    def carried(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(v.dtype, torch.float32)
        return tuple(k.new_zeros(k.shape[0], k.shape[2], dtype=dtype) for _ in range(2))

    def operands(self, q, k, v, *, carry, g, w, m):
        last, seen = carry
        first = k[..., 0].to(last.dtype)
        before = torch.cat([last[:, None], first], dim=1)
        count = seen[:, None] + torch.arange(1, k.shape[1] + 1, dtype=last.dtype, device=k.device)[:, None]
        return Operands(
            r=torch.cat([q, q, w], dim=-1),
            k=torch.cat([k, k * k, k], dim=-1),
            u=torch.cat([m * v, torch.ones_like(v[..., :1])], dim=-1),
            g=g,
            beta=before[:, :-1],
            carry=(before[:, -1], count[:, -1]),
            output=lambda o: count[..., None] * o[..., :-1],
        )


def by_loop(x: Inputs, scale: float) -> Tensor:
    o = torch.zeros_like(x.v)
    for b in range(B):
        for h in range(H):
            S, last = torch.zeros(3 * K, V + 1, dtype=torch.float64), 0.0
            for t in range(T):
                q, k, v = (part[b, t, h] for part in (x.q, x.k, x.v))
                g, w, m = (x.gates[name][b, t, h] for name in "gwm")
                key, value = torch.cat([k, k * k, k]), torch.cat([m * v, torch.ones(1, dtype=torch.float64)])
                S = g.exp() * S + last * torch.outer(key, value)
                o[b, t, h] = (t + 1) * scale * (S.T @ torch.cat([q, q, w]))[:-1]
                last = k[0]
    return o


def inputs(rule: UpdateRule) -> Inputs:
    return draw(rule, batch=B, length=T, heads=H, key_dim=K, value_dim=V)


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
def test_the_widened_rule_is_its_loop(backend: str) -> None:
    x = inputs(Widened())
    o, (state, last, count) = scan(Widened(), x, backend, scale=0.5)
    torch.testing.assert_close(o, by_loop(x, 0.5))
    assert [part.shape for part in (state, last, count)] == [(B, H, 3 * K, V + 1), (B, H), (B, H)]


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize("split", [1, 4, T - 1])
def test_a_carry_goes_on(backend: str, split: int) -> None:
    rule, x = Widened(), inputs(Widened())
    whole, after = scan(rule, x, backend)
    first, between = scan(rule, x.span(0, split), backend)
    second, last = scan(rule, x.span(split, state=between), backend)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(last, after)


def test_packed_sequences_each_have_a_carry() -> None:
    rule, x = Widened(), inputs(Widened())
    alone = [scan(rule, one(x, b), "chunked") for b in range(B)]
    packed = Inputs(
        *(p.flatten(0, 1)[None] for p in (x.q, x.k, x.v)), {n: g.flatten(0, 1)[None] for n, g in x.gates.items()}
    )
    o, state = scan(rule, packed, "chunked", cu_seqlens=torch.tensor([0, T, 2 * T]))
    torch.testing.assert_close(o[0].unflatten(0, (B, T)), torch.cat([one[0] for one in alone]))
    torch.testing.assert_close(state, tuple(torch.cat(parts) for parts in zip(*(one[1] for one in alone), strict=True)))


def one(x: Inputs, b: int) -> Inputs:
    return x.map(lambda part: part[b : b + 1])


@pytest.mark.parametrize("conv", [0, 4])
def test_a_layer_with_a_vector_goes_token_by_token(conv: int) -> None:
    layer = RuleLayer(Widened(), 8, H, key_dim=K, value_dim=V, conv=conv).double()
    initialize(layer, 0)
    x = normal(B, T, 8, seed=1)
    y, after = layer.advance(x)
    cache, outputs = None, []
    for token in x.split(1, dim=1):
        o, cache = layer.advance(token, cache)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, dim=1), y)
    torch.testing.assert_close((after.conv, *after.state), (cache.conv, *cache.state))


def test_a_vector_is_convolved_activated_and_normalized() -> None:
    layer = RuleLayer(Widened(), 8, H, key_dim=K, value_dim=V, conv=3).double()
    initialize(layer, 0)
    x = normal(B, T, 8, seed=1)
    values, _ = layer.vectors(x, None)
    z = F.pad(x @ layer.vectors.project["w"].weight.mT, (0, 0, 2, 0))
    want = sum(layer.vectors.conv[i] * z[:, i : i + T] for i in range(3))
    torch.testing.assert_close(values["w"], F.normalize(F.silu(want).unflatten(-1, (H, K)), dim=-1))


# --- operands that do not fit ---------------------------------------------------------------------------------


class Good(UpdateRule):
    name = "good_test"
    transition: Transition = ADDITIVE


def wrong(transition: Transition, **changed: object) -> UpdateRule:
    class Wrong(Good):
        def operands(self, q, k, v):
            return Operands(**{"r": q, "k": k, "u": v, **changed})

    return Wrong(transition=transition)


@pytest.mark.parametrize(
    ("transition", "changed", "said"),
    [
        (DECAY, {}, "g is None, but a transition with decay 'scalar' needs it"),
        (ADDITIVE, {"g": torch.zeros(B, T, H)}, "g is given, but a transition with decay 'none' has no use for it"),
        (ADDITIVE, {"u": torch.zeros(B, T, V)}, r"u is \[2, 11, 5\], must be \[B, T, H, V\]: \[2, 11, 3, 5\]"),
        (ADDITIVE, {"k": None}, r"k is a NoneType, must be \[B, T, H, K\]"),
        (DECAY, {"g": torch.zeros(B, T, 1)}, r"g is \[2, 11, 1\], must be \[B, T, H\] or \[H\]: \[2, 11, 3\] or \[3\]"),
        (DIAGONAL, {"g": torch.zeros(B, T, H, 1)}, r"g is \[2, 11, 3, 1\], must be \[B, T, H, K\]"),
        (ADDITIVE, {"bonus": torch.zeros(B, T, H)}, "bonus takes a transition with output 'before'"),
        (ADDITIVE, {"carry": (torch.zeros(B, H),)}, "a carry is given"),
        (ADDITIVE, {"beta": torch.ones(B, T, H, dtype=torch.long)}, "beta has dtype torch.int64, must be floating"),
    ],
)
def test_operands_that_do_not_fit_are_named(transition: Transition, changed: dict[str, object], said: str) -> None:
    q, v = normal(B, T, H, K, seed=1), normal(B, T, H, V, seed=2)
    with pytest.raises(InputError, match=said):
        deltalab.scan(wrong(transition, **changed), q, q, v, {})


def test_operands_must_return_operands() -> None:
    class Nothing(Good):
        def operands(self, q, k, v):
            return None

    q = normal(B, T, H, K, seed=1)
    with pytest.raises(InputError, match=r"must return Operands\(r=..., k=..., u=...\), not a NoneType"):
        deltalab.scan(Nothing(transition=ADDITIVE), q, q, q, {})


@pytest.mark.parametrize("wrong", [{"decay": "scaler"}, {"low_rank": 1}, {"reads": "x"}, {"output": "x"}, {"steps": 0}])
def test_a_transition_takes_what_its_fields_allow(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Transition(name="t", **wrong)  # type: ignore[arg-type]


def test_a_gate_without_knob_is_refused() -> None:
    with pytest.raises(TypeError, match=r"declare it as `g: Gate = knob\(\.\.\.\)`"):

        class Bare(Good):
            g: Gate = gates.sigmoid()
