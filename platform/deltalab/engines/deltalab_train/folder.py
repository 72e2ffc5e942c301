"""What the exported folder holds."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from deltalab.models.spec import ModelSpec
from deltalab.training.recipe import complete

from . import FOLDER


def spec() -> ModelSpec:
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    return ModelSpec.of({field.name: config[field.name] for field in fields(ModelSpec)})


def weights() -> bool:
    """Whether the folder has weights to start from."""
    return (FOLDER / "model.safetensors").exists()


def recipe() -> dict[str, Any]:
    """The recipe that DELTALAB_RECIPE names, by default the folder's, with defaults for what it leaves out."""
    file = Path(os.environ.get("DELTALAB_RECIPE") or FOLDER / "recipe.yaml")
    return complete(yaml.safe_load(file.read_text(encoding="utf-8")))
