"""Reading by ridge regression: a linear system for every token, solved chunk by chunk without forming its matrix.

Chebyshev iteration and conjugate gradient need only products H_t x, which have the form of linear attention. Backward
is implicit differentiation, so that no iterate has to be kept (Gated KalmaNet, arXiv:2511.21016, section 4.2).
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
    """Reads by ridge regression, in the dtype of the state; differentiable once.

        o_t = scale U_t^T x_t,   (H_t + lambda_t I) x_t ~= q_t

    H and U are the states of `structure.Ridge`.

    Args:
        ridge: The settings of the regression.
        q: Queries, [B, T, H, K].
        k: Keys, [B, T, H, K].
        v: Values, [B, T, H, V].
        g: The log-decay, [B, T, H] or [H].
        scale: The factor of o.
        state: The pair H [B, H, K, K] and U [B, H, K, V].
        chunk_size: The tokens of a chunk.
        solver: The function that yields the iterates; None for the one that `ridge.solver` names. The exact solver has
            no iterates.

    Returns:
        o [B, T, H, V], and the next state.
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
    """Computes `regression` by Triton kernels, in fp32 with o in v's dtype. A rule calls it from its `fused`.

    Raises:
        InputError: `lacks_kernel` returns a reason, or no kernel can run.
    """
    device = v.device.type
    kernel = available(device).regression
    lacking = lacks_kernel(ridge, k, v)
    if lacking or kernel is None:
        raise InputError(f"{lacking or f'the kernels need {lacks_triton(device)}'}: use deltalab.ridge.regression")
    return kernel(ridge, q, k, v, g, scale=scale, state=state)


def lacks_kernel(ridge: Ridge, k: Tensor, v: Tensor) -> str | None:
    """Returns why `fused_regression` does not take inputs like k and v, as a clause; None if it takes them.

    A rule that uses `fused_regression` returns this value from its `lacks_kernel`.
    """
    if ridge.solver == "exact" or ridge.backward == "autograd":
        obstacle = "the exact solver" if ridge.solver == "exact" else "gradients through the iterations"
        return f"a ridge regression by {obstacle} has no Triton kernel"
    if v.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the Triton kernels take q, k and v in bf16, fp16 or fp32, not {v.dtype}"
    widest = 256 if ridge.in_one_half(v.dtype) else 128  # H must fit on the chip
    if k.shape[-1] > widest:
        return (
            f"the Triton kernels take q and k in {v.dtype}, with this ridge, with K up to {widest}, not {k.shape[-1]}"
        )
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
    """Solves (H_t + lambda_t I) x_t ~= q_t for every token, in the dtype of the inputs.

    x_t is 0 if H_t is zero, or so small that the square of its norm loses precision. In that case there is nothing to
    read, and lambda_t would be 0.

    Args:
        ridge: The settings of the regression.
        q: Queries, [B, T, H, K].
        k: Keys, [B, T, H, K].
        g: The log-decay, [B, T, H].
        gram: H before the first token, [B, H, K, K].
        chunk_size: The tokens of a chunk.
        solver: As in `regression`.

    Returns:
        x [B, T, H, K], and H after the last token.
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
            # Implicit differentiation needs the gradient of (H + lambda I) x at a fixed x. So the product minus its
            # detached copy, which is zero, is subtracted from the right-hand side. Autograd then finds dH from the
            # product, and dlambda through the norm (Lemma 1).
            product = System.of(ridge, grams).times(x)
            x = _Implicit.apply(  # type: ignore[no-untyped-call]
                rhs - (product - product.detach()), x, ridge, iterates, *frozen.tensors()
            )
    return from_chunks(x, batch, length), last


@dataclass(frozen=True)
class Grams:
    """The matrices H_t at every token of N chunks of C tokens, kept as factors from which products are computed.

        H_t = exp(g_t) H_{t-1} + k_t k_t^T

    Attributes:
        start: H before each chunk, [N, B H, K, K].
        k: Keys, [N, B H, C, K].
        within: The decay from token j to token i of a chunk, lower triangular, [N, B H, C, C]; the transpose of M in
            the paper.
        since: The decay from before the chunk to each of its tokens, [N, B H, C, 1]; zeta in the paper.
    """

    start: Tensor
    k: Tensor
    within: Tensor
    since: Tensor

    @classmethod
    def of(cls, k: Tensor, g: Tensor, gram: Tensor, chunk_size: int) -> "tuple[Grams, Tensor]":
        """Returns the factors, and H after the last token.

        Args:
            k: Keys, [B, T, H, K].
            g: The log-decay, [B, T, H].
            gram: H before the first token, [B, H, K, K].
            chunk_size: The tokens of a chunk.
        """
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
        """Returns H_t x_t for x [N, B H, C, K]."""
        return self.since * (x @ self.start.transpose(-1, -2)) + (x @ self.k.transpose(-1, -2) * self.within) @ self.k

    def squares(self) -> Tensor:
        """Returns ||H_t||_F ** 2, [N, B H, C, 1], as three sums of squares, in which nothing cancels (Eq. 5)."""
        before = self.start.square().sum((-1, -2), keepdim=True)
        across = ((self.k @ self.start) * self.k).sum(-1, keepdim=True)
        overlaps = (self.k @ self.k.transpose(-1, -2)).square()
        new = ((self.within @ overlaps) * self.within).sum(-1, keepdim=True)
        return self.since.square() * before + 2 * self.since * (self.within @ across) + new

    def formed(self) -> Tensor:
        """Returns every H_t as a matrix, [N, B H, C, K, K]."""
        new = torch.einsum("...ij,...jk,...jl->...ikl", self.within, self.k, self.k)
        return self.since[..., None] * self.start.unsqueeze(-3) + new


@dataclass(frozen=True)
class System:
    """The matrices H_t + lambda_t I of all tokens.

    Attributes:
        ridge: The settings of the regression.
        grams: The matrices H_t.
        low: The lower bound of the eigenvalues, which is lambda_t, [N, B H, C, 1].
        high: The upper bound of the eigenvalues, [N, B H, C, 1].
        live: Whether x_t is solved for, [N, B H, C, 1]. If False, H_t is zero or too small, and x_t is 0.
    """

    ridge: Ridge
    grams: Grams
    low: Tensor
    high: Tensor
    live: Tensor

    @classmethod
    def of(cls, ridge: Ridge, grams: Grams) -> "System":
        """Makes the system H_t + lambda_t I from the matrices H_t."""
        return cls(ridge, grams, *_bounds(ridge, grams.squares()))

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the tensors of the system."""
        grams = self.grams
        return grams.start, grams.k, grams.within, grams.since, self.low, self.high, self.live

    def times(self, x: Tensor) -> Tensor:
        """Returns (H_t + lambda_t I) x_t for x [N, B H, C, K]."""
        return self.grams.times(x) + self.low * x

    def solve(self, rhs: Tensor, iterates: "Solver") -> Tensor:
        """Returns the last of `ridge.iterations` iterates for the right-hand side [N, B H, C, K]."""
        return _nth(iterates(self, rhs * self.live), self.ridge.iterations)


