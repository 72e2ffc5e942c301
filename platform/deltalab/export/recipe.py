"""How an exported model is to be trained: `recipe.yaml`, made of a trial's training, a scale and a user's settings."""

import json
import math
from collections.abc import Mapping
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.export.scales import COMBA, SCALES, parameters
from deltalab.models.spec import ModelSpec
from deltalab.training.optimizer import EPS
from deltalab.training.recipe import CHOICES, LEAST, complete, settings
from deltalab.training.spec import TrainSpec

FILE = "recipe.yaml"


def of_trial(train: TrainSpec, length: int, seed: int, key: str) -> dict[str, Any]:
    """The recipe that trains as a trial did. length: of its sequences. key: of the trial, which `origin` names."""
    origin = {"from": f"trial {key}"}
    return {
        "optimizer": {
            "name": "adamw",
            "lr": train.lr,
            "betas": list(train.betas),
            "eps": EPS,
            "weight_decay": train.weight_decay,
        },
        "schedule": {"kind": "cosine", "warmup_steps": round(train.warmup * train.steps), "final": 0.0},
        "clip": train.clip,
        "batch": {"sequences": train.batch_size, "length": length},
        "steps": train.steps,
        "precision": "fp32" if train.precision == "fp32" else "bf16",
        "seed": seed,
        "origin": {name: dict(origin) for name in ("lr", "weight_decay", "warmup_steps", "clip", "batch", "steps")},
    }


def of_paper(model: ModelSpec) -> dict[str, Any]:
    """The recipe of Comba's paper, with the tokens of the scale nearest to the model, for a model without a trial."""
    found = parameters(model)
    name = min(SCALES, key=lambda name: abs(math.log(SCALES[name].parameters / found)))
    base = of_trial(
        TrainSpec(steps=100, batch_size=1, lr=3e-4, weight_decay=0.01, warmup=0.05, evaluations=1),
        SCALES[name].length,
        seed=42,
        key="",
    )
    base["origin"] = {
        **{name: {"from": f"{COMBA}, section 4"} for name in ("lr", "weight_decay", "clip")},
        "warmup_steps": {"from": "5% of the steps, which the paper does not say"},
    }
    return rescaled(base, model, model, name, {})


