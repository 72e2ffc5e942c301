"""The optimizer's kernels against a stack's step without them, in Triton's interpreter or on a GPU."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from deltalab.kernels.step import adamw
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.ops.backends import NONE, available
from deltalab.tasks import MQAR
from deltalab.tasks.batches import TrainingBatches
from deltalab.training.optimizer import Adam, Layout, Moments
from deltalab.training.stack import Stack

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TASK = MQAR(length=16, pairs=2, vocab_size=16)
TINY = ModelSpec(rule="deltanet", vocab_size=16, d_model=16, layers=1, heads=1)
RUNS = [
    Adam([0.1, 0.2, 0.05, 0.1], 0.1, (0.9, 0.95), 1.0),
    Adam([1e-3, 3e-3, 1e-2, 0.0], 0.0, (0.8, 0.999), 0.0),
    Adam([0.3, 0.1, 0.1, 0.1], 2.0, (0.0, 0.5), 1e-3),
]


@pytest.fixture(autouse=True)
def fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":  # The interpreter runs programs one after another.
        monkeypatch.setattr(adamw, "PARTS", 4)


def stack_of(runs: list[Adam], model: ModelSpec = TINY) -> Stack:
    network = build_model(model).to(DEVICE)
    layout = Layout(network)
    rows = torch.stack([layout.pack(build_model(model, seed=seed).state_dict()) for seed in range(len(runs))])
    state = Moments(*(rows.to(DEVICE) * factor for factor in (1, 0, 0)))
    stack = Stack(network, layout, TrainingBatches(TASK, 2, [*range(len(runs))], DEVICE, 4), state, runs, bf16=False)
    stack.optimizer.load(100, stack.optimizer.rates_of(0, 4))
    return stack


def both(stack: Stack, monkeypatch: pytest.MonkeyPatch, losses: list[Tensor], grads: list[Tensor]) -> list[Stack]:
    """Two copies, without the kernels and with them, after one step for each gradient."""
    made = []
    for fused in (False, True):
        one = copy.copy(stack)
        one.state = Moments(*(part.clone() for part in stack.state))
        one.optimizer = copy.copy(stack.optimizer)
        for name in ("bad", "loss", "row"):
            setattr(one.optimizer, name, getattr(stack.optimizer, name).clone())
        monkeypatch.setattr("deltalab.training.optimizer.automatic", available if fused else lambda device: NONE)
        for loss, grad in zip(losses, grads, strict=True):
            one.optimizer.step(one.state, loss.to(DEVICE), grad.to(DEVICE))
        made.append(one)
    return made


def assert_same(one: Stack, other: Stack, scale: float = 1.0) -> None:
    """scale: size of the gradients, which bounds the rounding of moments."""
    assert torch.equal(one.optimizer.bad, other.optimizer.bad)
    assert torch.equal(one.optimizer.row, other.optimizer.row)
    torch.testing.assert_close(one.optimizer.loss, other.optimizer.loss, rtol=0, atol=0, equal_nan=True)
    for mine, its, size in zip(one.state, other.state, (1.0, scale, scale**2), strict=True):
        torch.testing.assert_close(mine, its, rtol=5e-6, atol=1e-6 * size)


def drawn(stack: Stack, steps: int, scale: float, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(stack.state.weights.shape, generator=generator) for _ in range(steps)]


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    runs=st.lists(st.sampled_from(RUNS), min_size=1, max_size=4),
    model=st.sampled_from([TINY, replace(TINY, base_width=4)]),
    scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e4]),
    block=st.sampled_from([256, 1024, 4096]),
    parts=st.sampled_from([1, 4]),
    seed=st.integers(0, 99),
)
def test_steps_are_those_without_kernels(
    runs: list[Adam], model: ModelSpec, scale: float, block: int, parts: int, seed: int
) -> None:
    stack = stack_of(runs, model)
    losses = torch.rand(4, len(runs), generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw, "BLOCK", block)
        patch.setattr(adamw, "PARTS", parts)
        plain, fused = both(stack, patch, list(losses), drawn(stack, 4, scale, seed))
    assert not torch.equal(plain.state.weights, stack.state.weights)
    assert plain.optimizer.bad.eq(-1).all()
    assert_same(plain, fused, scale)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize(
    ("where", "value"),
    [("first", math.nan), ("last", math.inf), ("last", 1e30), *(("loss", v) for v in (math.nan, math.inf, 1e30))],
)
def test_what_is_not_finite_stops_its_run_alone(value: float, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From that step on. 1e30 stops a run as a gradient, because its square is infinite, but not as a loss."""
    stack = stack_of(RUNS)
    losses, grads = [torch.ones(3) for _ in range(4)], drawn(stack, 4, 1.0, 0)
    if where == "loss":
        losses[2][1] = value
    else:
        grads[2][1, 0 if where == "first" else -1] = value
    stopped = where != "loss" or value != 1e30
    (_, before), (plain, fused) = (both(stack, monkeypatch, losses[:end], grads[:end]) for end in (2, 4))
    assert fused.optimizer.bad.tolist() == [-1, 102 if stopped else -1, -1]
    assert torch.equal(fused.state.weights[1], before.state.weights[1]) == stopped
    assert not torch.equal(fused.state.weights[0], before.state.weights[0])
    assert all(part.isfinite().all() for part in fused.state)
    assert_same(plain, fused)


def test_the_norm_is_that_of_fp64_and_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown by the first moment of a run whose gradient is clipped to a norm of 1e-3."""
    stack = stack_of([Adam([0.1] * 4, 0.0, (0.0, 0.5), 1e-3)])
    grads = drawn(stack, 1, 1.0, 3)
    results = [both(stack, monkeypatch, [torch.ones(1)], grads)[1].state for _ in range(2)]
    assert all(map(torch.equal, *results))
    torch.testing.assert_close(results[0].first[0].double().norm().item(), 1e-3, rtol=2e-6, atol=0)


@pytest.mark.gpu
def test_rows_of_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = stack_of(RUNS * 3, ModelSpec(rule="comba", vocab_size=8192, d_model=128, layers=2, heads=2))
    assert stack.layout.width > 2**20
    losses = [torch.ones(9) for _ in range(3)]
    losses[1][4] = math.nan
    plain, fused = both(stack, monkeypatch, losses, drawn(stack, 3, 1.0, 0))
    assert fused.optimizer.bad.tolist() == [101 if i == 4 else -1 for i in range(9)]
    assert_same(plain, fused)
