"""Reading by ridge regression: a linear system for every token, solved chunk by chunk without forming its matrix.

Chebyshev iteration and conjugate gradient only need products H_t x, which have the form of linear attention. Backward
is implicit differentiation, so that no iterate has to be kept (Gated KalmaNet, arXiv:2511.21016, 4.2).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltalab.errors import InputError
from deltalab.ops.backends import available, lacks_triton
from deltalab.ops.reference import chunked, decays, from_chunks, into_chunks
from deltalab.rule import Operands
from deltalab.structure import DECAY, Ridge

CHUNK = 64
Product = Callable[[Tensor], Tensor]


def regression(
    ridge: Ridge,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float,
    state: tuple[Tensor, Tensor],
    chunk_size: int = CHUNK,
    solver: "Solver | None" = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """o_t = scale U_t^T x_t, where (H_t + lambda_t I) x_t ~= q_t, with the states of `structure.Ridge`.

    q, k [B, T, H, K]; v [B, T, H, V]; g: log-decay, [B, T, H] or [H]; state: (H [B, H, K, K], U [B, H, K, V]).
    solver: iterates to a solution; those of `ridge.solver` where None. The exact solver takes none.
    Computes in the dtype of the state. Returns o [B, T, H, V] and the next state. Differentiable once.
    """
    gram, memory = state
    q, k, v, g = (x.to(memory.dtype) for x in (q, k, v, g.expand(k.shape[:3])))
    x, gram = solve(ridge, q, k, g, gram, chunk_size=chunk_size, solver=solver)
    o, (memory,) = chunked(DECAY, Operands(r=x, k=k, u=v, g=g), scale=scale, state=(memory,), chunk_size=chunk_size)
    return o, (gram, memory)


def fused_regression(
    ridge: Ridge,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float,
    state: tuple[Tensor, Tensor],
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`regression` by Triton kernels, for a rule's `fused`: fp32 within, o in v's dtype.

    Raises `InputError` where `lacks_kernel` gives a reason, and where no kernel can run.
    """
    device = v.device.type
    kernel = available(device).regression
    lacking = lacks_kernel(ridge, k, v)
    if lacking or kernel is None:
        raise InputError(f"{lacking or f'the kernels need {lacks_triton(device)}'}: use deltalab.ridge.regression")
    return kernel(ridge, q, k, v, g, scale=scale, state=state)


def lacks_kernel(ridge: Ridge, k: Tensor, v: Tensor) -> str | None:
    """Why `fused_regression` does not take inputs like these, as a clause, or None; for a rule's `lacks_kernel`."""
    if ridge.solver == "exact" or ridge.backward == "autograd":
        what = "the exact solver" if ridge.solver == "exact" else "gradients through the iterations"
        return f"a ridge regression by {what} has no Triton kernel"
    if v.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the Triton kernels take q, k and v in bf16, fp16 or fp32, not {v.dtype}"
    most = 256 if ridge.in_one_half(v.dtype) else 128  # H must fit on the chip
    if k.shape[-1] > most:
        return f"the Triton kernels take q and k in {v.dtype}, with this ridge, with K up to {most}, not {k.shape[-1]}"
    if v.device.type == "cpu" and v.dtype != torch.float32:
        return f"on a CPU, Triton's interpreter multiplies matrices in {v.dtype} wrongly"
    return None


def solve(
    ridge: Ridge,
    q: Tensor,
    k: Tensor,
    g: Tensor,
    gram: Tensor,
    *,
    chunk_size: int = CHUNK,
    solver: "Solver | None" = None,
) -> tuple[Tensor, Tensor]:
    """x [B, T, H, K] with (H_t + lambda_t I) x_t ~= q_t, and the last H.

    q, k [B, T, H, K]; g [B, T, H]; gram: H before the first token [B, H, K, K]; solver: as in `regression`. Computes in
    the dtype of its inputs. x_t is 0 where H_t is empty, or so faded that the square of its norm loses precision: there
    is nothing to read, and lambda_t would be 0.
    """
    iterates = solver or SOLVERS.get(ridge.solver)
    batch, length = q.shape[:2]
    grams, last = Grams.of(k, g, gram, min(chunk_size, length))
    rhs = into_chunks(q, grams.k.shape[-2])
    if iterates is None:
        x = _exact(ridge, grams, rhs)
    elif ridge.backward == "autograd":
        x = System.of(ridge, grams).solve(rhs, iterates)
    else:
        with torch.no_grad():
            frozen = System.of(ridge, grams)
            x = frozen.solve(rhs, iterates)
        if torch.is_grad_enabled():
            # Implicit differentiation is d((H + lambda I) x) = dq at a fixed x. The product with x goes to the right-
            # hand side with value zero; from it autograd finds dH, and dlambda through the norm (Lemma 1).
            product = System.of(ridge, grams).times(x)
            x = _Implicit.apply(  # type: ignore[no-untyped-call]
                rhs - (product - product.detach()), x, ridge, iterates, *frozen.tensors()
            )
    return from_chunks(x, batch, length), last


