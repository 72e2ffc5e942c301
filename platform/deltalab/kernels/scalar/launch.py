"""How `kernels.scalar` is launched: the sizes of blocks, segments and parts, warps and stages, of one problem."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels import sequence_parts as parts
from deltalab.kernels.chunk import ALL_REGISTERS, PRECISIONS, Problem, chunk_map, tiles

WORKSPACE = 128 * 2**20
"""Bytes that the states of a segment may take in the backward; a segment has fewer only where it would idle the GPU."""

ENOUGH = 96
"""Programs that keep a GPU busy, so that each may take 128 values instead of 64 and read the keys half as often."""

WARPS = {"prepare": 4, "scan": 4, "states": 4, "reverse": 4, "gradients": 4}
STAGES = {"prepare": 1, "scan": 3, "states": 3, "reverse": 3, "gradients": 3}


@dataclass(frozen=True)
class Launch(Problem):
    """The plan of one problem: sizes of blocks and of segments, and where its sequences lie.

    Few long sequences of whole chunks that are not packed are cut in equal parts, which lie in memory as so many
    sequences: `batch`, `tokens` and `chunks` are of these.
    """

    bk: int
    bv: int
    chunks: int
    every: int
    parts: int
    packed: tuple[Tensor, Tensor, Tensor] | None
    ragged: bool
    precision: str

    @classmethod
    def of(cls, k: Tensor, u: Tensor, cu_seqlens: Tensor | None, size: int) -> "Launch":
        batch, tokens, heads, key_dim = k.shape
        value_dim = u.shape[-1]
        chunks, packed = triton.cdiv(tokens, size), None
        if cu_seqlens is not None:
            of, first, chunks = chunk_map(cu_seqlens, tokens, size)
            packed, batch = (cu_seqlens.to(torch.int32), of, first), cu_seqlens.numel() - 1
        wide = k.element_size() > 2
        blocks = (32, 16) if wide else (128, 64, 32, 16)
        bv = next(bv for bv in blocks if value_dim % bv == 0)
        if bv == 128 and (key_dim > 128 or batch * heads * value_dim < ENOUGH * bv):
            bv = 64
        ragged, split = packed is not None or tokens % size != 0, 1
        if not ragged:
            split = parts.count(batch * heads * (value_dim // bv), chunks)
            batch, tokens, chunks = batch * split, tokens // split, chunks // split
        each = batch * heads * key_dim * value_dim * k.element_size()
        every = chunks if packed else min(chunks, max(WORKSPACE // each, 8, triton.cdiv(1024, batch * heads)))
        return cls(
            batch, tokens, heads, key_dim, value_dim, size, key_dim, bv, chunks, every, split, packed, ragged,
            precision=PRECISIONS[u.dtype],
        )  # fmt: skip

    def per_chunk(self) -> "Launch":
        """The same with blocks for `gradients`: of keys, with all values at once."""
        blocks = (32, 16) if self.precision == "ieee" else (128, 64, 32, 16)
        return replace(self, bk=min(self.key_dim, 32), bv=next(bv for bv in blocks if self.value_dim % bv == 0))

    @property
    def segments(self) -> int:
        return triton.cdiv(self.chunks, self.every)

    @property
    def all_chunks(self) -> int:
        return self.chunks if self.packed else self.batch * self.chunks

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.value_dim // self.bv, self.heads, self.batch

    def keys(self, x: Tensor | None, *, store: bool = False) -> Any:
        return tiles(x, self.size, self.bk, store=store, ragged=self.ragged)

    def values(self, x: Tensor | None, *, store: bool = False) -> Any:
        return tiles(x, self.size, self.bv, store=store, ragged=self.ragged)

    def squares(self, x: Tensor) -> Any:
        return tiles(x.flatten(0, 1), self.size, self.size) if x.numel() else None

    def states(self, x: Tensor) -> Any:
        return tiles(x.flatten(0, 1), self.bv, self.bk)

    def sequence(self) -> dict[str, Any]:
        bounds, _, first = self.packed or (None, None, None)
        return {"cu_seqlens": bounds, "first": first, "length": self.tokens, "chunks": self.chunks}

    def sizes(self) -> dict[str, Any]:
        return {
            "H": self.heads, "K": self.key_dim, "SIZE": self.size,
            "PACKED": self.packed is not None, "RAGGED": self.ragged, "PRECISION": self.precision,
        }  # fmt: skip

    def how(self, kernel: str, erases: bool = False) -> dict[str, int]:
        warps, stages = WARPS[kernel], STAGES[kernel]
        if kernel == "gradients" and self.value_dim > self.bv:
            # Its loop would hold all values twice.
            stages = 1
        elif kernel == "gradients" and erases:
            # Two programs would no longer share a multiprocessor.
            stages = 2
        elif kernel in ("scan", "states", "reverse") and self.bv == 128:
            warps *= 2
        made = {"num_warps": warps, "num_stages": stages}
        if kernel == "prepare" and self.precision == "tf32" and self.key_dim <= 128:
            # Four programs a multiprocessor.
            made["maxnreg"] = 128
        elif self.precision == "ieee":
            made["maxnreg"] = ALL_REGISTERS
        return made

    @property
    def vectors(self) -> torch.dtype:
        """Also of cumulative sums; in fp32 their differences next to extremes would not keep fp32's precision."""
        return torch.float64 if self.precision == "ieee" else torch.float32

    @property
    def sum(self) -> Any:
        return tl.float64 if self.precision == "ieee" else tl.float32
