"""The kernel of one token against the equation in fp64: every structure, size and dtype, in Triton's interpreter."""

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import deltalab
from deltalab.authoring.inputs import draw
from deltalab.kernels.decode import decode
from deltalab.ops.lowering import for_kernels
from deltalab.ops.reference import recurrent
from deltalab.ops.scan import operands as operands_of
from deltalab.rule import Fit, Operands, State
from deltalab.structure import DECAY, DIAGONAL, DPLR, IPLR, SPLR, ResidualState, Transition

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, SCALE = 2, 2, 0.5
RLA_WITH_L2, RDN = ResidualState(loss="l2"), ResidualState(loss="huber", clip=0.5)
FREE = Transition(name="free", decay="diagonal", low_rank="free")


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operands(transition: Transition, key_dim: int, value_dim: int, fit: ResidualState | None = None) -> Operands:
    """fp64 operands of one token, with every part that the structure has."""
    rows = transition.steps
    vector, value, gate = (BATCH, rows, HEADS, key_dim), (BATCH, rows, HEADS, value_dim), (BATCH, rows, HEADS)
    keys = (BATCH, 1, HEADS, key_dim)
    tied, free = transition.low_rank == "tied", transition.low_rank == "free"
    x = Operands(
        r=normal(1, *keys),
        k=torch.nn.functional.normalize(normal(2, *vector), dim=-1),
        u=normal(3, *value),
        g=None
        if transition.decay == "none"
        else -normal(4, *(vector if transition.decay == "diagonal" else gate)).abs(),
        e=normal(5, *gate).sigmoid() if tied else None,
        a=-normal(6, *vector) if free else None,
        b=torch.nn.functional.normalize(normal(7, *vector), dim=-1) if free else None,
        beta=normal(8, *gate).sigmoid(),
        read=normal(9, *keys[:3]),
        d=normal(10, *gate) if rows == 1 else None,
    )
    if fit is None:
        return x
    strength, read = normal(13, *gate).sigmoid(), normal(14, *keys[:3])
    return replace(x, fit=Fit(fit, r=normal(11, *keys), v=2 * normal(12, *value), strength=strength, read=read, e=x.e))


def filled(transition: Transition, x: Operands) -> State:
    """A state of each kind, in fp64."""
    shape = (BATCH, HEADS, x.k.shape[-1], x.u.shape[-1])
    return (normal(15, *shape),) if x.fit is None else (normal(15, *shape), normal(16, *shape))


def mapped(x: Operands, change: Callable[[str, Tensor], Tensor]) -> Operands:
    def part(tensors: Operands | Fit) -> dict[str, Tensor]:
        return {name: change(name, value) for name, value in vars(tensors).items() if isinstance(value, Tensor)}

    return replace(x, fit=None if x.fit is None else replace(x.fit, **part(x.fit)), **part(x))  # type: ignore[arg-type]


def like(state: State | None, dtype: torch.dtype, device: str) -> State | None:
    return None if state is None else tuple(part.to(device, dtype) for part in state)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double().cpu() - want).norm() / want.norm().clamp_min(1e-3))


def assert_solves(
    transition: Transition,
    x: Operands,
    state: State | None,
    dtype: torch.dtype = torch.float32,
    limit: float = 1e-6,
) -> None:
    """Vectors in dtype, scalars, decays and states in fp32, as a layer hands them on."""
    given = mapped(x, lambda name, value: value.to(DEVICE, torch.float32 if value.dim() == 3 or name == "g" else dtype))
    o, after = decode(transition, given, scale=SCALE, state=like(state, torch.float32, DEVICE))
    rounded = mapped(given, lambda _, value: value.double().cpu())
    want, want_after = recurrent(
        transition, rounded, scale=SCALE, state=like(like(state, torch.float32, "cpu"), torch.float64, "cpu")
    )
    assert (o.dtype, o.shape) == (dtype, want.shape)
    assert error(o, want) < limit
    for got, right in zip(after, want_after, strict=True):
        assert got.dtype == torch.float32
        assert error(got, right) < 1e-6


def structures() -> Iterator[Transition]:
    for decay, low_rank, reads, steps in itertools.product(
        ("none", "scalar", "diagonal"), ("none", "tied", "free"), ("state", "decayed_state"), (1, 3)
    ):
        if reads == "state" or (decay != "none" and low_rank != "none"):
            name = f"{decay} {low_rank} {reads} {steps}"
            transition = Transition(name=name, decay=decay, low_rank=low_rank, reads=reads, steps=steps)  # type: ignore[arg-type]
            yield transition
            if steps == 1:
                yield replace(transition, name=f"{name} before", output="before")


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Elements that the kernel does not write are NaN."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("transition", structures(), ids=str)
def test_every_structure_from_a_state_and_from_none(transition: Transition) -> None:
    x = operands(transition, 16, 8)
    assert_solves(transition, x, filled(transition, x))
    assert_solves(transition, x, None)


@pytest.mark.parametrize("loss", ["l2", "huber", "log_cosh"])
@pytest.mark.parametrize("transition", [DECAY, IPLR, DPLR, FREE], ids=str)
def test_a_second_state_fits_what_the_first_predicts_wrongly(transition: Transition, loss: str) -> None:
    x = operands(transition, 16, 8, ResidualState(loss=loss, clip=0.5))  # type: ignore[arg-type]
    assert_solves(transition, x, filled(transition, x))
    assert_solves(transition, x, None)
    forgetful = replace(x, fit=replace(x.fit, g=torch.full_like(x.g, -math.inf), e=None))
    assert_solves(transition, forgetful, filled(transition, x))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (5, 33), (64, 20), (200, 65)])
