"""A single needle in a haystack: can a state keep one thing over a long distance, and through which kind of noise?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.tasks.randomness import Random
from deltalab.tasks.splits import share_out
from deltalab.tasks.task import IGNORE, Batch, Task, surprisal
from deltalab.tasks.text import Text

PERIOD = b"The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
"""The text that variant 1 repeats."""
MARK, QUERY, KEYS = 256, 257, 258

VALUES = {1: (7, b"0123456789"), 2: (7, b"0123456789"), 3: (32, b"0123456789abcdef")}
"""The length m of a value, and the bytes that it is made of, by variant."""


@dataclass(frozen=True, kw_only=True)
class NIAH(Task):
    """S-NIAH-1, 2 and 3 of RULER (Hsieh et al. 2024, arXiv:2404.06654), in miniature, on tokens instead of words.

    A sequence of L tokens is a filler of F = L - 2m - 3 bytes, with the needle MARK key v1 ... vm in one of its F + 1
    places, all equally likely. Then QUERY key v1 ... v(m-1) follow. The targets at the last m positions are v1 ... vm.
    A byte is its own token, MARK is 256, QUERY is 257, and the key is uniform among the `keys` tokens from 258 on.

    | `variant` | filler | value |
    | --- | --- | --- |
    | 1 | `PERIOD`, again and again | m = 7 digits |
    | 2 | a window of real text | m = 7 digits |
    | 3 | a window of real text | m = 32 hexadecimal digits |

    The text is that of the task `text`, from the same split of `corpus`. A checksum of the value, which is uniform,
    decides whether a sequence belongs to training, validation or test (`share_out`).

    The metrics are `exact_match`, the share of sequences with all of v1 ... vm right, and `accuracy`, the share of
    right tokens. `chance` is an `exact_match` of 10^-m or 16^-m. The model reads the right tokens, not its own. That
    makes no difference to a sequence that is right throughout.

    Attributes:
        variant: The variant, 1 to 3, as in the table above.
        length: L in training.
        times: The multiples of `length` at which validation and test are measured, each under the label of its length.
            The metric is the mean over all.
        keys: The number of different keys.
        corpus: The corpus of the filler, as for the task `text`.

    Raises:
        InputError: The variant does not exist, `length` is below 2m + 4, there is no key, `times` are empty, below 1 or
            not distinct, or the corpus is missing or too small.

    Examples:
        >>> task = NIAH(variant=1, length=40)
        >>> batch = task.batch("train", 1, seed=0, step=0)
        >>> "".join(chr(token) if token < MARK else "[]k"[min(token - MARK, 2)] for token in batch.inputs[0].tolist())
        '[k0481404The grass is green. The]k048140'
    """

    name: ClassVar[str] = "niah"
    version: ClassVar[int] = 2
    metric: ClassVar[str] = "exact_match"
    maximize: ClassVar[bool] = True
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    example: ClassVar[Mapping[str, object]] = {"variant": 2, "length": 48}

    variant: int
    length: int = 512
    times: tuple[int, ...] = (1, 2, 4, 8)
    keys: int = 64
    corpus: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.variant in VALUES, "variant", "must be 1, 2 or 3")
        least = 2 * self.digits + 4
        self.require(self.length >= least, "length", f"must be at least {least}, for {self.digits} digits twice")
        self.require(self.keys >= 1, "keys", "must be at least 1")
        self.require(len(self.times) > 0, "times", "must name a multiple of the length")
        self.require(min(self.times) >= 1, "times", "must all be at least 1")
        self.require(len(set(self.times)) == len(self.times), "times", "must all be different")
        self.require(self.variant != 1 or self.corpus is None, "corpus", "is not read in variant 1: leave it out")
        if self.variant != 1:
            try:
                self._text.fingerprint()
            except InputError as error:
                raise InputError(f"task 'niah': filler of {self._filled} bytes: {error}") from None
            self.require(self._text.vocab_size == MARK, "corpus", "must be bytes, or packed as bytes")

    @property
    def digits(self) -> int:
        """m, the length of a value."""
        return VALUES[self.variant][0]

    @property
    def _filled(self) -> int:
        return self.length - 2 * self.digits - 3

    @cached_property
    def _text(self) -> Text:
        return Text(length=self._filled, corpus=self.corpus, times=())

    @property
    def vocab_size(self) -> int:
        return KEYS + self.keys

    @property
    def most_scored(self) -> int:
        return self.digits

    @property
    def chance(self) -> float:
        return float(len(VALUES[self.variant][1])) ** -self.digits

    def evaluations(self) -> Mapping[str, Task]:
        return {str(n * self.length): replace(self, length=n * self.length, times=(1,)) for n in self.times}

    def fed_by_cpu(self, device: torch.device) -> bool:
        return self.variant != 1 and self._text.fed_by_cpu(device)

    def fingerprint(self) -> str:
        return "" if self.variant == 1 else self._text.fingerprint()

    def draw(self, split: str, size: int, random: Random) -> Batch:
        m, alphabet = self.digits, _on_device(VALUES[self.variant][1], random.device)
        whole = torch.full((size,), m, device=random.device)
        numbers = random.integers("values", len(alphabet), size, m)
        values = alphabet[share_out(numbers, whole, len(alphabet), split, random)]
        key = KEYS + random.integers("key", self.keys, size, 1)
        mark, query = torch.full_like(key, MARK), torch.full_like(key, QUERY)
        needle = torch.cat([mark, key, values], dim=1)

        before = random.integers("place", self._filled + 1, size, 1)
        at = torch.arange(self._filled + m + 2, device=random.device) - before
        inside = (at >= 0) & (at < m + 2)
        rest = torch.where(at < 0, at, at - (m + 2)) + before  # the place in the filler, outside the needle
        haystack = self._filler(split, size, random).gather(1, rest.clamp(0, self._filled - 1))
        body = torch.where(inside, needle.gather(1, at.clamp(0, m + 1)), haystack)

        inputs = torch.cat([body, query, key, values[:, :-1]], dim=1)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, -m:] = values
        return Batch(inputs, targets)

    def _filler(self, split: str, size: int, random: Random) -> Tensor:
        if self.variant != 1:
            return self._text.draw(split, size, random).inputs
        place = torch.arange(self._filled, device=random.device) % len(PERIOD)
        return _on_device(PERIOD, random.device)[place].expand(size, -1)

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        right = (logits.argmax(-1) == batch.labels).view(-1, self.digits)
        nats = surprisal(batch, logits).double()
        count = nats.new_tensor(len(nats))
        return {
            "exact_match": (right.all(1).double().sum(), nats.new_tensor(len(right))),
            "accuracy": (right.double().sum(), count),
            "loss": (nats.sum(), count),
        }


@cache
def _on_device(text: bytes, device: torch.device) -> Tensor:
    return torch.tensor([*text], device=device)
