"""Rules of several recurrences, and recurrences that are read along their values."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import deltalab
from deltalab import gates as forms
from deltalab.authoring.inputs import draw
from deltalab.gates import Gate
from deltalab.passes import Passes, _run, read_values
from deltalab.rule import Operands, knob
from deltalab.structure import DECAY, DIAGONAL, DPLR, Transition

B, T, H, K, V = 2, 9, 2, 3, 4


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chunked(*given, **how):
    return _run(torch.float64, "chunked", *given, **how)


def given(transition: Transition) -> dict[str, Tensor]:
    g = -normal(B, T, H, *([K] if transition.decay == "diagonal" else []), seed=3).abs()
    x = {"k": 0.5 * normal(B, T, H, K, seed=1), "u": normal(B, T, H, V, seed=2), "g": g}
    return x | ({"e": normal(B, T, H, seed=4).sigmoid()} if transition.low_rank == "tied" else {})


def by_loop(transition: Transition, r: Tensor, state: Tensor, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    out = []
    for t in range(T):
        g = x["g"][:, t]
        decayed = g.exp().reshape(B, H, -1, 1) * state
        seen = decayed if transition.reads == "decayed_state" else state
        k, u = x["k"][:, t], x["u"][:, t]
        if "e" in x:
            u = u - x["e"][:, t, :, None] * torch.einsum("bhk,bhkv->bhv", k, seen)
        state = decayed + k[..., None] * u[..., None, :]
        out.append(torch.einsum("bhkv,bhv->bhk", state, r[:, t]))
    return torch.stack(out, dim=1), state


@pytest.mark.parametrize("transition", [DECAY, DIAGONAL, DPLR], ids=str)
def test_a_read_along_the_values_is_its_loop_with_its_gradients(transition: Transition) -> None:
    tensors = {"r": normal(B, T, H, V, seed=5), "state": normal(B, H, K, V, seed=6), **given(transition)}
    found = []
    for form in ("pass", "loop"):
        leaves = {name: one.clone().requires_grad_() for name, one in tensors.items()}
        x = {name: one for name, one in leaves.items() if name not in ("r", "state")}
        if form == "loop":
            o, last = by_loop(transition, leaves["r"], leaves["state"], x)
        else:
            o, (last,) = read_values(chunked, transition, Operands(r=leaves["r"], **x), state=(leaves["state"],))
        weighted = (o * normal(*o.shape, seed=7)).sum() + (last * normal(*last.shape, seed=8)).sum()
        found.append((o, last, *torch.autograd.grad(weighted, list(leaves.values()))))
    torch.testing.assert_close(found[0], found[1])


def test_a_read_along_the_values_under_vmap() -> None:
    tensors = {
        "r": normal(3, B, T, H, V, seed=5),
        "k": normal(3, B, T, H, K, seed=1),
        "u": normal(3, B, T, H, V, seed=2),
    }
    g = -normal(B, T, H, K, seed=3).abs()

    def read(r: Tensor, k: Tensor, u: Tensor) -> Tensor:
        return read_values(chunked, DIAGONAL, Operands(r=r, k=k, u=u, g=g), state=None)[0]

    stacked = torch.func.vmap(read)(*tensors.values())
    alone = torch.stack([read(*one) for one in zip(*tensors.values(), strict=True)])
    torch.testing.assert_close(stacked, alone)


@dataclass(frozen=True, kw_only=True)
class TwoPasses(Passes):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   z_t = S_t^T k_t,   R_t = R_{t-1} + k_t z_t^T,   o_t = scale R_t^T q_t."""

    name: ClassVar[str] = "two_passes_test"
    g: Gate = knob(forms.metala_decay())

    def initial_state(self, k, v):
        empty = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
        return empty, empty

    def passes(self, q, k, v, gates, *, scale, state, run):
        first, second = state
        z, (first,) = run(DECAY, Operands(r=k, k=k, u=v, g=gates["g"]), state=(first,))
        still = torch.zeros_like(gates["g"])
        o, (second,) = run(DECAY, Operands(r=q, k=k, u=z.to(v.dtype), g=still), state=(second,), scale=scale)
        return o, (first, second)


def inputs(dtype: torch.dtype = torch.float64):
    return draw(TwoPasses(), batch=B, length=T, heads=H, key_dim=K, value_dim=V).map(lambda part: part.to(dtype))


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
def test_a_rule_of_two_passes_is_its_loop(backend: str) -> None:
    x = inputs()
    o, state = deltalab.scan(TwoPasses(), x.q, x.k, x.v, x.gates, backend=backend, scale=0.5)
    S = torch.zeros(B, H, K, V, dtype=torch.float64)
    R = torch.zeros_like(S)
    for t in range(T):
        k = x.k[:, t, ..., None]
        S = x.gates["g"][:, t, :, None, None].exp() * S + k * x.v[:, t, :, None]
        R = R + k * (k * S).sum(-2, keepdim=True)
        torch.testing.assert_close(o[:, t], 0.5 * (x.q[:, t, ..., None] * R).sum(-2))
    torch.testing.assert_close(state, (S, R))


def test_a_rule_of_passes_has_the_kernels() -> None:
    pytest.importorskip("triton")
    x = inputs(torch.float32)
    want = deltalab.scan(TwoPasses(), x.q, x.k, x.v, x.gates, backend="recurrent")
    got = deltalab.scan(TwoPasses(), x.q, x.k, x.v, x.gates, backend="triton")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_read_along_the_values_by_kernels() -> None:
    pytest.importorskip("triton")
    x = {name: one.float() for name, one in given(DIAGONAL).items()}
    r = normal(B, T, H, V, seed=5).float().requires_grad_()
    found = []
    for backend in ("chunked", "triton"):
        o, (last,) = read_values(
            lambda *a, backend=backend, **b: _run(torch.float32, backend, *a, **b),
            DIAGONAL,
            Operands(r=r, **x),
            state=None,
        )
        found.append((o, last, *torch.autograd.grad(o.square().sum() + last.sum(), r)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_oja_erases_along_a_direction_of_length_1_in_16_bits(dtype):
    """A norm that is rounded itself makes an error of 2e-3 of the last state in bf16."""
    rule = deltalab.get_rule("gated_oja", beta=1)
    x = draw(rule, batch=B, length=T, heads=H, key_dim=K, value_dim=V)
    narrow = x.map(lambda part: part.to(dtype))
    gates = {name: gate.float() for name, gate in narrow.gates.items()}
    last = deltalab.scan(rule, narrow.q, narrow.k, narrow.v, gates, backend="chunked")[1][0]
    exact = narrow.map(torch.Tensor.double)
    wanted = deltalab.scan(rule, exact.q, exact.k, exact.v, exact.gates, backend="chunked")[1][0]
    assert (last - wanted).norm() <= 1e-5 * wanted.norm()
