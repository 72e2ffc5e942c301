"""`kernels.ridge` as a PyTorch operator: launches, gradients, `torch.func.vmap` and `torch.compile`."""

from typing import Any

import torch
from torch import Tensor

from deltalab.kernels.register import absent, eager, register
from deltalab.kernels.ridge.backward import differentiate, gradients, pairs, reverse
from deltalab.kernels.ridge.forward import measure, read, solve, sweep
from deltalab.kernels.ridge.launch import RidgeLaunch, SegmentStates
from deltalab.structure import Ridge


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
    """Computes `deltalab.ridge.regression` by kernels, for inputs that `deltalab.ridge.lacks_kernel` lets through."""
    gram, memory = (tensor.float().contiguous() for tensor in state)
    q, k, v = (tensor.to(v.dtype).contiguous() for tensor in (q, k, v))
    g = g.float().expand(k.shape[:3]).contiguous()
    o, gram, memory, *_ = _eagerly(
        q, k, v, g, gram, memory, scale, ridge.strength, ridge.iterations, ridge.adaptive,
        ridge.solver == "chebyshev", chunk_size, torch.is_grad_enabled(),
    )  # fmt: skip
    return o, (gram, memory)


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
    """Computes o_t = scale U_t^T x_t with (H_t + lambda_t I) x_t ~= q_t, as `structure.Ridge` defines it.

    Args:
        q: [B, T, H, K], contiguous like all other tensors.
        k: [B, T, H, K].
        v: [B, T, H, V].
        g: Log-decays [B, T, H].
        gram: H before the first token, [B, H, K, K] in fp32.
        memory: U before the first token, [B, H, K, V] in fp32.
        scale: The factor of the output.
        strength: The factor of ||H_t|| in lambda_t if adaptive, else lambda_t itself.
        iterations: Steps of the solver.
        adaptive: Whether lambda_t is strength ||H_t||, else strength.
        chebyshev: Whether the solver is Chebyshev's, else conjugate gradient.
        chunk_size: The most tokens of a chunk.
        keep: Whether to return what the backward needs.

    Returns:
        o, H and U after the last token, and for the backward x, ||H_t||, and H and U between segments.
    """
    plan = RidgeLaunch.of(k, v, strength, adaptive, chunk_size)
    o, last_gram, last_memory, x, norm, grams, memories = outputs = _outputs(plan, q, v, g, gram, memory)
    grams[:, 0], memories[:, 0] = gram, memory
    space = plan.space(q)
    for segment in range(plan.segments):
        chunks = plan.segment(segment)
        grid = plan.programs(chunks)
        _sweep(plan, k, v, g, grams, memories, segment, space)
        plan.launch(
            measure, grid, chunks, k=k, g=g, grams=space.gram.states, gram_norms=space.gram.norms, norm_out=norm
        )  # fmt: skip
        plan.launch(
            solve, grid, chunks,
            rhs=q, k=k, g=g, norm=norm, grams=space.gram.states, gram_norms=space.gram.norms,
            x=x, x_half=None, forward=None, c=None, strength=strength, iterations=iterations,
            ADAPTIVE=adaptive, CHEBYSHEV=chebyshev, ALONG=plan.parts,
        )  # fmt: skip
        plan.launch(
            read, grid, chunks,
            x=x, k=k, v=v, g=g, norm=norm, memories=space.memory.states, memory_norms=space.memory.norms,
            o=o, scale=scale,
        )  # fmt: skip
    last_gram.copy_(grams[:, -1])
    last_memory.copy_(memories[:, -1])
    return outputs if keep else (o, last_gram, last_memory, absent(q), absent(q), absent(q), absent(q))


