"""What is exported, wherever it comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from deltalab.models.spec import ModelSpec


@dataclass(frozen=True)
class Source:
    """A model, and how it was or is to be trained.

    weights: reads `Model(model).state_dict()`; None where it is untrained. recipe: as `recipe.yaml`, without `model`,
    `tokenizer` and `provenance`. provenance: where the model comes from. scores: what its weights reached, which counts
    for these weights alone. tokenizer: what `load_tokenizer` takes, None for a task's own tokens.
    """

    model: ModelSpec
    weights: Callable[[], Mapping[str, Tensor]] | None
    recipe: Mapping[str, Any]
    provenance: Mapping[str, Any]
    scores: Mapping[str, float]
    tokenizer: str | None


def model_fields(model: ModelSpec) -> dict[str, Any]:
    """A model as YAML and JSON have it, with every knob written out: a default that changes later changes nothing."""
    found = {f.name: getattr(model, f.name) for f in fields(ModelSpec)} | {"rule": model.make_rule().spec()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
