"""Resizes what is exported, where a user asks for it, and writes it in the format of an engine."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from deltalab.data.text_tokenizers import load_tokenizer, tokenizer_files
from deltalab.errors import InputError, unknown
from deltalab.export import recipe as recipes
from deltalab.export.fla import to_fla
from deltalab.export.hf import export_hf, write_folder
from deltalab.export.scales import PADDED, at_scale, find, parameters
from deltalab.export.source import Source, model_fields
from deltalab.models.spec import ModelSpec
from deltalab.reading import read_yaml
from deltalab.registry import get_rule

FORMATS = ("hf", "torchtitan", "fla")


@dataclass(frozen=True)
class Exported:
    """What was written. notes: what a user may not expect of a resized model, a line each."""

    model: ModelSpec
    parameters: int
    trained: bool
    notes: list[str]


def export(
    source: Source,
    directory: Path,
    *,
    to: str = "hf",
    scale: str | None = None,
    given: Sequence[str] = (),
    weights: bool | None = None,
    tokenizer: str | None = None,
) -> Exported:
    """Writes a model as a folder for `transformers`, for torchtitan (the same folder and the engine's files) or FLA.

    scale: a name of `SCALES`. given: settings KEY=VALUE of `model.`, `rule.` and `recipe.`, the value in YAML.
    weights: True and False ask for the source's weights and for none; None takes them where they fit.
    tokenizer: what `load_tokenizer` takes; None is the source's own.

    A model that is resized, or whose rule is changed, is untrained: the source's weights and scores are not its own.

    Raises `InputError` for formats, scales and settings that do not exist, for weights that are asked for and do not
    fit, for a tokenizer with more tokens than the model, for an untrained model that FLA cannot train as `base_width`
    asks, and as `export_hf` does.
    """
    if to not in FORMATS:
        raise unknown("format", to, FORMATS, where="--to")
    if scale is not None:
        find(scale)
    named = tokenizer or source.tokenizer
    loaded = None if named is None else load_tokenizer(named)
    size = None if loaded is None else loaded[1]["vocab_size"]
    settings = _settings(given)
    fixed = _model_fields(source.model, settings["model"], settings["rule"])
    notes: list[str] = []
    if scale is not None:
        model, notes = at_scale(source.model, scale, size, fixed)
    else:
        model = replace(source.model, **fixed)
    if size is not None and size > model.vocab_size:
        raise InputError(
            f"--tokenizer {named} has {size} tokens, the model {model.vocab_size}: give --scale, or --set "
            f"model.vocab_size={-(-size // PADDED) * PADDED}, and the model starts untrained"
        )
    resized = model != source.model
    if weights and resized:
        by = [option for option, used in (("--scale", scale), ("--set", fixed)) if used]
        raise InputError(
            f"--weights: the study's weights do not fit a model changed by {' and '.join(by)}; leave "
            f"{'those' if len(by) > 1 else 'that'} out"
        )
    if weights and source.weights is None:
        raise InputError("--weights: the source has none, since it is untrained")
    kept = None if resized or weights is False or source.weights is None else source.weights()
    provenance = {
        **source.provenance,
        **(source.scores if kept is not None else {}),
        **({"scale": scale} if scale else {}),
        "weights": "initial" if kept is None else "trained",
    }
    if to == "fla" and kept is None and model.width_share != 1:
        raise InputError(
            f"--to fla: FLA trains all parameters at one rate, and base_width {model.base_width} gives matrices "
            f"{model.width_share:g} of it: take --to torchtitan, or --set model.base_width=null"
        )
    # FLA's configuration has no base_width: the recipe has the rate of the matrices.
    trained = replace(model, base_width=None) if to == "fla" else model
    recipe = {
        **recipes.rescaled(source.recipe, source.model, trained, scale, settings["recipe"]),
        "model": model_fields(model),
        "tokenizer": None if loaded is None else {k: v for k, v in loaded[1].items() if k != "special"},
        "provenance": provenance,
    }
    if resized:
        recipe["origin"] = {**recipe["origin"], **_resized(source.model, model, scale, fixed)}
    texts = {} if loaded is None else tokenizer_files(*loaded)
    special = {} if loaded is None else _ids(*loaded)
    if to == "fla":
        config, theirs = to_fla(model, kept)
        config |= {name: value for name, value in special.items() if name in config}
        write_folder(directory, {"config.json": config, recipes.FILE: recipe, **texts}, theirs if kept else None)
    else:
        if to == "torchtitan":
            # The engines read exported folders, so they stand above this package, which loads them by name.
            texts |= importlib.import_module("deltalab.engines.torchtitan").files(model, recipe)
        export_hf(model, kept, directory, provenance=provenance, recipe=recipe, files=texts, special=special)
    return Exported(model, parameters(model), kept is not None, notes)


def _ids(tokenizer: Any, about: Mapping[str, Any]) -> dict[str, int]:
    """The ids of special tokens, by the names that a configuration of transformers has for them."""
    return {f"{name}_id": tokenizer.token_to_id(token) for name, token in about["special"].items()}


def _settings(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Settings by their first word, the rest of the key and the value."""
    found: dict[str, dict[str, Any]] = {"model": {}, "rule": {}, "recipe": {}}
    for pair in given:
        key, equals, text = pair.partition("=")
        part, dot, rest = key.partition(".")
        if not equals:
            raise InputError(f"--set {pair}: give settings as KEY=VALUE")
        if part not in found or not dot:
            raise unknown("setting", key, [f"{name}." for name in found], where="--set")
        found[part][rest] = read_yaml(text, where=f"--set {key}")
    return found


def _model_fields(model: ModelSpec, given: Mapping[str, Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
    names = [f.name for f in fields(ModelSpec) if f.name != "rule"]
    for name in given:
        if name not in names:
            raise unknown("setting", f"model.{name}", [f"model.{each}" for each in names], where="--set")
    found = dict(given)
    if knobs:
        rule = model.make_rule().spec()
        found["rule"] = get_rule(rule["name"], **{k: v for k, v in {**rule, **knobs}.items() if k != "name"}).spec()
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _resized(before: ModelSpec, after: ModelSpec, scale: str | None, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Where each number of the model that has changed comes from."""
    found = {}
    for f in fields(ModelSpec):
        old, new = getattr(before, f.name), getattr(after, f.name)
        if old != new and f.name != "rule":
            by = "--set" if f.name in fixed else f"scale {scale}"
            found[f"model.{f.name}"] = {"from": by, "was": list(old) if isinstance(old, tuple) else old}
    return found