def _outputs(
    plan: RidgeLaunch, q: Tensor, v: Tensor, g: Tensor, gram: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Room for the outputs."""
    grams, memories = (s.new_empty(s.shape[0], plan.boundaries, *s.shape[1:]) for s in (gram, memory))
    x, norm = torch.empty_like(q, dtype=torch.float32), torch.empty_like(g)
    return torch.empty_like(v), torch.empty_like(gram), torch.empty_like(memory), x, norm, grams, memories


def _shapes(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, gram: Tensor, memory: Tensor, strength: float, adaptive: bool,
    chunk_size: int, keep: bool, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Empty outputs of the operator."""
    plan = RidgeLaunch.of(k, v, strength, adaptive, chunk_size)
    o, last_gram, last_memory, *kept = _outputs(plan, q, v, g, gram, memory)
    return o, last_gram, last_memory, *(kept if keep else [absent(q) for _ in kept])


def _sweep(
    plan: RidgeLaunch,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    grams: Tensor,
    memories: Tensor,
    segment: int,
    space: SegmentStates,
) -> None:
    """Fills `space` with the states before each chunk of a segment.

    Also stores the states after the segment in `grams` and `memories`.
    """
    for gram, u, begin, (states, norms) in zip((True, False), (k, v), (grams, memories), space, strict=True):
        plan.launch(
            sweep, plan.grid(gram), plan.segment(segment),
            k=k, u=u, g=g, begin=begin, segment=segment, states=states, norms=norms, **plan.columns(gram),
        )  # fmt: skip


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
    d_o: Tensor | None,
    d_last_gram: Tensor | None,
    d_last_memory: Tensor | None,
    scale: float,
    strength: float,
    iterations: int,
    adaptive: bool,
    chebyshev: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g and both states, by implicit differentiation."""
    plan = RidgeLaunch.of(k, v, strength, adaptive, chunk_size)
    d_o = torch.zeros_like(v) if d_o is None else d_o.contiguous()
    d_q, d_k, d_v = map(torch.empty_like, (q, k, v))
    # `pairs` fills the first part, and `gradients` fills one part for each block of keys.
    d_g = g.new_empty(1 + plan.bk // plan.bg, *g.shape)
    y, d_x, readers = torch.empty_like(x), torch.empty_like(x), torch.empty_like(g)
    c = torch.zeros_like(g)
    d_gram, d_memory = (
        torch.zeros_like(states[:, 0]) if d_last is None else d_last.clone(memory_format=torch.contiguous_format)
        for d_last, states in ((d_last_gram, grams), (d_last_memory, memories))
    )
    # `_sweep` writes the state after each segment anew. Segments go from the last to the first, so `_sweep` changes no
    # state that is read later. The clones keep the saved tensors as they are.
    grams, memories = grams.clone(), memories.clone()
    space, after = plan.space(q), plan.space(q)
    gram_across, memory_across = torch.empty_like(space.gram.norms), torch.empty_like(space.memory.norms)
    square = (plan.batch * plan.segment_chunks, plan.heads, plan.chunk_size, plan.chunk_size)
    dtype = torch.float32 if plan.fp32 or plan.parts == 2 else torch.bfloat16
    for_x, for_y, for_key = (k.new_empty(square, dtype=dtype) for _ in range(3))
    for segment in reversed(range(plan.segments)):
        chunks = plan.segment(segment)
        grid = plan.programs(chunks)
        _sweep(plan, k, v, g, grams, memories, segment, space)
        plan.launch(
            differentiate, grid, chunks,
            k=k, v=v, g=g, d_o=d_o, x=x, memories=space.memory.states, memory_norms=space.memory.norms,
            d_x=d_x, readers=readers, scale=scale,
        )  # fmt: skip
        plan.launch(
            solve, grid, chunks,
            rhs=d_x, k=k, g=g, norm=norm, grams=space.gram.states, gram_norms=space.gram.norms,
            x=y, x_half=d_q, forward=x, c=c, strength=strength, iterations=iterations,
            ADAPTIVE=adaptive, CHEBYSHEV=chebyshev, ALONG=1 if plan.fp32 else 2,
        )  # fmt: skip
        for gram, (states, norms), (states_after, norms_after), d_state, across in (
            (True, space.gram, after.gram, d_gram, gram_across),
            (False, space.memory, after.memory, d_memory, memory_across),
        ):
            plan.launch(
                reverse, plan.grid(gram), chunks,
                k=k, x=x, y=y, c=c, d_o=d_o, g=g, states=states, norms=norms, after=d_state,
                states_after=states_after, norms_after=norms_after, across=across,
                scale=scale, GRAM=gram, **plan.columns(gram),
            )  # fmt: skip
        plan.launch(
            pairs, grid, chunks,
            k=k, v=v, g=g, d_o=d_o, x=x, y=y, c=c, readers=readers,
            memory_after=after.memory.states, memory_norms_after=after.memory.norms,
            memory_across=memory_across, gram_across=gram_across,
            for_x=for_x, for_y=for_y, for_key=for_key, d_v=d_v, d_g=d_g[0], scale=scale, ADAPTIVE=adaptive,
        )  # fmt: skip
        plan.launch(
            gradients, (grid[0] * (plan.bk // plan.bg),), chunks,
            k=k, v=v, g=g, x=x, y=y, c=c, for_x=for_x, for_y=for_y, for_key=for_key,
            grams=space.gram.states, gram_norms=space.gram.norms,
            gram_after=after.gram.states, gram_norms_after=after.gram.norms,
            memory_after=after.memory.states, memory_norms_after=after.memory.norms,
            d_k=d_k, d_g=d_g[1:], ADAPTIVE=adaptive,
        )  # fmt: skip
    return d_q, d_k, d_v, d_g.sum(0), d_gram, d_memory


def _gradient_shapes(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, grams: Tensor, memories: Tensor, **_: Any
) -> tuple[Tensor, ...]:
    """Empty gradients."""
    return (*map(torch.empty_like, (q, k, v, g)), torch.empty_like(grams[:, 0]), torch.empty_like(memories[:, 0]))


OUTPUTS = ["o", "last_gram", "last_memory", "x", "norm", "grams", "memories"]

register(_backward, shapes=_gradient_shapes)
register(ridge_regression, shapes=_shapes, backward=_backward, outputs=OUTPUTS)
_eagerly = eager(ridge_regression)
