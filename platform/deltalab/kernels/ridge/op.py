"""`kernels.ridge` and its backward as a PyTorch operator: launches, `torch.func.vmap` and `torch.compile`."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels.chunk import Problem, absent, fold_into_batch
from deltalab.kernels.ridge.backward import differentiate, gradients, pairs, reverse
from deltalab.kernels.ridge.forward import measure, read, solve, sweep
from deltalab.structure import Ridge

WORKSPACE = 160 * 2**20
"""Bytes that the states of a segment may take, unless that leaves it fewer chunks than `BUSY`."""

BUSY = 1024
"""Chunks, of all heads, that keep a GPU busy."""

WARPS = {"sweep": 4, "measure": 4, "solve": 4, "read": 4, "differentiate": 4, "reverse": 8, "pairs": 4, "gradients": 4}
STAGES = {"sweep": 2, "measure": 1, "solve": 1, "read": 2, "differentiate": 1, "reverse": 2, "pairs": 2, "gradients": 2}


def regression(
    ridge: Ridge,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float,
    state: tuple[Tensor, Tensor],
    chunk_size: int = 64,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`deltalab.ridge.regression` by kernels, where `deltalab.ridge.lacks_kernel` has no objection."""
    gram, memory = (x.float().contiguous() for x in state)
    q, k, v = (x.to(v.dtype).contiguous() for x in (q, k, v))
    g = g.float().expand(k.shape[:3]).contiguous()
    o, gram, memory, *_ = ridge_regression(
        q, k, v, g, gram, memory, scale, ridge.strength, ridge.iterations, ridge.adaptive,
        ridge.solver == "chebyshev", chunk_size, torch.is_grad_enabled(),
    )  # fmt: skip
    return o, (gram, memory)