def of_run(recipe: Mapping[str, Any], used: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The recipe of an exported folder with the settings that a run of `platform train` had instead.

    used: the recipe in `run.json`. name: of the run, which `origin` names.
    """
    new: dict[str, Any] = json.loads(json.dumps(recipe))
    own, asked = whole(recipe), flat(used)
    # `every` follows the number of steps: compare with what it would be for the run's.
    before = {**flat(complete({**recipe, "steps": asked.get("steps", own["steps"])})), "steps": own["steps"]}
    for key, value in asked.items():
        # A run measures no more validation rows than its data have, which says nothing of other data.
        if value != before[key] and key != "validation.sequences":
            _put(new, key, value)
            new.setdefault("origin", {})[_name(key)] = {"from": f"platform train, run {name}", "was": before[key]}
    return new


def rescaled(
    recipe: Mapping[str, Any], before: ModelSpec, after: ModelSpec, scale: str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The recipe for a model of another size.

    scale: a name of `SCALES`, for batches and steps, or None to keep them. given: dotted key -> value that the user
    asks for, which nothing overrides.

    The learning rate of another width is lr x (width before / width after), as the best rate of AdamW for a matrix
    falls with its width (Yang et al. 2022, arXiv:2203.03466). No run at the new width measured it. A model with a
    `base_width` keeps its rate, which is meant for this width: training follows the same rule for the matrices, and
    leaves the rate of embeddings and vectors, whose best rate does not fall. The warm-up keeps its share of the steps.

    Raises `InputError` for keys and values that no recipe has.
    """
    asked, origin, own = dict(given), dict(recipe.get("origin") or {}), whole(recipe)
    if scale is not None:
        found, said = _of_scale(scale, own)
        asked, origin = {**found, **asked}, {**origin, **said}
    old, width = (model.base_width or model.d_model for model in (before, after))
    if old != width and "optimizer.lr" not in given:
        asked["optimizer.lr"] = own["optimizer.lr"] * old / width
        origin["lr"] = {
            "from": origin.get("lr", {}).get("from", "the source's recipe"),
            "was": own["optimizer.lr"],
            "scaled": f"lr x ({old} / {width}), by width; a rule of thumb, not measured here",
        }
    new = changed(recipe, asked, prefix="recipe.")
    if whole(new)["steps"] != own["steps"] and "schedule.warmup_steps" not in given:
        origin["warmup_steps"] = {
            "from": origin.get("warmup_steps", {}).get("from", "the source's recipe"),
            "was": own["schedule.warmup_steps"],
            "scaled": f"{own['schedule.warmup_steps'] / own['steps']:.3g} of the steps",
        }
    origin |= {_name(key): {"from": "--set"} for key in given}
    both = "batch.sequences", "batch.length"
    if all(key in given for key in both):
        origin = {**{name: said for name, said in origin.items() if name not in both}, "batch": {"from": "--set"}}
    lr = {key: value for key, value in origin.get("lr", {}).items() if key != "matrices"}
    if after.width_share != 1:
        lr["matrices"] = f"lr x {after.width_share:g}: base_width {after.base_width} / d_model {after.d_model}"
    return {**new, "origin": {**origin, **({"lr": lr} if lr else {})}}


def changed(recipe: Mapping[str, Any], given: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """A recipe with other settings, by dotted key. The warm-up keeps its share of the steps, unless it is given.

    prefix: of the keys as a user spells them after `--set`.

    Raises `InputError` for keys that no recipe has, and for values that they do not take.
    """
    new: dict[str, Any] = json.loads(json.dumps(recipe))
    for key, value in given.items():
        if key not in settings():
            raise unknown("setting", prefix + key, [prefix + each for each in settings()], where="--set")
        check(key, value, where=f"--set {prefix}{key}")
        _put(new, key, value)
    before, after = whole(recipe), whole(new)
    if after["steps"] != before["steps"] and "schedule.warmup_steps" not in given:
        after["schedule.warmup_steps"] = round(before["schedule.warmup_steps"] / before["steps"] * after["steps"])
        _put(new, "schedule.warmup_steps", after["schedule.warmup_steps"])
    if after["schedule.warmup_steps"] > after["steps"]:
        warmup, steps = after["schedule.warmup_steps"], after["steps"]
        raise InputError(f"{prefix}schedule.warmup_steps {warmup} exceed {prefix}steps {steps}")
    return new


def check(key: str, value: object, *, where: str) -> None:
    """Raises `InputError` if a setting does not take the value. where: the option or the file that gives it."""
    default = settings()[key]
    if value is None and default is None:
        return
    if key in CHOICES:
        if value not in CHOICES[key]:
            raise unknown("value", value, CHOICES[key], where=where)
    elif key in LEAST:
        if not isinstance(value, int) or isinstance(value, bool) or value < LEAST[key]:
            raise InputError(f"{where}: must be a whole number of at least {LEAST[key]}, not {value!r}")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise InputError(f"{where}: must be true or false, not {value!r}")
    elif key == "optimizer.betas":
        if not isinstance(value, list) or len(value) != 2 or not all(_number(beta) and beta < 1 for beta in value):
            raise InputError(f"{where}: must be two numbers in [0, 1), not {value!r}")
    elif not _number(value):
        raise InputError(f"{where}: must be a number of at least 0, not {value!r}")


def flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a recipe names, by dotted key."""
    found: dict[str, Any] = {}
    for key in settings():
        part, dot, name = key.partition(".")
        if dot and name in (recipe.get(part) or {}):
            found[key] = recipe[part][name]
        elif not dot and part in recipe:
            found[key] = recipe[part]
    return found


def whole(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """All settings by dotted key, with defaults for those that a recipe leaves out."""
    return {**settings(), **flat(recipe)}


def _of_scale(name: str, own: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that a scale changes, and their origin. own: the settings of the source."""
    scale = SCALES[name]
    found: dict[str, Any] = {
        "batch.sequences": scale.batch // scale.length,
        "batch.length": scale.length,
        "steps": round(scale.tokens / scale.batch),
    }
    if own["batch.micro"] is not None:
        found["batch.micro"] = None  # it fits the smaller model
    batch = {"sequences": own["batch.sequences"], "length": own["batch.length"]}
    origin = {"from": f"scale {name}: {scale.source}"}
    return found, {
        "batch": {**origin, "was": batch, "scaled": f"{scale.batch:,} tokens a step"},
        "steps": {**origin, "was": own["steps"], "scaled": f"{scale.tokens:,.0f} tokens in all"},
    }


def _put(recipe: dict[str, Any], key: str, value: Any) -> None:
    part, dot, name = key.partition(".")
    recipe[part] = {**(recipe.get(part) or {}), name: value} if dot else value


def _name(key: str) -> str:
    """What `origin` calls a setting."""
    return key.removeprefix("optimizer.").removeprefix("schedule.")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
