"""Makes, reads and changes `recipe.yaml`, which says how an exported model is to be trained.

`deltalab.training.recipe_keys` has the keys of a recipe and their defaults.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.export.papers import PaperRecipe, find_recipe
from deltalab.export.scales import SCALES, parameter_count
from deltalab.models.spec import ModelSpec
from deltalab.own_module import OwnModule
from deltalab.reading import read_text, read_yaml
from deltalab.training.optimizer import EPS
from deltalab.training.recipe_keys import CHOICES, LEAST, SHARES, default_settings, with_defaults
from deltalab.training.spec import TrainSpec

RECIPE_FILE = "recipe.yaml"
OF_KINDS = {
    "schedule.final": ("cosine", "linear", "wsd"),
    "schedule.stable": ("wsd",),
    "schedule.decay": ("wsd",),
}
"""The settings that only some kinds of schedules read, with these kinds."""


CANNOT = {
    ("fp8", "float8", "mxfp"): "products are in bf16 or fp32, as precision says",
    ("tensor_parallel", "tp"): "GPUs share a model by FSDP2, and none shares the products of a layer",
    ("context_parallel", "sequence_parallel", "cp"): "GPUs share a sequence by the setting context_parallel",
    ("pipeline_parallel", "pp"): "GPUs share a model by FSDP2, and each computes all layers",
}
"""Words of settings for what the engines have of their own and trainings here do not use -> what they do instead."""


def make_recipe(train: TrainSpec, length: int, seed: int, origin: str) -> dict[str, Any]:
    """Makes the recipe that trains as a `TrainSpec` does.

    Args:
        train: The training of a trial.
        length: Tokens of a training sequence.
        seed: The seed of the parameters and of the order of the data.
        origin: Where the numbers come from, such as `trial KEY`. The recipe names it beside each of them.
    """
    return {
        "optimizer": {
            "name": train.optimizer,
            "lr": train.lr,
            "betas": list(train.betas),
            "eps": EPS,
            "weight_decay": train.weight_decay,
        },
        "schedule": {
            "kind": train.schedule,
            "warmup_steps": round(train.warmup * train.steps),
            "final": train.final,
            **({"stable": train.stable, "decay": train.decay} if train.schedule == "wsd" else {}),
        },
        "clip": train.clip,
        **({"z_loss": train.z_loss} if train.z_loss else {}),
        "batch": {"sequences": train.batch_size, "length": length},
        "steps": train.steps,
        **({"seconds": train.seconds} if train.seconds else {}),
        "precision": "fp32" if train.precision == "fp32" else "bf16",
        "seed": seed,
        "origin": {
            name: {"from": origin}
            for name in ("optimizer", "lr", "weight_decay", "warmup_steps", "clip", "batch", "steps")
        },
    }


def paper_recipe(model: ModelSpec) -> dict[str, Any]:
    """Makes the recipe of Comba's paper, at its scale nearest to the model's, for a model that comes from no trial."""
    recipe = make_recipe(TrainSpec(steps=100, batch_size=1, lr=3e-4, evaluations=1), 2048, seed=0, origin="no trial")
    return by_a_paper(recipe, find_recipe("comba"), parameter_count(model))


def by_a_paper(
    recipe: Mapping[str, Any], paper: PaperRecipe, parameters: float, scale: str | None = None
) -> dict[str, Any]:
    """Makes a recipe with the settings of a paper, and the `origin` of each of them.

    Args:
        recipe: The recipe to change, which stays as it is. It keeps what no paper says, such as precision and logs.
        paper: The recipe of the paper.
        parameters: The number of the model's parameters.
        scale: The scale of the model, such as `1.3B`. If it is None or the paper has no such scale, the settings are
            those of the scale that is nearest to `parameters`.
    """
    before = all_settings(recipe)
    nearest = scale if scale is not None and scale in paper.scales else paper.nearest(parameters)
    of_scale, origin = _settings_of_scale(nearest, before)
    stated = paper.at(nearest)
    new = changed_recipe(recipe, {**of_scale, **{key: each.value for key, each in stated.items()}}, prefix="recipe.")
    for key, each in stated.items():
        was = {"was": before[key]} if before[key] != each.value else {}
        origin[_origin_name(key)] = {"from": each.source, **was}
    kept = {name: source for name, source in (recipe.get("origin") or {}).items() if not name.startswith("batch.")}
    return {**new, "origin": {**kept, **origin}}


def run_recipe(recipe: Mapping[str, Any], used: Mapping[str, Any], run: str) -> dict[str, Any]:
    """Makes the recipe by which a run of `deltalab train` trained an exported folder.

    Args:
        recipe: The recipe of the exported folder.
        used: The recipe in the run's `run.json`, which has every key. Its settings replace those of `recipe`.
        run: The name of the run, which `origin` names.
    """
    new = _copy(recipe)
    before, after = all_settings(recipe), named_settings(used)
    # The defaults of `every` depend on the number of steps, so they are computed for the run's steps.
    defaults = named_settings(with_defaults({**recipe, "steps": after.get("steps", before["steps"])}))
    before = {**defaults, "steps": before["steps"]}
    for key, value in after.items():
        # A run measures no more validation rows than its data have, which says nothing about other data.
        if value != before[key] and key != "validation.sequences":
            _put(new, key, value)
            new.setdefault("origin", {})[_origin_name(key)] = {"from": f"deltalab train, run {run}", "was": before[key]}
    return new


def resized_recipe(
    recipe: Mapping[str, Any], before: ModelSpec, after: ModelSpec, scale: str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Makes the recipe of a model from the recipe of the same model in another size.

    The learning rate of another width is lr x (width before / width after), because AdamW's best rate for a matrix
    falls with its width. No run at the new width measured the rate. A model with a `base_width` keeps its rate: the
    rate is meant for the base width, and training scales it for the matrices alone. The best rate of embeddings and
    vectors does not fall. The warm-up keeps its share of the steps.

    Args:
        recipe: The recipe of `before`.
        before: The model in its earlier size.
        after: The model in its new size.
        scale: The name in `SCALES` that gives batches and steps; None keeps those of `recipe`.
        given: The settings that the user asks for, by dotted key. Nothing overrides them.

    Raises:
        InputError: If no recipe has a given key, or if the key does not take the value.

    References:
        Yang et al. 2022, arXiv:2203.03466 (the rate by width).
    """
    asked, origin, settings = dict(given), dict(recipe.get("origin") or {}), all_settings(recipe)
    if scale is not None:
        of_scale, origin_of_scale = _settings_of_scale(scale, settings)
        asked, origin = {**of_scale, **asked}, {**origin, **origin_of_scale}
    old, width = (model.base_width or model.d_model for model in (before, after))
    if old != width and "optimizer.lr" not in given:
        asked["optimizer.lr"] = settings["optimizer.lr"] * old / width
        origin["lr"] = {
            "from": origin.get("lr", {}).get("from", "the source's recipe"),
            "was": settings["optimizer.lr"],
            "scaled": f"lr x ({old} / {width}), by width; a rule of thumb, not measured here",
        }
    new = changed_recipe(recipe, asked, prefix="recipe.")
    if all_settings(new)["steps"] != settings["steps"] and "schedule.warmup_steps" not in given:
        origin["warmup_steps"] = {
            "from": origin.get("warmup_steps", {}).get("from", "the source's recipe"),
            "was": settings["schedule.warmup_steps"],
            "scaled": f"{settings['schedule.warmup_steps'] / settings['steps']:.3g} of the steps",
        }
    origin |= {_origin_name(key): {"from": "--set"} for key in given}
    both = "batch.sequences", "batch.length"
    if all(key in given for key in both):
        origin = {**{name: source for name, source in origin.items() if name not in both}, "batch": {"from": "--set"}}
    lr = {key: value for key, value in origin.get("lr", {}).items() if key != "matrices"}
    if after.width_share != 1:
        lr["matrices"] = f"lr x {after.width_share:g}: base_width {after.base_width} / d_model {after.d_model}"
    return {**new, "origin": {**origin, **({"lr": lr} if lr else {})}}


