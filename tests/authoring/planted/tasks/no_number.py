"""Planted bug: the version is a string, but the database stores an integer."""

from typing import Any, ClassVar

from deltalab.tasks import MQAR


class NoNumber(MQAR):
    name: ClassVar[str] = "planted_no_number"
    version: ClassVar[Any] = "1.0"
