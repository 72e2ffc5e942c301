"""Kernels with diagonal decay, in Triton's interpreter, against the recurrence and its gradients in fp64."""

import dataclasses
import itertools
import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.kernels.diagonal.op import diagonal_scan
from deltalab.kernels.operands import DIAGONAL
from deltalab.ops import reference
from deltalab.rule import Operands
from deltalab.structure import Transition

H, CHUNK = 2, 16
STRUCTURES = ["none", "tied", "free"]
SEEN = [(False, False), (True, False), (False, True)]
"""What a low rank reads is late, what a token reads is early: the pairs that the kernels take."""


def drawn(
    structure: str, tokens: int, *, batch: int = 1, key: int = 16, value: int = 16, more: bool = True
) -> Operands:
    """fp32 operands. more: with the scalars that a rule may leave out."""
    draw = torch.Generator().manual_seed(1)

    def normal(*width: int) -> Tensor:
        return torch.randn(batch, tokens, H, *width, generator=draw)

    def uniform(*width: int) -> Tensor:
        return torch.rand(batch, tokens, H, *width, generator=draw)

    k, b = F.normalize(normal(key), dim=-1), F.normalize(normal(key), dim=-1)
    tied, free = structure == "tied", structure == "free"
    return Operands(
        r=F.normalize(normal(key), dim=-1), k=k, u=normal(value), g=-uniform(key) * 0.5,
        e=uniform() if tied else None, a=-uniform(key) * b if free else None, b=b if free else None,
        beta=uniform() + 0.5 if more else None, read=uniform() + 0.5 if more else None, d=uniform() if more else None,
    )  # fmt: skip


def fast(x: Operands, state: Tensor | None, *, late: bool, early: bool, chunk: int) -> tuple[Tensor, Tensor]:
    tensors = (getattr(x, name) for name in DIAGONAL.names)
    o, last, _ = diagonal_scan(*tensors, state, None, 0.3, late, early, chunk, True)
    return o, last


def right(x: Operands, state: Tensor | None, *, late: bool, early: bool, chunk: int) -> tuple[Tensor, Tensor]:
    transition = Transition(
        name="this", decay="diagonal", low_rank="tied" if x.e is not None else "free" if x.a is not None else "none",
        reads="decayed_state" if late else "state", output="before" if early else "after",
    )  # fmt: skip
    o, (last,) = reference.recurrent(transition, x, scale=0.3, state=None if state is None else (state,))
    return o, last


def given(x: Operands, state: Tensor | None, dtype: torch.dtype) -> tuple[Operands, Tensor | None, dict[str, Tensor]]:
    """A copy of operands and state whose tensors require gradients, and these tensors by name."""
    leaves = {name: getattr(x, name) for name in DIAGONAL.names} | {"state": state}
    leaves = {
        name: t.detach().clone().to(t.dtype if dtype == torch.float32 else dtype).requires_grad_()
        for name, t in leaves.items()
        if t is not None
    }
    state = leaves.get("state")
    return Operands(**{name: t for name, t in leaves.items() if name != "state"}), state, leaves


