"""`kernels.diagonal` as a PyTorch operator: launches, gradients, `torch.func.vmap` and `torch.compile`.

Each operator takes its arguments in the order of its schema, which follows from the tuples of `kernels.operands`.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltalab.kernels.diagonal import forward
from deltalab.kernels.diagonal.backward import gradients
from deltalab.kernels.diagonal.launch import DiagonalLaunch
from deltalab.kernels.operands import DIAGONAL, DiagonalOperands
from deltalab.kernels.register import absent, empty_like, existing, register


class Prepared(NamedTuple):
    """The tensors that `forward.prepare` writes for each chunk and head. Those that the low rank does not use are None.

    Attributes:
        reading: exp(G) r.
        writing: exp(G_C - G) k.
        kept: exp(G_C).
        within: P.
        erasing: The matrix that multiplies S in w.
        from_u: The matrix that multiplies u in w.
        inverse: The inverse of the system, without its identity.
        adding: exp(G_C - G) a.
        within_a: P of a.
    """

    reading: Tensor
    writing: Tensor
    kept: Tensor
    within: Tensor
    erasing: Tensor | None
    from_u: Tensor | None
    inverse: Tensor | None
    adding: Tensor | None
    within_a: Tensor | None

    @classmethod
    def empty(cls, plan: DiagonalLaunch, like: Tensor, chunks: int) -> "Prepared":
        """Allocates the tensors for `chunks` chunks of each sequence, in the dtype of `like`."""
        slots, size = (plan.slots(chunks), plan.heads), plan.chunk_size
        rows, square = (size, plan.key_dim), (size, size)
        low_rank, free = plan.low_rank != "none", plan.low_rank == "free"
        return cls(
            reading=like.new_empty(*slots, *rows),
            writing=like.new_empty(*slots, *rows),
            kept=like.new_empty(*slots, plan.key_dim, dtype=torch.float32),
            within=like.new_empty(*slots, *square),
            erasing=like.new_empty(*slots, *rows) if low_rank else None,
            from_u=like.new_empty(*slots, *square) if low_rank else None,
            inverse=like.new_empty(*slots, *square) if low_rank else None,
            adding=like.new_empty(*slots, *rows) if free else None,
            within_a=like.new_empty(*slots, *square) if free else None,
        )

    def fill(self, plan: DiagonalLaunch, operands: DiagonalOperands, scale: float, chunks: range) -> None:
        """Launches `forward.prepare`."""
        arguments = DIAGONAL.arguments(operands, partial(plan.keys, kernel="prepare"))
        bk, size = plan.bk("prepare"), plan.chunk_size
        plan.launch(
            forward.prepare, plan.programs(len(chunks)), chunks, arguments,
            total=plan.slots(len(chunks)) * plan.heads, scale=scale, kept=self.kept,
            reading=plan.slabs(self.reading, size, bk), writing=plan.slabs(self.writing, size, bk),
            erasing=plan.slabs(self.erasing, size, bk), adding=plan.slabs(self.adding, size, bk),
            within=plan.slabs(self.within, size, size), within_a=plan.slabs(self.within_a, size, size),
            from_u=plan.slabs(self.from_u, size, size), inverse=plan.slabs(self.inverse, size, size),
        )  # fmt: skip

    def scanned(self) -> dict[str, Tensor | None]:
        """Returns the tensors that `forward.scan` takes: all but the inverse, which only the backward takes."""
        return {name: tensor for name, tensor in self._asdict().items() if name != "inverse"}


@torch.library.custom_op(
    "deltalab::diagonal_scan",
    mutates_args=(),
    schema=f"({DIAGONAL.schema()}, Tensor? state, Tensor? cu_seqlens, float scale, bool late, bool early,"
    " SymInt chunk_size, bool keep) -> (Tensor, Tensor, Tensor)",
)
def diagonal_scan(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Scans a state that decays by channel, as `rule.Operands` and `structure.Transition` define it.

    Args:
        *arguments: `DiagonalOperands`, contiguous. The vectors of keys are in u's dtype, or in fp32 if their gradients
                shall be (`rule.Operands.exact_gradients`). Then
            state: The first state [B, H, K, V], or None for zero; N states if sequences are packed.
            cu_seqlens: The bounds [N + 1] of N sequences that are packed into B = 1, or None.
            scale: The factor of the output.
            late: Whether the low rank sees the decayed state.
            early: Whether a token reads the state before it writes; not beside a low rank that is `late`.
            chunk_size: Tokens of a chunk.
            keep: Whether to return what the backward needs.

    Returns:
        o, the last state, and the state before each segment for the backward.
    """
    operands, (state, cu_seqlens, scale, late, early, chunk_size, keep) = DIAGONAL.split(arguments)
    operands = DIAGONAL.narrowed(operands)
    plan, u = DiagonalLaunch.of(operands, cu_seqlens, late, early, chunk_size), operands.u
    beta = operands.beta
    prepared = Prepared.empty(plan, u, plan.chunks)
    if beta is not None or operands.a is not None:
        prepared = prepared._replace(inverse=None)
    prepared.fill(plan, operands, scale, range(plan.chunks))
    o, last, begin = outputs = _outputs(plan, u, keep)
    plan.launch(
        forward.scan, plan.grid, range(plan.chunks), prepared.scanned(),
        u=u, beta=beta, state=state, begin_states=existing(begin),
        o=o, last=last, states=None, written=None,
    )  # fmt: skip
    return outputs


