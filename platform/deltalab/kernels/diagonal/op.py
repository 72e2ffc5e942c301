"""`kernels.diagonal` as a PyTorch operator: launches, gradients, `torch.func.vmap` and `torch.compile`."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from deltalab.kernels.chunk import ALL_REGISTERS, PRECISIONS, Problem, absent, chunk_map, fold_into_batch, tiles
from deltalab.kernels.diagonal import forward as diagonal
from deltalab.kernels.diagonal.backward import gradients

WORKSPACE = 640 * 2**20
"""Bytes that a segment may take in the backward for what does not leave it, where it has not MOST_SEGMENTS yet."""

MOST_SEGMENTS = 4
"""Each costs four launches, about 0.3 ms of Python."""

KEYS = {"prepare": {"none": 64, "tied": 32, "free": 16}, "gradients": {"none": 32, "tied": 32, "free": 16}}
"""That a program takes at once, by its kernel and low rank: as many as registers hold."""

BUSY = 264
"""Programs of `prepare` or `gradients` that an H100 runs at a time."""

ENOUGH = 96
"""Programs of `scan` or `reverse` that keep it busy."""

SQUARES = ("within", "given", "inverse", "within_a")

STAGES = {"prepare": 1, "scan": 2, "reverse": 2, "gradients": 1}


@dataclass(frozen=True)
class Plan(Problem):
    """How one problem is launched: sizes of blocks and of segments."""

    chunks: int
    every: int
    packed: tuple[Tensor, Tensor, Tensor] | None
    ragged: bool
    precision: str
    late: bool
    low_rank: str
    dtype: torch.dtype

    @classmethod
    def of(
        cls, k: Tensor, u: Tensor, e: Tensor | None, a: Tensor | None, cu_seqlens: Tensor | None, late: bool, size: int
    ) -> "Plan":
        batch, tokens, heads, key_dim = k.shape
        value_dim = u.shape[-1]
        packed, chunks, segments = None, triton.cdiv(tokens, size), 1
        tied, free = e is not None, a is not None
        if cu_seqlens is None:
            each = 2 * key_dim * value_dim + size * (2 * key_dim + size)
            each += (tied + free) * size * (key_dim + 2 * size + value_dim) + free * size * (key_dim + size + value_dim)
            segments = min(MOST_SEGMENTS, triton.cdiv(batch * chunks * heads * each * u.element_size(), WORKSPACE))
        else:
            batch = cu_seqlens.numel() - 1
            of, first, chunks = chunk_map(cu_seqlens, tokens, size)
            packed = (cu_seqlens.to(torch.int32), of, first)
        precision = PRECISIONS[u.dtype]
        every = triton.cdiv(chunks, segments)
        ragged = packed is not None or tokens % size != 0
        low_rank = "tied" if tied else "free" if free else "none"
        return cls(
            batch, tokens, heads, key_dim, value_dim, size, chunks, every, packed, ragged, precision, late,
            low_rank, u.dtype,
        )  # fmt: skip

    @property
    def segments(self) -> int:
        return triton.cdiv(self.chunks, self.every)

    def bk(self, kernel: str) -> int:
        """Keys that `prepare` or `gradients` takes at once."""
        return min(self.key_dim, KEYS[kernel][self.low_rank] if self.dtype.itemsize == 2 else 16)

    @property
    def bv(self) -> int:
        """Values that `scan` and `reverse` take at once; 128, which read all else once, where that idles no GPU."""
        enough = self.batch * self.heads * self.value_dim >= ENOUGH * 128
        if enough and self.value_dim % 128 == 0 and self.key_dim <= 128 and self.dtype.itemsize == 2:
            return 128
        return max(16, min(64, triton.next_power_of_2(self.value_dim)))

    def how(self, kernel: str) -> dict[str, int]:
        """To launch it, in as many stages as leave shared memory for two programs, or for one of 8 warps."""
        wide = self.bv == 128 and kernel in ("scan", "reverse")
        stages = STAGES[kernel]
        if kernel == "gradients" and self.low_rank == "none" and self.all_values == self.value_dim:
            stages = 2
        elif kernel == "reverse" and self.low_rank == "free" and wide and self.size == 64:
            stages = 1
        elif kernel in ("scan", "reverse") and self.low_rank == "none":
            stages = 3
        registers = {"maxnreg": ALL_REGISTERS} if self.precision == "ieee" else {}
        return {"num_warps": 8 if wide else 4, "num_stages": stages, **registers}

    @property
    def all_values(self) -> int:
        """Those that `gradients` takes at once."""
        most = 128 if self.dtype.itemsize == 2 else 32
        return next(bv for bv in (128, 64, 32, 16) if bv <= most and self.value_dim % bv == 0)

    def keys(self, x: Tensor | None, kernel: str, *, store: bool = False) -> Any:
        return tiles(x, self.size, self.bk(kernel), store=store, ragged=self.ragged)

    def values(self, x: Tensor | None, *, store: bool = False) -> Any:
        return tiles(x, self.size, self.all_values, store=store, ragged=self.ragged)

    def described(self, inputs: dict[str, Tensor | None], kernel: str) -> dict[str, Any]:
        """What `prepare` or `gradients` takes: vectors as descriptors."""
        return {name: self.keys(x, kernel) if name in ("r", "k", "g", "a", "b") else x for name, x in inputs.items()}

    def slots(self, chunks: int) -> int:
        """Chunks in a launch over this many of each sequence."""
        return self.chunks if self.packed else self.batch * chunks

    def prepared(self, like: Tensor, chunks: int, inputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Empty tensors for what `diagonal.prepare` writes; to scan, the inverse may be left out."""
        tied, free = inputs["e"] is not None, inputs["a"] is not None
        at = (self.slots(chunks), self.heads)

        def tile(exists: bool, *shape: int, dtype: torch.dtype = self.dtype) -> Tensor | None:
            return like.new_empty(*at, *shape, dtype=dtype) if exists else None

        rows, square = (self.size, self.key_dim), (self.size, self.size)
        return {
            "reading": tile(True, *rows),
            "writing": tile(True, *rows),
            "kept": tile(True, self.key_dim, dtype=torch.float32),
            "within": tile(True, *square),
            "erasing": tile(tied or free, *rows),
            "given": tile(tied or free, *square),
            "inverse": tile(tied or free, *square),
            "adding": tile(free, *rows),
            "within_a": tile(free, *square),
        }

    def prepare(
        self, inputs: dict[str, Tensor | None], made: dict[str, Tensor | None], scale: float, begin: int, end: int
    ) -> None:
        inputs = {name: x for name, x in inputs.items() if name != "u"}
        bk, outputs = self.bk("prepare"), dict[str, Any](made)
        for name, x in made.items():
            if x is not None and name != "kept":
                outputs[name] = tiles(x.flatten(0, 1), self.size, self.size if name in SQUARES else bk)
        diagonal.prepare[self.programs(end - begin)](
            **self.described(inputs, "prepare"), **outputs, **self.parallel(begin, end), scale=scale, H=self.heads,
            K=self.key_dim, SIZE=self.size, BK=bk, LATE=self.late,
            PACKED=self.packed is not None, RAGGED=self.ragged, PRECISION=self.precision, **self.how("prepare"),
        )  # fmt: skip

    def parallel(self, begin: int, end: int) -> dict[str, Any]:
        bounds, of, first = self.packed or (None, None, None)
        return {
            "cu_seqlens": bounds, "of": of, "first": first, "length": self.tokens,
            "from_chunk": begin, "span": end - begin, "sequences": self.batch,
            "total": self.slots(end - begin) * self.heads,
        }  # fmt: skip

    def programs(self, chunks: int) -> tuple[int]:
        """Of `prepare` or `gradients`: each takes several chunks, which share what does not depend on them."""
        each = min(8, triton.cdiv(self.slots(chunks) * self.heads, BUSY))
        return (triton.cdiv(self.slots(chunks) * self.heads, each),)

    def sequential(self, begin: int, end: int) -> dict[str, Any]:
        bounds, _, first = self.packed or (None, None, None)
        return {
            "cu_seqlens": bounds, "first": first, "length": self.tokens, "chunks": self.chunks,
            "from_chunk": begin, "to_chunk": end, "H": self.heads, "K": self.key_dim, "V": self.value_dim,
            "SIZE": self.size, "BK": self.key_dim, "BV": self.bv, "FULL_V": self.value_dim % self.bv == 0,
            "PACKED": self.packed is not None, "PRECISION": self.precision,
        }  # fmt: skip

    @property
    def grid(self) -> tuple[int, int, int]:
        return triton.cdiv(self.value_dim, self.bv), self.heads, self.batch


