"""The parameters of each built-in task in tests, with a folder of images where it needs one."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from deltalab.tasks import BUILTIN

_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def example(name: str) -> dict[str, Any]:
    """Returns parameters of a task with which it is small and can be made."""
    given: dict[str, Any] = dict(BUILTIN[name].example)
    return {**given, "folder": pictures(), "side": 8} if name == "image_folder" else given


@cache
def pictures() -> str:
    """Returns a folder of 600 images of noise in three classes, whose mean colours differ."""
    made = tempfile.TemporaryDirectory()
    _KEPT.append(made)
    random = np.random.default_rng(0)
    for i in range(600):
        pixels = random.integers(0, 128, (8, 8, 3))
        pixels[..., i % 3] += 100
        file = Path(made.name, "rgb"[i % 3], f"{i}.png")
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(file)
    return made.name
