"""Planted bug: a parameter is changed as it is read, so that a worker, who is sent the result, changes it again."""

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
