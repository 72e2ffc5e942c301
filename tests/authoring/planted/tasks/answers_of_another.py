"""Planted bug: the answers are those of another example of the batch."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class AnswersOfAnother(MQAR):
    name: ClassVar[str] = "planted_answers_of_another"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        return Batch(batch.inputs, batch.targets.roll(1, dims=0))