def _bounds(ridge: Ridge, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `System.low`, `System.high` and `System.live` from the squares ||H_t||_F ** 2."""
    finfo = torch.finfo(squares.dtype)
    full = squares > finfo.tiny / finfo.eps
    norm = torch.where(full, squares.where(full, squares.new_ones(())).sqrt(), 0.0)
    if not ridge.adaptive:
        low = torch.full_like(norm, ridge.strength)
        return low, norm + low, torch.ones_like(full)
    low = torch.where(full, ridge.strength * norm, 1.0)
    return low, norm + low, full


def _exact(ridge: Ridge, grams: Grams, rhs: Tensor) -> Tensor:
    """Forms and factorizes every H_t, computes its norm directly, and leaves gradients to autograd.

    It is the reference for the other solvers.
    """
    formed = grams.formed()
    low, _, live = _bounds(ridge, formed.square().sum((-1, -2)).unsqueeze(-1))
    eye = torch.eye(formed.shape[-1], dtype=formed.dtype, device=formed.device)
    x: Tensor = torch.linalg.solve(formed + low[..., None] * eye, (rhs * live).unsqueeze(-1)).squeeze(-1)
    return x


class _Implicit(torch.autograd.Function):
    """Returns x unchanged. Its backward pass solves d rhs = A^{-1} dx for the symmetric A of a `System` (Table 1)."""

    generate_vmap_rule = True
    # This gradient is that of the exact solution. So `rule check` does not compare it with finite differences.
    approximate = True

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
    """Yields iterates xi_1, xi_2, ... to A xi = q for a symmetric A, by Chebyshev iteration (Algorithm 1).

    xi_r is a polynomial of degree r in A, times q, and so linear in q.

    Args:
        times: The function from x to A x.
        q: The right-hand side, [..., K].
        low: The lower bound of the eigenvalues of A, [..., 1].
        high: The upper bound of the eigenvalues of A, [..., 1].
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
    """Yields iterates x_1, x_2, ... to A x = q for a symmetric and positive definite A, by conjugate gradient.

    Vectors are divided by the largest element of q, because squares of small gradients would vanish in fp32. An x whose
    residual is as small as rounding stays as it is, because another step would divide 0 by 0.

    Args:
        times: The function from x to A x.
        q: The right-hand side, [..., K].
    """
    finfo = torch.finfo(q.dtype)
    size = q.detach().abs().amax(-1, keepdim=True).clamp_min(finfo.tiny)
    r = q / size
    x, p = torch.zeros_like(q), r
    squared = _dot(r, r)
    threshold = finfo.eps**2 * squared.detach()
    unit = squared.new_ones(())
    while True:
        product = times(p)
        curvature = _dot(p, product)
        going = (squared > threshold) & (curvature > 0)
        alpha = torch.where(going, squared / curvature.where(going, unit), 0.0)
        x, r = x + alpha * p, r - alpha * product
        before, squared = squared, _dot(r, r)
        p = r + squared / before.where(going, unit) * p
        yield (solution := size * x)
        if _settled(squared, threshold):
            while True:
                yield solution


Solver = Callable[[System, Tensor], Iterator[Tensor]]
"""Yields iterates x_1, x_2, ... to the solution of a system for a right-hand side."""

SOLVERS: dict[str, Solver] = {
    "chebyshev": lambda system, q: chebyshev(system.times, q, system.low, system.high),
    "cg": lambda system, q: conjugate_gradient(system.times, q),
}
"""The function for each value of `Ridge.solver` but `exact`, which does not iterate."""


def _settled(squared: Tensor, threshold: Tensor) -> bool:
    """Returns whether no residual is above its threshold. It is False where nobody may look at the numbers.

    A look would stop a GPU, cut a compiled graph in two, and cannot be had of a stack of runs. Where operators are
    counted, all steps count.
    """
    unseen = squared.device.type != "cpu" or torch.compiler.is_compiling()
    if unseen or torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return False
    return bool((squared <= threshold).all())


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _nth(iterates: Iterator[Tensor], n: int) -> Tensor:
    for _ in range(n - 1):
        next(iterates)
    return next(iterates)
