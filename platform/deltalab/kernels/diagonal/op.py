"""`kernels.diagonal` as a PyTorch operator: launches, gradients, `torch.func.vmap` and `torch.compile`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltalab.kernels.diagonal import forward
from deltalab.kernels.diagonal.backward import gradients
from deltalab.kernels.diagonal.launch import DiagonalLaunch
from deltalab.kernels.register import absent, empty_like, existing, register


class DiagonalOperands(NamedTuple):
    """The operands as `rule.Operands` names them, or their gradients."""

    r: Tensor
    k: Tensor
    u: Tensor
    g: Tensor
    e: Tensor | None
    a: Tensor | None
    b: Tensor | None
    beta: Tensor | None
    read: Tensor | None
    d: Tensor | None

    def per_key(self, x: DiagonalLaunch, kernel: str) -> dict[str, Any]:
        """All but u by name, those with keys as descriptors."""
        return {
            "r": x.keys(self.r, kernel), "k": x.keys(self.k, kernel), "g": x.keys(self.g, kernel),
            "a": x.keys(self.a, kernel), "b": x.keys(self.b, kernel),
            "e": self.e, "beta": self.beta, "read": self.read, "d": self.d,
        }  # fmt: skip


class Prepared(NamedTuple):
    """What `forward.prepare` writes for each chunk and head."""

    reading: Tensor
    writing: Tensor
    kept: Tensor
    within: Tensor
    erasing: Tensor | None
    given: Tensor | None
    inverse: Tensor | None
    adding: Tensor | None
    within_a: Tensor | None

    @classmethod
    def empty(cls, x: DiagonalLaunch, like: Tensor, chunks: int) -> "Prepared":
        at, rows, square = (x.slots(chunks), x.heads), (x.size, x.key_dim), (x.size, x.size)
        low_rank, free = x.low_rank != "none", x.low_rank == "free"
        return cls(
            reading=like.new_empty(*at, *rows),
            writing=like.new_empty(*at, *rows),
            kept=like.new_empty(*at, x.key_dim, dtype=torch.float32),
            within=like.new_empty(*at, *square),
            erasing=like.new_empty(*at, *rows) if low_rank else None,
            given=like.new_empty(*at, *square) if low_rank else None,
            inverse=like.new_empty(*at, *square) if low_rank else None,
            adding=like.new_empty(*at, *rows) if free else None,
            within_a=like.new_empty(*at, *square) if free else None,
        )

    def fill(self, x: DiagonalLaunch, given: DiagonalOperands, scale: float, chunks: range) -> None:
        """Launches `forward.prepare`."""
        bk = x.bk("prepare")
        x.launch(
            forward.prepare, x.programs(len(chunks)), chunks,
            **given.per_key(x, "prepare"), total=x.slots(len(chunks)) * x.heads, scale=scale, kept=self.kept,
            reading=x.slabs(self.reading, x.size, bk), writing=x.slabs(self.writing, x.size, bk),
            erasing=x.slabs(self.erasing, x.size, bk), adding=x.slabs(self.adding, x.size, bk),
            within=x.slabs(self.within, x.size, x.size), within_a=x.slabs(self.within_a, x.size, x.size),
            given=x.slabs(self.given, x.size, x.size), inverse=x.slabs(self.inverse, x.size, x.size),
        )  # fmt: skip

    def scanned(self) -> dict[str, Tensor | None]:
        """What `forward.scan` takes: all but the inverse, which is for the backward."""
        return {name: one for name, one in self._asdict().items() if name != "inverse"}


@torch.library.custom_op("deltalab::diagonal_scan", mutates_args=())
def diagonal_scan(
    r: Tensor,
    k: Tensor,
    u: Tensor,
    g: Tensor,
    e: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    beta: Tensor | None,
    read: Tensor | None,
    d: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    late: bool,
    chunk_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scans a state that decays by channel, as `rule.Operands` and `structure.Transition` define it.

    Contiguous r, k, g, a, b [B, T, H, K], u [B, T, H, V], scalars [B, T, H], state [B, H, K, V] (N of them where
    cu_seqlens [N + 1] packs N sequences into B = 1).
    late: whether the low rank sees the decayed state. keep: whether to return what the backward needs.
    Returns (o, last state, and the state before each segment for the backward).
    """
    x = DiagonalLaunch.of(k, u, e, a, cu_seqlens, late, chunk_size)
    given, prepared = DiagonalOperands(r, k, u, g, e, a, b, beta, read, d), Prepared.empty(x, u, x.chunks)
    if beta is not None or a is not None:
        prepared = prepared._replace(inverse=None)
    prepared.fill(x, given, scale, range(x.chunks))
    o, last, begin = found = _outputs(x, u, keep)
    x.launch(
        forward.scan, x.grid, range(x.chunks),
        u=u, beta=beta, **prepared.scanned(), state=state, begin_states=existing(begin),
        o=o, last=last, states=None, written=None,
    )  # fmt: skip
    return found