NAMES = ("r", "k", "u", "g", "e", "a", "b", "beta", "read", "d")


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
    """The scan of a state that decays by channel, as `rule.Operands` and `structure.Transition` define it.

    Contiguous r, k, g, a, b [B, T, H, K], u [B, T, H, V], scalars [B, T, H], state [B, H, K, V] (of which there are N
    where cu_seqlens [N + 1] packs N sequences into B = 1).
    late: whether the low rank sees the decayed state; keep: whether what the backward needs is returned.
    Returns (o, last state, and, for the backward, states).
    """
    x = Plan.of(k, u, e, a, cu_seqlens, late, chunk_size)
    inputs = dict(zip(NAMES, (r, k, u, g, e, a, b, beta, read, d), strict=True))
    made = x.prepared(u, x.chunks, inputs)
    if beta is not None or a is not None:
        made["inverse"] = None
    x.prepare(inputs, made, scale, 0, x.chunks)
    o = torch.empty_like(u)
    last = u.new_empty(x.batch, x.heads, x.key_dim, x.value_dim, dtype=torch.float32)
    begin = last.new_empty(x.batch, x.segments, x.heads, x.value_dim, x.key_dim) if keep else None
    made.pop("inverse")
    diagonal.scan[x.grid](
        u, beta, **made, state=state, begin_states=begin, o=o, last=last, states=None, written=None,
        every=x.every, segments=x.segments, **x.sequential(0, x.chunks), **x.how("scan"),
    )  # fmt: skip
    return o, last, absent(u) if begin is None else begin