def changed_recipe(recipe: Mapping[str, Any], given: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Makes a recipe with other settings. The warm-up keeps its share of the steps unless it is given.

    Args:
        recipe: The recipe to change, which stays as it is.
        given: The new settings by dotted key.
        prefix: The prefix of keys as a user spells them after `--set`, such as `recipe.`.

    Raises:
        InputError: If no recipe has a given key, or if the key does not take the value.
    """
    new = _copy(recipe)
    for key, value in given.items():
        if key not in default_settings():
            raise unknown_setting(prefix + key, [prefix + known for known in default_settings()], where="--set")
        check_setting(key, value, where=f"--set {prefix}{key}")
        _put(new, key, value)
    before, after = all_settings(recipe), all_settings(new)
    if after["steps"] != before["steps"] and "schedule.warmup_steps" not in given:
        after["schedule.warmup_steps"] = round(before["schedule.warmup_steps"] / before["steps"] * after["steps"])
        _put(new, "schedule.warmup_steps", after["schedule.warmup_steps"])
    for key, kinds in OF_KINDS.items():
        if key in given and after["schedule.kind"] not in kinds:
            raise InputError(
                f"--set {prefix}{key}: has no effect on a schedule of kind {after['schedule.kind']}, only on "
                f"{' or '.join(kinds)}"
            )
    if after["schedule.warmup_steps"] > after["steps"]:
        warmup, steps = after["schedule.warmup_steps"], after["steps"]
        raise InputError(f"{prefix}schedule.warmup_steps {warmup} exceed {prefix}steps {steps}")
    return new


def no_engine_takes(key: str) -> str | None:
    """Says what trainings do in place of what a setting asks for; None if it asks for nothing that engines cannot do.

    Examples:
        >>> no_engine_takes("parallelism.pp")
        "no engine takes 'parallelism.pp': GPUs share a model by FSDP2, and each computes all layers"
    """
    parts = re.split(r"\W", key.lower())
    for words, what in CANNOT.items():
        if any(part == word or (len(word) > 2 and word in part) for part in parts for word in words):
            return f"no engine takes '{key}': {what}"
    return None


def unknown_setting(key: str, known: Iterable[str], *, where: str = "") -> InputError:
    """Makes the error for a setting that no recipe has. If no engine can do what it asks for, the error says so.

    Args:
        key: The setting, as the user gave it.
        known: The settings that exist, as a user spells them.
        where: The option or the file that gives the setting.
    """
    if (reason := no_engine_takes(key)) is not None:
        return InputError(f"{where}{': ' if where else ''}{reason}")
    return unknown("setting", key, known, where=where)


def check_setting(key: str, value: object, *, where: str) -> None:
    """Checks that a setting takes a value.

    Args:
        key: A dotted key of `default_settings`.
        value: The value to check.
        where: The option or the file that gives the value, for the error.

    Raises:
        InputError: If the setting does not take the value.
    """
    default = default_settings()[key]
    if value is None and default is None:
        return
    if key in CHOICES:
        if value not in CHOICES[key]:
            raise unknown("value", value, CHOICES[key], where=where)
    elif key in SHARES:
        if not _number(value) or float(value) > 1:  # type: ignore[arg-type]
            raise InputError(f"{where}: must be a number from 0 to 1, not {value!r}")
    elif key in LEAST:
        if not isinstance(value, int) or isinstance(value, bool) or value < LEAST[key]:
            raise InputError(f"{where}: must be a whole number of at least {LEAST[key]}, not {value!r}")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise InputError(f"{where}: must be true or false, not {value!r}")
    elif key == "seconds":
        if not _number(value) or not value:
            raise InputError(f"{where}: must be a number of seconds above 0, or null, not {value!r}")
    elif key == "optimizer.betas":
        if not isinstance(value, list) or len(value) != 2 or not all(_number(beta) and beta < 1 for beta in value):
            raise InputError(f"{where}: must be two numbers in [0, 1), not {value!r}")
    elif not _number(value):
        raise InputError(f"{where}: must be a number of at least 0, not {value!r}")


def no_graphs(settings: Mapping[str, Any], engine: str, gpus: float) -> str | None:
    """Returns why no CUDA graphs are replayed in a training of any model; None if they are.

    Args:
        settings: The settings by dotted key, at least those that differ from their defaults.
        engine: torchtitan or accelerate.
        gpus: The GPUs of all machines.
    """
    others: list[tuple[str, object]] = [("compile", True), ("activation_checkpointing", True)]
    others += [("batch.documents", "reset"), *([("precision", "fp32")] if engine == "torchtitan" else [])]
    for key, value in others:
        if settings.get(key) == value:
            return f"there are no CUDA graphs with {key}: {str(value).lower()}"
    return None if gpus == 1 else f"only a training on one GPU replays CUDA graphs, and this one has {gpus:g}"


def no_graphs_of(model: ModelSpec) -> str | None:
    """Returns why the blocks of a model are not replayed as CUDA graphs; None if they are."""
    return None if model.more_than_x is None else f"there are no CUDA graphs with model.{model.more_than_x}"


def no_milestones(milestones: int | None, every: int | None) -> str | None:
    """Returns why no checkpoint can stay after each so many steps; None if they can, or if none is asked to.

    Args:
        milestones: The steps.
        every: The steps from one checkpoint to the next; None lets the milestones decide.
    """
    if milestones is None or every is None or milestones % every == 0:
        return None
    return f"milestones {milestones} must be a multiple of checkpoint.every {every}"


def no_context(model: ModelSpec, settings: Mapping[str, Any], engine: str) -> str | None:
    """Returns why processes cannot share the sequences of a training; None if they can, or if none is asked to.

    Args:
        model: The model.
        settings: The settings by dotted key, at least those that differ from their defaults.
        engine: torchtitan or accelerate.
    """
    if (count := settings.get("context_parallel", 1)) == 1:
        return None
    where = f"context_parallel {count}: "
    if engine != "torchtitan":
        return f"{where}{engine} gives each process whole sequences: take engine torchtitan"
    for layer in range(model.depth):
        spec = model.at(layer)
        for mixer in (spec, spec.second()):
            if mixer is not None and isinstance(rule := mixer.make_rule(), OwnModule):
                return f"{where}layer {layer} is the module '{rule.name}', which keeps no state to hand on"
    return None


def named_settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that a recipe names, by dotted key."""
    settings: dict[str, Any] = {}
    for key in default_settings():
        part, dot, name = key.partition(".")
        if dot and name in (recipe.get(part) or {}):
            settings[key] = recipe[part][name]
        elif not dot and part in recipe:
            settings[key] = recipe[part]
    return settings


def all_settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all settings by dotted key, with defaults for those that a recipe leaves out."""
    return {**default_settings(), **named_settings(recipe)}


def read_recipe(folder: Path) -> Mapping[str, Any]:
    """Reads the recipe of an exported folder.

    Raises:
        InputError: If the folder has no recipe, or if its file is not a recipe.
    """
    file = folder / RECIPE_FILE
    try:
        recipe = read_yaml(read_text(file), where=str(file))
    except FileNotFoundError:
        why = "not an exported folder: it has no recipe.yaml" if folder.is_dir() else "no such folder"
        raise InputError(f"{folder}: {why}") from None
    if not isinstance(recipe, Mapping) or "optimizer" not in recipe:
        raise InputError(f"{file}: not a recipe: it has no optimizer")
    return recipe


def _settings_of_scale(name: str, before: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that a scale changes, and the `origin` of each. `before` has all settings before the change."""
    scale = SCALES[name]
    settings: dict[str, Any] = {
        "batch.sequences": scale.batch // scale.length,
        "batch.length": scale.length,
        "steps": round(scale.tokens / scale.batch),
    }
    if before["batch.micro"] is not None:
        settings["batch.micro"] = None  # it was chosen for the smaller model
    batch = {"sequences": before["batch.sequences"], "length": before["batch.length"]}
    origin = {"from": f"scale {name}: {scale.source}"}
    return settings, {
        "batch": {**origin, "was": batch, "scaled": f"{scale.batch:,} tokens a step"},
        "steps": {**origin, "was": before["steps"], "scaled": f"{scale.tokens:,.0f} tokens in all"},
    }


def _copy(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of a recipe, in the types that YAML has."""
    copy: dict[str, Any] = json.loads(json.dumps(recipe))
    return copy


def _put(recipe: dict[str, Any], key: str, value: Any) -> None:
    """Puts the value of a dotted key into a recipe."""
    part, dot, name = key.partition(".")
    recipe[part] = {**(recipe.get(part) or {}), name: value} if dot else value


def _origin_name(key: str) -> str:
    """The name under which `origin` lists a setting."""
    if key in ("optimizer.name", "schedule.kind"):
        return key.partition(".")[0]
    return key.removeprefix("optimizer.").removeprefix("schedule.")


def _number(value: object) -> bool:
    """Whether a value is a finite number of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
