"""How an exported model is to be trained: `recipe.yaml`, made of a trial's own training and of a scale's."""

import json
import math
from collections.abc import Mapping
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.export.scales import COMBA, SCALES, Scale, parameters
from deltalab.models.spec import ModelSpec
from deltalab.training.optimizer import EPS
from deltalab.training.spec import TrainSpec

FILE = "recipe.yaml"

ALLOWED: Mapping[str, Any] = {
    "optimizer.name": ("adamw",),
    "schedule.kind": ("cosine",),
    "precision": ("bf16", "fp32"),
}
"""The values of settings that are words."""


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


def rescaled(
    recipe: Mapping[str, Any], before: ModelSpec, after: ModelSpec, scale: str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The recipe for a model of another size.

    scale: a name of `SCALES`, for batches and steps, or None to keep them. given: dotted key -> value that the user
    asks for, which nothing overrides.

    The learning rate of another width is lr x (width before / width after), as the best rate of AdamW for a matrix
    falls with its width (Yang et al. 2022, arXiv:2203.03466). That is a rule of thumb here: no run at the new width
    measured it, and the same rate goes to embeddings and vectors, whose best rate does not fall. The warm-up keeps its
    share of the steps.

    Raises `InputError` for keys and values that no recipe has.
    """
    new: dict[str, Any] = json.loads(json.dumps(recipe))
    origin = new["origin"]
    share = recipe["schedule"]["warmup_steps"] / recipe["steps"]
    if scale is not None:
        _to(SCALES[scale], scale, new)
    if after.d_model != before.d_model:
        lr = recipe["optimizer"]["lr"]
        new["optimizer"]["lr"] = lr * before.d_model / after.d_model
        origin["lr"] = {
            "from": origin.get("lr", {}).get("from", "the source's recipe"),
            "value": lr,
            "scaled": f"lr x ({before.d_model} / {after.d_model}), by width; a rule of thumb, not measured here",
        }
    for path, value in given.items():
        _put(new, path, value)
        origin[path.split(".")[-1] if path.startswith(("optimizer", "schedule")) else path] = {"from": "--set"}
    if new["steps"] != recipe["steps"] and "schedule.warmup_steps" not in given:
        new["schedule"]["warmup_steps"] = round(share * new["steps"])
        origin["warmup_steps"] = {
            "from": origin.get("warmup_steps", {}).get("from", "the source's recipe"),
            "value": recipe["schedule"]["warmup_steps"],
            "scaled": f"{share:.3g} of the steps",
        }
    if new["schedule"]["warmup_steps"] > new["steps"]:
        raise InputError(
            f"recipe.schedule.warmup_steps {new['schedule']['warmup_steps']} exceed recipe.steps {new['steps']}"
        )
    return new


def _to(scale: Scale, name: str, recipe: dict[str, Any]) -> None:
    batch, steps = dict(recipe["batch"]), recipe["steps"]
    recipe["batch"] = {"sequences": scale.batch // scale.length, "length": scale.length}
    recipe["steps"] = round(scale.tokens / scale.batch)
    origin = {"from": f"scale {name}: {scale.source}"}
    recipe["origin"]["batch"] = {**origin, "value": batch, "scaled": f"{scale.batch:,} tokens a step"}
    recipe["origin"]["steps"] = {**origin, "value": steps, "scaled": f"{scale.tokens:,.0f} tokens in all"}


def _put(recipe: dict[str, Any], path: str, value: Any) -> None:
    known = paths(recipe)
    if path not in known:
        raise unknown("setting", f"recipe.{path}", [f"recipe.{each}" for each in known], where="--set")
    if path in ALLOWED:
        if value not in ALLOWED[path]:
            raise unknown(path, value, ALLOWED[path], where=f"--set recipe.{path}")
    elif path == "optimizer.betas":
        if not isinstance(value, list) or len(value) != 2 or not all(_number(beta) and 0 <= beta < 1 for beta in value):
            raise InputError(f"--set recipe.{path} must be two numbers in [0, 1), not {value!r}")
    elif path in ("steps", "seed", "schedule.warmup_steps", "batch.sequences", "batch.length"):
        least = 0 if path in ("seed", "schedule.warmup_steps") else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"--set recipe.{path} must be a whole number of at least {least}, not {value!r}")
    elif not _number(value) or value < 0:
        raise InputError(f"--set recipe.{path} must be a number of at least 0, not {value!r}")
    *parents, last = path.split(".")
    here = recipe
    for part in parents:
        here = here[part]
    here[last] = value


def paths(recipe: Mapping[str, Any]) -> list[str]:
    """The dotted keys of a recipe that a user may set."""
    found = []
    for name in ("optimizer", "schedule", "clip", "batch", "steps", "precision", "seed"):
        part = recipe[name]
        found += [f"{name}.{key}" for key in part] if isinstance(part, Mapping) else [name]
    return found


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
