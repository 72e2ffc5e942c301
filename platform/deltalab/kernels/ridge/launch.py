"""How `kernels.ridge` is launched: blocks, segments, halves of numbers, warps and stages."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels.launch import Launch, planned
from deltalab.structure import Ridge

WORKSPACE = 160 * 2**20
"""Bytes that the states of a segment may take, unless that leaves it fewer chunks than `BUSY`."""

BUSY = 1024
"""Chunks, of all heads, that keep a GPU busy."""

WARPS = {"sweep": 4, "measure": 4, "solve": 4, "read": 4, "differentiate": 4, "reverse": 8, "pairs": 4, "gradients": 4}
STAGES = {"sweep": 2, "measure": 1, "solve": 1, "read": 2, "differentiate": 1, "reverse": 2, "pairs": 2, "gradients": 2}


class States(NamedTuple):
    """A segment's states over the norms of their blocks, in `parts` halves, and these norms."""

    states: Tensor
    norms: Tensor


class Both(NamedTuple):
    """`States` of H and of U."""

    gram: States
    memory: States


@dataclass(frozen=True, kw_only=True)
class RidgeLaunch(Launch):
    """bk: keys of a block, all of them; bg, bv: columns of a block of H and of U.

    parts: halves of 16 bits that a state and the vectors it is multiplied with are held in.
    """

    bk: int
    bg: int
    bv: int
    parts: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, strength: float, adaptive: bool, chunk_size: int) -> "RidgeLaunch":
        return planned(cls._of, *k.shape, v.shape[-1], k.dtype, strength, adaptive, chunk_size)

    @classmethod
    def _of(
        cls, batch: int, tokens: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, strength: float,
        adaptive: bool, chunk_size: int,
    ) -> "RidgeLaunch":  # fmt: skip
        wide = dtype == torch.float32
        bk = max(16, triton.next_power_of_2(key_dim))
        bg = min(bk, 16 if wide else 64)
        bv = max(16, min(16 if wide else 64, triton.next_power_of_2(value_dim)))
        size = max(16, triton.next_power_of_2(min(chunk_size, tokens, 16 if wide else 64)))
        one_half = Ridge(strength=strength, adaptive=adaptive).in_one_half(dtype)
        parts = 1 if wide or one_half else 2
        chunks = triton.cdiv(tokens, size)
        each = batch * heads * bk * (bk + triton.cdiv(value_dim, bv) * bv) * parts * (4 if wide else 2)
        every = min(chunks, max(WORKSPACE // each, triton.cdiv(BUSY, batch * heads)))
        return cls(
            batch=batch, tokens=tokens, heads=heads, key_dim=key_dim, value_dim=value_dim, size=size, chunks=chunks,
            every=every, dtype=dtype, bk=bk, bg=bg, bv=bv, parts=parts,
        )  # fmt: skip

    @property
    def boundaries(self) -> int:
        """Number of boundaries of segments, the first and the last included."""
        return self.segments + 1

    def space(self, like: Tensor) -> Both:
        """Room for a segment's states."""
        dtype = torch.float32 if self.wide else torch.float16

        def of(width: int, block: int) -> States:
            blocks = triton.cdiv(width, block)
            at = (self.batch * self.every, self.heads)
            return States(
                like.new_empty(*at, self.parts, self.bk, blocks * block, dtype=dtype),
                like.new_empty(*at, blocks, dtype=torch.float32),
            )

        return Both(of(self.bk, self.bg), of(self.value_dim, self.bv))

    def columns(self, gram: bool) -> dict[str, Any]:
        """The columns of H or U that `sweep` and `reverse` take; the grid has blocks for all bk columns of H."""
        if gram:
            return {"D": self.key_dim, "BW": self.bg, "FULL_D": self.bk == self.key_dim}
        return {"D": self.value_dim, "BW": self.bv, "FULL_D": self.value_dim % self.bv == 0}

    def grid(self, gram: bool) -> tuple[int, int, int]:
        """Of `sweep` and `reverse`."""
        width, block = (self.bk, self.bg) if gram else (self.value_dim, self.bv)
        return triton.cdiv(width, block), self.heads, self.batch

    def programs(self, chunks: range) -> tuple[int]:
        """The grid of all other kernels."""
        return (self.batch * len(chunks) * self.heads,)

    def sizes(self, kernel: str) -> dict[str, Any]:
        return {
            **super().sizes(kernel), "T": self.tokens, "boundaries": self.boundaries,
            "BK": self.bk, "BG": self.bg, "BV": self.bv,
            "FULL": self.bk == self.key_dim, "FULL_V": self.value_dim % self.bv == 0, "PARTS": self.parts,
            "IN": 2 if self.dtype == torch.float16 else 1, "KIND": tl.float32 if self.wide else tl.bfloat16,
            "HALF": tl.float32 if self.wide else tl.float16, "WIDE": self.wide,
        }  # fmt: skip

    def resources(self, kernel: str) -> dict[str, int]:
        crowded = (self.bk > 128 and kernel == "solve") or (self.bk > 64 and kernel == "measure" and self.wide)
        return {"num_warps": 8 if crowded else WARPS[kernel], "num_stages": STAGES[kernel]}
