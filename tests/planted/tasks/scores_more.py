"""Planted bug: more positions of an example are scored than it says, and their loss would be left out."""

from typing import ClassVar

from deltalab.tasks import MQAR


class ScoresMore(MQAR):
    name: ClassVar[str] = "planted_scores_more"

    @property
    def most_scored(self) -> int:
        return self.pairs - 1
