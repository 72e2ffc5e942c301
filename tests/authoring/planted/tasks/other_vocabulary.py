"""Planted bug: an evaluation has more tokens than the model's vocabulary."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from deltalab.tasks import MQAR, Task


class OtherVocabulary(MQAR):
    name: ClassVar[str] = "planted_other_vocabulary"

    def evaluations(self) -> Mapping[str, Task]:
        return {"larger": replace(self, vocab_size=2 * self.vocab_size)}
