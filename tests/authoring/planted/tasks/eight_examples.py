"""Planted bug: every split draws from eight examples of its own."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class EightExamples(MQAR):
    name: ClassVar[str] = "planted_eight_examples"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        rows = random.integers("examples", 8, size)
        return super().draw(
            split, size, Random(f"{self.name}/{split}/{random.address.split('/')[3]}", random.device, rows)
        )
