"""Checks whether a run that has begun can go on: its identity, its settings, its checkpoints and the disk's room."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltalab.engines import checkpoints
from deltalab.engines.deltalab_train.lock import FILE as LOCK
from deltalab.engines.deltalab_train.milestones import is_milestone, step_of
from deltalab.engines.outcome import Transient, amount, tail
from deltalab.errors import InputError
from deltalab.export.recipe import all_settings
from deltalab.training.recipe_keys import FREE


def earlier_run(run: Path, identity: Mapping[str, str]) -> dict[str, Any]:
    """Returns the `run.json` of a run that has begun, else {}. Raises `InputError` if the run has another identity."""
    if not (run / "run.json").is_file():
        if run.exists() and (not run.is_dir() or any(file.name != LOCK for file in run.iterdir())):
            raise InputError(f"{run}: is neither empty nor a run of deltalab train")
        return {}
    about: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))
    for name, value in identity.items():
        if about["identity"][name] != value:
            raise InputError(
                f"{run}: its checkpoints are of another {name}: give another --out, or train {about['export']} on "
                f"{about['data']['folder']} with --engine {about['engine']}"
            )
    return about


def check_same_training(run: Path, before: Mapping[str, Any], recipe: dict[str, Any], *, keep_warmup: bool) -> None:
    """Raises `InputError` if a run has trained steps with other settings, since its records name one setting for all.

    The number of steps may change as long as the learning rates of the steps so far do not depend on it. They never do
    if the schedule is `constant`. If it is `wsd`, they do from the beginning of the decay on.

    Args:
        run: The folder of the run.
        before: The recipe of the run so far.
        recipe: The recipe to go on with.
        keep_warmup: Whether `recipe` gets the warm-up of the run. Otherwise the warm-up grows with the number of steps.
    """
    trained = _trained(run)
    was = all_settings(before)
    if not trained or was == all_settings(recipe):
        return
    kind, steps = was["schedule.kind"], (was["steps"], recipe["steps"])
    decays = [round((1 - was["schedule.stable"]) * count) for count in steps]
    stable = kind == "wsd" and all(trained + decay <= count for decay, count in zip(decays, steps, strict=True))
    if kind == "constant" or stable:
        if keep_warmup:
            recipe["schedule"]["warmup_steps"] = was["schedule.warmup_steps"]
        was["steps"] = recipe["steps"]
    now = all_settings(recipe)
    for key in sorted(now, key="schedule.warmup_steps".__eq__):  # the warm-up last: it follows the number of steps
        if now[key] != was[key] and not key.startswith(FREE):
            why = f"; the rates of schedule.kind {kind} depend on the number of steps" if key == "steps" else ""
            raise InputError(
                f"{run}: has trained {trained} steps with {key} {was[key]}, now {now[key]}{why}: give another --out, "
                f"or leave {key} as it was"
            )


def _trained(run: Path) -> int:
    """Returns the number of the last step that a run has trained, as its checkpoints and its metrics say; 0 if none."""
    steps = [int(folder.name.removeprefix("step-")) for folder in checkpoints.complete_checkpoints(run)]
    metrics = run / "metrics.jsonl"
    # A killed process may have left a last line unfinished.
    whole = [line for line in tail(metrics).splitlines(True)[-2:] if line.endswith("\n")] if metrics.is_file() else []
    return max([0, *steps, *(int(json.loads(line)["step"]) for line in whole)])


def check_readable(run: Path, *, sharded: bool) -> None:
    """Raises `InputError` if Accelerate cannot go on from the newest checkpoint of a run.

    It cannot if several GPUs wrote the checkpoint and one GPU shall train, or the reverse.

    Args:
        run: The folder of the run.
        sharded: Whether several GPUs shall train.
    """
    for newest in checkpoints.complete_checkpoints(run)[-1:]:
        if (newest / checkpoints.SHARDED).is_dir() != sharded:
            before, now = ("one GPU", "several GPUs")[:: 1 if sharded else -1]
            raise InputError(
                f"{run}: {newest.name} is of {before}, and Accelerate cannot go on from it on {now}: give --gpus as "
                "before, or another --out"
            )


def check_room(run: Path, size: int, recipe: Mapping[str, Any]) -> None:
    """Raises `Transient` if the disk has no room for the checkpoints that a run will add.

    There is one more than `checkpoint.keep` while the newest is written, unless the run writes fewer. Milestones stay
    besides.
    """
    folder = next(parent for parent in (run, *run.parents) if parent.exists())
    keep, every = (recipe["checkpoint"][name] for name in ("keep", "every"))
    complete = [step_of(each) for each in checkpoints.complete_checkpoints(run)]
    newest, apart = max(complete, default=0), recipe["milestones"]
    to_write = math.ceil(recipe["steps"] / every) - newest // every
    others = [step for step in complete if not is_milestone(step, apart)]
    to_stay = 0 if apart is None else recipe["steps"] // apart - newest // apart
    count = min(max(1, keep + 1 - len(others)) + to_stay, to_write)
    free, needed = shutil.disk_usage(folder).free, count * checkpoints.BYTES_A_PARAMETER * size
    if free < needed:
        raise Transient(
            f"{folder}: {amount(free)} are free; {count} checkpoints of {size:,} parameters (checkpoint.keep {keep}, "
            f"{f'{to_stay} milestones ' if to_stay else ''}and one while it is written) take {amount(needed)}"
        )
