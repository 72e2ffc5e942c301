"""Parity: one bit of state that a rule must be able to flip. Decay alone can only forget it."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab.tasks.final_answer import OneAnswer
from deltalab.tasks.randomness import Random
from deltalab.tasks.splits import share_out, shared_from


@dataclass(frozen=True, kw_only=True)
class Parity(OneAnswer):
    """Parity: the target at the last of n - 1 uniform bits is their sum mod 2.

    n is the total length of the sequence. Tokens are 0, 1, and 2 for padding. Lengths, evaluation and metric are those
    of `OneAnswer`. No rule of finite precision whose state transition has only positive real eigenvalues solves parity
    at all lengths (Grazzi et al. 2024, Theorem 1).

    A checksum decides whether a sequence of 10 bits or more belongs to training, validation or test (`share_out`).

    Examples:
        >>> batch = Parity(length_range=(3, 12), test_range=(12, 16)).batch("train", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2]])
        >>> batch.targets
        tensor([[-100, -100, -100, -100,    1, -100, -100, -100, -100, -100, -100]])

    References:
        Grazzi et al. 2024, arXiv:2411.12537, section 5.1, who train on lengths U[3, 40] and test on 8,192 sequences of
        lengths U[40, 256].
    """

    name: ClassVar[str] = "parity"
    version: ClassVar[int] = 1
    answers: ClassVar[int] = 2
    padding: ClassVar[int] = 2

    @property
    def vocab_size(self) -> int:
        return 3

    @property
    def least(self) -> int:
        return shared_from(2) + 1

    def sequences(self, total: Tensor, split: str, random: Random) -> tuple[Tensor, Tensor]:
        count = total - 1
        bits = share_out(random.integers("bits", 2, len(total), self.length), count, 2, split, random)
        return bits, bits.cumsum(1).gather(1, count[:, None] - 1)[:, 0] % 2
