"""Trains the trial that an exported folder comes from once more, from the folder alone."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltalab.errors import InputError
from deltalab.export.hf import RULES, rule_hashes
from deltalab.models.spec import ModelSpec
from deltalab.reading import read_text, read_yaml
from deltalab.registry import add_plugin, get_task, list_rules, rule_plugin
from deltalab.training.spec import TrainSpec
from deltalab.training.trainer import LockStep


def rebuild(folder: str | Path, steps: int = 200) -> list[float]:
    """The training losses of the first `steps` updates of the trial that `recipe.yaml` names, at most all of them.

    They are those that the trial had, to the bit on the same machine with the same release. After an update that
    diverges there are no more.

    Raises `InputError` for a folder that holds no recipe with a trial, and where a rule or a task is not the trial's.
    """
    trial = trial_of(Path(folder))
    task = get_task(trial["task"]["name"], **trial["task"]["parameters"])
    if task.version != trial["task"]["version"]:
        raise InputError(
            f"{folder}: task '{task.name}' is version {task.version} here, and the trial ran "
            f"{trial['task']['version']}: install the release of deltalab that ran it"
        )
    load_rules(Path(folder))
    model, train = ModelSpec.of(trial["model"]), TrainSpec(**trial["train"])
    run = LockStep(task, [(model, train)], [trial["seed"]], most=1)
    losses: list[float] = []
    for step in range(1, min(steps, train.steps) + 1):
        run.advance(step)
        loss = run.results(0)[0].final("train", "loss")
        if math.isnan(loss):
            break
        losses.append(loss)
    return losses


def trial_of(folder: Path) -> Mapping[str, Any]:
    """The trial that a folder's recipe names. Raises `InputError` for a folder without one."""
    recipe = read_recipe(folder)
    trial = recipe.get("trial")
    if not isinstance(trial, Mapping):
        raise InputError(f"{folder / 'recipe.yaml'}: names no trial: the model does not come from a study")
    return trial


def read_recipe(folder: Path) -> Mapping[str, Any]:
    """A folder's recipe. Raises `InputError` for a folder that has none."""
    try:
        found = read_yaml(read_text(folder / "recipe.yaml"), where=str(folder / "recipe.yaml"))
    except FileNotFoundError:
        why = "not an exported folder: it has no recipe.yaml" if folder.is_dir() else "no such folder"
        raise InputError(f"{folder}: {why}") from None
    if not isinstance(found, Mapping) or "optimizer" not in found:
        raise InputError(f"{folder / 'recipe.yaml'}: not a recipe: it has no optimizer")
    return found


def load_rules(folder: Path) -> None:
    """Makes the rules of a folder known to this process, each from its file where deltalab does not have it.

    Raises `InputError` where deltalab has a rule of the name that is not the folder's.
    """
    for name, digest in rule_hashes(folder).items():
        if name not in list_rules():
            add_plugin(folder / RULES / f"{name}.py")
        elif rule_plugin(name).hash != digest:
            raise InputError(
                f"{folder / RULES / name}.py: not rule '{name}' of {rule_plugin(name).file}: use the release of "
                "deltalab, or the plugin file, that the folder was exported with"
            )
