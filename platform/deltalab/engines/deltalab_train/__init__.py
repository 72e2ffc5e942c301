"""Trains an exported folder on packed data by torchtitan (0.2.2 and 0.3) or by transformers' Trainer.

The folder's modules are imported as the package `exported`, whatever the name of the folder. Environment variables name
the inputs:

- DELTALAB_DATA: the packed data.
- DELTALAB_RUN: the folder for the results.
- DELTALAB_FOLDER: the exported folder, by default the one that holds this package.
- DELTALAB_RECIPE: the recipe, by default the `recipe.yaml` of the exported folder.
"""

import os
import sys
import types
from pathlib import Path

FOLDER = Path(os.environ.get("DELTALAB_FOLDER") or Path(__file__).parents[2]).resolve()
"""The exported folder."""

if "exported" not in sys.modules:
    _package = types.ModuleType("exported", f"The modules of {FOLDER}.")
    _package.__path__ = [str(FOLDER)]
    sys.modules["exported"] = _package
