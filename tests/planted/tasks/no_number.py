"""Planted bug: the version is a word, which no column of the database takes."""

from typing import Any, ClassVar

from deltalab.tasks import MQAR


class NoNumber(MQAR):
    name: ClassVar[str] = "planted_no_number"
    version: ClassVar[Any] = "1.0"
