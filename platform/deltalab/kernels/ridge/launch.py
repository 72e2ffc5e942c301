"""Plans the launches of `kernels.ridge`: blocks, segments, parts of numbers, warps and stages."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels.launch import Launch, planned
from deltalab.structure import Ridge

WORKSPACE = 160 * 2**20
"""Bytes that the states of a segment may take. A segment takes more if it would have fewer than `BUSY` chunks."""

BUSY = 1024
"""How many chunks, counted over all sequences and heads, keep a GPU busy."""

WARPS = {"sweep": 4, "measure": 4, "solve": 4, "read": 4, "differentiate": 4, "reverse": 8, "pairs": 4, "gradients": 4}
STAGES = {"sweep": 2, "measure": 1, "solve": 1, "read": 2, "differentiate": 1, "reverse": 2, "pairs": 2, "gradients": 2}


class StoredStates(NamedTuple):
    """A segment's states, divided by the norms of their blocks, in `RidgeLaunch.parts` parts, and the norms."""

    states: Tensor
    norms: Tensor


class SegmentStates(NamedTuple):
    """`StoredStates` of H and of U."""

    gram: StoredStates
    memory: StoredStates


@dataclass(frozen=True, kw_only=True)
class RidgeLaunch(Launch):
    """The plan of `kernels.ridge`.

    Attributes:
        bk: Keys of a block, which are all keys.
        bg: Columns of a block of H.
        bv: Columns of a block of U.
        parts: The number of 16-bit parts that a state, and the vectors that it is multiplied with, are held in.
    """

    bk: int
    bg: int
    bv: int
    parts: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, strength: float, adaptive: bool, chunk_size: int) -> "RidgeLaunch":
        """Returns the plan for inputs shaped like k and v."""
        return planned(cls._of, *k.shape, v.shape[-1], k.dtype, strength, adaptive, chunk_size)

    @classmethod
    def _of(
        cls, batch: int, tokens: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, strength: float,
        adaptive: bool, chunk_size: int,
    ) -> "RidgeLaunch":  # fmt: skip
        """The plan, whose chunks may be smaller than `chunk_size`."""
        fp32 = dtype == torch.float32
        bk = max(16, triton.next_power_of_2(key_dim))
        bg = min(bk, 16 if fp32 else 64)
        bv = max(16, min(16 if fp32 else 64, triton.next_power_of_2(value_dim)))
        chunk_size = max(16, triton.next_power_of_2(min(chunk_size, tokens, 16 if fp32 else 64)))
        one_half = Ridge(strength=strength, adaptive=adaptive).in_one_half(dtype)
        parts = 1 if fp32 or one_half else 2
        chunks = triton.cdiv(tokens, chunk_size)
        chunk_bytes = batch * heads * bk * (bk + triton.cdiv(value_dim, bv) * bv) * parts * (4 if fp32 else 2)
        segment_chunks = min(chunks, max(WORKSPACE // chunk_bytes, triton.cdiv(BUSY, batch * heads)))
        return cls(
            batch=batch, tokens=tokens, heads=heads, key_dim=key_dim, value_dim=value_dim, chunk_size=chunk_size,
            chunks=chunks, segment_chunks=segment_chunks, dtype=dtype, bk=bk, bg=bg, bv=bv, parts=parts,
        )  # fmt: skip

    @property
    def boundaries(self) -> int:
        """Number of boundaries of segments, the first and the last included."""
        return self.segments + 1

    def space(self, like: Tensor) -> SegmentStates:
        """Room for a segment's states."""
        dtype = torch.float32 if self.fp32 else torch.float16

        def room(width: int, block: int) -> StoredStates:
            blocks = triton.cdiv(width, block)
            slots = (self.batch * self.segment_chunks, self.heads)
            return StoredStates(
                like.new_empty(*slots, self.parts, self.bk, blocks * block, dtype=dtype),
                like.new_empty(*slots, blocks, dtype=torch.float32),
            )

        return SegmentStates(room(self.bk, self.bg), room(self.value_dim, self.bv))

    def columns(self, gram: bool) -> dict[str, Any]:
        """Returns the sizes of the columns of H (if `gram`) or of U, for `sweep` and `reverse`.

        The grid has blocks for all `bk` columns of H.
        """
        if gram:
            return {"D": self.key_dim, "BW": self.bg, "FULL_D": self.bk == self.key_dim}
        return {"D": self.value_dim, "BW": self.bv, "FULL_D": self.value_dim % self.bv == 0}

    def grid(self, gram: bool) -> tuple[int, int, int]:
        """The grid of `sweep` and `reverse`, for H or for U."""
        width, block = (self.bk, self.bg) if gram else (self.value_dim, self.bv)
        return triton.cdiv(width, block), self.heads, self.batch

    def programs(self, chunks: range) -> tuple[int]:
        """The grid of the kernels other than `sweep` and `reverse`. `gradients` multiplies it by the blocks of keys."""
        return (self.batch * len(chunks) * self.heads,)

    def sizes(self, kernel: str) -> dict[str, Any]:
        """Arguments that follow from the plan, by name."""
        return {
            **super().sizes(kernel), "T": self.tokens, "boundaries": self.boundaries,
            "BK": self.bk, "BG": self.bg, "BV": self.bv,
            "FULL": self.bk == self.key_dim, "FULL_V": self.value_dim % self.bv == 0, "PARTS": self.parts,
            "IN": 2 if self.dtype == torch.float16 else 1, "DTYPE": tl.float32 if self.fp32 else tl.bfloat16,
            "HALF": tl.float32 if self.fp32 else tl.float16, "FP32": self.fp32,
        }  # fmt: skip

    def resources(self, kernel: str) -> dict[str, int]:
        """Warps and stages."""
        crowded = (self.bk > 128 and kernel == "solve") or (self.bk > 64 and kernel == "measure" and self.fp32)
        return {"num_warps": 8 if crowded else WARPS[kernel], "num_stages": STAGES[kernel]}
