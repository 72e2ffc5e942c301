"""Names candidates and arms of a search by what they are: the choices in which they differ from the base."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from deltalab.study.answers.answer import format_values

MOST_CHOICES = 4
"""Choices in a name. A longer one ends in "and N more"."""


def title(values: Mapping[str, Any], *, most: int = MOST_CHOICES, training: bool = False) -> str:
    """What a candidate is. values: the settings that differ from the base, by path. most: how many choices it names.

    training: with the settings of the training, too. They tell one trial from another, and not what a candidate is:
    without `training`, they stand in a name only where nothing else differs.

    >>> title({"rule.decay": "diagonal", "rule.low_rank": "tied", "train.lr": 0.0123456})
    'diagonal decay, tied low rank'
    >>> title({"rule": {"name": "comba", "transition": "iplr"}, "model.heads": 2, "model.mlp": False, "rule.d": "none"})
    'comba (iplr transition), heads 2, no mlp, no d'
    >>> title({"rule": "gla", "rule.d": {"head": {"init": 0.02}}, "model.layers": ["rule", "attention"]})
    'gla, d head(init=0.02), layers [rule, attention]'
    >>> title({"train.lr": 0.0123456}), title({})
    ('the base with lr 0.0123', 'as the base')
    """
    choices = {path: value for path, value in values.items() if not path.startswith("train.")}
    said = [_said(path, value) for path, value in choices.items()]
    if len(said) > most + 1:
        said = [*said[:most], f"and {len(said) - most} more"]
    if training or not choices:
        said += [_said(path, value) for path, value in values.items() if path not in choices]
    if not choices:
        return f"the base with {', '.join(said)}" if said else "as the base"
    return ", ".join(said)


def titles(candidates: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """The titles of candidates by name. candidates: names, and the values that differ from the base.

    Where several would have one title, theirs have all choices, then the settings of the training, too, and where that
    is not enough the candidate's name.

    >>> gla = {"rule": "gla"}
    >>> titles([("found_1", {**gla, "train.lr": 0.2}), ("7", {**gla, "train.lr": 0.1}), ("8", {"rule": "comba"})])
    {'found_1': 'gla, lr 0.2', '7': 'gla, lr 0.1', '8': 'comba'}
    >>> titles([("1", gla), ("2", gla)])
    {'1': 'gla (1)', '2': 'gla (2)'}
    """
    found = _alone({name: title(values) for name, values in candidates})
    for training in (False, True):
        left = [(name, values) for name, values in candidates if name not in found]
        found |= _alone({name: title(values, most=len(values), training=training) for name, values in left})
    return {name: found.get(name) or f"{title(values)} ({name})" for name, values in candidates}


def _alone(found: Mapping[str, str]) -> dict[str, str]:
    """Those that no other name shares."""
    count = Counter(found.values())
    return {name: said for name, said in found.items() if count[said] == 1}


def _said(path: str, value: Any) -> str:
    """One setting in words."""
    word = path.rpartition(".")[2].replace("_", " ")
    if path == "rule":
        knobs = {key: given for key, given in value.items() if key != "name"} if isinstance(value, Mapping) else {}
        name = str(value["name"]) if isinstance(value, Mapping) else str(value)
        return f"{name} ({title(knobs)})" if knobs else name
    if value is None or value is False or value == "none":
        return f"no {word}"
    if value is True:
        return word
    if isinstance(value, str):
        return f"{value.replace('_', ' ')} {word}"
    return format_values({word: value}).replace("=", " ", 1)
