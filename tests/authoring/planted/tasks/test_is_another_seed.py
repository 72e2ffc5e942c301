"""Planted bug: the test has the batches of training at another seed."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class TestIsAnotherSeed(MQAR):
    name: ClassVar[str] = "planted_test_is_another_seed"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        if split == "test":
            *_, seed, step = random.address.split("/")
            random = Random(self.address("train", int(seed) + 17, int(step) + 321), random.device, random.rows)
        return super().draw(split, size, random)
