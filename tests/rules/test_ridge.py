"""Ridge regression for every token: the chunked form and the implicit gradients against direct computation."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import deltalab
from deltalab.authoring.inputs import normal
from deltalab.errors import InputError
from deltalab.ops.reference import from_chunks
from deltalab.ridge import SOLVERS, Grams, System, chebyshev, conjugate_gradient, regression, solve
from deltalab.rule import UpdateRule
from deltalab.structure import Ridge

B, T, H, K, V = 2, 13, 2, 6, 3
NAMES = ("q", "k", "v", "g", "H", "U")
torch.set_num_threads(1)
CONVERGED = Ridge(strength=0.1, iterations=150)


def inputs(length: int = T) -> dict[str, Tensor]:
    """q, k, v, g, H, U with a state that earlier tokens left."""
    q, k = (F.normalize(normal(B, length, H, K, seed=i), dim=-1) for i in (1, 2))
    g = -normal(B, length, H, seed=3).abs()
    past, values = normal(B, H, 2 * K, K, seed=5) / 3, normal(B, H, 2 * K, V, seed=6)
    gram, memory = past.transpose(-1, -2) @ past, past.transpose(-1, -2) @ values
    return dict(zip(NAMES, (q, k, normal(B, length, H, V, seed=4), g, gram, memory), strict=True))


def regressed(ridge: Ridge, x: dict[str, Tensor], chunk_size: int = 5) -> dict[str, Tensor]:
    """Output, states, and gradients of a weighted sum of all of them."""
    x = {name: value.clone().requires_grad_() for name, value in x.items()}
    state = (x["H"], x["U"])
    o, after = regression(ridge, *(x[n] for n in "qkvg"), scale=0.7, state=state, chunk_size=chunk_size)
    results = {"o": o, "H'": after[0], "U'": after[1]}
    total = sum((y * normal(*y.shape, seed=20 + i)).sum() for i, y in enumerate(results.values()))
    assert isinstance(total, Tensor)
    gradients = torch.autograd.grad(total, list(x.values()))
    return results | {f"d{name}": d for name, d in zip(x, gradients, strict=True)}


def token_by_token(ridge: Ridge, x: dict[str, Tensor]) -> dict[str, Tensor]:
    x = {name: value.clone().requires_grad_() for name, value in x.items()}
    state, out = (x["H"], x["U"]), []
    for t in range(x["q"].shape[1]):
        o, state = regression(ridge, *(x[n][:, t : t + 1] for n in "qkvg"), scale=0.7, state=state)
        out.append(o)
    results = {"o": torch.cat(out, dim=1), "H'": state[0], "U'": state[1]}
    total = sum((y * normal(*y.shape, seed=20 + i)).sum() for i, y in enumerate(results.values()))
    assert isinstance(total, Tensor)
    gradients = torch.autograd.grad(total, list(x.values()))
    return results | {f"d{name}": d for name, d in zip(x, gradients, strict=True)}


def error(got: Tensor, want: Tensor) -> float:
    return float(((got - want).norm() / want.norm()).detach())


def close(got: dict[str, Tensor], want: dict[str, Tensor], limit: float) -> None:
    errors = {name: error(got[name], want[name]) for name in want}
    assert max(errors.values()) < limit, errors


def grams_one_by_one(x: dict[str, Tensor]) -> Tensor:
    """H_t by the recurrence, [B, T, H, K, K]."""
    gram, all_of_them = x["H"], []
    for k, g in zip(x["k"].unbind(1), x["g"].unbind(1), strict=True):
        gram = g.exp()[..., None, None] * gram + k.unsqueeze(-1) * k.unsqueeze(-2)
        all_of_them.append(gram)
    return torch.stack(all_of_them, dim=1)


def in_time(x: Tensor) -> Tensor:
    values: Tensor = from_chunks(x.flatten(3), B, T).unflatten(-1, x.shape[3:])
    return values


@pytest.mark.parametrize("chunk_size", [1, 5, 13])
def test_products_and_norms_without_forming_a_matrix(chunk_size: int) -> None:
    """Products and norms (Eq. 5) beside a decay that forgets everything."""
    x = inputs()
    x["g"][:, 7] = -math.inf
    want = grams_one_by_one(x)
    grams, last = Grams.of(x["k"], x["g"], x["H"], chunk_size)
    assert error(last, want[:, -1]) < 1e-14
    assert error(in_time(grams.formed()), want) < 1e-14
    assert error(in_time(grams.squares()).squeeze(-1).sqrt(), want.flatten(-2).norm(dim=-1)) < 1e-14
    vectors = normal(*grams.k.shape, seed=9)
    assert error(in_time(grams.times(vectors)), (want @ in_time(vectors).unsqueeze(-1)).squeeze(-1)) < 1e-14


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize(("solver", "iterations"), [("chebyshev", 4), ("chebyshev", 30), ("cg", 4), ("exact", 30)])
def test_chunks_are_tokens(solver: Any, iterations: int, adaptive: bool) -> None:
    ridge = Ridge(solver=solver, iterations=iterations, adaptive=adaptive, strength=0.1)
    want = token_by_token(ridge, inputs())
    for chunk_size in (4, 64):
        close(regressed(ridge, inputs(), chunk_size), want, 1e-9)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("solver", ["chebyshev", "cg"])
def test_implicit_gradients_are_those_of_the_exact_solution(solver: Any, adaptive: bool) -> None:
    ridge = replace(CONVERGED, solver=solver, adaptive=adaptive)
    close(regressed(ridge, inputs()), regressed(replace(ridge, solver="exact"), inputs()), 1e-8)


def test_implicit_gradients_approach_those_of_the_iterations() -> None:
    def apart(iterations: int) -> float:
        ridge = replace(CONVERGED, iterations=iterations)
        got, want = (regressed(replace(ridge, backward=b), inputs())["dk"] for b in ("implicit", "autograd"))
        return error(got, want)

    assert apart(3) > 1e-3, "the test could not tell the two apart"
    assert apart(150) < 1e-8


@pytest.mark.parametrize("iterations", [1, 2, 7])
def test_lemma_2(iterations: int) -> None:
    """Through Chebyshev iteration dq is exact after any number of steps; through conjugate gradient it is not."""
    ridge = Ridge(iterations=iterations)
    implicit, auto = (regressed(replace(ridge, backward=b), inputs())["dq"] for b in ("implicit", "autograd"))
    assert error(implicit, auto) < 1e-10
    ridge = Ridge(iterations=2, solver="cg")
    implicit, auto = (regressed(replace(ridge, backward=b), inputs())["dq"] for b in ("implicit", "autograd"))
    assert error(implicit, auto) > 1e-3


def test_lemma_1() -> None:
    """dk as Eq. 7 writes it, for a loss that reads x alone."""
    x = inputs()
    k = x["k"].clone().requires_grad_()
    solution, _ = solve(CONVERGED, x["q"], k, x["g"], x["H"], chunk_size=5)
    dx = normal(*solution.shape, seed=9)
    (got,) = torch.autograd.grad((solution * dx).sum(), k)
    grams = grams_one_by_one(x)
    norm = grams.flatten(-2).norm(dim=-1)[..., None]
    inverse = torch.linalg.inv(grams + CONVERGED.strength * norm[..., None] * torch.eye(K, dtype=torch.float64))
    solved, dq = ((inverse @ y.unsqueeze(-1)).squeeze(-1) for y in (x["q"], dx))
    w = 2 * CONVERGED.strength * (solved * dq).sum(-1, keepdim=True) / norm
    outer = dq.unsqueeze(-1) * solved.unsqueeze(-2)
    both = -outer - outer.transpose(-1, -2) - w[..., None] * grams
    want = torch.zeros_like(got)
    for i in range(T):
        for t in range(i, T):
            decay = x["g"][:, i + 1 : t + 1].sum(1).exp()[..., None]
            want[:, i] += decay * (both[:, t] @ x["k"][:, i].unsqueeze(-1)).squeeze(-1)
    assert error(got, want) < 1e-8


def spd(low: float, high: float) -> tuple[Tensor, Tensor]:
    """A symmetric matrix with eigenvalues evenly in [low, high], and a right-hand side."""
    basis, _ = torch.linalg.qr(normal(40, 40, seed=1))
    return basis @ torch.linspace(low, high, 40).double().diag() @ basis.T, normal(40, seed=2)


def test_chebyshev_keeps_its_bound() -> None:
    """The residual after r steps is at most 1 / T_{r+1}((high + low) / (high - low)), and comes near it."""
    low, high = torch.tensor([0.02]).double(), torch.tensor([1.02]).double()
    matrix, q = spd(0.02, 1.02)
    argument = float((high + low) / (high - low))
    for r, x in zip(range(1, 60), chebyshev(lambda x: x @ matrix, q, low, high), strict=False):
        bound = 1 / math.cosh((r + 1) * math.acosh(argument))
        assert 0.2 * bound < error(x @ matrix, q) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("size", [1.0, 1e-30, 0.0])
def test_conjugate_gradient_of_small_right_hand_sides(size: float) -> None:
    matrix, q = spd(0.02, 1.02)
    iterates = conjugate_gradient(lambda x: x @ matrix.float(), size * q.float())
    x = [next(iterates) for _ in range(200)][-1]
    want = size * torch.linalg.solve(matrix, q)
    assert (x.double() - want).norm() <= 1e-4 * want.norm()


@pytest.mark.parametrize(("size", "stops"), [(3, True), (60, False)])
def test_conjugate_gradient_stops_where_no_step_changes_anything(size: int, stops: bool) -> None:
    """What it yields then is what further steps give, as those under vmap, which looks at no numbers."""
    diagonal, q = torch.linspace(1, 9, size, dtype=torch.float64), normal(2, size, seed=1)
    products = []

    def iterates(q: Tensor) -> Tensor:
        def times(x: Tensor) -> Tensor:
            products.append(x)
            return diagonal * x

        return torch.stack(list(itertools.islice(conjugate_gradient(times, q), 12)))

    got = iterates(q)
    assert (len(products) < 8) is stops
    torch.testing.assert_close(got, torch.func.vmap(iterates)(q[None])[0])


@pytest.mark.parametrize(("backward", "grows"), [("implicit", False), ("autograd", True)])
def test_what_backward_keeps(backward: Any, grows: bool) -> None:
    """Implicit differentiation saves as many tensors for 40 iterations as for 2."""

    def kept(iterations: int) -> int:
        x = {name: value.requires_grad_() for name, value in inputs().items()}
        sizes: list[int] = []

        def count(y: Tensor) -> Tensor:
            sizes.append(y.numel())
            return y

        with torch.autograd.graph.saved_tensors_hooks(count, lambda y: y):
            solve(Ridge(iterations=iterations, backward=backward), x["q"], x["k"], x["g"], x["H"])
        return sum(sizes)

    assert (kept(40) > kept(2)) is grows


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("solver", ["chebyshev", "cg", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padding(solver: Any, adaptive: bool, dtype: torch.dtype) -> None:
    """Before any other key, zero keys read nothing; after others, the state only decays, until it is empty."""
    ridge = Ridge(solver=solver, adaptive=adaptive)
    x = {name: value.to(dtype) for name, value in inputs(200).items()}
    x["H"], x["U"] = torch.zeros_like(x["H"]), torch.zeros_like(x["U"])
    x["g"] = x["g"].clamp(min=-1.0)
    for part in ("q", "k", "v"):
        x[part][:, :3] = 0
    x["k"][:, 8:] = 0
    results = regressed(ridge, x)
    assert all(value.isfinite().all() for value in results.values())
    assert not results["o"][:, :3].any()
    assert not results["dq"][:, :3].any()
    unpadded = {name: value[:, 3:8] if name in "qkvg" else value for name, value in x.items()}
    assert error(results["o"][:, 3:8], regressed(ridge, unpadded)["o"]) < 1e-4


def rule(**knobs: Any) -> UpdateRule:
    return deltalab.get_rule("gka", g=0, **knobs)


@pytest.mark.parametrize("ridge", [0.2, 1.5])
def test_the_kalman_filter_is_the_limit(ridge: float) -> None:
    """They agree without gating, with a fixed ridge and with enough iterations."""
    x = inputs(40)
    want, _ = deltalab.scan(deltalab.get_rule("kalman", eta=1, ridge=ridge), x["q"], x["k"], x["v"], {})
    errors = []
    for iterations in (3, 30, 300):
        o, _ = deltalab.scan(rule(adaptive=False, ridge=ridge, iterations=iterations), x["q"], x["k"], x["v"], {})
        errors.append(error(o, want))
    assert errors[0] > errors[1] > errors[2]
    assert errors[-1] < 1e-9
    exact, _ = deltalab.scan(rule(adaptive=False, ridge=ridge, solver="exact"), x["q"], x["k"], x["v"], {})
    assert error(exact, want) < 1e-12


def test_the_kalman_filter_is_weighted_ridge_regression() -> None:
    """Eq. 3, minimized in closed form at every token."""
    x, ridge = inputs(20), 0.5
    eta = x["g"].exp()
    o, (inverse, memory) = deltalab.scan(
        deltalab.get_rule("kalman", ridge=ridge), x["q"], x["k"], x["v"], {"eta": eta}, scale=1.0
    )
    for t in (0, 4, 19):
        keys, values, weights = (y[:, : t + 1].transpose(1, 2) for y in (x["k"], x["v"], eta[..., None]))
        hessian = (weights * keys).transpose(-1, -2) @ keys + ridge * torch.eye(K, dtype=torch.float64)
        best = torch.linalg.solve(hessian, (weights * keys).transpose(-1, -2) @ values)
        assert error(o[:, t], torch.einsum("bhk,bhkv->bhv", x["q"][:, t], best)) < 1e-12
    assert error(inverse, torch.linalg.inv(hessian)) < 1e-12
    assert error(memory, best) < 1e-12


def test_more_iterations_come_closer_to_the_exact_solver() -> None:
    x = inputs(40)
    gates = {"g": x["g"]}
    outputs = [
        deltalab.scan(deltalab.get_rule("gka", **knobs), x["q"], x["k"], x["v"], gates)[0]
        for knobs in ({"solver": "exact"}, {"iterations": 5}, {"iterations": 30}, {"iterations": 200})
    ]
    errors = [error(o, outputs[0]) for o in outputs[1:]]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-9


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="iterations has no effect with solver exact"):
        deltalab.get_rule("gka", solver="exact", iterations=5)
    with pytest.raises(InputError, match="strength > 0"):
        Ridge(strength=0.0)


def test_a_caller_brings_a_solver_of_its_own() -> None:
    """Benchmarks compare solvers: they are given, and the library's table stays as it is."""
    q, k, v = (normal(1, 20, 2, 4, seed=i) for i in (1, 2, 3))
    g, state = -normal(1, 20, 2, seed=4).abs(), (torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4))
    calls = []

    def solver(system: System, rhs: Tensor) -> Iterator[Tensor]:
        calls.append(rhs.shape)
        return SOLVERS["cg"](system, rhs)

    found = []
    for ridge, own in ((Ridge(), solver), (Ridge(solver="cg"), None)):
        queries = q.clone().requires_grad_()
        o, _ = regression(ridge, queries, k, v, g, scale=1.0, state=state, solver=own)
        found.append((o, torch.autograd.grad(o.sum(), queries)[0]))
    assert len(calls) == 2, "forward and backward"
    for mine, its in zip(*found, strict=True):
        assert torch.equal(mine, its)
