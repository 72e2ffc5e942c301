"""Writes a model as a folder for an engine, in another size if a user asks for it."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from deltalab.data.text_tokenizers import load_tokenizer, tokenizer_files
from deltalab.errors import InputError, unknown
from deltalab.export.fla import to_fla
from deltalab.export.hf import export_hf, write_folder
from deltalab.export.papers import Stated, find_recipe
from deltalab.export.recipe import RECIPE_FILE, by_a_paper, resized_recipe
from deltalab.export.scales import PADDED, at_scale, find_scale, parameter_count
from deltalab.export.source import Source, model_fields
from deltalab.models.spec import ModelSpec
from deltalab.reading import read_yaml
from deltalab.registry import get_rule

FORMATS = ("hf", "torchtitan", "fla")


@dataclass(frozen=True)
class Exported:
    """The model that was written.

    Attributes:
        model: The model, in its new size.
        parameters: The number of its parameters.
        trained: Whether the folder has trained weights.
        notes: A line for each thing that a user may not expect of a resized model.
    """

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
    recipe: str | None = None,
    given: Sequence[str] = (),
    weights: bool | None = None,
    tokenizer: str | None = None,
) -> Exported:
    """Writes a model as a folder for `transformers`, for torchtitan, or for FLA.

    A model that is resized, or whose rule is changed, is untrained: the weights and the scores of the source are those
    of another model.

    Args:
        source: The model to write.
        directory: The folder to write, which must not exist or be empty.
        to: A name of `FORMATS`. A folder for torchtitan is one for transformers with the files of the engine.
        scale: A name of `SCALES`; None keeps the size.
        recipe: A name of `papers.recipe_names`, whose training takes the place of the source's; None keeps the latter.
        given: Settings KEY=VALUE of `model.`, `rule.` and `recipe.`, the value in YAML.
        weights: True asks for the weights of the source, False for none; None takes the weights if they fit.
        tokenizer: A tokenizer as `load_tokenizer` takes it; None means that of the source.

    Raises:
        InputError: If the model reads images; if a format, a scale or a setting does not exist; if weights that are
            asked for do not fit; if the tokenizer has more tokens than the model; if FLA cannot train an untrained
            model as its `base_width` asks; and if `export_hf` raises one.
    """
    if source.model.patches is not None:
        raise InputError("a model of images has no tokens, and no format of `deltalab export` takes it")
    if to not in FORMATS:
        raise unknown("format", to, FORMATS, where="--to")
    if scale is not None:
        find_scale(scale)
    paper = None if recipe is None else find_recipe(recipe)
    name = tokenizer or source.tokenizer
    loaded = None if name is None else load_tokenizer(name)
    size = None if loaded is None else loaded[1]["vocab_size"]
    settings = _settings(given)
    fixed = _changed_fields(source.model, settings["model"], settings["rule"])
    untrained = scale is not None or fixed != {} or weights is False or source.weights is None
    of_paper: dict[str, Stated] = {}
    if paper is not None and paper.init_std is not None and untrained:
        of_paper["init_std"] = paper.init_std
    if paper is not None and scale is not None and size is None:
        of_paper["vocab_size"] = paper.vocabulary
    of_paper = {name: stated for name, stated in of_paper.items() if name not in fixed}
    start = replace(source.model, **{name: stated.value for name, stated in of_paper.items()})
    notes: list[str] = []
    if scale is not None:
        model, notes = at_scale(start, scale, start.vocab_size if "vocab_size" in of_paper else size, fixed)
    else:
        model = replace(start, **fixed)
    if size is not None and size > model.vocab_size:
        raise InputError(
            f"--tokenizer {name} has {size} tokens, the model {model.vocab_size}: give --scale, or --set "
            f"model.vocab_size={-(-size // PADDED) * PADDED}, and the model starts untrained"
        )
    resized = model != source.model
    if weights and resized:
        options = [option for option, used in (("--scale", scale), ("--set", fixed)) if used]
        raise InputError(
            f"--weights: the study's weights do not fit a model changed by {' and '.join(options)}; leave "
            f"{'those' if len(options) > 1 else 'that'} out"
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
    # FLA's configuration has no base_width, so the recipe has the rate of the matrices.
    as_trained = replace(model, base_width=None) if to == "fla" else model
    if paper is None:
        training = resized_recipe(source.recipe, source.model, as_trained, scale, settings["recipe"])
    else:
        if model.width_share != 1:
            raise InputError(
                f"--recipe {recipe}: its rate is that of all parameters, and base_width {model.base_width} gives "
                f"matrices {model.width_share:g} of it: --set model.base_width=null"
            )
        training = by_a_paper(source.recipe, paper, parameter_count(model), scale)
        notes.append(training["origin"]["batch"]["from"])
        training = resized_recipe(training, as_trained, as_trained, None, settings["recipe"])
    written = {
        **training,
        "model": model_fields(model),
        "tokenizer": None if loaded is None else {k: v for k, v in loaded[1].items() if k != "special"},
        "provenance": provenance,
    }
    if resized:
        written["origin"] = {**written["origin"], **_origin_of_fields(source.model, model, scale, fixed, of_paper)}
    texts = {} if loaded is None else tokenizer_files(*loaded)
    special = {} if loaded is None else _ids(*loaded)
    if to == "fla":
        config, tensors = to_fla(model, kept)
        config |= {key: value for key, value in special.items() if key in config}
        write_folder(directory, {"config.json": config, RECIPE_FILE: written, **texts}, tensors if kept else None)
    else:
        if to == "torchtitan":
            # Layers forbid an import: the engines read exported folders, so they stand above this package.
            texts |= importlib.import_module("deltalab.engines.torchtitan").files(model, written)
        export_hf(model, kept, directory, provenance=provenance, recipe=written, files=texts, special=special)
    return Exported(model, parameter_count(model), kept is not None, notes)


def _ids(tokenizer: Any, description: Mapping[str, Any]) -> dict[str, int]:
    """The ids of special tokens, by their names in a configuration of transformers."""
    return {f"{name}_id": tokenizer.token_to_id(token) for name, token in description["special"].items()}


def _settings(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Values by the first word of their key, and by the rest of it."""
    settings: dict[str, dict[str, Any]] = {"model": {}, "rule": {}, "recipe": {}}
    for pair in given:
        key, equals, text = pair.partition("=")
        part, dot, rest = key.partition(".")
        if not equals:
            raise InputError(f"--set {pair}: give settings as KEY=VALUE")
        if part not in settings or not dot:
            raise unknown("setting", key, [f"{name}." for name in settings], where="--set")
        settings[part][rest] = read_yaml(text, where=f"--set {key}")
    return settings