def test_any_size_is_padded(key_dim: int, value_dim: int) -> None:
    for transition, fit in ((SPLR, RDN), (FREE, None)):
        x = operands(transition, key_dim, value_dim, fit)
        assert_solves(transition, x, filled(transition, x))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
def test_only_the_output_is_rounded_in_16_bits(dtype: torch.dtype, limit: float) -> None:
    for transition, fit in ((IPLR, RDN), (FREE, None)):
        x = operands(transition, 16, 8, fit)
        assert_solves(transition, x, filled(transition, x), dtype, limit)


@pytest.mark.parametrize("extreme", [0.0, -1000.0, -math.inf])
@pytest.mark.parametrize("transition", [SPLR, IPLR, DIAGONAL, FREE], ids=str)
def test_extreme_decays(transition: Transition, extreme: float) -> None:
    x = operands(transition, 16, 8)
    x.g[0] = extreme
    if transition.decay == "diagonal":
        x.g[1, ..., ::2] = extreme
    assert_solves(transition, x, filled(transition, x))


TRANSITIONS = {name: deltalab.get_rule(name).transition for name in deltalab.list_rules()}


@pytest.mark.slow(keep="preconditioned_gated_deltanet")
@pytest.mark.parametrize("name", [name for name, t in TRANSITIONS.items() if t])
def test_every_rule_in_every_setting(name: str) -> None:
    """From the state that earlier tokens leave, with gates as `scan` hands them on: expanded, and constant ones."""
    for rule in deltalab.get_rule(name).variants():
        x = draw(rule, batch=BATCH, length=5, heads=HEADS, key_dim=8, value_dim=4)
        before, now = x.span(0, 4), x.span(4)
        _, state = deltalab.scan(rule, before.q, before.k, before.v, before.gates, backend="recurrent")
        assert rule.transition is not None
        low = for_kernels(rule.transition, operands_of(rule, now.q, now.k, now.v, now.gates))
        if low.later:
            continue  # It is two tokens, which the scan takes.
        assert_solves(low.transition, low.operands, state, limit=2e-6)


def test_strided_operands_are_read_where_they_stand() -> None:
    x = operands(SPLR, 16, 8)
    wide = mapped(x, lambda _, value: torch.stack([value, torch.full_like(value, math.nan)], dim=-1)[..., 0])
    assert not wide.k.is_contiguous()
    assert_solves(SPLR, wide, tuple(s.mT.contiguous().mT for s in filled(SPLR, x)))


@pytest.mark.parametrize("fit", [None, RDN], ids=str)
def test_the_state_that_is_given_is_left_as_it_is(fit: ResidualState | None) -> None:
    x = mapped(operands(IPLR, 16, 8, fit), lambda _, value: value.float().to(DEVICE))
    state = like(filled(IPLR, x), torch.float32, DEVICE)
    before = [part.clone() for part in state]
    decode(IPLR, x, scale=SCALE, state=state)
    assert all(torch.equal(part, was) for part, was in zip(state, before, strict=True))


@pytest.mark.parametrize("fit", [None, RDN], ids=str)
def test_vmap_folds_its_dimension_into_the_batch(fit: ResidualState | None) -> None:
    """vmap works with the dimension at any place, and with operands that lack it."""
    x = mapped(operands(IPLR, 16, 8, fit), lambda _, value: value.float().to(DEVICE))
    state = like(filled(IPLR, x), torch.float32, DEVICE)
    keys = torch.stack([x.k, x.k.flip(-1), x.k.roll(1, -1)], dim=2)

    def decoded(k: Tensor) -> tuple[Tensor, ...]:
        o, after = decode(IPLR, replace(x, k=k), scale=SCALE, state=state)
        return (o, *after)

    together = torch.func.vmap(decoded, in_dims=2)(keys)
    for i, k in enumerate(keys.unbind(2)):
        for got, want in zip(together, decoded(k), strict=True):
            assert torch.allclose(got[i], want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fit", [None, RDN], ids=str)
def test_the_operator_says_what_it_returns(fit: ResidualState | None) -> None:
    """The fake operator returns the shapes of the real one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = mapped(operands(IPLR, 16, 8, fit), lambda _, value: value.bfloat16().to(DEVICE))
    o, after = decode(IPLR, x, scale=SCALE, state=None)
    with FakeTensorMode() as mode:
        fake = mapped(x, lambda _, value: mode.from_tensor(value))
        fake_o, fake_after = decode(IPLR, fake, scale=SCALE, state=None)
    for got, want in zip((fake_o, *fake_after), (o, *after), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


FIRST_TOKEN = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from deltalab.kernels.decode import decode_kernel

types = dict.fromkeys(("r", "k", "u", "o"), "*bf16") | dict.fromkeys(("g", "e", "beta", "last"), "*fp32")
types |= dict.fromkeys(("scale", "clip"), "fp32")
sizes = {"H": 2, "K": 64, "V": 64, "BK": 64, "BV": 32, "STEPS": 1, "DIAGONAL": False, "LATE": True}
names = decode_kernel.arg_names
signature = {name: types.get(name, "constexpr") for name in names}
constants = {(i,): sizes.get(name) for i, name in enumerate(names) if name not in types}
source = ASTSource(fn=decode_kernel, signature=signature, constexprs=constants)
print("cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm)
"""
"""Compiles the kernel for an H100 with no state, as for the first token of a sequence."""


def test_a_first_token_compiles() -> None:
    """The interpreter runs what Triton's compiler refuses, such as code behind a return within an if."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run(
        [sys.executable, "-c", FIRST_TOKEN], env=environment, capture_output=True, text=True, check=False
    )
    assert found.stdout.split() == ["True"], found.stderr[-400:]