def _outputs(x: DiagonalLaunch, u: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    last = u.new_empty(x.batch, x.heads, x.key_dim, x.value_dim, dtype=torch.float32)
    begin = last.new_empty(x.batch, x.segments, x.heads, x.value_dim, x.key_dim) if keep else absent(u)
    return torch.empty_like(u), last, begin


def _shapes(
    *, k: Tensor, u: Tensor, e: Tensor | None, a: Tensor | None, cu_seqlens: Tensor | None, late: bool,
    chunk_size: int, keep: bool, **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _outputs(DiagonalLaunch.of(k, u, e, a, cu_seqlens, late, chunk_size), u, keep)


@torch.library.custom_op("deltalab::diagonal_scan_backward", mutates_args=())
def _backward(
    r: Tensor,
    k: Tensor,
    u: Tensor,
    g: Tensor,
    e: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    beta: Tensor | None,
    read: Tensor | None,
    d: Tensor | None,
    begin: Tensor,
    d_o: Tensor | None,
    d_last: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    late: bool,
    chunk_size: int,
) -> list[Tensor]:
    """Gradients of r, k, u, g, e, a, b, beta, read, d and the state; `absent` for what was not given."""
    x = DiagonalLaunch.of(k, u, e, a, cu_seqlens, late, chunk_size)
    given = DiagonalOperands(r, k, u, g, e, a, b, beta, read, d)
    found = empty_like(given, u)
    grads = DiagonalOperands._make(map(existing, found))
    d_o = torch.zeros_like(u) if d_o is None else d_o.contiguous()
    if d_last is None:
        d_state = begin.new_zeros(x.batch, x.heads, x.value_dim, x.key_dim)
    else:
        d_state = d_last.float().transpose(-1, -2).contiguous()
    prepared = Prepared.empty(x, u, x.every)
    states = u.new_empty(x.slots(x.every), x.heads, x.value_dim, x.key_dim)
    states_after = torch.empty_like(states)
    written = None if x.low_rank == "none" else u.new_empty(x.slots(x.every), x.heads, x.size, x.value_dim)
    d_seen = torch.empty_like(written) if x.low_rank == "free" and written is not None else None
    bk, bv = x.bk("gradients"), x.bv("gradients")
    per_chunk = {
        **given.per_key(x, "gradients"), "u": x.values(u), "kept": prepared.kept, "d_o": x.values(d_o),
        "d_u": x.values(grads.u), "new_d_u": x.values(grads.u, store=True),
        "written": x.slabs(written, x.size, bv), "d_seen": x.slabs(d_seen, x.size, bv),
        "states": x.slabs(states, bv, bk), "states_after": x.slabs(states_after, bv, bk),
        "d_r": x.keys(grads.r, "gradients", store=True), "d_k": x.keys(grads.k, "gradients", store=True),
        "d_g": x.keys(grads.g, "gradients", store=True), "d_a": x.keys(grads.a, "gradients", store=True),
        "d_b": x.keys(grads.b, "gradients", store=True),
        "d_e": grads.e, "d_beta": grads.beta, "d_read": grads.read, "d_d": grads.d,
    }  # fmt: skip
    for number in reversed(range(x.segments)):
        chunks = x.segment(number)
        prepared.fill(x, given, scale, chunks)
        x.launch(
            forward.scan, x.grid, chunks,
            u=u, beta=beta, **prepared.scanned(), state=None, begin_states=begin,
            o=None, last=None, states=states, written=written,
        )  # fmt: skip
        x.launch(
            forward.reverse, x.grid, chunks,
            d_o=d_o, **prepared._asdict(), d_last=d_state, states_after=states_after, d_u=grads.u, d_seen=d_seen,
            d_state=d_state,
        )  # fmt: skip
        x.launch(
            gradients, x.programs(len(chunks)), chunks,
            **per_chunk, total=x.slots(len(chunks)) * x.heads, scale=scale,
        )  # fmt: skip
    return [*found, d_state.transpose(-1, -2).contiguous()]


def _gradient_shapes(*, u: Tensor, begin: Tensor, **given: Any) -> list[Tensor]:
    given["u"] = u
    grads = empty_like((given[name] for name in DiagonalOperands._fields), u)
    return [*grads, begin.new_empty(begin.shape[0], begin.shape[2], begin.shape[4], begin.shape[3])]


register(_backward, shapes=_gradient_shapes)
register(diagonal_scan, shapes=_shapes, backward=_backward, outputs=["o", "last", "begin"], results=2)
