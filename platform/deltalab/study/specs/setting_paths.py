"""Dotted paths of settings, such as `train.lr`, and the parts of a configuration that they belong to."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

TRAINING = "train."


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