def _outputs(plan: DiagonalLaunch, u: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the outputs."""
    last = u.new_empty(plan.batch, plan.heads, plan.key_dim, plan.value_dim, dtype=torch.float32)
    begin = last.new_empty(plan.batch, plan.segments, plan.heads, plan.value_dim, plan.key_dim) if keep else absent(u)
    return torch.empty_like(u), last, begin


def _shapes(
    *, state: Tensor | None, cu_seqlens: Tensor | None, scale: float, late: bool, early: bool, chunk_size: int,
    keep: bool, **operands: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Empty outputs of `diagonal_scan`."""
    tensors = DiagonalOperands(**operands)
    return _outputs(DiagonalLaunch.of(tensors, cu_seqlens, late, early, chunk_size), tensors.u, keep)


@torch.library.custom_op(
    "deltalab::diagonal_scan_backward",
    mutates_args=(),
    schema=f"({DIAGONAL.schema()}, Tensor begin, Tensor? d_o, Tensor? d_last, Tensor? cu_seqlens, float scale,"
    " bool late, bool early, SymInt chunk_size) -> Tensor[]",
)
def _backward(*arguments: Any) -> list[Tensor]:
    """Returns the gradients of the operands and of the state, `absent` for each that was not given."""
    operands, more = DIAGONAL.split(arguments)
    begin, d_o, d_last, cu_seqlens, scale, late, early, chunk_size = more
    plan, u = DiagonalLaunch.of(operands, cu_seqlens, late, early, chunk_size), operands.u
    outputs, is_exact = empty_like(operands, u), operands.k.dtype != u.dtype
    operands, grads = DIAGONAL.narrowed(operands), DiagonalOperands._make(map(existing, outputs))
    d_o = torch.zeros_like(u) if d_o is None else d_o.contiguous()
    if d_last is None:
        d_state = begin.new_zeros(plan.batch, plan.heads, plan.value_dim, plan.key_dim)
    else:
        d_state = d_last.float().transpose(-1, -2).contiguous()
    prepared = Prepared.empty(plan, u, plan.segment_chunks)
    slots, size = plan.slots(plan.segment_chunks), plan.chunk_size
    states = u.new_empty(slots, plan.heads, plan.value_dim, plan.key_dim)
    states_after = torch.empty_like(states)
    written = None if plan.low_rank == "none" else u.new_empty(slots, plan.heads, size, plan.value_dim)
    d_seen = torch.empty_like(written) if plan.low_rank == "free" and written is not None else None
    bk, bv = plan.bk("gradients"), plan.bv("gradients")
    keys = partial(plan.keys, kernel="gradients")
    d_arguments = DIAGONAL.gradients(grads, partial(keys, store=True), partial(plan.values, store=True))
    chunk_arguments = {
        **DIAGONAL.arguments(operands, keys, plan.values), **d_arguments,
        # `gradients` loads the gradient of beta u, if tied, and stores that of u in its place.
        "d_u": plan.values(grads.u), "new_d_u": d_arguments["d_u"],
        "kept": prepared.kept, "d_o": plan.values(d_o),
        "written": plan.slabs(written, size, bv), "d_seen": plan.slabs(d_seen, size, bv),
        "states": plan.slabs(states, bv, bk), "states_after": plan.slabs(states_after, bv, bk),
    }  # fmt: skip
    # An early reader sees the write before it undecayed, so that the nearest pairs are the largest: they must cancel.
    is_exact = is_exact or early
    for number in reversed(range(plan.segments)):
        chunks = plan.segment(number)
        prepared.fill(plan, operands, scale, chunks)
        plan.launch(
            forward.scan, plan.grid, chunks, prepared.scanned(),
            u=u, beta=operands.beta, state=None, begin_states=begin,
            o=None, last=None, states=states, written=written,
        )  # fmt: skip
        plan.launch(
            forward.reverse, plan.grid, chunks, prepared._asdict(),
            d_o=d_o, d_last=d_state, states_after=states_after, d_u=grads.u, d_seen=d_seen,
            d_state=d_state,
        )  # fmt: skip
        plan.launch(
            gradients, plan.programs(len(chunks)), chunks, chunk_arguments,
            total=plan.slots(len(chunks)) * plan.heads, scale=scale, EXACT=is_exact,
        )  # fmt: skip
    return [*outputs, d_state.transpose(-1, -2).contiguous()]


def _gradient_shapes(*, u: Tensor, begin: Tensor, **arguments: Any) -> list[Tensor]:
    """Empty gradients of the operands and of the state."""
    arguments["u"] = u
    grads = empty_like((arguments[name] for name in DIAGONAL.names), u)
    return [*grads, begin.new_empty(begin.shape[0], begin.shape[2], begin.shape[4], begin.shape[3])]


register(_backward, shapes=_gradient_shapes)
register(diagonal_scan, shapes=_shapes, backward=_backward, outputs=["o", "last", "begin"], results=2)
