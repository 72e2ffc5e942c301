"""Planted bug: `chance` is the accuracy of naming any value of the context, which a model has to learn first."""

from typing import ClassVar

from deltalab.tasks import MQAR


class ChanceOfAWord(MQAR):
    name: ClassVar[str] = "planted_chance_of_a_word"

    @property
    def chance(self) -> float:
        return 1 / self.pairs