@diagonal_scan.register_fake
def _(r, k, u, g, e, a, b, beta, read, d, state, cu_seqlens, scale, late, chunk_size, keep):  # type: ignore[no-untyped-def]
    x = Plan.of(k, u, e, a, cu_seqlens, late, chunk_size)
    last = u.new_empty(x.batch, x.heads, x.key_dim, x.value_dim, dtype=torch.float32)
    begin = last.new_empty(x.batch, x.segments, x.heads, x.value_dim, x.key_dim) if keep else absent(u)
    return torch.empty_like(u), last, begin


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
    d_o: Tensor,
    d_last: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    late: bool,
    chunk_size: int,
) -> list[Tensor]:
    """Gradients of r, k, u, g, e, a, b, beta, read, d and the state; empty for what was not given."""
    x = Plan.of(k, u, e, a, cu_seqlens, late, chunk_size)
    inputs = dict(zip(NAMES, (r, k, u, g, e, a, b, beta, read, d), strict=True))
    found = {f"d_{name}": None if one is None else torch.empty_like(one) for name, one in inputs.items()}
    if d_last is None:
        after = begin.new_zeros(x.batch, x.heads, x.value_dim, x.key_dim)
    else:
        after = d_last.float().transpose(-1, -2).contiguous()
    made = x.prepared(u, x.every, inputs)
    low_rank, free = e is not None or a is not None, a is not None
    states = u.new_empty(x.slots(x.every), x.heads, x.value_dim, x.key_dim)
    states_after = torch.empty_like(states)
    written = u.new_empty(x.slots(x.every), x.heads, x.size, x.value_dim) if low_rank else None
    d_seen = torch.empty_like(written) if free else None
    bk = x.bk("gradients")
    per_chunk = {
        **x.described(inputs, "gradients"), "u": x.values(u), "kept": made["kept"], "d_o": x.values(d_o),
        "d_u": x.values(found["d_u"]), "new_d_u": x.values(found["d_u"], store=True),
        "written": None if written is None else tiles(written.flatten(0, 1), x.size, x.all_values),
        "d_seen": None if d_seen is None else tiles(d_seen.flatten(0, 1), x.size, x.all_values),
        "states": tiles(states.flatten(0, 1), x.all_values, bk),
        "states_after": tiles(states_after.flatten(0, 1), x.all_values, bk),
        **{name: x.keys(found[name], "gradients", store=True) for name in ("d_r", "d_k", "d_g", "d_a", "d_b")},
        **{name: found[name] for name in ("d_e", "d_beta", "d_read", "d_d")},
    }  # fmt: skip
    for segment in reversed(range(x.segments)):
        span = (segment * x.every, min((segment + 1) * x.every, x.chunks))
        x.prepare(inputs, made, scale, *span)
        scanned = {name: one for name, one in made.items() if name != "inverse"}
        diagonal.scan[x.grid](
            u, beta, **scanned, state=None, begin_states=begin, o=None, last=None, states=states, written=written,
            every=x.every, segments=x.segments, **x.sequential(*span), **x.how("scan"),
        )  # fmt: skip
        diagonal.reverse[x.grid](
            d_o, **made, d_last=after, states_after=states_after, d_u=found["d_u"], d_seen=d_seen, d_state=after,
            **x.sequential(*span), **x.how("reverse"),
        )  # fmt: skip
        gradients[x.programs(span[1] - span[0])](
            **per_chunk, **x.parallel(*span), scale=scale, H=x.heads, K=x.key_dim, V=x.value_dim,
            SIZE=x.size, BK=bk, BV=x.all_values, LATE=late, PACKED=x.packed is not None, RAGGED=x.ragged,
            PRECISION=x.precision, **x.how("gradients"),
        )  # fmt: skip
    grads = [absent(u) if one is None else one for one in found.values()]
    return [*grads, after.transpose(-1, -2).contiguous()]


