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
"""The tokens that are counted at a time."""


@dataclass(frozen=True, eq=False)
class PackedCorpus:
    """A folder of packed data, with the interface of `tasks.corpus.Corpus`."""

    packed: Packed
    unit = "tokens"

    @property
    def fingerprint(self) -> str:
        """The `sha256` of `meta.json`, which hashes the contents of the shards and not their places."""
        return str(self.packed.meta["sha256"])

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the tokenizer."""
        return int(self.packed.tokenizer["vocab_size"])

    @cached_property
    def bytes_per_token(self) -> float:
        """The mean number of bytes of a token, in all splits together."""
        splits = [self.packed.split(split) for split in SPLITS]
        return sum(split.bytes for split in splits) / sum(split.tokens for split in splits)

    def size(self, split: str) -> int:
        """Returns the number of tokens in a split."""
        return self.packed.split(split).tokens

    def fits(self, split: str, device: torch.device) -> bool:
        """Returns whether a device can hold a copy of a split, in 4 bytes per token. The CPU needs no copy."""
        if device.type != "cuda":
            return True
        return 4 * self.size(split) <= torch.cuda.get_device_properties(device).total_memory // SHARE

    def windows(self, split: str, places: Tensor) -> Tensor:
        """Returns the tokens at `places` [B, n], whose rows count up by 1, int64 on the device of `places`."""
        device = places.device
        if device.type != "cpu" and self.fits(split, device):
            return _device_copy(self, split, device)[places].long()
        packed_split, width = self.packed.split(split), places.shape[1]
        rows = [torch.from_numpy(packed_split.read(start, width)) for start in places[:, 0].tolist()]
        return torch.stack(rows).to(device)

    def is_rare(self, first: Tensor, second: Tensor) -> Tensor:
        """Returns whether the bigrams (first, second) make up less than `RARE` of the training split's bigrams."""
        number, frequent = (part.to(first.device) for part in self._frequent)
        return ~frequent[number[first], number[second]]

    @cached_property
    def _frequent(self) -> tuple[Tensor, Tensor]:
        """A number for each token, int64 [vocab_size], and whether each bigram of two numbers is frequent.

        The second tensor is bool [n + 1, n + 1]. A token of a frequent bigram is at least as frequent as the bigram. So
        at most 1 / `RARE` tokens can be in frequent bigrams. These n tokens have the numbers 0 to n - 1, and all other
        tokens have the number n. The first call reads the training split twice.
        """
        train = self.packed.split("train")
        counts = np.zeros(self.vocab_size, np.int64)
        for begin in range(0, train.tokens, _BLOCK):
            counts += np.bincount(train.read(begin, min(_BLOCK, train.tokens - begin)), minlength=self.vocab_size)
        # A frequent bigram occurs RARE * (tokens - 1) times or more, and so do its tokens.
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
    """Reads the packed data at a path.

    Raises:
        InputError: The packed data are not whole.
    """
    try:
        return PackedCorpus(Packed(path))
    except ValueError as error:
        raise InputError(f"task 'text': parameter 'corpus': {error}") from None


def is_packed(path: str) -> bool:
    """Returns whether a folder holds packed data, and not text."""
    return all(os.path.isfile(os.path.join(path, name)) for name in (META, TOKENIZER))


@cache
def _device_copy(corpus: PackedCorpus, split: str, device: torch.device) -> Tensor:
    return torch.from_numpy(corpus.packed.split(split).read(0, corpus.size(split)).astype(np.int32)).to(device)
