"""Lists the settings in which two configurations differ."""

from collections.abc import Mapping
from typing import Any


def difference(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Lists the settings in which two configurations differ: dotted key -> [value in base, value in other].

    A gate counts as one value. A setting that only one configuration has is None in the other. Beside a module of
    another author, the settings of a layer count for nothing.

    Examples:
        >>> difference({"train": {"lr": 1, "clip": 2}}, {"train": {"lr": 3, "clip": 2}})
        {'train.lr': [1, 3]}
    """
    before, after = flat(base), flat(other)
    names = [str(config.get("rule.name")) for config in (before, after)]
    if any("." in name for name in names):  # as in that of every module of another author
        # Both import torch, which the comparison of rules does not need.
        from deltalab.models.settings.layer_list import OF_A_MIXER
        from deltalab.own_module import is_path

        if any(map(is_path, names)):
            idle = {f"model.{setting}" for setting in OF_A_MIXER}
            before, after = ({k: v for k, v in config.items() if k not in idle} for config in (before, after))
    keys = [*before, *(key for key in after if key not in before)]
    return {k: [before.get(k), after.get(k)] for k in keys if before.get(k) != after.get(k)}


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Lists the settings of a configuration by dotted key. A gate counts as one value.

    Examples:
        >>> flat({"rule": {"name": "comba", "d": {"head": {}}}, "train": {"lr": 1}})
        {'rule.name': 'comba', 'rule.d': {'head': {}}, 'train.lr': 1}
    """
    return {f"{section}.{key}": value for section, part in config.items() for key, value in part.items()}