@_backward.register_fake
def _(r, k, u, g, e, a, b, beta, read, d, begin, d_o, d_last, cu_seqlens, scale, late, chunk_size):  # type: ignore[no-untyped-def]
    like = [absent(u) if x is None else torch.empty_like(x) for x in (r, k, u, g, e, a, b, beta, read, d)]
    return [*like, begin.new_empty(begin.shape[0], begin.shape[2], begin.shape[4], begin.shape[3])]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, state, cu_seqlens, scale, late, chunk_size, _ = inputs
    ctx.save_for_backward(*tensors, output[2], cu_seqlens)
    ctx.rest = (scale, late, chunk_size)
    ctx.given = [tensor is not None for tensor in (*tensors, state)]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_o: Tensor | None, d_last: Tensor | None, *_: Any) -> Any:
    *saved, cu_seqlens = ctx.saved_tensors
    d_o = torch.zeros_like(saved[2]) if d_o is None else d_o.contiguous()
    found = _backward(*saved, d_o, d_last, cu_seqlens, *ctx.rest)
    return (*(one if given else None for one, given in zip(found, ctx.given, strict=True)), *[None] * 5)


diagonal_scan.register_autograd(_differentiate, setup_context=_remember)
fold_into_batch(diagonal_scan)
fold_into_batch(_backward)
