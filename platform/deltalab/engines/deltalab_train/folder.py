"""The model and the recipe of the exported folder that is trained."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from deltalab.models.spec import ModelSpec
from deltalab.training.recipe_keys import with_defaults

from . import FOLDER


def spec() -> ModelSpec:
    """Returns the model of the folder."""
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    return ModelSpec.of({field.name: config[field.name] for field in fields(ModelSpec)})


def weights() -> bool:
    """Returns whether the folder has weights to start from."""
    return (FOLDER / "model.safetensors").exists()


def recipe() -> dict[str, Any]:
    """Returns the recipe that DELTALAB_RECIPE names, by default that of the folder, with defaults for missing keys."""
    file = Path(os.environ.get("DELTALAB_RECIPE") or FOLDER / "recipe.yaml")
    return with_defaults(yaml.safe_load(file.read_text(encoding="utf-8")))
