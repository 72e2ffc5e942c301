"""Planted bug: `__post_init__` changes a parameter, so a worker that restores the task changes it again."""

from dataclasses import dataclass
from typing import ClassVar

from deltalab.tasks import MQAR


@dataclass(frozen=True, kw_only=True)
class Grows(MQAR):
    name: ClassVar[str] = "planted_grows"

    gap: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", self.length + self.gap)
        super().__post_init__()
