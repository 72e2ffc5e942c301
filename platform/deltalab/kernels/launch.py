"""Plans and launches the kernels of every structure over the sequences, chunks and segments of one problem."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from deltalab.kernels.compilations import Launcher, Tile

R = TypeVar("R")

PRECISIONS = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "ieee"}
"""Precision of products of fp32 operands, by the dtype of q, k and v. The hardware truncates tf32 operands to 10 bits
instead of rounding them, so an inverse loses more accuracy if its products are in tf32 than if it is rounded to fp16
afterwards."""

MOST = 256
"""How many plans are remembered. When there are more, all are forgotten."""

ALL_REGISTERS = 255
"""The most registers that a thread can have. Left alone, ptxas gives kernels with fp32 products, and many kernels of an
A100, 32 registers, and spills up to 12 KiB."""


@cache
def has_tensor_memory() -> bool:
    """Returns whether this machine's GPU keeps accumulators in tensor memory, as those of compute capability 10 do."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10


@cache
def is_a100() -> bool:
    """Returns whether this machine's GPU has compute capability 8.0."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (8, 0)


class Packing(NamedTuple):
    """Where the chunks of packed sequences lie.

    Attributes:
        cu_seqlens: The bounds of the sequences, [N + 1] in int32.
        chunk_sequences: The number of the sequence that each chunk belongs to, [bound], for a bound on the number of
            chunks. Chunks beyond the last one have N.
        first_chunks: The first chunk of each sequence, [N + 1].
    """

    cu_seqlens: Tensor
    chunk_sequences: Tensor
    first_chunks: Tensor


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The plan of one problem. Each structure adds the sizes of its blocks and the resources of its kernels.

    Attributes:
        batch: Number of sequences; packed sequences are counted singly.
        tokens: Length of each sequence, or of all packed sequences together.
        heads: H.
        key_dim: K.
        value_dim: V.
        chunk_size: Tokens of a chunk.
        chunks: Chunks of each sequence, or a bound on the chunks of all packed sequences together.
        segment_chunks: Chunks of a segment. The forward keeps the state before each segment for the backward.
        dtype: The dtype of q, k and v.
        packing: Where the chunks of packed sequences lie; None if sequences are not packed.
        results: The launchers, and what `once` has made, by key.
    """

    batch: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    chunk_size: int
    chunks: int
    segment_chunks: int
    dtype: torch.dtype
    packing: Packing | None = None
    results: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def segments(self) -> int:
        """Number of segments of a sequence."""
        return -(-self.chunks // self.segment_chunks)

    def segment(self, number: int) -> range:
        """The chunks of one segment."""
        return range(number * self.segment_chunks, min((number + 1) * self.segment_chunks, self.chunks))

    @property
    def fp32(self) -> bool:
        """Whether q, k and v are in fp32."""
        return self.dtype == torch.float32

    @property
    def precision(self) -> str:
        """Precision of products of fp32 operands, as `triton.language.dot` takes it."""
        return PRECISIONS[self.dtype]

    @property
    def ragged(self) -> bool:
        """Whether a sequence may end inside a chunk."""
        return self.packing is not None or self.tokens % self.chunk_size != 0

    def slots(self, chunks: int) -> int:
        """Number of chunks, over all sequences, in a launch over `chunks` chunks of each sequence."""
        return self.chunks if self.packing else self.batch * chunks

    def sizes(self, kernel: str) -> dict[str, Any]:
        """Returns the arguments that follow from the plan, by name. A launch passes those that its kernel takes."""
        cu_seqlens, chunk_sequences, first_chunks = self.packing or (None, None, None)
        return {
            "cu_seqlens": cu_seqlens, "chunk_sequences": chunk_sequences, "first_chunks": first_chunks,
            "length": self.tokens, "sequences": self.batch, "chunks": self.chunks,
            "segment_chunks": self.segment_chunks, "segments": self.segments,
            "H": self.heads, "K": self.key_dim, "V": self.value_dim, "BT": self.chunk_size,
            "PACKED": self.packing is not None, "RAGGED": self.ragged, "PRECISION": self.precision,
        }  # fmt: skip

    def resources(self, kernel: str) -> dict[str, int]:
        """Returns the warps, stages and registers of a kernel."""
        raise NotImplementedError

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        chunks: range,
        first: dict[str, Any] | None = None,
        /,
        **operands: Any,
    ) -> None:
        """Launches a kernel with its operands by name, and with those of `sizes` that it takes.

        Args:
            kernel: A function with `triton.jit`.
            grid: The number of programs in each dimension.
            chunks: The chunks of each sequence that the launch computes.
            first: Operands by name in a dictionary, which saves unpacking it into the other operands.
            **operands: The other operands.
        """
        if first is not None:
            operands = {**first, **operands} if operands else first
        key = kernel.__name__, chunks, *operands
        launcher = self.results.get(key)
        if launcher is None:
            launcher = self.results[key] = self._launcher(kernel, chunks, operands)
        launcher(grid, operands)

    def _launcher(self, kernel: Any, chunks: range, operands: Mapping[str, Any]) -> Launcher:
        """Makes a launcher with the sizes that the kernel takes besides the operands."""
        name, missing = kernel.__name__, set(kernel.arg_names) - set(operands)
        sizes = {**self.sizes(name), "from_chunk": chunks.start, "to_chunk": chunks.stop, "span": len(chunks)}
        taken = {argument: size for argument, size in sizes.items() if argument in missing}
        resources = self.resources(name)
        if is_a100():
            resources = {"maxnreg": ALL_REGISTERS, **resources}
        if torch.version.hip:  # Triton's back end for AMD knows no limit of registers.
            resources.pop("maxnreg", None)
        return Launcher(kernel, taken, resources)

    def once(self, key: Any, make: Callable[[], R]) -> R:
        """What `make` returned when it was first called for this plan and key."""
        result: R | None = self.results.get(key)
        if result is None:
            result = self.results[key] = make()
        return result


_plans: dict[Any, Any] = {}


def planned(make: Callable[..., R], *sizes: Any) -> R:
    """Returns make(*sizes), and remembers the result unless a size is a compiler's symbol."""
    if torch.SymInt in map(type, sizes):
        return make(*sizes)
    plan: R | None = _plans.get((make, sizes))
    if plan is None:
        if len(_plans) >= MOST:
            _plans.clear()
        plan = _plans[make, sizes] = make(*sizes)
    return plan


def chunk_map(cu_seqlens: Tensor, tokens: int, chunk_size: int) -> tuple[Packing, int]:
    """Finds the chunks of packed sequences with bounds cu_seqlens [N + 1], without waiting for the device.

    Returns:
        The packing, and an upper bound on the number of chunks.
    """
    bound = tokens // chunk_size + cu_seqlens.numel() - 1
    counts = (cu_seqlens.diff() + chunk_size - 1) // chunk_size
    first_chunks = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    chunks = torch.arange(bound, device=cu_seqlens.device, dtype=torch.int32)
    chunk_sequences = torch.searchsorted(first_chunks, chunks, right=True, out_int32=True) - 1
    return Packing(cu_seqlens.to(torch.int32), chunk_sequences, first_chunks), bound


def tiles(x: Tensor | None, width: int, rows: int, columns: int, *, store: bool = False, ragged: bool = False) -> Any:
    """Views contiguous x as a matrix with rows of `width`, in tiles of [rows, columns].

    Returns:
        The `Tile`, or None if x is None. If a kernel stores to x, and a sequence may end inside a chunk, x itself,
        because `chunk.put_rows` then takes a pointer.
    """
    return x if x is None or (store and ragged) else Tile(x, width, (rows, columns))
