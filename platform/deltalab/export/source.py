"""The model that an export starts from, wherever it comes from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from deltalab.models.spec import ModelSpec


@dataclass(frozen=True)
class Source:
    """A model, and the recipe by which it was trained or is to be trained.

    Attributes:
        model: The model.
        weights: A function that reads `Model(model).state_dict()`; None for an untrained model.
        recipe: The contents of `recipe.yaml` without `model`, `tokenizer` and `provenance`.
        provenance: Where the model comes from, by name.
        scores: The scores that were measured with these weights, by name. They hold for no other weights.
        tokenizer: The tokenizer as `load_tokenizer` takes it; None for a model of a task's own tokens.
    """

    model: ModelSpec
    weights: Callable[[], Mapping[str, Tensor]] | None
    recipe: Mapping[str, Any]
    provenance: Mapping[str, Any]
    scores: Mapping[str, float]
    tokenizer: str | None


def model_fields(model: ModelSpec) -> dict[str, Any]:
    """Returns the fields of a model in the types of YAML and JSON.

    Every knob of the rule is written out, so that a default that changes later does not change the model.
    """
    values = {f.name: getattr(model, f.name) for f in fields(ModelSpec)} | {"rule": model.make_rule().spec()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
