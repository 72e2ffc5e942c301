"""Makes the files with which torchtitan 0.2.2 or 0.3 trains an exported folder."""

import re
from collections.abc import Mapping
from pathlib import Path

from deltalab.errors import InputError
from deltalab.models.spec import ModelSpec

HERE = Path(__file__).parent
PACKAGE = "deltalab_train"
WHERE = f"engines/{PACKAGE}"
"""The place of the package in an exported folder."""
BESIDE = {"token_shards": "data", "recipe_keys": "training", "schedule": "training", "muon": "training"}
"""Modules of deltalab that are copied into the package, each with its folder in deltalab. The package imports all other
modules from the exported folder."""


def files(spec: ModelSpec, recipe: Mapping[str, object]) -> dict[str, str]:
    """Returns the texts of the files that train an exported folder, by relative path.

    Raises:
        InputError: If the model is not causal, because torchtitan trains next-token prediction.
    """
    if spec.readout != "position":
        raise InputError(f"torchtitan takes causal models: one with readout '{spec.readout}' predicts no next token")
    return {f"{WHERE}/{name}": text for name, text in package().items()}


def package() -> dict[str, str]:
    """Returns the files of the package: name -> text. They import the exported folder in place of deltalab."""
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted((HERE / PACKAGE).glob("*.py"))}
    texts |= {f"{name}.py": (HERE.parent / home / f"{name}.py").read_text("utf-8") for name, home in BESIDE.items()}
    return {name: _of_the_folder(text) for name, text in texts.items()}


def _of_the_folder(text: str) -> str:
    """Returns a source text that imports the exported folder in place of deltalab.

    `from deltalab.x.y import` becomes `from exported.x_y import`, or `from .y import` for a module of `BESIDE`.
    """
    for name, home in BESIDE.items():
        text = text.replace(f"from deltalab.{home}.{name} import", f"from .{name} import")
    return re.sub(
        r"^from deltalab\.([\w.]+) import",
        lambda match: f"from exported.{match[1].replace('.', '_')} import",
        text,
        flags=re.MULTILINE,
    )