def _changed_fields(model: ModelSpec, given: Mapping[str, Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelSpec` that a user gave, with the rule if its knobs were given."""
    names = [f.name for f in fields(ModelSpec) if f.name != "rule"]
    for name in given:
        if name not in names:
            raise unknown("setting", f"model.{name}", [f"model.{known}" for known in names], where="--set")
    changed = dict(given)
    if knobs:
        rule = model.make_rule().spec()
        changed["rule"] = get_rule(rule["name"], **{k: v for k, v in {**rule, **knobs}.items() if k != "name"}).spec()
    return {name: tuple(value) if isinstance(value, list) else value for name, value in changed.items()}


def _origin_of_fields(
    before: ModelSpec, after: ModelSpec, scale: str | None, fixed: Mapping[str, Any], of_paper: Mapping[str, Stated]
) -> dict[str, Any]:
    """The `origin` of each field of the model that has changed."""
    origin: dict[str, Any] = {}
    for f in fields(ModelSpec):
        old, new = getattr(before, f.name), getattr(after, f.name)
        if old != new and f.name != "rule":
            by = "--set" if f.name in fixed else of_paper[f.name].source if f.name in of_paper else f"scale {scale}"
            origin[f"model.{f.name}"] = {"from": by, "was": list(old) if isinstance(old, tuple) else old}
    if "init_std" in of_paper and "model.init_std" in origin:
        origin["model.init_std"]["scaled"] = "over sqrt(2 x blocks) for the last matrix of a mixer and of an MLP; ours"
    return origin
