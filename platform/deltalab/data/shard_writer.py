"""Writes the shards of a split. The name of a shard ends in `PARTIAL` until the shard is whole."""

import hashlib
import json
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from deltalab.data.token_shards import DTYPES, ends_file

PARTIAL = ".partial"
"""The end of the name of a file that is not whole."""


class Shards:
    """The shards of one split, in order.

    Args:
        folder: The folder of the shards.
        split: The name of the split.
        dtype: The dtype of tokens, a name of `DTYPES`.
        bound: The number of tokens that ends a shard, with the document that reaches it.
        finished: The finished shards.

    Attributes:
        finished: The entry of `meta.json` for each finished shard, to which `chain` is added: the hash of the documents
            up to the shard's end.
        skip: The number of documents of finished shards that `passed` has yet to see.
    """

    def __init__(self, folder: Path, split: str, dtype: str, bound: int, finished: list[dict[str, Any]]) -> None:
        self.finished = finished
        self.skip = sum(shard["documents"] for shard in finished)
        self._folder, self._split, self._bound = folder, split, bound
        self._dtype = np.dtype(DTYPES[dtype])
        self._chain = hashlib.sha256()
        self._file: BinaryIO | None = None

    def passed(self, digest: bytes) -> bool:
        """Notes the next document of the split, and returns whether it is still to be written.

        Args:
            digest: The SHA-256 of the document's text.

        Raises:
            ValueError: The documents so far are not those of the finished shards.
        """
        self._chain.update(digest)
        if not self.skip:
            return True
        self.skip -= 1
        if not self.skip and self._chain.hexdigest() != self.finished[-1]["chain"]:
            raise ValueError("other documents than those of the finished shards")
        return False

    def add(self, tokens: NDArray[Any], size: int, chain: str) -> bool:
        """Writes a document, and returns whether it finished a shard.

        Args:
            tokens: The tokens of the document.
            size: The bytes of its text.
            chain: The value of `chain()` after the document was passed.
        """
        if self._file is None:
            self._file = self._path.with_name(self._path.name + PARTIAL).open("wb")
            self._digest, self._ends, self._bytes = hashlib.sha256(), [0], 0
        data = tokens.astype(self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._ends.append(self._ends[-1] + len(tokens))
        self._bytes += size
        if self._ends[-1] < self._bound:
            return False
        self.finish(chain)
        return True

    def sync(self) -> None:
        """Puts the shard that is being written on the disk, as far as it is."""
        if self._file is not None:
            _to_disk(self._file)

    def reopen(self, tokens: Sequence[int], size: int) -> None:
        """Goes on with the shard that was being written when the process was killed.

        Args:
            tokens: The tokens of each of its documents.
            size: The bytes of their texts.

        Raises:
            ValueError: Its file does not have so many tokens.
        """
        path = self._path.with_name(self._path.name + PARTIAL)
        length = sum(tokens) * self._dtype.itemsize
        if self._path.is_file():
            self._path.replace(path)  # the kill came before the shard was noted as finished
        if not path.is_file() or path.stat().st_size < length:
            raise ValueError(f"{path}: has not the tokens that were written before the packing was killed")
        self._digest = hashlib.sha256()
        self._file = path.open("r+b")
        self._file.truncate(length)
        while block := self._file.read(2**20):
            self._digest.update(block)
        self._ends, self._bytes = [0, *accumulate(tokens)], size

    def chain(self) -> str:
        """Returns the hash of all documents that were passed."""
        return self._chain.hexdigest()

    def finish(self, chain: str) -> None:
        """Ends the shard that is being written, if there is one, and gives the shard its name.

        Args:
            chain: The value of `chain()` after the last document of the shard was passed.
        """
        if self._file is None:
            return
        ends = ends_file(self._path)
        with self._file as file:
            _to_disk(file)
        partial = ends.with_name(ends.name + PARTIAL)
        with partial.open("wb") as file:
            np.save(file, np.array(self._ends[1:], np.int64))
            _to_disk(file)
        ends_digest = hashlib.sha256(partial.read_bytes()).hexdigest()
        partial.replace(ends)
        self._path.with_name(self._path.name + PARTIAL).replace(self._path)
        self.finished.append(
            {
                "file": self._path.name,
                "tokens": self._ends[-1],
                "documents": len(self._ends) - 1,
                "bytes": self._bytes,
                "sha256": self._digest.hexdigest(),
                "ends_sha256": ends_digest,
                "chain": chain,
            }
        )
        self._file = None

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._split}-{len(self.finished):05d}.bin"


def write_json(file: Path, value: object) -> None:
    """Writes a JSON file whole or not at all. The file outlasts a loss of power."""
    partial = file.with_name(file.name + PARTIAL)
    with partial.open("wb") as opened:
        opened.write((json.dumps(value, indent=1) + "\n").encode())
        _to_disk(opened)
    partial.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
