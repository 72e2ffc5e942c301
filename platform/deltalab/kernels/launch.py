"""How the kernels of every structure are launched: the sequences, chunks and segments of one problem."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from deltalab.kernels.compiled import Launcher, Tile

Found = TypeVar("Found")

PRECISIONS = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "ieee"}
"""Precision of products of fp32 operands, by the dtype of q, k and v. The hardware truncates tf32 operands to 10 bits
instead of rounding them, so tf32 costs an inverse more accuracy than rounding it to fp16 afterwards does."""

MOST = 256
"""Plans that are remembered. With more, all are forgotten."""

ALL_REGISTERS = 255
"""The most that a thread may have. By itself, ptxas gives kernels of fp32 products 32 and spills up to 10 KiB."""


class Packing(NamedTuple):
    """Where the chunks of packed sequences lie: `cu_seqlens` [N + 1] in int32, and what `chunk_map` returns."""

    cu_seqlens: Tensor
    of: Tensor
    first: Tensor


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The plan of one problem. Each structure adds the sizes of its blocks and the resources of its kernels.

    batch: number of sequences, packed ones counted singly.
    tokens, chunks: length of each sequence; of packed sequences, length and bound on the chunks of all together.
    size: tokens of a chunk. every: chunks of a segment, after which the forward keeps the state for the backward.
    dtype: of q, k and v. known: what `once` found.
    """

    batch: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    size: int
    chunks: int
    every: int
    dtype: torch.dtype
    packing: Packing | None = None
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def segments(self) -> int:
        return -(-self.chunks // self.every)

    def segment(self, number: int) -> range:
        """The chunks of one segment."""
        return range(number * self.every, min((number + 1) * self.every, self.chunks))

    @property
    def wide(self) -> bool:
        return self.dtype == torch.float32

    @property
    def precision(self) -> str:
        return PRECISIONS[self.dtype]

    @property
    def ragged(self) -> bool:
        """Whether a sequence may end inside a chunk."""
        return self.packing is not None or self.tokens % self.size != 0

    def slots(self, chunks: int) -> int:
        """Number of chunks, over all sequences, in a launch over `chunks` chunks of each sequence."""
        return self.chunks if self.packing else self.batch * chunks

    def sizes(self, kernel: str) -> dict[str, Any]:
        """Arguments that follow from the plan, by name: a launch passes on those that its kernel takes."""
        cu_seqlens, of, first = self.packing or (None, None, None)
        return {
            "cu_seqlens": cu_seqlens, "of": of, "first": first, "length": self.tokens, "sequences": self.batch,
            "chunks": self.chunks, "every": self.every, "segments": self.segments,
            "H": self.heads, "K": self.key_dim, "V": self.value_dim, "SIZE": self.size,
            "PACKED": self.packing is not None, "RAGGED": self.ragged, "PRECISION": self.precision,
        }  # fmt: skip

    def resources(self, kernel: str) -> dict[str, int]:
        """Warps, stages and registers."""
        raise NotImplementedError

    def launch(self, kernel: Any, grid: tuple[int, ...], chunks: range, /, **operands: Any) -> None:
        """Launches a kernel over `chunks` of each sequence, with named operands and those of `sizes` that it takes."""
        self.once((kernel.__name__, chunks, *operands), lambda: self._launcher(kernel, chunks, operands))(
            grid, operands
        )

    def _launcher(self, kernel: Any, chunks: range, operands: Mapping[str, Any]) -> Launcher:
        name, among = kernel.__name__, set(kernel.arg_names) - set(operands)
        sizes = {**self.sizes(name), "from_chunk": chunks.start, "to_chunk": chunks.stop, "span": len(chunks)}
        return Launcher(kernel, {one: size for one, size in sizes.items() if one in among}, self.resources(name))

    def once(self, key: Any, make: Callable[[], Found]) -> Found:
        """What `make` returned when it was first called for this plan and key."""
        found: Found | None = self.known.get(key)
        if found is None:
            found = self.known[key] = make()
        return found


_plans: dict[Any, Any] = {}


def planned(make: Callable[..., Found], *sizes: Any) -> Found:
    """make(*sizes), from memory where it was called before, unless a size is a compiler's symbol."""
    if torch.SymInt in map(type, sizes):
        return make(*sizes)
    found: Found | None = _plans.get((make, sizes))
    if found is None:
        if len(_plans) >= MOST:
            _plans.clear()
        found = _plans[make, sizes] = make(*sizes)
    return found


def chunk_map(cu_seqlens: Tensor, tokens: int, chunk_size: int) -> tuple[Packing, int]:
    """Finds the chunks of packed sequences with bounds cu_seqlens [N + 1]. Does not synchronize with the device.

    Returns the packing and `bound`, an upper bound on the number of chunks: `of` [bound] is the sequence of each
    chunk, N for chunks beyond the last one, and `first` [N + 1] is the first chunk of each sequence.
    """
    bound = tokens // chunk_size + cu_seqlens.numel() - 1
    counts = (cu_seqlens.diff() + chunk_size - 1) // chunk_size
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    at = torch.arange(bound, device=cu_seqlens.device, dtype=torch.int32)
    of = torch.searchsorted(first, at, right=True, out_int32=True) - 1
    return Packing(cu_seqlens.to(torch.int32), of, first), bound


def tiles(x: Tensor | None, width: int, rows: int, columns: int, *, store: bool = False, ragged: bool = False) -> Any:
    """Views contiguous x as a matrix with rows of `width` in tiles of [rows, columns].

    Returns x itself where a kernel stores at ragged ends, for which `chunk.put_rows` takes a pointer.
    """
    return x if x is None or (store and ragged) else Tile(x, width, (rows, columns))
