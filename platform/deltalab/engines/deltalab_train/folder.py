"""What the exported folder holds."""

import json
from dataclasses import fields

from deltalab.models.spec import ModelSpec

from . import FOLDER


def spec() -> ModelSpec:
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    return ModelSpec.of({field.name: config[field.name] for field in fields(ModelSpec)})


def weights() -> bool:
    """Whether the folder has weights to start from."""
    return (FOLDER / "model.safetensors").exists()
