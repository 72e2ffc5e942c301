"""Planted bug: training has no scored positions, so its loss is a mean over nothing."""

from typing import ClassVar

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class NoTargets(MQAR):
    name: ClassVar[str] = "planted_no_targets"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        if split == "train":
            batch.targets.fill_(IGNORE)
        return batch