@dataclass(frozen=True)
class Launch(Problem):
    """The plan of one problem: sizes of blocks and of segments, and the precision."""

    chunks: int
    every: int
    bk: int
    bg: int
    bv: int
    parts: int
    dtype: torch.dtype

    @classmethod
    def of(cls, k: Tensor, v: Tensor, strength: float, adaptive: bool, chunk_size: int) -> "Launch":
        batch, tokens, heads, key_dim = k.shape
        value_dim = v.shape[-1]
        wide = k.dtype == torch.float32
        bk = max(16, triton.next_power_of_2(key_dim))
        bg = min(bk, 16 if wide else 64)
        bv = max(16, min(16 if wide else 64, triton.next_power_of_2(value_dim)))
        size = max(16, triton.next_power_of_2(min(chunk_size, tokens, 16 if wide else 64)))
        one_half = Ridge(strength=strength, adaptive=adaptive).in_one_half(k.dtype)
        parts = 1 if wide or one_half else 2
        chunks = triton.cdiv(tokens, size)
        each = batch * heads * bk * (bk + triton.cdiv(value_dim, bv) * bv) * parts * (4 if wide else 2)
        every = min(chunks, max(WORKSPACE // each, triton.cdiv(BUSY, batch * heads)))
        return cls(batch, tokens, heads, key_dim, value_dim, size, chunks, every, bk, bg, bv, parts, k.dtype)

    @property
    def boundaries(self) -> int:
        """Of segments, the first and the last among them."""
        return triton.cdiv(self.chunks, self.every) + 1

    def span(self, segment: int) -> tuple[int, int]:
        return segment * self.every, min((segment + 1) * self.every, self.chunks)

    def space(self, like: Tensor) -> "tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]":
        """For a segment's states H and U in parts, each beside its blocks' norms."""
        dtype = torch.float32 if self.dtype == torch.float32 else torch.float16

        def of(width: int, block: int) -> tuple[Tensor, Tensor]:
            blocks = triton.cdiv(width, block)
            many = (self.batch * self.every, self.heads)
            return (
                like.new_empty(*many, self.parts, self.bk, blocks * block, dtype=dtype),
                like.new_empty(*many, blocks, dtype=torch.float32),
            )

        return of(self.bk, self.bg), of(self.value_dim, self.bv)

    def block(self, gram: bool) -> dict[str, Any]:
        """Of one state's columns; the grid has blocks for all bk of H's."""
        if gram:
            return {"D": self.key_dim, "BW": self.bg, "FULL_D": self.bk == self.key_dim}
        return {"D": self.value_dim, "BW": self.bv, "FULL_D": self.value_dim % self.bv == 0}

    def grid(self, gram: bool) -> tuple[int, int, int]:
        width, block = (self.bk, self.bg) if gram else (self.value_dim, self.bv)
        return triton.cdiv(width, block), self.heads, self.batch

    def launch(self, kernel: Any, grid: tuple[int, ...], *tensors: Tensor | None, **more: Any) -> None:
        """With what the kernel takes of these sizes."""
        every = {
            "T": self.tokens, "H": self.heads, "K": self.key_dim, "V": self.value_dim,
            "SIZE": self.size, "BK": self.bk, "BG": self.bg, "BV": self.bv,
            "FULL": self.bk == self.key_dim, "FULL_V": self.value_dim % self.bv == 0, "PARTS": self.parts,
            "IN": 2 if self.dtype == torch.float16 else 1, "KIND": tl.float32 if self.wide else tl.bfloat16,
            "HALF": tl.float32 if self.wide else tl.float16, "WIDE": self.wide,
        }  # fmt: skip
        taken = {name: value for name, value in every.items() if name in kernel.arg_names}
        kernel[grid](*tensors, **taken, **more, **self.resources(kernel.__name__))

    def resources(self, kernel: str) -> dict[str, int]:
        """Warps and stages."""
        crowded = (self.bk > 128 and kernel == "solve") or (self.bk > 64 and kernel == "measure" and self.wide)
        return {"num_warps": 8 if crowded else WARPS[kernel], "num_stages": STAGES[kernel]}

    @property
    def wide(self) -> bool:
        return self.dtype == torch.float32

    def sweep(
        self, k: Tensor, v: Tensor, g: Tensor, begin: tuple[Tensor, Tensor], segment: int, space: Any
    ) -> tuple[int, int]:
        """Fills space with the states before each chunk of a segment, and begin with those after it.

        Returns the segment's first chunk, and how many it has.
        """
        first, last = self.span(segment)
        for gram, u, bounds, (states, norms) in zip((True, False), (k, v), begin, space, strict=True):
            self.launch(
                sweep, self.grid(gram), k, u, g, bounds, segment, self.boundaries, states, norms,
                from_chunk=first, to_chunk=last, **self.block(gram),
            )  # fmt: skip
        return first, last - first


@torch.library.custom_op("deltalab::ridge_regression", mutates_args=())
def ridge_regression(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    gram: Tensor,
    memory: Tensor,
    scale: float,
    strength: float,
    iterations: int,
    adaptive: bool,
    chebyshev: bool,
    chunk_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o_t = scale U_t^T x_t with (H_t + lambda_t I) x_t ~= q_t, as `structure.Ridge` defines it.

    Contiguous q, k [B, T, H, K], v [B, T, H, V], g [B, T, H], gram [B, H, K, K] and memory [B, H, K, V] in fp32.
    keep: whether what the backward needs is returned.
    Returns (o, H, U after the last token, and, for the backward, x, ||H_t||, and H and U between segments).
    """
    plan = Launch.of(k, v, strength, adaptive, chunk_size)
    o = torch.empty_like(v)
    x, norm = torch.empty_like(q, dtype=torch.float32), torch.empty_like(g)
    begin = tuple(s.new_empty(s.shape[0], plan.boundaries, *s.shape[1:]) for s in (gram, memory))
    for bounds, s in zip(begin, (gram, memory), strict=True):
        bounds[:, 0] = s
    space = plan.space(q)
    for segment in range(plan.boundaries - 1):
        first, chunks = plan.sweep(k, v, g, begin, segment, space)
        grid, span = (plan.batch * chunks * plan.heads,), {"from_chunk": first, "chunks": chunks}
        plan.launch(measure, grid, k, g, *space[0], norm, **span)
        plan.launch(
            solve, grid, q, k, g, norm, *space[0], x, None, None, None, strength=strength, iterations=iterations,
            ADAPTIVE=adaptive, CHEBYSHEV=chebyshev, ALONG=plan.parts, **span,
        )  # fmt: skip
        plan.launch(read, grid, x, k, v, g, norm, *space[1], o, scale=scale, **span)
    after = [bounds[:, -1].clone() for bounds in begin]
    kept = (x, norm, *begin) if keep else tuple(absent(q) for _ in range(4))
    return o, *after, *kept


@ridge_regression.register_fake
def _(q, k, v, g, gram, memory, scale, strength, iterations, adaptive, chebyshev, chunk_size, keep):  # type: ignore[no-untyped-def]
    plan = Launch.of(k, v, strength, adaptive, chunk_size)
    states = (gram, memory)
    kept = [torch.empty_like(q, dtype=torch.float32), torch.empty_like(g)]
    kept += [s.new_empty(s.shape[0], plan.boundaries, *s.shape[1:]) for s in states]
    rest = kept if keep else [absent(q) for _ in kept]
    return (torch.empty_like(v), *map(torch.empty_like, states), *rest)


@torch.library.custom_op("deltalab::ridge_regression_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    x: Tensor,
    norm: Tensor,
    grams: Tensor,
    memories: Tensor,
    d_o: Tensor,
    d_gram: Tensor | None,
    d_memory: Tensor | None,
    scale: float,
    strength: float,
    iterations: int,
    adaptive: bool,
    chebyshev: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g and both states, by implicit differentiation."""
    plan = Launch.of(k, v, strength, adaptive, chunk_size)
    d_q, d_k, d_v = map(torch.empty_like, (q, k, v))
    # Of pairs of tokens, and of each block of keys.
    d_g = g.new_empty(1 + plan.bk // plan.bg, *g.shape)
    y, d_x, readers = torch.empty_like(x), torch.empty_like(x), torch.empty_like(g)
    c = torch.zeros_like(g)
    after = [
        torch.zeros_like(bounds[:, 0]) if d is None else d.clone(memory_format=torch.contiguous_format)
        for d, bounds in ((d_gram, grams), (d_memory, memories))
    ]
    # Last segment first; what begins the next one is written over by itself.
    begin = (grams.clone(), memories.clone())
    space, space_after = plan.space(q), plan.space(q)
    across = [torch.empty_like(norms) for _, norms in space]
    square = (plan.batch * plan.every, plan.heads, plan.size, plan.size)
    weights = [
        k.new_empty(square, dtype=torch.float32 if plan.wide or plan.parts == 2 else torch.bfloat16) for _ in range(3)
    ]
    for segment in reversed(range(plan.boundaries - 1)):
        first, chunks = plan.sweep(k, v, g, begin, segment, space)
        grid, span = (plan.batch * chunks * plan.heads,), {"from_chunk": first, "chunks": chunks}
        plan.launch(differentiate, grid, k, v, g, d_o, x, *space[1], d_x, readers, scale=scale, **span)
        plan.launch(
            solve, grid, d_x, k, g, norm, *space[0], y, d_q, x, c, strength=strength, iterations=iterations,
            ADAPTIVE=adaptive, CHEBYSHEV=chebyshev, ALONG=1 if plan.wide else 2, **span,
        )  # fmt: skip
        for i, gram in enumerate((True, False)):
            plan.launch(
                reverse, plan.grid(gram), k, x, y, c, d_o, g, *space[i], after[i], *space_after[i], across[i],
                from_chunk=first, to_chunk=first + chunks, scale=scale, GRAM=gram, **plan.block(gram),
            )  # fmt: skip
        plan.launch(
            pairs, grid, k, v, g, d_o, x, y, c, readers, *space_after[1], across[1], across[0], *weights, d_v, d_g[0],
            scale=scale, ADAPTIVE=adaptive, **span,
        )  # fmt: skip
        plan.launch(
            gradients, (grid[0] * (plan.bk // plan.bg),), k, v, g, x, y, c, *weights, *space[0], *space_after[0],
            *space_after[1], d_k, d_g[1:], ADAPTIVE=adaptive, **span,
        )  # fmt: skip
    return d_q, d_k, d_v, d_g.sum(0), after[0], after[1]


@_backward.register_fake
def _(q, k, v, g, x, norm, grams, memories, *_):  # type: ignore[no-untyped-def]
    return (*map(torch.empty_like, (q, k, v, g)), torch.empty_like(grams[:, 0]), torch.empty_like(memories[:, 0]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output[3:])
    ctx.rest = inputs[6:12]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_o: Tensor | None, d_gram: Tensor | None, d_memory: Tensor | None, *_: Any) -> Any:
    d_o = torch.zeros_like(ctx.saved_tensors[2]) if d_o is None else d_o.contiguous()
    return (*_backward(*ctx.saved_tensors, d_o, d_gram, d_memory, *ctx.rest), *[None] * 7)


ridge_regression.register_autograd(_differentiate, setup_context=_remember)
fold_into_batch(ridge_regression)
fold_into_batch(_backward)
