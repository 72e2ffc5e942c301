"""Planted bug: the bounds leave out values that the metric takes."""

from typing import ClassVar

from deltalab.tasks import MQAR


class NarrowBounds(MQAR):
    name: ClassVar[str] = "planted_narrow_bounds"
    bounds: ClassVar[tuple[float, float] | None] = (0.5, 1.0)
