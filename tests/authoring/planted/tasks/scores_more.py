"""Planted bug: an example has more scored positions than `most_scored`, whose loss would be left out."""

from typing import ClassVar

from deltalab.tasks import MQAR


class ScoresMore(MQAR):
    name: ClassVar[str] = "planted_scores_more"

    @property
    def most_scored(self) -> int:
        return self.pairs - 1
