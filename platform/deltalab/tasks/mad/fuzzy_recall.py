"""MAD's fuzzy recall: keys and values of several tokens. Tests whether a model binds tokens before it stores them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.mad.task import MAD, first_use
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch

MOTIF = 3
"""The largest number of tokens in a key, and in a value."""


@dataclass(frozen=True, kw_only=True)
class FuzzyRecall(MAD):
    """Fuzzy in-context recall of MAD.

    A key is an ordered choice of 1 to 3 different tokens of [0, K), with K = (V - 1)//2. Its value is an ordered choice
    of 1 to 3 different tokens of [K, V - 1), the same wherever the key stands in the sequence. Sizes are uniform, and
    choices are uniform given the size. All keys of validation and test have 3 tokens.

    The last pair, of s tokens, is drawn first. Other pairs follow one another before it while they hold fewer than
    L - s - 6 tokens. The last pair is also put among the others, before the first pair that begins at t or later, with
    t uniform in [0, L - s - 11), unless its key occurs earlier anyway. On the left, V - 1 fills the sequence up to
    L + 1 tokens, which are the inputs and, shifted by one, the targets. Training scores every next token. Validation
    and test score the tokens of values whose key stood before. The authors draw t from [0, L - 2s), where a late t
    leaves the last key without its value.

    `chance` is the accuracy of naming any token of values, 1/(V - 1 - K).

    Attributes:
        length: L.
        vocab_size: V.

    Raises:
        InputError: L is below 18, or V below 7.

    Examples:
        >>> batch = FuzzyRecall(length=24, vocab_size=7).batch("test", 1, seed=0, step=0)
        >>> print(*batch.inputs[0].tolist())
        6 6 6 6 6 6 6 2 1 0 4 5 3 1 0 2 5 4 3 1 0 2 5 4
        >>> batch.targets[0, -4:]
        tensor([-100,    5,    4,    3])
    """

    name: ClassVar[str] = "mad_fuzzy_recall"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"length": 48}

    length: int = 128
    vocab_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.length >= 6 * MOTIF, "length", f"must be at least {6 * MOTIF}")
        self.require(self.vocab_size > 2 * MOTIF, "vocab_size", f"must be at least {2 * MOTIF + 1}")

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 1 - (self.vocab_size - 1) // 2)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        pad, half = self.vocab_size - 1, (self.vocab_size - 1) // 2
        shortest = 1 if split == "train" else MOTIF
        # Index 0 is the last pair. As many other pairs are drawn as fit before the last pair.
        pairs = 1 - (shortest + 1 + 2 * MOTIF - self.length) // (shortest + 1)
        order = torch.arange(pairs, device=random.device)
        token = torch.arange(MOTIF, device=random.device)
        key = random.distinct("keys", half, size, pairs, MOTIF)
        value = half + random.distinct("values", pad - half, size, pairs, MOTIF)
        key_size = shortest + random.integers("key sizes", MOTIF + 1 - shortest, size, pairs)
        value_size = 1 + random.integers("value sizes", MOTIF, size, pairs)
        first = first_use(((key + 1) * (token < key_size[..., None]) * (half + 1) ** token).sum(dim=2))
        value = value.gather(1, first[..., None].expand_as(value))
        value_size = value_size.gather(1, first)

        last, others = (key_size + value_size).split([1, pairs - 1], dim=1)
        start = others.cumsum(dim=1) - others
        room = self.length - last - 2 * MOTIF
        early = start < random.integers("place", room - 2 * MOTIF + 1, size, 1)
        is_last = first[:, 1:] == 0
        put = ~(is_last & early).any(dim=1, keepdim=True)
        late = put & ~early
        start = start + torch.where(late, last, 0)
        kept = start < room
        known = torch.where(is_last, late | (is_last.cumsum(dim=1) > 1), first[:, 1:] < order[1:])

        # The order is: the others, the last pair as it is put among them, and the last pair at the end.
        where = torch.cat([order[1:], order[:1], order[:1]])
        key, value, key_size, value_size = (x[:, where] for x in (key, value, key_size, value_size))
        end = (others * kept).sum(dim=1, keepdim=True) + put * last
        start = torch.cat([start, (others * early).sum(dim=1, keepdim=True), end], dim=1)
        kept = torch.cat([kept, put, torch.ones_like(put)], dim=1)
        known = torch.cat([known, torch.zeros_like(put), torch.ones_like(put)], dim=1)

        tokens = torch.cat([key, value], dim=2)
        answers = torch.cat([torch.full_like(key, IGNORE), torch.where(known[..., None], value, IGNORE)], dim=2)
        used = torch.cat([token < key_size[..., None], token < value_size[..., None]], dim=2) & kept[..., None]
        column = start[..., None] + torch.cat([token.expand_as(key), key_size[..., None] + token], dim=2)
        # Write unused tokens to a column that is cut off.
        column = torch.where(used, column + (self.length + 1 - end - last)[..., None], self.length + 1).flatten(1)

        def laid_out(parts: Tensor, between: int) -> Tensor:
            row = torch.full((size, self.length + 2), between, device=random.device)
            return row.scatter_(1, column, parts.flatten(1))[:, : self.length + 1]

        sequence = laid_out(tokens, pad)
        following = sequence if split == "train" else laid_out(answers, IGNORE)
        return Batch(sequence[:, :-1].contiguous(), following[:, 1:].contiguous())