def check(
    x: Operands, state: Tensor | None, *, late: bool, early: bool = False, chunk: int = CHUNK,
    half: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Compares output, last state and every gradient. half: names of operands in fp16."""
    results = []
    x = dataclasses.replace(x, **{name: getattr(x, name).half() for name in half if getattr(x, name) is not None})
    for scan, dtype in ((fast, torch.float32), (right, torch.float64)):
        operands, start, leaves = given(x, state, dtype)
        o, last = scan(operands, start, late=late, early=early, chunk=chunk)
        weights = torch.arange(o.numel(), dtype=dtype).cos().view_as(o).to(o.dtype)
        loss = (o * weights).sum() + (last * torch.arange(last.numel(), dtype=dtype).sin().view_as(last)).sum()
        loss.backward()
        results.append({"o": o, "last": last, **{name: leaf.grad for name, leaf in leaves.items()}})
    actual, wanted = results
    for name, want in wanted.items():
        assert name not in half or actual[name].dtype == torch.float16
        error = (actual[name].double() - want).norm() / want.norm().clamp_min(1e-12)
        assert error <= (1e-3 if half else 1e-5), f"{name}: {float(error):.1e}"


@pytest.mark.slow(keep="tied")
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("tokens", "late"), [(1, False), (16, True), (39, False), (39, True)])
def test_output_state_and_gradients_are_those_of_the_recurrence(structure, tokens, late):
    state = torch.randn(1, H, 16, 16, generator=torch.Generator().manual_seed(2))
    check(drawn(structure, tokens), state, late=late)


@pytest.mark.slow(keep="free-39")
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("tokens", [1, 16, 39])
def test_a_token_may_read_the_state_before_it_writes(structure, tokens):
    state = torch.randn(1, H, 16, 16, generator=torch.Generator().manual_seed(2))
    check(drawn(structure, tokens), state, late=False, early=True)


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_several_blocks_of_keys_and_values_and_no_state(structure):
    check(drawn(structure, 20, batch=2, key=32, value=48, more=False), None, late=True)


@pytest.mark.slow
@pytest.mark.parametrize(("late", "early"), SEEN)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_decays_without_end(structure, late, early):
    """-1000 in one head, and -inf in the other."""
    x = drawn(structure, 20)
    at = torch.rand(x.g.shape, generator=torch.Generator().manual_seed(3))
    low = torch.tensor([-1000.0, -torch.inf])[:, None]
    steep = dataclasses.replace(x, g=torch.where(at < 0.3, low, torch.where(at < 0.6, 0.0, x.g)))
    check(steep, None, late=late, early=early)


@pytest.mark.slow
@pytest.mark.parametrize(("late", "early"), SEEN)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_long_chunks_in_half_precision(structure, late, early):
    vectors = ("r", "k", "u", "a", "b")
    check(drawn(structure, 70), None, late=late, early=early, chunk=64, half=(*vectors, "g") if late else vectors)


@pytest.mark.slow(keep="free-False-False")
@pytest.mark.parametrize(("late", "early"), SEEN)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_gradients_of_a_steep_decay_can_be_summed_over_tokens(structure, late, early):
    """The vectors of keys are in fp32. Where they were in fp16, these sums had errors of 8e-3 to 2e-2."""
    x = drawn(structure, 70, more=False)
    sums = []
    for scan, dtype in ((fast, torch.float32), (right, torch.float64)):
        given_x = dataclasses.replace(x, g=torch.full_like(x.g, -2.5), u=x.u.half())
        in_fp16 = {n: t.half().float() for n in ("r", "k", "a", "b") if (t := getattr(x, n)) is not None}
        operands, _, leaves = given(dataclasses.replace(given_x, **in_fp16), None, dtype)
        o, _ = scan(operands, None, late=late, early=early, chunk=64)
        (o * torch.arange(o.numel()).cos().half().to(o.dtype).view_as(o)).sum().backward()
        assert leaves["k"].grad.dtype == dtype
        sums.append(leaves["g"].grad.double().sum(dim=(0, 1)))
    actual, wanted = sums
    assert (actual - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_long_chunks(structure):
    check(drawn(structure, 70), None, late=False, chunk=32)


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_packed_sequences_are_each_their_own(structure):
    x = drawn(structure, 40)
    bounds = [0, 3, 3, 20, 40]
    operands, _, leaves = given(x, None, torch.float32)
    tensors = (getattr(operands, name) for name in DIAGONAL.names)
    o, last, _ = diagonal_scan(*tensors, None, torch.tensor(bounds), 0.3, True, False, CHUNK, True)
    (o.square().sum() + last.sum()).backward()
    for n, (begin, end) in enumerate(itertools.pairwise(bounds)):
        part = {name: t[:, begin:end] for name in DIAGONAL.names if (t := getattr(x, name)) is not None}
        if end == begin:
            continue
        alone, _, wants = given(Operands(**part), None, torch.float64)
        want, final = right(alone, None, late=True, early=False, chunk=CHUNK)
        (want.square().sum() + final.sum()).backward()
        torch.testing.assert_close(o[:, begin:end].double(), want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(last[n : n + 1].double(), final, atol=1e-5, rtol=1e-4)
        for name, leaf in wants.items():
            torch.testing.assert_close(leaves[name].grad[:, begin:end].double(), leaf.grad, atol=1e-4, rtol=1e-3)
