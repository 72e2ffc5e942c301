"""Gated KalmaNet's kernels through `scan`, held to the recurrence in fp64: in Triton's interpreter, or on a GPU."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import deltalab
from deltalab import gates as forms
from deltalab.authoring.inputs import Inputs, draw, parts
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.kernels.ridge import launch as ridge_launch
from deltalab.ops.backends import available
from deltalab.ops.scan import _say
from deltalab.ridge import fused_regression, lacks_kernel, regression
from deltalab.rule import State, UpdateRule, knob
from deltalab.structure import Ridge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)
BEFORE = 20  # tokens that make an initial state, which has full rank where K is 16

GKA = deltalab.get_rule("gka", iterations=5)
# Conjugate gradient loses its directions in fp32, so results agree after few iterations or after convergence alone.
CG = replace(GKA, solver="cg", iterations=3)
RULES = {
    "chebyshev": GKA,
    "chebyshev, lambda": replace(GKA, adaptive=False, ridge=0.2),
    "cg": CG,
    "cg, lambda": replace(CG, adaptive=False, ridge=0.2),
}


def error(actual: Tensor, right: Tensor) -> float:
    return float((actual.detach().double().cpu() - right.detach()).norm() / right.detach().norm().clamp_min(1e-12))


def cosines(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), dtype=torch.float64).cos().view_as(x).to(x.device)


def given(
    rule: UpdateRule,
    length: int,
    *,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    key_dim: int = 16,
    value_dim: int = 16,
    heads: int = 1,
    started: bool = True,
    fade: float = 0.2,
) -> Inputs:
    """fp64 inputs that are exact in `dtype`, and a state that earlier tokens left. fade: factor of all gates."""
    x = draw(rule, batch=batch, length=BEFORE + length, heads=heads, key_dim=key_dim, value_dim=value_dim)
    x = replace(x, gates={name: fade * value for name, value in x.gates.items()})
    x = x.map(lambda part: part.to(dtype if part.dim() == 4 else torch.float32).double())
    first = x.span(0, BEFORE)
    _, state = deltalab.scan(rule, first.q, first.k, first.v, first.gates, backend="chunked")
    return x.span(BEFORE, state=tuple(part.float().double() for part in state) if started else None)


def run(rule: UpdateRule, x: Inputs, backend: str, *, backward: bool = True, **more: Any) -> dict[str, Tensor]:
    """o, the states, and the gradients of a weighted sum of all of them."""
    x = x.map(lambda part: part.detach().requires_grad_(backward))
    o, state = deltalab.scan(rule, x.q, x.k, x.v, x.gates, state=x.state, backend=backend, **more)
    actual = {"o": o, **{f"last {name}": part for name, part in parts(state).items()}}
    if not backward:
        return actual
    total = torch.stack([(part.double() * cosines(part)).sum() for part in actual.values()]).sum()
    named = x.named()
    return actual | {f"d {n}": d for n, d in zip(named, torch.autograd.grad(total, list(named.values())), strict=True)}


def placed(x: Inputs, dtype: torch.dtype) -> Inputs:
    """q, k and v in dtype; gates and states in fp32, as a layer has them."""
    y = x.map(lambda part: part.detach().to(DEVICE, torch.float32))
    return replace(y, q=y.q.to(dtype), k=y.k.to(dtype), v=y.v.to(dtype))


def compare(
    rule: UpdateRule, x: Inputs, tolerance: float, dtype: torch.dtype = torch.float32, *, backward: bool = True
) -> None:
    # The recurrence is slow, and other tests hold the parallel form equal to it.
    wanted = run(rule, x, "recurrent" if x.q.shape[1] < 50 else "chunked", backward=backward)
    actual = run(rule, placed(x, dtype), "triton", backward=backward)
    errors = {name: error(actual[name], right) for name, right in wanted.items()}
    print({name: f"{value:.1e}" for name, value in errors.items()})
    assert max(errors.values()) <= tolerance, {name: f"{value:.1e}" for name, value in errors.items()}


@pytest.mark.slow(keep="cg-19")
@pytest.mark.parametrize("length", [1, 19])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_output_states_and_gradients_are_those_of_the_recurrence(rule, length):
    compare(rule, given(rule, length, heads=2 if rule is GKA else 1), 2e-5)


@pytest.mark.parametrize("rule", [GKA, CG], ids=["chebyshev", "cg"])
def test_widths_that_are_no_multiple_of_a_block(rule):
    compare(rule, given(rule, 5, key_dim=12, value_dim=20), 2e-5)


@pytest.mark.slow
def test_keys_that_do_not_fill_their_blocks():
    # Two chunks and heads: the next head's keys lie behind a head's own, and would get into the second chunk's state.
    compare(GKA, given(GKA, 19, key_dim=48, heads=2), 2e-5)


@pytest.mark.slow
def test_segments_whose_states_do_not_fit_the_workspace(monkeypatch):
    x = given(GKA, 37)
    whole = run(GKA, placed(x, torch.float32), "triton")
    monkeypatch.setattr(ridge_launch, "WORKSPACE", 1)
    monkeypatch.setattr(ridge_launch, "BUSY", 1)
    monkeypatch.setattr("deltalab.kernels.launch._plans", {})
    assert ridge_launch.RidgeLaunch.of(placed(x, torch.float32).k, x.v, 0.02, True, 64).boundaries == 4
    compare(GKA, x, 2e-5)
    for name, part in run(GKA, placed(x, torch.float32), "triton").items():
        assert error(part, whole[name].double().cpu()) <= 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("low", [-1000.0, -torch.inf])
@pytest.mark.parametrize("adaptive", [True, False])
def test_decays_without_end(low, adaptive):
    rule = replace(GKA, adaptive=adaptive)
    x = given(rule, 21)
    at = torch.rand(x.gates["g"].shape, generator=torch.Generator().manual_seed(3))
    g = torch.where(at < 0.3, low, torch.where(at < 0.6, 0.0, x.gates["g"]))
    compare(rule, replace(x, gates={"g": g}), 2e-5)


def test_where_there_is_nothing_to_regress_on_the_answer_is_zero():
    x = given(GKA, 18, started=False)
    x = replace(x, k=torch.zeros_like(x.k))
    for name, part in run(GKA, placed(x, torch.float32), "triton").items():
        assert name == "d q" or part.isfinite().all(), name
        assert not name.startswith(("o", "last")) or not part.any(), name


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_packed_sequences_are_each_for_itself(backend):
    bounds = torch.tensor([0, 3, 20, 23])
    x = given(GKA, 23, started=False)
    wanted = run(GKA, x, "recurrent", cu_seqlens=bounds)
    for name, part in run(GKA, placed(x, torch.float32), backend, cu_seqlens=bounds.to(DEVICE)).items():
        assert error(part, wanted[name]) <= 2e-5, name


def test_stacked_models_fold_into_the_batch():
    x = placed(given(GKA, 18), torch.float32)
    stacked = [torch.stack([part, part.flip(1)]).requires_grad_() for part in (x.q, x.k, x.v, x.gates["g"])]

    def scanned(q, k, v, g):
        return deltalab.scan(GKA, q, k, v, {"g": g}, state=x.state, backend="triton")[0]

    together = torch.func.vmap(scanned)(*stacked)
    alone = torch.stack([scanned(*(part[i] for part in stacked)) for i in range(2)])
    torch.testing.assert_close(together, alone)
    grads = [torch.autograd.grad((y * cosines(y).float()).sum(), stacked) for y in (together, alone)]
    torch.testing.assert_close(*grads)


def test_the_kernels_are_one_node_of_a_compiled_graph():
    x = placed(given(GKA, 3), torch.float32)

    def fused(q, k, v, g):
        return GKA.fused(q, k, v, {"g": g}, scale=1.0, state=x.state)[0]

    leaves = [part.requires_grad_() for part in (x.q, x.k, x.v, x.gates["g"])]
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    outputs = [f(*leaves) for f in (compiled, fused)]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), leaves) for o in outputs))


def test_token_after_token_is_the_whole_sequence():
    length = 6
    x = placed(given(GKA, length), torch.float32)
    with torch.no_grad():
        whole, last = deltalab.scan(GKA, x.q, x.k, x.v, x.gates, state=x.state, backend="triton")
        state, out = x.state, []
        for t in range(length):
            one = x.span(t, t + 1)
            o, state = deltalab.scan(GKA, one.q, one.k, one.v, one.gates, state=state, backend="triton")
            out.append(o)
    assert error(torch.cat(out, 1), whole.double().cpu()) <= 1e-5
    assert all(error(a, b.double().cpu()) <= 1e-6 for a, b in zip(state, last, strict=True))


@pytest.mark.parametrize(
    ("rule", "dtype", "key_dim", "says"),
    [
        (deltalab.get_rule("gka", solver="exact"), torch.float32, 16, "regression by the exact solver has no Triton"),
        (GKA, torch.float64, 16, r"bf16, fp16 or fp32, not torch\.float64"),
        (GKA, torch.float32, 129, "K up to 128, not 129"),
        (GKA, torch.bfloat16, 257, "K up to 256, not 257"),
    ],
    ids=["exact", "fp64", "wide", "wide in bf16"],
)
def test_what_has_no_kernel_is_refused_by_name_and_else_said_once(rule, dtype, key_dim, says, monkeypatch, caplog):
    x = given(rule, 3, key_dim=key_dim, started=False).map(lambda part: part.to(DEVICE, dtype))
    with pytest.raises(InputError, match=says) as refused:
        deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="triton")
    assert "\n" not in str(refused.value)
    monkeypatch.setattr("deltalab.ops.recurrence.automatic", available)
    _say.cache_clear()
    with caplog.at_level(logging.INFO, "deltalab"):
        outputs = [deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend=backend)[0] for backend in ("auto", "auto")]
    assert len(caplog.records) == 1
    torch.testing.assert_close(outputs[1], deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="chunked")[0])


def test_a_state_that_grows_is_refused():
    x = placed(given(GKA, 3, started=False), torch.float32)
    with pytest.raises(InputError, match="g is a log-decay"):
        deltalab.scan(GKA, x.q, x.k, x.v, {"g": -x.gates["g"]}, backend="triton")


def test_any_rule_that_reads_by_regression_reaches_the_kernels():
    ridge = Ridge(iterations=4, strength=0.1)

    @dataclass(frozen=True, kw_only=True)
    class Twice(UpdateRule):
        """A user's rule, which doubles its values."""

        name: ClassVar[str] = "twice"
        g: Gate = knob(forms.mamba2_decay())

        def initial_state(self, k: Tensor, v: Tensor) -> State:
            return GKA.initial_state(k, v)

        def mix(
            self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
        ) -> tuple[Tensor, State]:
            return regression(ridge, q, k, 2 * v, gates["g"], scale=scale, state=(state[0], state[1]))

        def fused(
            self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
        ) -> tuple[Tensor, State]:
            return fused_regression(ridge, q, k, 2 * v, gates["g"], scale=scale, state=(state[0], state[1]))

        def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
            return lacks_kernel(ridge, k, v)

    compare(Twice(), given(Twice(), 7), 2e-5)


