"""Names candidates and arms of a search by the choices in which they differ from the base."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from deltalab.study.specs.setting_paths import model_part, training_part
from deltalab.study.specs.setting_text import settings_text

MOST_CHOICES = 4
"""How many choices a name has. A longer name ends in "and N more"."""


def title(values: Mapping[str, Any], *, most: int = MOST_CHOICES, training: bool = False) -> str:
    """Names a candidate by its choices.

    Settings of the training are left out by default: they tell trials apart, and not architectures.

    Args:
        values: The settings that differ from the base, by path.
        most: How many choices of rule and model the name has.
        training: Whether the name also has the settings of the training. It has them anyway if nothing else differs.

    Examples:
        >>> title({"rule.decay": "diagonal", "rule.low_rank": "tied", "train.lr": 0.0123456})
        'diagonal decay, tied low rank'
        >>> title({"rule": {"name": "comba", "transition": "iplr"}, "model.heads": 2, "model.mlp": False})
        'comba (iplr transition), heads 2, no mlp'
        >>> title({"rule": "gla", "rule.d": {"head": {"init": 0.02}}, "model.layers": ["rule", "attention"]})
        'gla, d head(init=0.02), layers [rule, attention]'
        >>> title({"train.lr": 0.0123456}), title({}), title({"rule.d": "none"})
        ('the base with lr 0.0123', 'as the base', 'no d')
    """
    choices = [_choice(path, value) for path, value in model_part(values).items()]
    trainings = [_choice(path, value) for path, value in training_part(values).items()]
    if not choices:
        return f"the base with {', '.join(trainings)}" if trainings else "as the base"
    if len(choices) > most + 1:
        choices = [*choices[:most], f"and {len(choices) - most} more"]
    return ", ".join([*choices, *trainings] if training else choices)


def titles(candidates: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """The titles of candidates by name, all different.

    Candidates that would share a title get all their choices, then the settings of the training, too, and if that is
    not enough, their names.

    Args:
        candidates: The name of each candidate, and its values that differ from the base.

    Examples:
        >>> gla = {"rule": "gla"}
        >>> titles([("found_1", {**gla, "train.lr": 0.2}), ("7", {**gla, "train.lr": 0.1}), ("8", {"rule": "comba"})])
        {'found_1': 'gla, lr 0.2', '7': 'gla, lr 0.1', '8': 'comba'}
        >>> titles([("1", gla), ("2", gla)])
        {'1': 'gla (1)', '2': 'gla (2)'}
    """
    unique = _unshared({name: title(values) for name, values in candidates})
    for training in (False, True):
        left = [(name, values) for name, values in candidates if name not in unique]
        unique |= _unshared({name: title(values, most=len(values), training=training) for name, values in left})
    return {name: unique.get(name) or f"{title(values)} ({name})" for name, values in candidates}


def _unshared(texts: Mapping[str, str]) -> dict[str, str]:
    """The titles that only one name has."""
    count = Counter(texts.values())
    return {name: text for name, text in texts.items() if count[text] == 1}


def _choice(path: str, value: Any) -> str:
    """A setting in words."""
    word = path.rpartition(".")[2].replace("_", " ")
    if path == "rule":
        knobs = {key: knob for key, knob in value.items() if key != "name"} if isinstance(value, Mapping) else {}
        name = str(value["name"]) if isinstance(value, Mapping) else str(value)
        return f"{name} ({title(knobs)})" if knobs else name
    if value is None or value is False or value == "none":
        return f"no {word}"
    if value is True:
        return word
    if isinstance(value, str):
        return f"{value.replace('_', ' ')} {word}"
    return settings_text({word: value}, 3).replace("=", " ", 1)
