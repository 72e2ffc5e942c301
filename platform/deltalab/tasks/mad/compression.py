"""MAD's compression: rebuild a sequence from one hidden state. Tests how much of the sequence the state holds."""

from dataclasses import dataclass
from typing import ClassVar

from deltalab.tasks.mad.task import MAD
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import Batch


@dataclass(frozen=True, kw_only=True)
class Compression(MAD):
    """Compression of MAD.

    A sequence is L - 1 tokens, uniform in [0, V - 1), and then V - 1. The model is to name all L tokens, each from the
    hidden state at the last position: a 2-layer MLP gets this state and the position (`ModelSpec.readout` is `last`).
    `chance` is the accuracy of naming any token, 1/(V - 1), and of knowing the last token.

    Attributes:
        length: L.
        vocab_size: V.

    Raises:
        InputError: L is below 2, or V below 3.

    Examples:
        >>> batch = Compression(length=8).batch("test", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[ 9, 14,  4, 11,  5,  7, 14, 15]])
        >>> batch.targets
        tensor([[ 9, 14,  4, 11,  5,  7, 14, 15]])
    """

    name: ClassVar[str] = "mad_compression"
    version: ClassVar[int] = 1
    readout: ClassVar[str] = "last"

    length: int = 32
    vocab_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.length >= 2, "length", "must be at least 2")
        self.require(self.vocab_size >= 3, "vocab_size", "must be at least 3")

    @property
    def chance(self) -> float:
        return ((self.length - 1) / (self.vocab_size - 1) + 1) / self.length

    def draw(self, split: str, size: int, random: Random) -> Batch:
        inputs = random.integers("tokens", self.vocab_size - 1, size, self.length)
        inputs[:, -1] = self.vocab_size - 1
        return Batch(inputs, inputs.clone())