def test_gradients_through_the_iterations_have_no_kernel():
    x = placed(given(GKA, 3), torch.float32)
    unrolled = Ridge(backward="autograd")
    with pytest.raises(InputError, match="by gradients through the iterations has no Triton kernel: use deltalab"):
        fused_regression(unrolled, x.q, x.k, x.v, x.gates["g"], scale=1.0, state=x.state)


# On a GPU, compilation takes most of the time, so some cases run in one dtype alone.
LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
FULL = deltalab.get_rule("gka")


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 65, 1000])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_errors_on_a_gpu(dtype, width, length):
    x = given(FULL, length, dtype=dtype, batch=2, key_dim=width, value_dim=width, heads=2, fade=0.02)
    compare(FULL, x, LIMITS[dtype], dtype, backward=width == 64 or (dtype == torch.bfloat16 and length > 1))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [65, 1000])
def test_errors_in_fp16_on_a_gpu(length):
    x = given(FULL, length, dtype=torch.float16, batch=2, key_dim=64, value_dim=64, heads=2, fade=0.02)
    compare(FULL, x, LIMITS[torch.float16], torch.float16)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("rule", [FULL, replace(FULL, solver="cg"), replace(FULL, adaptive=False, ridge=0.2)], ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_errors_of_every_solver_on_a_gpu(dtype, rule):
    x = given(rule, 1000, dtype=dtype, batch=2, key_dim=128, value_dim=128, heads=2, fade=0.02)
    compare(rule, x, LIMITS[dtype], dtype)


@pytest.mark.gpu
def test_errors_with_the_widest_keys_on_a_gpu():
    x = given(FULL, 100, dtype=torch.bfloat16, key_dim=256, value_dim=64, fade=0.02)
    compare(FULL, x, LIMITS[torch.bfloat16], torch.bfloat16, backward=False)


@pytest.mark.gpu
def test_repeats_on_a_gpu_are_equal():
    """A result that changes would be a race."""
    x = placed(
        given(FULL, 1000, dtype=torch.bfloat16, batch=2, key_dim=64, value_dim=64, heads=2, fade=0.02), torch.bfloat16
    )
    first = run(FULL, x, "triton")
    for _ in range(50):
        for name, part in run(FULL, x, "triton").items():
            assert torch.equal(part, first[name]), name
