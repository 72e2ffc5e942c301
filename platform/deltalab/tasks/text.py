"""Language modelling on real bytes: shows whether a gain on synthetic recall is also a gain on text."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.data.token_shards import Packed
from deltalab.errors import InputError
from deltalab.tasks.corpus import PYTHON, Corpus, corpus_path, load
from deltalab.tasks.packed_corpus import PackedCorpus, is_packed, load_packed
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import SPLITS, Batch, Task, surprisal


@dataclass(frozen=True, kw_only=True)
class Text(Task):
    """Language modelling: predict byte t + 1 from bytes 0 ... t, at every position.

    With packed data, tokens take the place of bytes. `corpus` is one of five:

    - None, for the King James Bible and the Jargon File, 5.6 MB that come with deltalab and are the same on every
      machine. Each chapter of the Bible and each entry of the Jargon File is in one split, about 80/10/10;
    - a file, cut by bytes into training, validation and test, 80/10/10;
    - a folder of at least 3 files, hidden files not counted. Each file is in one split, 80/10/10, by the order of the
      hashes of the files' relative paths. The files of a split are joined in the order of their paths;
    - `python`, for the source files of this machine's Python standard library, split as a folder is. A folder of
      that name is `./python`;
    - a folder of packed data, as `deltalab data pack` writes it, with its tokens and its splits. `vocab_size` is that
      of its tokenizer. Metrics in bits per byte divide the bits of a token by the mean number of bytes of a token in
      all of the data.

    Windows start at uniform places of a split. A corpus of any size is mapped into memory. Do not change it while a
    study runs.

    The metrics are in bits per byte (8 for a uniform guess of bytes, and less is better):

    - `bits_per_byte` over all positions;
    - `bits_per_byte_quarter_1` to `_4` over a quarter of the positions each, first to last: they fall as far as a
      longer context helps;
    - `recall_bits_per_byte` over the associative-recall slice: positions t whose bigram (byte t, byte t + 1) occurred
      before in the window and is `corpus.RARE` in training, so that it can be recalled from the context but hardly
      known by heart. About 5% of positions are in the slice at L = 128.

    Attributes:
        length: L, the number of positions in training and validation.
        corpus: The corpus, one of the five above.
        times: The multiples n of L at which the test is measured, beside L itself. The metrics at n L have the label of
            the length, and are measured on an n-th of the examples, so that the number of bytes is the same.

    Raises:
        InputError: The corpus is missing, unreadable or not whole, a split is too short for its windows, or `times` are
            below 2 or not distinct.

    References:
        Arora et al. 2023, arXiv:2312.04927, section 3, for the associative-recall slice.
    """

    name: ClassVar[str] = "text"
    version: ClassVar[int] = 2
    metric: ClassVar[str] = "bits_per_byte"
    maximize: ClassVar[bool] = False

    length: int = 128
    corpus: str | None = None
    times: tuple[int, ...] = (2, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.length >= 1, "length", "must be at least 1")
        self.require(all(n >= 2 for n in self.times), "times", "must all be at least 2")
        self.require(len(set(self.times)) == len(self.times), "times", "must all be different")
        is_name = self.corpus is None or (self.corpus.strip() != "" and "\0" not in self.corpus)
        self.require(is_name, "corpus", "must name a file or a folder")
        for split in SPLITS:
            times = 1 if split == "train" else max(self.times, default=1)
            size, least = self._corpus.size(split), times * self.length
            if size <= least:
                factor = "length" if times == 1 else f"{times} (in `times`) x length"
                raise InputError(
                    f"task 'text': parameter 'corpus': the {split} split of '{self._path}' has {size} "
                    f"{self._corpus.unit}, it needs more than {factor} = {least}"
                )

    @property
    def vocab_size(self) -> int:
        return self._corpus.vocab_size

    @property
    def chance(self) -> float:
        return math.log2(self.vocab_size) / self._corpus.bytes_per_token

    @property
    def train_tokens(self) -> int:
        return self._corpus.size("train")

    def fingerprint(self) -> str:
        return self._corpus.fingerprint

    @property
    def packed(self) -> Packed | None:
        """The packed data that the task reads; None if it reads text."""
        return self._corpus.packed if isinstance(self._corpus, PackedCorpus) else None

    @property
    def bytes_per_token(self) -> float:
        """The mean number of bytes of a token."""
        return self._corpus.bytes_per_token

    @cached_property
    def _path(self) -> str:
        # Resolve once, so that a task in a worker process keeps its corpus, also if the process has another folder.
        return corpus_path(self.corpus)

    @property
    def _corpus(self) -> Corpus | PackedCorpus:
        return open_corpus(self._path, self.corpus == PYTHON)

    def evaluations(self) -> Mapping[str, Task]:
        corpus = self.corpus if self.corpus in (None, PYTHON) else self._path
        lengths = [n * self.length for n in self.times]
        return {"": self} | {str(length): replace(self, length=length, corpus=corpus, times=()) for length in lengths}

    def evaluated(self, other: Task, split: str, size: int, batches: int) -> tuple[int, int]:
        n = other.length // self.length
        return max(1, size // n), batches if n == 1 or split == "test" else 0

    def fed_by_cpu(self, device: torch.device) -> bool:
        return not self._corpus.fits("train", device)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        starts = random.integers("starts", self._corpus.size(split) - self.length, size, 1)
        windows = self._corpus.windows(split, starts + torch.arange(self.length + 1, device=random.device))
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        nats = surprisal(batch, logits).double()
        bits = (nats / math.log(2)).view(batch.targets.shape)
        recalled = self.recall_slice(batch)
        cuts = [self.length * quarter // 4 for quarter in range(5)]
        parts = {
            "bits_per_byte": bits,
            **{f"bits_per_byte_quarter_{i + 1}": bits[:, cuts[i] : cuts[i + 1]] for i in range(4)},
            "recall_bits_per_byte": bits[recalled],
        }
        size = self._corpus.bytes_per_token
        return {name: (part.sum(), part.new_tensor(part.numel() * size)) for name, part in parts.items()} | {
            "loss": (nats.sum(), nats.new_tensor(len(nats)))
        }

    def recall_slice(self, batch: Batch) -> Tensor:
        """Returns whether a bigram (input, target) occurred earlier in its row and is rare in training, bool [B, T]."""
        bigram = batch.inputs * self.vocab_size + batch.targets
        by_kind, position = bigram.sort(dim=1, stable=True)
        again = torch.zeros_like(bigram, dtype=torch.bool)
        again.scatter_(1, position[:, 1:], by_kind[:, 1:] == by_kind[:, :-1])
        return again & self._corpus.is_rare(batch.inputs, batch.targets)


@cache
def open_corpus(path: str, library: bool) -> Corpus | PackedCorpus:
    """Opens the corpus at a path, once per process.

    Args:
        path: A file, a folder, or a folder of packed data.
        library: As in `corpus.load`.

    Raises:
        InputError: As for `corpus.load` and `load_packed`.
    """
    return load_packed(path) if is_packed(path) and not library else load(path, library)
