"""Rules as their authors publish them: `rule: mamba2@published` sets the rule's knobs and the layer around the rule."""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.models.settings.layer_list import OF_A_LAYER
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_rule, list_rules, rule_plugin
from deltalab.rule import UpdateRule

PRESET = "published"
"""The only preset."""

OF_THE_STUDY = ("heads", "key_dim", "expand_v", "backend")
"""The settings of a layer that a preset leaves as they are, because they are sizes, or choose code and no function."""


def presets() -> list[str]:
    """Returns the names of the rules that have the preset.

    Examples:
        >>> "mamba2" in presets()
        True
    """
    return [name for name in list_rules() if _published(name)]


def written_out(rule: str | Mapping[str, Any], model: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes out a preset: every knob of its rule, and every setting of a layer except `OF_THE_STUDY`.

    Args:
        rule: A rule's name, or a mapping with knobs and perhaps a name.
        model: Settings of a model.

    Returns:
        The rule and the settings with the preset under them: what is given beside the preset stays. Both are as they
        were if the rule's name ends in no preset.

    Raises:
        InputError: The rule has no preset, or no such preset.

    Examples:
        >>> rule, model = written_out("mamba2@published", {"heads": 4})
        >>> rule["name"], model["output_norm"], model["skip"], model["heads"]
        ('mamba2', 'rms_all', True, 4)
    """
    if not isinstance(rule, str | Mapping):
        raise InputError(f"rule must be a name or {{name: ..., knob: ...}}, not {rule!r}")
    knobs = {"name": rule} if isinstance(rule, str) else dict(rule)
    name, mark, preset = str(knobs.get("name", "")).partition("@")
    if not mark:
        return knobs, dict(model)
    if preset != PRESET:
        raise unknown("preset", preset, [PRESET], where=f"rule '{name}'")
    published = settings(name)
    layer = {key: value for key, value in published.items() if key != "rule"}
    return {**published["rule"], **knobs, "name": name}, {**layer, **model}


def settings(name: str) -> dict[str, Any]:
    """Returns the preset of a rule: `rule` with every knob, and every setting of a layer except `OF_THE_STUDY`.

    Raises:
        InputError: The rule does not exist, or has no preset.
    """
    published = _published(name)
    if not published:
        raise InputError(
            f"rule '{name}' has no preset '{PRESET}': say {name}, or one of {', '.join(presets())} with @{PRESET}"
        )
    plain = {field.name: field.default for field in fields(ModelSpec)}
    layer = {key: plain[key] for key in OF_A_LAYER if key not in OF_THE_STUDY}
    rule = get_rule(name, **published.get("knobs", {}))
    return {"rule": rule.spec(), **layer, **published.get("layer", {})}


def differences(config: Mapping[str, Any]) -> list[str] | None:
    """Lists the settings in which a configuration differs from the preset of its rule.

    Args:
        config: A configuration with every setting spelled out: `rule` and `model`.

    Returns:
        The settings, such as `beta` or `model.scale`; None if the rule has no preset.
    """
    name = config["rule"]["name"]
    if name not in presets():
        return None
    wanted = settings(name)
    spec = ModelSpec.of({**config["model"], "rule": config["rule"]})
    authors = ModelSpec.of({**config["model"], **wanted})
    knobs = [key for key, value in authors.make_rule().spec().items() if spec.make_rule().spec()[key] != value]
    return knobs + [f"model.{key}" for key in wanted if key != "rule" and _value(spec, key) != _value(authors, key)]


def _published(name: str) -> Mapping[str, Any]:
    kind = rule_plugin(name).kind
    assert issubclass(kind, UpdateRule)
    return kind.published


def _value(spec: ModelSpec, key: str) -> object:
    """Returns a setting of a model's layers with what None stands for, so that two ways to say it are equal."""
    rule = spec.make_rule()
    given: object = getattr(spec, key)
    if given is not None:
        return given
    if key == "features":
        return rule.features if rule.silu_of_v else re.sub(r"(unit|silu)$", r"\1_qk", rule.features)
    return {
        "scale": rule.scale(spec.head_dims[0]),
        "qk_heads": spec.own_qk_heads,
        "kv_heads": spec.heads,
    }.get(key)
