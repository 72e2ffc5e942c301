"""The layers that a model lists: their entries, each in its only form, and the settings that an entry may change."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from deltalab.errors import InputError, unknown
from deltalab.models.settings.limits import MOST, whole
from deltalab.own_module import OwnModule, as_rule, is_path
from deltalab.registry import get_rule

ATTENTION = "attention"
"""The rule of the layers in `ModelSpec.attention`."""

RULE = "rule"
"""An entry of `ModelSpec.layers` that stands for `ModelSpec.rule`."""

OF_A_LAYER = (
    "heads",
    "key_dim",
    "expand_v",
    "conv",
    "qk_heads",
    "kv_heads",
    "qk_norm",
    "rope",
    "rope_dim",
    "q_rank",
    "kv_rank",
    "token_shift",
    "output_norm",
    "output_gate",
    "gate_rank",
    "features",
    "scale",
    "low_rank_bias",
    "low_rank_activation",
    "conv_bias",
    "skip",
    "bonus",
    "norm_eps",
    "backend",
    "beside",
)
"""The settings of mixers that an entry of `ModelSpec.layers` may change for its own layer."""

OF_A_BLOCK = (*OF_A_LAYER, "mlp_width")
"""All settings that such an entry may change."""

OF_A_MIXER = tuple(name for name in OF_A_LAYER if name != "beside")
"""Those of them that a rule's own layer reads."""

OF_NO_PRESET = ("low_rank_activation", "bonus")
"""The settings that came after presets, which write out all settings of a layer. The keys of older trials lack them."""

Layer: TypeAlias = str | Mapping[str, Any]


def listed(layers: object, rule_name: str) -> tuple[Layer, ...]:
    """Returns the entries of `layers` one by one, with all knobs, so that equal models have equal entries.

    Args:
        layers: The setting `layers` of a model, if it is no number.
        rule_name: The name of the model's rule.

    Raises:
        InputError: It lists no layers, or none of the model's rule.
    """
    entries = tuple(_listed_layer(entry, rule_name, OF_A_BLOCK) for entry in _repeated(layers, "model.layers"))
    if RULE not in [entry if isinstance(entry, str) else entry["name"] for entry in entries]:
        raise InputError(
            f"model.layers: rule '{rule_name}' stands in no layer; list `{RULE}`, which is the model's rule, or "
            f"'{rule_name}'"
        )
    return entries


def _repeated(layers: object, where: str) -> list[object]:
    """Returns the entries of a list of layers, with each pattern written out as often as it repeats."""
    if isinstance(layers, Mapping):
        layers = [layers]
    if not isinstance(layers, list | tuple) or not layers:
        raise InputError(f"{where} must list at least one layer, not {layers!r}")
    entries: list[object] = []
    for entry in layers:
        if not isinstance(entry, Mapping) or "name" in entry:
            entries.append(entry)
            continue
        if "module" in entry:
            entries.append(as_rule(entry, where))
            continue
        for key in entry:
            if key not in ("repeat", "pattern"):
                raise unknown("key", key, ("name", "module", "repeat", "pattern"), where=where)
        if "pattern" not in entry:
            raise InputError(f"{where}: {{repeat: n}} needs pattern: [layer, ...]")
        whole("layers repeat", entry.get("repeat", 1), least=1)
        pattern = _repeated(entry["pattern"], f"{where} pattern")
        _few_blocks(len(entries) + entry.get("repeat", 1) * len(pattern))
        entries += entry.get("repeat", 1) * pattern
    _few_blocks(len(entries))
    return entries


def _few_blocks(count: int) -> None:
    if count > MOST["layers"]:
        raise InputError(f"model.layers lists {count:,} blocks; a model has at most {MOST['layers']:,}")


def _listed_layer(entry: object, rule_name: str, allowed: tuple[str, ...]) -> Layer:
    """Returns an entry of `layers` in its only form, so that equal entries are equal values.

    An entry for the model's own rule, whose name is `rule_name`, becomes `rule` if it changes no knob and no setting.
    `allowed` are the settings that it may change.
    """
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping) or not isinstance(entry["name"], str):
        raise InputError(f"model.layers: a layer is a rule's name or {{name: ..., knob: ...}}, not {entry!r}")
    settings = entry.get("layer") or {}
    knobs = {key: value for key, value in entry.items() if key != "layer"}
    if not isinstance(settings, Mapping):
        raise InputError(f"model.layers: layer takes {{setting: ...}}, not {settings!r}")
    for key in settings:
        if key not in allowed:
            raise unknown("setting of a layer", key, allowed, where="model.layers")
    if "@" in entry["name"]:
        # Import late, as in `ModelSpec.of`.
        from deltalab.models.published import written_out

        knobs, settings = written_out(knobs, settings)
    if settings.get("beside") is not None:
        settings = {**settings, "beside": beside_layer(settings["beside"], rule_name)}
    name = knobs.pop("name")
    of_mixer = [key for key in settings if key in OF_A_LAYER]
    if of_mixer and is_path(name) and isinstance(get_rule(name, **knobs), OwnModule):
        raise InputError(f"model.layers: module '{name}' has no {of_mixer[0]} of a layer: give it kwargs")
    settings = {"layer": dict(settings)} if settings else {}
    if name == RULE and knobs:
        raise InputError(f"model.layers: `{RULE}` is the model's rule with its knobs, and takes no {next(iter(knobs))}")
    if name == RULE or (name == rule_name and not knobs):
        return {"name": RULE, **settings} if settings else RULE
    try:
        for key in knobs:
            if key in allowed and not is_path(name) and key not in get_rule(name).options():
                raise InputError(f"{key} is a setting of the layer: say {{name: {name}, layer: {{{key}: ...}}}}")
        return {**get_rule(name, **knobs).spec(), **settings}
    except InputError as error:
        raise InputError(f"model.layers: {error}") from None


def beside_layer(entry: object, rule_name: str) -> Layer:
    """Returns the mixer beside a rule in its only form."""
    if isinstance(entry, Mapping) and "module" in entry:
        entry = as_rule(entry, "model.beside")
    if not isinstance(entry, str) and not (isinstance(entry, Mapping) and isinstance(entry.get("name"), str)):
        raise InputError(f"model.beside must be a rule's name, {{name: ..., knob: ...}} or a module, not {entry!r}")
    if isinstance(entry, Mapping) and (entry.get("layer") or {}).get("beside") is not None:
        raise InputError("model.beside: a third mixer does not go beside two")
    try:
        return _listed_layer(entry, rule_name, OF_A_LAYER)
    except InputError as error:
        raise InputError(str(error).replace("model.layers", "model.beside")) from None
