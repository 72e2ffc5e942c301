"""Packed data as the corpus of the task `text`: tokens of any tokenizer, in the splits that they were packed in."""

import os
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from deltalab.data.token_shards import META, SPLITS, TOKENIZER, Packed
from deltalab.errors import InputError
from deltalab.tasks.corpus import RARE, SHARE

_BLOCK = 2**20
"""Tokens that are counted at a time."""


@dataclass(frozen=True, eq=False)
class PackedCorpus:
    """The interface of `tasks.corpus.Corpus`, of a folder of packed data."""

    packed: Packed
    unit = "tokens"

    @property
    def fingerprint(self) -> str:
        """The `sha256` of `meta.json`: of the shards' hashes, not of where they lie."""
        return str(self.packed.meta["sha256"])

    @property
    def vocab_size(self) -> int:
        return int(self.packed.tokenizer["vocab_size"])

    @cached_property
    def bytes_per_token(self) -> float:
        """Of all splits together."""
        splits = [self.packed.split(split) for split in SPLITS]
        return sum(split.bytes for split in splits) / sum(split.tokens for split in splits)

    def size(self, split: str) -> int:
        return self.packed.split(split).tokens

    def fits(self, split: str, device: torch.device) -> bool:
        """Whether the device can hold a copy of a split, in 4 bytes a token. The CPU needs none."""
        if device.type != "cuda":
            return True
        return 4 * self.size(split) <= torch.cuda.get_device_properties(device).total_memory // SHARE

    def windows(self, split: str, places: Tensor) -> Tensor:
        """The tokens at `places` [B, n], each row of which counts up by 1: int64 on the device of `places`."""
        device = places.device
        if device.type != "cpu" and self.fits(split, device):
            return _copied(self, split, device)[places].long()
        found, width = self.packed.split(split), places.shape[1]
        rows = [torch.from_numpy(found.read(start, width)) for start in places[:, 0].tolist()]
        return torch.stack(rows).to(device)

    def is_rare(self, first: Tensor, second: Tensor) -> Tensor:
        """Whether the bigrams (first, second) make up less than `RARE` of the training split's."""
        number, frequent = (part.to(first.device) for part in self._frequent)
        return ~frequent[number[first], number[second]]

    @cached_property
    def _frequent(self) -> tuple[Tensor, Tensor]:
        """int64 `[vocab_size]`, a number for each token, and bool `[n + 1, n + 1]`, whether a bigram of two numbers is
        frequent. The first call reads all of training, twice.

        Both tokens of a frequent bigram are as frequent, so there are n <= 1 / `RARE` such; the others have number n.
        """
        train = self.packed.split("train")
        counts = np.zeros(self.vocab_size, np.int64)
        for begin in range(0, train.tokens, _BLOCK):
            counts += np.bincount(train.read(begin, min(_BLOCK, train.tokens - begin)), minlength=self.vocab_size)
        # A token at an end of the text is in one bigram less than it is in the text.
        often = np.flatnonzero(counts >= RARE * (train.tokens - 1))
        number = np.full(self.vocab_size, len(often), np.int64)
        number[often] = np.arange(len(often))
        pairs = np.zeros((len(often) + 1) ** 2, np.int64)
        for begin in range(0, train.tokens - 1, _BLOCK):
            block = number[train.read(begin, min(_BLOCK + 1, train.tokens - begin))]
            pairs += np.bincount(block[:-1] * (len(often) + 1) + block[1:], minlength=len(pairs))
        frequent = (pairs >= RARE * pairs.sum()).reshape(len(often) + 1, -1)
        frequent[-1, :] = frequent[:, -1] = False
        return torch.from_numpy(number), torch.from_numpy(frequent)


def load_packed(path: str) -> PackedCorpus:
    """The packed data at `path`. Raises `InputError` where they are not whole."""
    try:
        return PackedCorpus(Packed(path))
    except ValueError as error:
        raise InputError(f"task 'text': parameter 'corpus': {error}") from None


def is_packed(path: str) -> bool:
    """Whether a folder holds packed data, rather than text."""
    return all(os.path.isfile(os.path.join(path, name)) for name in (META, TOKENIZER))


@cache
def _copied(corpus: PackedCorpus, split: str, device: torch.device) -> Tensor:
    return torch.from_numpy(corpus.packed.split(split).read(0, corpus.size(split)).astype(np.int32)).to(device)
