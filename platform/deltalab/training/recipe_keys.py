"""The keys of a training's `recipe.yaml`, with their defaults. Exported folders hold a copy of this module."""

from collections.abc import Mapping
from typing import Any

from deltalab.training.schedule import DECAYS, STABLE, learning_rate

TOKENS_AT_ONCE = 32768
"""Tokens that a process takes in one pass unless `batch.micro` says how many sequences. The rest of a batch is
accumulated."""

DEFAULTS: dict[str, Any] = {
    "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    "schedule": {"kind": "cosine", "warmup_steps": 0, "final": 0.0, "stable": STABLE, "decay": "linear"},
    "clip": 1.0,
    "z_loss": 0.0,
    "batch": {"sequences": 128, "length": 2048, "micro": None, "documents": "cross"},
    "steps": 1000,
    "seconds": None,
    "precision": "bf16",
    "seed": 0,
    "activation_checkpointing": False,
    "compile": False,
    "graphs": True,
    "context_parallel": 1,
    "milestones": None,
    "log": {"every": None},
    "checkpoint": {"every": None, "keep": 3},
    "validation": {"every": None, "sequences": 64},
}
"""The keys of a recipe that a training reads, each with its default.

- `optimizer`: `adamw`; or `muon` for the matrices of the blocks, with the first of `betas` as momentum, and AdamW for
  all else.
- `clip`: the largest norm of the gradient; 0 means no limit.
- `z_loss`: the weight of the squared logarithm of softmax's denominator in the loss that is trained on.
- `batch`: `sequences` counts those of all processes together, and `micro` those of one process in one pass. With
  documents `cross`, the state runs on from one document of a row to the next; `reset` empties the state in between.
- `schedule`: a linear warm-up, then a decay of kind `cosine`, `linear`, `constant` or `wsd` down to `final`, a share of
  lr. `wsd` is constant up to `stable`, a share of the steps, and then decays as the word `decay` says.
- `seconds`: the seconds of training steps after which a training ends, unless `steps` ends it before; null for no end.
  The rates follow whichever of the two is nearer to its end.
- `graphs`: whether a single GPU replays blocks as CUDA graphs, unless it checkpoints or compiles the blocks.
- `context_parallel`: the processes that share each sequence. Each computes a part of it.
- `milestones`: the checkpoints after each so many steps stay, beside the newest `checkpoint.keep`; null for none.
- `every` of `log`, `checkpoint` and `validation` counts steps; null means that the number of steps decides.
"""

CHOICES = {
    "optimizer.name": ("adamw", "muon"),
    "schedule.kind": ("cosine", "linear", "constant", "wsd"),
    "schedule.decay": DECAYS,
    "batch.documents": ("cross", "reset"),
    "precision": ("bf16", "fp32"),
}
"""The settings that take one of a few words, with these words."""

SHARES = ("schedule.final", "schedule.stable")
"""The settings that are numbers from 0 to 1."""

LATER = ("context_parallel", "milestones")
"""The settings that a release before this one did not have. Its runs keep their folders' names."""

LEAST = {
    "schedule.warmup_steps": 0,
    "batch.sequences": 1,
    "batch.length": 1,
    "batch.micro": 1,
    "steps": 1,
    "seed": 0,
    "context_parallel": 1,
    "milestones": 1,
    "log.every": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 2,
    "validation.every": 1,
    "validation.sequences": 0,
}
"""The settings that are whole numbers, each with its smallest value. At least two checkpoints are kept, because the
newest may still be in the middle of being written."""

FREE = (
    "log.",
    "checkpoint.",
    "validation.",
    "batch.micro",
    "activation_checkpointing",
    "compile",
    "graphs",
    "context_parallel",
    "milestones",
)
"""How the settings begin that do not change what a step learns. A run may go on with other values of them."""


def default_settings() -> dict[str, Any]:
    """Returns the dotted keys of `DEFAULTS`, such as `optimizer.lr`, with their defaults."""
    return {
        f"{name}.{key}" if key else name: default
        for name, part in DEFAULTS.items()
        for key, default in (part.items() if isinstance(part, Mapping) else [("", part)])
    }


def with_defaults(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of a recipe that `DEFAULTS` lists, with defaults for the missing ones.

    Each `every` that is null becomes a number of steps. That of checkpoints divides the milestones.
    """
    settings: dict[str, Any] = {}
    for key, default in DEFAULTS.items():
        value = recipe.get(key, default)
        settings[key] = {**default, **(value or {})} if isinstance(default, dict) else value
    steps = settings["steps"]
    for part, share, most in (("log", 200, 10), ("checkpoint", 10, 1000), ("validation", 20, 500)):
        if settings[part]["every"] is None:
            settings[part]["every"] = min(most, max(1, steps // share))
            if part == "checkpoint" and (apart := settings["milestones"]) is not None:
                every = settings[part]["every"]
                near = (count for count in range(every // 2 + 1, every + 1) if apart % count == 0)
                settings[part]["every"] = max(near, default=apart)
    return settings


def rate_factor(recipe: Mapping[str, Any], step: int, spent: float = 0.0) -> float:
    """Returns the factor of the learning rates in the update that follows `step` updates.

    Args:
        recipe: A recipe that `with_defaults` completed.
        step: The updates so far.
        spent: The seconds of training steps so far; without effect if the recipe sets no `seconds`.
    """
    done = step if recipe["seconds"] is None else max(step, min(1.0, spent / recipe["seconds"]) * recipe["steps"])
    rest = {name: value for name, value in recipe["schedule"].items() if name != "warmup_steps"}
    return learning_rate(1.0, done, recipe["steps"], warmup=recipe["schedule"]["warmup_steps"], **rest)


def micro_batch(recipe: Mapping[str, Any], world: int) -> int:
    """Returns how many sequences a process takes in one pass.

    The recipe's `batch.micro` decides. If it is null, the number is the largest that `TOKENS_AT_ONCE` allows. Processes
    that share sequences take the same ones.

    Args:
        recipe: A recipe that `with_defaults` completed.
        world: The number of processes.

    Raises:
        ValueError: If the processes cannot share the batch or its sequences evenly.
    """
    batch, context = recipe["batch"], recipe["context_parallel"]
    if world % context:
        raise ValueError(f"context_parallel {context} must divide the number of processes, {world}")
    if batch["length"] % context:
        raise ValueError(f"context_parallel {context} must divide batch.length {batch['length']}")
    world //= context
    share, rest = divmod(batch["sequences"], world)
    if rest or not share:
        of = "processes" if context == 1 else f"groups of {context} processes"
        raise ValueError(f"batch.sequences {batch['sequences']} must be a multiple of the {world} {of}")
    if batch["micro"] is not None:
        if share % batch["micro"]:
            raise ValueError(
                f"batch.micro {batch['micro']} must divide the {share} sequences of a process, which are "
                f"batch.sequences {batch['sequences']} over {world} processes"
            )
        return int(batch["micro"])
    most = max(1, TOKENS_AT_ONCE * context // batch["length"])
    return max(size for size in range(1, share + 1) if share % size == 0 and size <= most)
