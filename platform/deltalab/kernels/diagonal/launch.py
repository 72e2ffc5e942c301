"""Plans the launches of `kernels.diagonal`: blocks, segments, warps and stages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from deltalab.kernels.launch import ALL_REGISTERS, Launch, Packing, chunk_map, planned, tiles
from deltalab.kernels.operands import DiagonalOperands

WORKSPACE = 640 * 2**20
"""Bytes that the intermediate tensors of a segment may take in the backward, unless there are MOST_SEGMENTS already."""

MOST_SEGMENTS = 4
"""Each segment costs four launches, about 0.3 ms of Python."""

KEYS = {"prepare": {"none": 64, "tied": 32, "free": 16}, "gradients": {"none": 32, "tied": 32, "free": 16}}
"""Keys that a program takes at once, by its kernel and low rank: as many as registers hold."""

BUSY = 264
"""Programs of `prepare` or `gradients` that an H100 runs at a time."""

ENOUGH = 96
"""Programs of `scan` or `reverse` that keep an H100 busy."""

STAGES = {"prepare": 1, "scan": 2, "reverse": 2, "gradients": 1}


@dataclass(frozen=True, kw_only=True)
class DiagonalLaunch(Launch):
    """The plan of `kernels.diagonal`.

    Attributes:
        late: Whether the low rank sees the decayed state.
        early: Whether a token reads the state before it writes. Then not `late`, unless there is no low rank.
        low_rank: `none`, `tied` or `free`.
    """

    late: bool
    early: bool
    low_rank: str

    @classmethod
    def of(
        cls, operands: DiagonalOperands, cu_seqlens: Tensor | None, late: bool, early: bool, chunk_size: int
    ) -> "DiagonalLaunch":  # fmt: skip
        """Returns the plan for operands of these shapes, and for packed sequences if there are `cu_seqlens`."""
        k, u = operands.k, operands.u
        make: Callable[..., DiagonalLaunch] = cls._of
        tied, free = operands.e is not None, operands.a is not None
        sizes = *k.shape, u.shape[-1], u.dtype, tied, free, late, early, chunk_size
        if cu_seqlens is None:
            return planned(make, *sizes)
        packing, bound = chunk_map(cu_seqlens, k.shape[1], chunk_size)
        return make(*sizes, sequences=cu_seqlens.numel() - 1, packing=packing, bound=bound)

    @classmethod
    def _of(
        cls, batch: int, tokens: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, tied: bool,
        free: bool, late: bool, early: bool, chunk_size: int, sequences: int = 0, packing: Packing | None = None,
        bound: int = 0,
    ) -> "DiagonalLaunch":  # fmt: skip
        """The plan; with a packing, `sequences` and `bound` are the numbers of packed sequences and of their chunks.

        `tied` and `free` are the kinds of low rank.
        """
        chunks, segments, batch = bound or triton.cdiv(tokens, chunk_size), 1, sequences or batch
        if packing is None:
            numbers = 2 * key_dim * value_dim + chunk_size * (2 * key_dim + chunk_size)
            numbers += (tied + free) * chunk_size * (key_dim + 2 * chunk_size + value_dim)
            numbers += free * chunk_size * (key_dim + chunk_size + value_dim)
            segments = min(MOST_SEGMENTS, triton.cdiv(batch * chunks * heads * numbers * dtype.itemsize, WORKSPACE))
        return cls(
            batch=batch, tokens=tokens, heads=heads, key_dim=key_dim, value_dim=value_dim, chunk_size=chunk_size,
            chunks=chunks, segment_chunks=triton.cdiv(chunks, segments), dtype=dtype, packing=packing, late=late,
            early=early, low_rank="tied" if tied else "free" if free else "none",
        )  # fmt: skip

    def bk(self, kernel: str) -> int:
        """Keys that a program takes at once: all of them in `scan` and `reverse`."""
        if kernel not in KEYS:
            return self.key_dim
        return min(self.key_dim, 16 if self.fp32 else KEYS[kernel][self.low_rank])

    def bv(self, kernel: str) -> int:
        """Values that a program takes at once. Blocks of 128 read other tensors less often, but may idle the GPU."""
        if kernel == "gradients":
            most = 32 if self.fp32 else 128
            return next(bv for bv in (128, 64, 32, 16) if bv <= most and self.value_dim % bv == 0)
        enough = self.batch * self.heads * self.value_dim >= ENOUGH * 128
        if enough and self.value_dim % 128 == 0 and self.key_dim <= 128 and not self.fp32:
            return 128
        narrow: int = triton.next_power_of_2(self.value_dim)
        return max(16, min(64, narrow))

    @property
    def grid(self) -> tuple[int, int, int]:
        """The grid of `scan` and `reverse`."""
        return triton.cdiv(self.value_dim, self.bv("scan")), self.heads, self.batch

    def programs(self, chunks: int) -> tuple[int]:
        """The grid of `prepare` and `gradients`: a program takes several chunks, which share constant matrices."""
        chunks_of_program = min(8, triton.cdiv(self.slots(chunks) * self.heads, BUSY))
        return (triton.cdiv(self.slots(chunks) * self.heads, chunks_of_program),)

    def sizes(self, kernel: str) -> dict[str, Any]:
        """Arguments that follow from the plan, by name."""
        bv = self.bv(kernel)
        sizes = {"BK": self.bk(kernel), "BV": bv, "FULL_V": self.value_dim % bv == 0}
        return {**super().sizes(kernel), **sizes, "LATE": self.late, "EARLY": self.early}

    def resources(self, kernel: str) -> dict[str, int]:
        """Warps, registers, and as many stages as leave shared memory for two programs of 4 warps, or one of 8."""
        big_block = kernel in ("scan", "reverse") and self.bv(kernel) == 128
        stages = STAGES[kernel]
        if kernel == "gradients" and self.low_rank == "none" and self.bv(kernel) == self.value_dim:
            stages = 2
        elif kernel == "reverse" and self.low_rank == "free" and big_block and self.chunk_size == 64:
            stages = 1
        elif kernel in ("scan", "reverse") and self.low_rank == "none":
            stages = 3
        registers = {"maxnreg": ALL_REGISTERS} if self.fp32 else {}
        return {"num_warps": 8 if big_block else 4, "num_stages": stages, **registers}

    def keys(self, x: Tensor | None, kernel: str, *, store: bool = False) -> Any:
        """Views x [B, T, H, K] in the tiles of a kernel."""
        return tiles(x, self.heads * self.key_dim, self.chunk_size, self.bk(kernel), store=store, ragged=self.ragged)

    def values(self, x: Tensor | None, *, store: bool = False) -> Any:
        """Views x [B, T, H, V] in the tiles of `gradients`."""
        bv = self.bv("gradients")
        return tiles(x, self.heads * self.value_dim, self.chunk_size, bv, store=store, ragged=self.ragged)

    def slabs(self, x: Tensor | None, rows: int, columns: int) -> Any:
        """Views x [slots, H, ...], one matrix for each chunk and head, in tiles of [rows, columns]."""
        return None if x is None else tiles(x, x.shape[-1], rows, columns)