@dataclass(frozen=True)
class Grams:
    """H_t = exp(g_t) H_{t-1} + k_t k_t^T at every token of N chunks of C tokens, as factors.

    start: H before each chunk [N, B H, K, K]. k: [N, B H, C, K].
    within: the decay from token j to token i of a chunk, lower triangular [N, B H, C, C]; the paper's M transposed.
    since: the decay from before the chunk to each of its tokens [N, B H, C, 1]; the paper's zeta.
    """

    start: Tensor
    k: Tensor
    within: Tensor
    since: Tensor

    @classmethod
    def of(cls, k: Tensor, g: Tensor, gram: Tensor, chunk_size: int) -> "tuple[Grams, Tensor]":
        """The factors for k [B, T, H, K], g [B, T, H] and H before the first token, and H after the last."""
        k, g = into_chunks(k, chunk_size), into_chunks(g, chunk_size)
        within = decays(g)
        since = within[..., :1] * g[..., :1, None].exp()
        added = (within[..., -1, :, None] * k).transpose(-1, -2) @ k
        start, starts = gram.flatten(0, 1), []
        for keep, add in zip(since[..., -1:, :].unbind(), added.unbind(), strict=True):
            starts.append(start)
            start = keep * start + add
        return cls(torch.stack(starts), k, within, since), start.view_as(gram)

    def times(self, x: Tensor) -> Tensor:
        """H_t x_t, for x [N, B H, C, K]."""
        return self.since * (x @ self.start.transpose(-1, -2)) + (x @ self.k.transpose(-1, -2) * self.within) @ self.k

    def squares(self) -> Tensor:
        """||H_t||_F ** 2, [N, B H, C, 1], as three sums of squares, in which nothing cancels (Eq. 5)."""
        before = self.start.square().sum((-1, -2), keepdim=True)
        across = ((self.k @ self.start) * self.k).sum(-1, keepdim=True)
        overlaps = (self.k @ self.k.transpose(-1, -2)).square()
        new = ((self.within @ overlaps) * self.within).sum(-1, keepdim=True)
        return self.since.square() * before + 2 * self.since * (self.within @ across) + new

    def formed(self) -> Tensor:
        """Every H_t as a matrix, [N, B H, C, K, K]."""
        new = torch.einsum("...ij,...jk,...jl->...ikl", self.within, self.k, self.k)
        return self.since[..., None] * self.start.unsqueeze(-3) + new


