"""Exports of a small model with random weights, as evaluations take them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltalab.export.recipe import paper_recipe
from deltalab.export.source import Source
from deltalab.export.write import export
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec

LENGTH = 64
MODEL = ModelSpec.of(
    {"rule": {"name": "gated_deltanet"}, "vocab_size": 256, "d_model": 16, "layers": 1, "heads": 2, "mlp": False}
)


def exported(
    folder: Path,
    model: ModelSpec = MODEL,
    tokenizer: str | None = "bytes",
    *,
    seed: int = 1,
    run: str = "r1",
    data: Mapping[str, Any] | None = None,
    **recipe: Any,
) -> Path:
    """An export with random weights, trained on rows of `LENGTH` as its recipe says."""
    trained = build_model(model, seed=seed)
    about = {**paper_recipe(model), "batch": {"sequences": 2, "length": LENGTH}, **recipe}
    provenance = {"study": "s", "arm": "base", "training": run, "checkpoint": "step-30", "data": data}
    export(Source(model, trained.state_dict, about, provenance, {}, tokenizer), folder)
    return folder
