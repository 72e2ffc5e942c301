"""Dotted paths of settings, such as `train.lr`, and the parts of a configuration that they belong to."""

from collections.abc import Mapping
from typing import Any, TypeVar

from deltalab.errors import unknown

T = TypeVar("T")

TRAINING = "train."

OF_THE_TASK = ("vocab_size", "readout", "patches")
"""Settings of the model that the task determines."""
FIXED = ("rule.name", *(f"model.{key}" for key in OF_THE_TASK))
"""Settings that no study tunes or searches."""


def of_training(path: str) -> bool:
    """Whether a setting is one of the training alone, so that the model is the same for all its values."""
    return path.startswith(TRAINING)


def changes_a_step(path: str) -> bool:
    """Whether a setting may change the operations of a training step.

    >>> [changes_a_step(path) for path in ("train.lr", "train.batch_size", "rule.d")]
    [False, True, True]
    """
    return not of_training(path) or path == "train.batch_size"


def training_part(values: Mapping[str, T]) -> dict[str, T]:
    """Returns those of the values, by path, that are settings of the training.

    >>> training_part({"train.lr": 0.1, "rule.d": 0})
    {'train.lr': 0.1}
    """
    return {path: value for path, value in values.items() if of_training(path)}


def model_part(values: Mapping[str, T]) -> dict[str, T]:
    """Returns those of the values, by path, that are settings of the rule or the model.

    >>> model_part({"train.lr": 0.1, "rule.d": 0})
    {'rule.d': 0}
    """
    return {path: value for path, value in values.items() if not of_training(path)}


def setting(config: Mapping[str, Any], path: str, where: str) -> Any:
    """Looks up a setting by its path.

    Args:
        config: A configuration with every setting spelled out.
        path: The path, such as `train.lr`.
        where: The section, which errors name.

    Raises:
        InputError: There is no such setting.
    """
    here: Any = config
    for part in path.split("."):
        if not isinstance(here, Mapping) or part not in here:
            raise unknown("setting", path, settable(config), where=where)
        here = here[part]
    return here


def settable(config: Mapping[str, Any], under: str = "") -> list[str]:
    """Lists the paths of all settings that a study may tune or search."""
    paths = []
    for key, value in config.items():
        paths += settable(value, f"{under}{key}.") if isinstance(value, dict) else [f"{under}{key}"]
    return [path for path in paths if path not in FIXED]