@dataclass(frozen=True)
class System:
    """The matrices H_t + lambda_t I of all tokens.

    low, high: bounds of their eigenvalues, [N, B H, C, 1] each; low is lambda_t.
    live: whether H_t is more than empty, [N, B H, C, 1].
    """

    ridge: Ridge
    grams: Grams
    low: Tensor
    high: Tensor
    live: Tensor

    @classmethod
    def of(cls, ridge: Ridge, grams: Grams) -> "System":
        return cls(ridge, grams, *_bounds(ridge, grams.squares()))

    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors."""
        grams = self.grams
        return grams.start, grams.k, grams.within, grams.since, self.low, self.high, self.live

    def times(self, x: Tensor) -> Tensor:
        return self.grams.times(x) + self.low * x

    def solve(self, rhs: Tensor, iterates: "Solver") -> Tensor:
        return _nth(iterates(self, rhs * self.live), self.ridge.iterations)


def _bounds(ridge: Ridge, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """lambda, ||H||_F + lambda, and whether H is more than empty, from ||H||_F ** 2."""
    finfo = torch.finfo(squares.dtype)
    full = squares > finfo.tiny / finfo.eps
    norm = torch.where(full, squares.where(full, squares.new_ones(())).sqrt(), 0.0)
    if not ridge.adaptive:
        low = torch.full_like(norm, ridge.strength)
        return low, norm + low, torch.ones_like(full)
    low = torch.where(full, ridge.strength * norm, 1.0)
    return low, norm + low, full


def _exact(ridge: Ridge, grams: Grams, rhs: Tensor) -> Tensor:
    """The oracle: it forms and factorizes every H_t, takes its norm directly, and leaves gradients to autograd."""
    formed = grams.formed()
    low, _, live = _bounds(ridge, formed.square().sum((-1, -2)).unsqueeze(-1))
    eye = torch.eye(formed.shape[-1], dtype=formed.dtype, device=formed.device)
    x: Tensor = torch.linalg.solve(formed + low[..., None] * eye, (rhs * live).unsqueeze(-1)).squeeze(-1)
    return x


class _Implicit(torch.autograd.Function):
    """Returns x. Its backward is that of A^{-1} rhs, for the symmetric A of a `System`: d rhs = A^{-1} dx (Table 1)."""

    generate_vmap_rule = True
    approximate = True  # `rule check` does not hold it to finite differences: it is the gradient of the exact solution

    @staticmethod
    def forward(rhs: Tensor, x: Tensor, ridge: Ridge, iterates: "Solver", *system: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.ridge, ctx.iterates, *system = inputs
        ctx.save_for_backward(*system)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        *grams, low, high, live = ctx.saved_tensors
        system = System(ctx.ridge, Grams(*grams), low, high, live)
        return system.solve(dx, ctx.iterates), None, None, None, *[None] * len(ctx.saved_tensors)


def chebyshev(times: Product, q: Tensor, low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """Iterates xi_1, xi_2, ... to A xi = q (Algorithm 1), for eigenvalues of A within [low, high].

    times: x to A x, with A symmetric. xi_r is a polynomial of degree r in A, times q, and so linear in q.
    """
    rho_squared = ((high - low) / (high + low)).square()
    step = 2 / (high + low)
    omega = torch.full_like(step, 2.0)
    before, xi = torch.zeros_like(q), step * q
    while True:
        omega = 4 / (4 - rho_squared * omega)
        before, xi = xi, xi - omega * step * (times(xi) - q) + (omega - 1) * (xi - before)
        yield xi


def conjugate_gradient(times: Product, q: Tensor) -> Iterator[Tensor]:
    """Iterates x_1, x_2, ... to A x = q, for A symmetric and positive definite.

    Vectors are divided by the largest element of q, or squares of small gradients would vanish in fp32. An x whose
    residual is as small as rounding stays as it is, since another step would divide 0 by 0.
    """
    finfo = torch.finfo(q.dtype)
    size = q.detach().abs().amax(-1, keepdim=True).clamp_min(finfo.tiny)
    r = q / size
    x, p = torch.zeros_like(q), r
    squared = _dot(r, r)
    enough = finfo.eps**2 * squared.detach()
    one = squared.new_ones(())
    while True:
        product = times(p)
        curvature = _dot(p, product)
        going = (squared > enough) & (curvature > 0)
        alpha = torch.where(going, squared / curvature.where(going, one), 0.0)
        x, r = x + alpha * p, r - alpha * product
        before, squared = squared, _dot(r, r)
        p = r + squared / before.where(going, one) * p
        yield size * x


Solver = Callable[[System, Tensor], Iterator[Tensor]]
"""Iterates x_1, x_2, ... to the solution of a system for a right-hand side."""

SOLVERS: dict[str, Solver] = {
    "chebyshev": lambda system, q: chebyshev(system.times, q, system.low, system.high),
    "cg": lambda system, q: conjugate_gradient(system.times, q),
}
"""The iterates of each `Ridge.solver` but `exact`, from the first on."""


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _nth(iterates: Iterator[Tensor], n: int) -> Tensor:
    for _ in range(n - 1):
        next(iterates)
    return next(iterates)
