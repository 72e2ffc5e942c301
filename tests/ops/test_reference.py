"""The parallel form is the recurrence for every structure of the algebra, whether or not a rule has it yet."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltalab.ops.reference import chunked, recurrent
from deltalab.rule import Fit, Operands, State
from deltalab.structure import ResidualState, Transition

EXACT = 1e-10


@dataclass(frozen=True)
class Structure:
    transition: Transition
    residual: ResidualState | None = None

    def __str__(self) -> str:
        of = self.transition
        fit = f"-{self.residual.loss}" if self.residual else ""
        return f"{of.decay}-{of.low_rank}-{of.reads}-{of.steps}{fit}"


def structures() -> Iterator[Structure]:
    """All structures. With a fit there is one step per token, which erases along its key or not at all."""
    kinds = (("none", "scalar", "diagonal"), ("none", "tied", "free"), ("state", "decayed_state"), (1, 2, 3))
    losses = ("l2", "huber", "log_cosh")
    for decay, low_rank, reads, steps in itertools.product(*kinds):
        if reads == "decayed_state" and "none" in (decay, low_rank):
            continue
        made: Any = {"decay": decay, "low_rank": low_rank, "reads": reads, "steps": steps}
        yield Structure(Transition(name="any", **made))
        if steps == 1 and low_rank != "free":
            yield from (Structure(Transition(name="any", **made), ResidualState(loss=loss)) for loss in losses)  # type: ignore[arg-type]


STRUCTURES = list(structures())


class Drawn:
    """Operands and a state; `leaves` are the tensors that get a gradient."""

    def __init__(self, of: Structure, *, tokens: int, extreme: bool, given: bool, seed: int, sizes: tuple[int, ...]):
        self.generator = torch.Generator().manual_seed(seed)
        self.leaves: dict[str, Tensor] = {}
        transition, (b, h, k, v) = of.transition, sizes
        n = transition.steps * tokens
        channels = (k,) if transition.decay == "diagonal" else ()
        x = {
            "r": self.normal("r", b, tokens, h, k),
            "k": self.unit("k", b, n, h, k),
            "u": self.normal("u", b, n, h, v),
        }
        if transition.decay != "none":
            x["g"] = self.decay("g", (b, n, h, *channels), extreme)
        if transition.low_rank == "tied":
            x["e"] = self.leaf("e", 2 * self.uniform(b, n, h))
        if transition.low_rank == "free":
            # As RWKV-7 has them, or the state grows without bound and all rounding with it.
            x["b"] = self.unit("b", b, n, h, k)
            x["a"] = self.leaf("a", -self.uniform(b, n, h, k) * x["b"].detach())
        fit = None
        if of.residual is not None:
            of_fit: dict[str, Tensor] = {}
            if transition.decay != "none" and seed % 2:
                of_fit["g"] = self.decay("fit.g", (b, n, h, *channels), extreme)
            if transition.low_rank == "tied":
                of_fit["e"] = self.leaf("fit.e", 2 * self.uniform(b, n, h))
            fit = Fit(
                residual=of.residual,
                r=self.normal("fit.r", b, tokens, h, k),
                v=self.normal("fit.v", b, tokens, h, v),
                strength=self.leaf("fit.strength", self.uniform(b, tokens, h)),
                **of_fit,
            )
        self.operands = Operands(**x, fit=fit)
        self.state: State | None = None
        if given:
            names = ("state",) if fit is None else ("state", "second state")
            self.state = tuple(self.normal(name, b, h, k, v) for name in names)

    def leaf(self, name: str, value: Tensor) -> Tensor:
        self.leaves[name] = value.requires_grad_()
        return value

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def normal(self, name: str, *shape: int) -> Tensor:
        return self.leaf(name, torch.randn(shape, generator=self.generator, dtype=torch.float64))

    def unit(self, name: str, *shape: int) -> Tensor:
        return F.normalize(self.normal(name, *shape), dim=-1)

    def decay(self, name: str, shape: tuple[int, ...], extreme: bool) -> Tensor:
        g = -torch.randn(shape, generator=self.generator, dtype=torch.float64).exp()
        if extreme:
            kind = torch.randint(6, shape, generator=self.generator)
            for i, value in enumerate((0.0, -1000.0, -torch.inf)):
                g[kind == i] = value
        return self.leaf(name, g)


def results(form: Callable[[], tuple[Tensor, State]], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs, states, and the gradients of a curved function of all of them."""
    o, state = form()
    actual = {"o": o, **{f"S{i}": part for i, part in enumerate(state)}}
    total = torch.stack([value.sin().sum() for value in actual.values()]).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, materialize_grads=True)
    return actual | {f"d {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def worst(transition: Transition, parallel: Transition, x: Drawn, chunk_size: int) -> tuple[float, str]:
    """The largest difference between the two forms, relative for values above 1, and the name of the result."""
    given: Any = {"operands": x.operands, "scale": 0.5, "state": x.state}
    want = results(lambda: recurrent(transition, **given), x.leaves)
    got = results(lambda: chunked(parallel, **given, chunk_size=chunk_size), x.leaves)
    assert all(value.isfinite().all() for value in want.values())
    errors = {n: (got[n] - value).abs().max() / value.abs().max().clamp_min(1) for n, value in want.items()}
    name = max(errors, key=lambda n: math.inf if errors[n].isnan() else float(errors[n].detach()))
    return float(errors[name].detach()), name


@pytest.mark.slow(keep="l2")
@pytest.mark.parametrize("of", STRUCTURES, ids=str)
@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(
    tokens=st.integers(1, 40),
    chunk_size=st.integers(1, 48),
    extreme=st.booleans(),
    given=st.booleans(),
    seed=st.integers(0, 1000),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 5), st.integers(1, 5)),
)
def test_both_forms_are_one_function(
    of: Structure, tokens: int, chunk_size: int, extreme: bool, given: bool, seed: int, sizes: tuple[int, ...]
) -> None:
    x = Drawn(of, tokens=tokens, extreme=extreme, given=given, seed=seed, sizes=sizes)
    error, name = worst(of.transition, of.transition, x, chunk_size)
    assert error <= EXACT, name


@pytest.mark.parametrize("of", [of for of in STRUCTURES if of.transition.reads == "decayed_state"], ids=str)
def test_what_the_low_rank_reads_is_seen(of: Structure) -> None:
    x = Drawn(of, tokens=9, extreme=False, given=True, seed=1, sizes=(2, 2, 4, 3))
    error, _ = worst(of.transition, replace(of.transition, reads="state"), x, 4)
    assert error > 1e-3
