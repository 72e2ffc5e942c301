"""Repeats the training of the trial that an exported folder comes from. Only the folder is needed."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltalab import trust
from deltalab.errors import InputError
from deltalab.export.hf import OWN, RULES, rule_hashes
from deltalab.export.recipe import RECIPE_FILE, read_recipe
from deltalab.models.spec import ModelSpec
from deltalab.own_module import is_path
from deltalab.registry import add_module, add_plugin, get_task, list_rules, rule_plugin
from deltalab.training.spec import TrainSpec
from deltalab.training.trainer import LockStep


def rebuild(folder: str | Path, steps: int = 200) -> list[float]:
    """Repeats the training of the trial that a folder's `recipe.yaml` names, and returns the training losses.

    On the same machine and with the same release, the losses equal those of the trial to the bit.

    Args:
        folder: An exported folder.
        steps: How many updates to make, at most those of the trial.

    Returns:
        The loss of each update, in nats. The list ends before an update that diverges.

    Raises:
        InputError: If the folder's recipe names no trial, or if a rule or the task differs from that of the trial.
    """
    trial = trial_of(Path(folder))
    task = get_task(trial["task"]["name"], **trial["task"]["parameters"])
    if task.version != trial["task"]["version"]:
        raise InputError(
            f"{folder}: task '{task.name}' is version {task.version} here, and the trial ran "
            f"{trial['task']['version']}: install the release of deltalab that ran it"
        )
    load_rules(Path(folder))
    load_modules(Path(folder), trial["model"])
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
    """Returns the trial that a folder's recipe names.

    Raises:
        InputError: If the folder has no recipe, or if its recipe names no trial.
    """
    recipe = read_recipe(folder)
    trial = recipe.get("trial")
    if not isinstance(trial, Mapping):
        raise InputError(f"{folder / RECIPE_FILE}: names no trial: the model does not come from a study")
    return trial


def load_rules(folder: Path) -> None:
    """Registers the rules of an exported folder that deltalab does not have, each from its file in the folder.

    Raises:
        InputError: If deltalab has another rule under the name of one of the folder's rules, or lacks a rule and the
            folder is not trusted.
    """
    for name, digest in rule_hashes(folder).items():
        if name not in list_rules():
            trust.require(folder.resolve() / RULES / f"{name}.py", f"rule '{name}' of the folder runs it")
            add_plugin(folder / RULES / f"{name}.py")
        elif rule_plugin(name).hash != digest:
            raise InputError(
                f"{folder / RULES / name}.py: not rule '{name}' of {rule_plugin(name).file}: use the release of "
                "deltalab, or the plugin file, that the folder was exported with"
            )


def load_modules(folder: Path, model: Mapping[str, Any]) -> None:
    """Finds the modules of files that stand in place of rules: where their names say, or else in an exported folder.

    Args:
        folder: The exported folder.
        model: The model as the folder's recipe has it.

    Raises:
        InputError: If the file that a name says is not the one of the folder.
    """
    entries = model["layers"] if isinstance(model["layers"], list | tuple) else []
    names = {entry["name"] for entry in [model["rule"], *entries] if isinstance(entry, Mapping)}
    for name in sorted(name for name in names if is_path(name) and ":" in name):
        copy = folder / OWN / Path(name.rpartition(":")[0]).name
        trust.require(copy.resolve(), f"module '{name}' of the folder runs it")
        if add_module(name, copy).source != copy.read_text(encoding="utf-8"):
            raise InputError(f"{copy}: not the module '{name}' of this folder: use the file that was exported")
