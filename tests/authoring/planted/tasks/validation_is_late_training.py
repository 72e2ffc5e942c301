"""Planted bug: validation has the batches of training from step 5000 on."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class ValidationIsLateTraining(MQAR):
    name: ClassVar[str] = "planted_validation_is_late_training"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        if split == "validation":
            _, _, _, seed, step = random.address.split("/")
            random = Random(self.address("train", int(seed), int(step) + 5000), random.device, random.rows)
        return super().draw(split, size, random)
