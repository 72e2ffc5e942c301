"""Language modelling on real bytes: shows whether a gain on synthetic recall is also a gain on text."""

import math
import os
import sysconfig
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import SPLITS, Batch, Task, surprisal

CAP = 8 * 2**20
"""The most bytes of a split that are used: the first ones, in the order of the files' relative paths."""

RARE = 1e-3
"""A bigram is rare if its share of the training split's bigrams is below this. In the default corpus 97% of the
bigrams that occur are rare, and they make up a quarter of the text."""

# Folders that are left out of the default corpus. Some hold what is installed beside the library, or not on every
# machine. Two hold no source text: `encodings` near-copies of one table, `pydoc_data` one string as long as half a
# held-out split.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True, eq=False)
class Corpus:
    """`data[split]`, uint8 on the CPU; `rare [65536]`: whether the bigram `256 first + second` is rare."""

    data: dict[str, Tensor]
    rare: Tensor
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Text(Task):
    """Byte-level language modelling: predict byte t + 1 from bytes 0 ... t, at every one of L = `length`
    positions.

    `corpus` is one of three:

    - a file, cut by bytes into training, validation and test, 80/10/10;
    - a folder of at least 3 files, hidden ones not counted. Each file is in one split; the order of the hashes of
      their relative paths decides, 80/10/10;
    - None, for the source files of this machine's Python standard library, split as a folder is.

    At most `CAP` bytes of a split are used. Its files are joined in the order of their paths; windows start at uniform
    places.

    Metrics, in bits per byte (8 for a uniform guess, less is better):

    - `bits_per_byte` over all positions;
    - `recall_bits_per_byte` over the associative-recall slice (Arora et al. 2023, arXiv:2312.04927, section
      3): positions t whose bigram (byte t, byte t + 1) occurred before in the window and is `RARE` in
      training, so that it can be recalled from the context but hardly known by heart. About 5% of positions
      at L = 128.

    Raises `InputError` for a corpus that is missing, unreadable, or has a split of `length` bytes or fewer.
    """

    name: ClassVar[str] = "text"
    version: ClassVar[int] = 1
    metric: ClassVar[str] = "bits_per_byte"
    maximize: ClassVar[bool] = False

    length: int = 128
    corpus: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.length >= 1, "length", "must be at least 1")
        named = self.corpus is None or (self.corpus.strip() != "" and "\0" not in self.corpus)
        self.require(named, "corpus", "must name a file or a folder")
        for split, data in self._corpus.data.items():
            if len(data) <= self.length:
                raise InputError(
                    f"task 'text': parameter 'corpus': the {split} split of '{self._path}' has {len(data)} "
                    f"bytes, it needs more than length = {self.length}"
                )

    @property
    def vocab_size(self) -> int:
        return 256

    @property
    def chance(self) -> float:
        return 8.0

    def fingerprint(self) -> str:
        return self._corpus.fingerprint

    @cached_property
    def _path(self) -> str:
        # Resolve once: a task that is sent to a worker process keeps its corpus, whatever that process's folder is.
        if self.corpus is None:
            return sysconfig.get_path("stdlib")
        return os.path.abspath(os.path.expanduser(self.corpus))

    @property
    def _corpus(self) -> Corpus:
        return load(self._path, self.corpus is None)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        data = _on_device(self._corpus, split, random.device)
        starts = random.integers("starts", len(data) - self.length, size, 1)
        windows = data[starts + torch.arange(self.length + 1, device=random.device)].long()
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        nats = surprisal(batch, logits).double()
        bits, count = nats / math.log(2), nats.new_tensor(len(nats))
        recalled = self.recall_slice(batch).flatten()
        return {
            "bits_per_byte": (bits.sum(), count),
            "recall_bits_per_byte": (bits[recalled].sum(), recalled.sum().double()),
            "loss": (nats.sum(), count),
        }

    def recall_slice(self, batch: Batch) -> Tensor:
        """bool `[B, T]`: whether the bigram (input, target) occurred earlier in the row and is rare in training."""
        bigram = batch.inputs * 256 + batch.targets
        by_kind, position = bigram.sort(dim=1, stable=True)
        again = torch.zeros_like(bigram, dtype=torch.bool)
        again.scatter_(1, position[:, 1:], by_kind[:, 1:] == by_kind[:, :-1])
        return again & self._corpus.rare.to(bigram.device)[bigram]


@cache
def load(path: str, library: bool) -> Corpus:
    """The corpus at `path`, read once per process. library: only the standard library's own source files."""
    root = Path(path)
    try:
        contents = _cut_file(root) if root.is_file() else _split_folder(root, library)
    except OSError as error:
        raise InputError(f"task 'text': parameter 'corpus': cannot read '{path}': {error}") from error
    digest = sha256()
    for split in SPLITS:
        digest.update(f"{split} {len(contents[split])}\n".encode() + contents[split])
    data = {split: torch.tensor(np.frombuffer(contents[split], np.uint8)) for split in SPLITS}
    train = data["train"].int()
    counts = torch.bincount((train[:-1] << 8) | train[1:], minlength=256 * 256)
    return Corpus(data, counts < RARE * counts.sum(), digest.hexdigest())


def _cut_file(path: Path) -> dict[str, bytes]:
    size = path.stat().st_size
    cuts = (0, size * 8 // 10, size * 9 // 10, size)
    contents = {}
    with path.open("rb") as file:
        for split, begin, end in zip(SPLITS, cuts, cuts[1:], strict=False):
            file.seek(begin)
            contents[split] = file.read(min(end - begin, CAP))
    return contents


def _split_folder(root: Path, library: bool) -> dict[str, bytes]:
    def refuse(error: OSError) -> None:
        raise error

    paths = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and not (library and name in _NOT_LIBRARY)]
        names = [name for name in files if name[0] != "." and (name.endswith(".py") or not library)]
        paths += [path.relative_to(root) for name in names if (path := Path(folder, name)).is_file()]
    if len(paths) < 3:
        raise InputError(
            f"task 'text': parameter 'corpus': '{root}' holds {len(paths)} files; "
            "a folder is split by file and needs at least 3, or name a single file"
        )
    paths.sort(key=lambda path: sha256(os.fsencode(path.as_posix())).digest())
    tenth = max(1, len(paths) // 10)
    held_out = {"validation": paths[:tenth], "test": paths[tenth : 2 * tenth]}
    members = {"train": paths[2 * tenth :], **held_out}
    return {split: _join(root, sorted(members[split])) for split in SPLITS}


def _join(root: Path, paths: list[Path]) -> bytes:
    content = bytearray()
    for path in paths:
        if len(content) >= CAP:
            break
        with (root / path).open("rb") as file:
            content += file.read(CAP - len(content))
    return bytes(content)


@cache
def _on_device(corpus: Corpus, split: str, device: torch.device) -> Tensor:
    return corpus.data[split].to(device)
