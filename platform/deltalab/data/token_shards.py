"""Reads packed data, the memory-mapped shards of tokens that `deltalab data pack` writes; needs numpy alone."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 1
META = "meta.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "validation", "test")
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
"""Numpy's name of each dtype in `meta.json`, little-endian on every machine."""


class Split:
    """The documents of one split, joined into one stream of tokens.

    Shards are mapped into memory at the first read, and again after unpickling.

    Args:
        folder: The folder of the shards.
        dtype: The dtype of tokens, a name of `DTYPES`.
        facts: The entry of the split in `meta.json`.

    Attributes:
        tokens: The number of tokens.
        documents: The number of documents.
        bytes: The bytes of UTF-8 text, without the end-of-document tokens.
    """

    def __init__(self, folder: Path, dtype: str, facts: Mapping[str, Any]) -> None:
        self.tokens: int = facts["tokens"]
        self.documents: int = facts["documents"]
        self.bytes: int = facts["bytes"]
        self._dtype = np.dtype(DTYPES[dtype])
        self._files = [folder / shard["file"] for shard in facts["shards"]]
        self._bounds = np.cumsum([0, *(shard["tokens"] for shard in facts["shards"])])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_maps"}

    @cached_property
    def _maps(self) -> list[tuple[NDArray[Any], NDArray[np.int64]]]:
        """The tokens and the ends of documents of each shard."""
        return [
            (np.memmap(file, self._dtype, mode="r"), np.load(ends_file(file), mmap_mode="r")) for file in self._files
        ]

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Returns the tokens start ... start + count - 1 of the stream.

        Raises:
            ValueError: The tokens are not all in the stream.
        """
        if start < 0 or count < 0 or start + count > self.tokens:
            raise ValueError(f"tokens {start} to {start + count} are not within 0 to {self.tokens}")
        out = np.empty(count, np.int64)
        for shard, begin, end in self._parts(start, start + count):
            at = int(self._bounds[shard])
            out[at + begin - start : at + end - start] = self._maps[shard][0][begin:end]
        return out

    def starts(self, start: int, count: int) -> NDArray[np.int64]:
        """Returns where documents start among the tokens of `read(start, count)`, ascending, in [0, count)."""
        parts = [np.empty(0, np.int64)]
        for shard, begin, end in self._parts(start, start + count):
            at, ends = int(self._bounds[shard]), self._maps[shard][1]
            if begin == 0:
                parts.append(np.array([at - start]))  # a shard begins with a document
            first, last = np.searchsorted(ends, [max(begin, 1), min(end, int(ends[-1]))])
            parts.append(np.asarray(ends[first:last]) + (at - start))
        return np.concatenate(parts)

    def rows(self, length: int) -> int:
        """Returns the number of rows of length + 1 tokens.

        Rows begin `length` tokens apart. The last token of a row, which is only predicted, is the first token of the
        next row.
        """
        if length < 1:
            raise ValueError(f"a row has a length of at least 1, not {length}")
        return max(0, (self.tokens - 1) // length)

    def row(self, index: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns a row of `rows(length)`: its tokens [length + 1], and where documents start in the row.

        The starts are ascending, in [0, length], with a 0 only if a document starts there. So the bounds of the
        sequences in the inputs tokens[:-1] are `np.unique([0, *starts[starts < length], length])`.

        Args:
            index: The number of the row.
            length: The length of the row's inputs.

        Raises:
            ValueError: There is no such row.
        """
        if not 0 <= index < self.rows(length):
            raise ValueError(f"row {index} is not among the {self.rows(length)} rows of length {length}")
        start = int(index) * length
        return self.read(start, length + 1), self.starts(start, length + 1)

    def order(self, seed: int, epoch: int, length: int) -> NDArray[np.int64]:
        """Returns the order of the rows of `length` in one pass through the data. It is the same on every machine."""
        key = _scrambled(_scrambled(np.array([seed], np.uint64)) + np.uint64(epoch))
        # `_scrambled` maps different numbers to different numbers, so that the sort meets no ties.
        return np.argsort(_scrambled(np.arange(self.rows(length), dtype=np.uint64) ^ key), kind="stable")

    def _parts(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Returns the pieces of shards that make up tokens start ... end - 1: (shard, first token, last token + 1)."""
        first, last = np.searchsorted(self._bounds, [start, end], side="right") - 1
        parts = []
        for shard in range(int(first), min(int(last), len(self._files) - 1) + 1):
            at, following = int(self._bounds[shard]), int(self._bounds[shard + 1])
            begin, stop = max(start, at) - at, min(end, following) - at
            if begin < stop:
                parts.append((shard, begin, stop))
        return parts


class Packed:
    """A folder of packed data.

    Args:
        folder: The folder.

    Attributes:
        folder: The folder.
        meta: The content of `meta.json`.
        tokenizer: The entry {kind, name, vocab_size, sha256, eos} of `meta.json`. The tokenizer itself is the file
            `tokenizer.json`.

    Raises:
        ValueError: The folder holds no packed data, is not finished, is of another version, or lacks files. The message
            is one line.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        file = self.folder / META
        try:
            self.meta: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(
                f"{folder}: is no packed data: {META}: {error.strerror}; `deltalab data pack` makes it"
            ) from None
        except ValueError as error:
            raise ValueError(f"{file}: is not JSON: {error}") from None
        version = self.meta.get("version") if isinstance(self.meta, dict) else None
        if version != VERSION:
            raise ValueError(f"{file}: is packed data of version {version}; this deltalab reads version {VERSION}")
        try:
            self.tokenizer: dict[str, Any] = self.meta["tokenizer"]
            self._splits = {name: Split(self.folder, self.meta["dtype"], self.meta["splits"][name]) for name in SPLITS}
            width = np.dtype(DTYPES[self.meta["dtype"]]).itemsize
            shards = [shard for name in SPLITS for shard in self.meta["splits"][name]["shards"]]
            sizes = {shard["file"]: shard["tokens"] * width for shard in shards}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: is no packed data: {type(error).__name__}: {error}") from None
        for name, size in sizes.items():
            shard_file = self.folder / name
            missing = [path for path in (shard_file, ends_file(shard_file)) if not path.is_file()]
            if missing:
                raise ValueError(f"{missing[0]}: is missing, though {META} lists it")
            if shard_file.stat().st_size != size:
                raise ValueError(f"{shard_file}: has {shard_file.stat().st_size} bytes, not the {size} of {META}")

    def split(self, name: str) -> Split:
        """Returns the split "train", "validation" or "test".

        Raises:
            ValueError: There is no split of this name.
        """
        if name not in self._splits:
            raise ValueError(f"unknown split '{name}'; allowed: {', '.join(SPLITS)}")
        return self._splits[name]


def ends_file(shard: Path) -> Path:
    """Returns the file with the ends of a shard's documents, int64: where the next document starts in the shard."""
    return shard.with_suffix(".ends.npy")


def _scrambled(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Maps 64-bit integers one to one to 64-bit integers without visible order.

    The map is the finalizer of SplitMix64 (Steele et al. 2014).
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
