"""Plans the launches of `kernels.scalar`: blocks, segments, parts of a sequence, warps and stages."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels import sequence_parts
from deltalab.kernels.launch import ALL_REGISTERS, Launch, Packing, chunk_map, has_tensor_memory, planned, tiles
from deltalab.kernels.register import existing

WORKSPACE = 128 * 2**20
"""Bytes that the states of a segment may take in the backward. A segment takes more only to keep the GPU busy."""

ENOUGH = 96
"""How many programs keep a GPU busy. If there are as many, each takes 128 values instead of 64, so that keys are read
half as often."""

WARPS = {"prepare": 4, "scan": 4, "reverse": 4, "gradients": 4}
STAGES = {"prepare": 1, "scan": 3, "reverse": 3, "gradients": 3}


@dataclass(frozen=True, kw_only=True)
class ScalarLaunch(Launch):
    """The plan of `kernels.scalar`.

    A few long sequences that consist of whole chunks and are not packed are cut into equal parts, which lie in memory
    like separate sequences. `batch` is then the number of all parts, and `tokens` and `chunks` are those of one part.

    Attributes:
        bk: Keys of a block.
        bv: Values of a block.
        parts: Parts of each sequence.
        erases: Whether `gradients` has an erasure to differentiate.
        loads_ahead: Whether `scan` loads the tiles of later chunks ahead.
    """

    bk: int
    bv: int
    parts: int
    erases: bool = False
    loads_ahead: bool = True

    @classmethod
    def of(cls, k: Tensor, u: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> "ScalarLaunch":
        """Returns the plan for operands shaped like k and u, and for packed sequences if there are `cu_seqlens`."""
        make: Callable[..., ScalarLaunch] = cls._of
        sizes = *k.shape, u.shape[-1], chunk_size, u.dtype
        if cu_seqlens is not None:
            packing, bound = chunk_map(cu_seqlens, k.shape[1], chunk_size)
            return make(*sizes, sequences=cu_seqlens.numel() - 1, packing=packing, bound=bound)
        return planned(make, *sizes)

    @classmethod
    def _of(
        cls, batch: int, tokens: int, heads: int, key_dim: int, value_dim: int, chunk_size: int, dtype: torch.dtype,
        sequences: int = 0, packing: Packing | None = None, bound: int = 0,
    ) -> "ScalarLaunch":  # fmt: skip
        """The plan; with a packing, `sequences` and `bound` are the numbers of packed sequences and of their chunks."""
        chunks, parts, batch = bound or triton.cdiv(tokens, chunk_size), 1, sequences or batch
        bv = _widest(value_dim, dtype)
        if bv == 128 and (key_dim > 128 or batch * heads * value_dim < ENOUGH * bv):
            bv = 64
        if packing is None and tokens % chunk_size == 0:
            parts = sequence_parts.count(batch * heads * (value_dim // bv), chunks)
            batch, tokens, chunks = batch * parts, tokens // parts, chunks // parts
        state_bytes = batch * heads * key_dim * value_dim * dtype.itemsize
        segment_chunks = chunks
        if packing is None:
            segment_chunks = min(chunks, max(WORKSPACE // state_bytes, 8, triton.cdiv(1024, batch * heads)))
        return cls(
            batch=batch, tokens=tokens, heads=heads, key_dim=key_dim, value_dim=value_dim, chunk_size=chunk_size,
            chunks=chunks, segment_chunks=segment_chunks, dtype=dtype, packing=packing, bk=key_dim, bv=bv,
            parts=parts,
        )  # fmt: skip

    def per_chunk(self, erases: bool) -> "ScalarLaunch":
        """The same plan with the blocks of `gradients`: some keys, and all values."""
        bk, bv = min(self.key_dim, 32), _widest(self.value_dim, self.dtype)
        return self.once(("per chunk", erases), lambda: replace(self, bk=bk, bv=bv, erases=erases))

    def storing_states(self, erases: bool) -> "ScalarLaunch":
        """The same plan for the `scan` that stores the state before each chunk.

        Without an erasure, Triton 3.7.1 fails to compile that loop for tensor memory if it loads ahead.
        """
        if erases or not has_tensor_memory():
            return self
        return self.once("storing states", lambda: replace(self, loads_ahead=False))

    def narrowed(self, bv: int) -> "ScalarLaunch":
        """The same plan with at most `bv` values in a block."""
        return self if self.bv <= bv else self.once(("narrowed", bv), lambda: replace(self, bv=bv))

    @property
    def grid(self) -> tuple[int, int, int]:
        """The grid of `scan` and `reverse`."""
        return self.value_dim // self.bv, self.heads, self.batch

    def keys(self, x: Tensor | None, *, store: bool = False) -> Any:
        """Views x [B, T, H, K] in tiles."""
        return tiles(x, self.heads * self.key_dim, self.chunk_size, self.bk, store=store, ragged=self.ragged)

    def values(self, x: Tensor | None, *, store: bool = False) -> Any:
        """Views x [B, T, H, V] in tiles."""
        return tiles(x, self.heads * self.value_dim, self.chunk_size, self.bv, store=store, ragged=self.ragged)

    def squares(self, x: Tensor) -> Any:
        """Views x, which has one square for each chunk and head, in tiles."""
        size = self.chunk_size
        return None if existing(x) is None else tiles(x, size, size, size)

    def states(self, x: Tensor) -> Any:
        """Views transposed states [.., V, K] in tiles."""
        return tiles(x, self.key_dim, self.bv, self.bk)

    def sizes(self, kernel: str) -> dict[str, Any]:
        """Arguments that follow from the plan, by name."""
        dtype = tl.float64 if self.fp32 else tl.float32
        return {**super().sizes(kernel), "BK": self.bk, "BV": self.bv, "SUM_DTYPE": dtype}

    def resources(self, kernel: str) -> dict[str, int]:
        """Warps, stages and registers."""
        warps, stages = WARPS[kernel], STAGES[kernel]
        if kernel == "gradients" and self.value_dim > self.bv:
            # With more stages, its loop would hold all values twice.
            stages = 1
        elif kernel == "gradients" and self.erases:
            # With three stages, two programs would no longer share a multiprocessor.
            stages = 2
        elif kernel in ("scan", "reverse") and self.bv == 128:
            warps *= 2
        if kernel == "scan" and not self.loads_ahead:
            stages = 1
        resources = {"num_warps": warps, "num_stages": stages}
        if kernel == "prepare" and self.precision == "tf32" and self.key_dim <= 128:
            # So that four programs share a multiprocessor.
            resources["maxnreg"] = 128
        elif self.fp32:
            resources["maxnreg"] = ALL_REGISTERS
        return resources

    @property
    def vector_dtype(self) -> torch.dtype:
        """Dtype of the vectors and cumulative sums of `forward.prepare`.

        Sums are large where decays are extreme, and a small difference of two large sums is imprecise in fp32.
        """
        return torch.float64 if self.fp32 else torch.float32


def _widest(value_dim: int, dtype: torch.dtype) -> int:
    """The largest block that divides the values."""
    blocks = (32, 16) if dtype.itemsize > 2 else (128, 64, 32, 16)
    return next(block for block in blocks if value_dim % block == 0)
