"""What a training's `recipe.yaml` says, with defaults for what it leaves out. Exported folders hold a copy."""

from collections.abc import Mapping
from typing import Any

TOKENS_AT_ONCE = 32768
"""Tokens that a GPU takes in one pass, unless `batch.micro` says how many sequences: more are accumulated."""

KEYS: dict[str, Any] = {
    "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    "schedule": {"kind": "cosine", "warmup_steps": 0, "final": 0.0},
    "clip": 1.0,
    "batch": {"sequences": 128, "length": 2048, "micro": None, "documents": "cross"},
    "steps": 1000,
    "precision": "bf16",
    "seed": 0,
    "activation_checkpointing": False,
    "compile": False,
    "graphs": True,
    "log": {"every": None},
    "checkpoint": {"every": None, "keep": 3},
    "validation": {"every": None, "sequences": 64},
}
"""What a recipe says about training, and what holds where it is silent.

clip: largest norm of the gradient, 0 for none. batch: `sequences` over all processes together, `micro` sequences a
process and pass; documents: `cross` lets the state run on from one document to the next in a row, `reset` empties it.
schedule: linear warm-up, then kind `cosine`, `linear`, `constant` or `wsd` (constant, and linear over the last tenth)
down to `final`, a share of lr. graphs: one GPU replays blocks as CUDA graphs, unless it checkpoints or compiles them.
The three `every` count steps; null chooses by the number of steps.
"""

CHOICES = {
    "optimizer.name": ("adamw",),
    "schedule.kind": ("cosine", "linear", "constant", "wsd"),
    "batch.documents": ("cross", "reset"),
    "precision": ("bf16", "fp32"),
}


LEAST = {
    "schedule.warmup_steps": 0,
    "batch.sequences": 1,
    "batch.length": 1,
    "batch.micro": 1,
    "steps": 1,
    "seed": 0,
    "log.every": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 2,
    "validation.every": 1,
    "validation.sequences": 0,
}
"""The settings that are whole numbers, with the smallest. Two checkpoints stay: the newest may still be written."""


def settings() -> dict[str, Any]:
    """The dotted keys of `KEYS`, such as `optimizer.lr`, with their defaults."""
    return {
        f"{name}.{key}" if key else name: default
        for name, part in KEYS.items()
        for key, default in (part.items() if isinstance(part, Mapping) else [("", part)])
    }


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a recipe that `KEYS` lists, with defaults for what is missing."""
    whole: dict[str, Any] = {}
    for key, default in KEYS.items():
        value = given.get(key, default)
        whole[key] = {**default, **(value or {})} if isinstance(default, dict) else value
    steps = whole["steps"]
    for part, share, most in (("log", 200, 10), ("checkpoint", 10, 1000), ("validation", 20, 500)):
        if whole[part]["every"] is None:
            whole[part]["every"] = min(most, max(1, steps // share))
    return whole


def micro(recipe: Mapping[str, Any], world: int) -> int:
    """Sequences that a process takes in one pass: what the recipe says, or the most that `TOKENS_AT_ONCE` allows.

    Raises `ValueError` for a batch that the processes cannot share evenly.
    """
    batch = recipe["batch"]
    share, rest = divmod(batch["sequences"], world)
    if rest or not share:
        raise ValueError(f"batch.sequences {batch['sequences']} must be a multiple of the {world} processes")
    if batch["micro"] is not None:
        if share % batch["micro"]:
            raise ValueError(
                f"batch.micro {batch['micro']} must divide the {share} sequences of a process, which are "
                f"batch.sequences {batch['sequences']} over {world} processes"
            )
        return int(batch["micro"])
    most = max(1, TOKENS_AT_ONCE // batch["length"])
    return max(size for size in range(1, share + 1) if share % size == 0 and size <= most)
