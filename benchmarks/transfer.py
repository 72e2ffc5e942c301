"""Measures how the best learning rate moves with the width, with `model.base_width` and without.

    python benchmarks/transfer.py --out transfer.json                  one GPU: widths 64 to 512, three rules
    python benchmarks/transfer.py --out transfer.json --toy            two CPU cores: widths 32 to 256, one rule

The script trains every learning rate of a grid at every width, on MQAR and on text, and determines the best rate of
each width. A cell is a rule, a task, a parametrization and a width. The JSON file is written after every cell.
`--limit` seconds after its start, a call begins no further cell, and the next call goes on from there.

The best rate is the lowest point of a parabola through the least loss and its two neighbours, over the logarithm of the
rate. `spread` is the largest best rate over the least. It is near 1 if rates transfer.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

import deltalab
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_task
from deltalab.training.train import TrainSpec, hardware, train_together

HEAD_DIM = 16
"""The width of a head; wider models have more heads."""
PARAMETRIZATIONS = ("none", "mup")
GPU: dict[str, Any] = {
    "rules": ["gated_deltanet", "mamba2", "attention"],
    "widths": [64, 128, 256, 512],
    "rates": [1e-3 * 2 ** (i / 2) for i in range(14)],
    "layers": 2,
    "seeds": 2,
    "tasks": {
        "mqar": {"params": {"length": 64, "pairs": 8, "vocab_size": 256}, "steps": 1000, "batch_size": 32},
        "text": {"params": {"length": 128}, "steps": 1000, "batch_size": 32},
    },
}
TOY: dict[str, Any] = {
    "rules": ["gated_deltanet"],
    "widths": [32, 64, 128, 256],
    "rates": [2e-3 * 2**i for i in range(7)],
    "layers": 1,
    "seeds": 1,
    "tasks": {
        "mqar": {"params": {"length": 32, "pairs": 4, "vocab_size": 64}, "steps": 200, "batch_size": 32},
        "text": {"params": {"length": 64}, "steps": 150, "batch_size": 16},
    },
}


def cells(grid: dict[str, Any]) -> Iterator[tuple[str, str, str, int]]:
    """Yields the rule, task, parametrization and width of every cell, narrow models first."""
    for width, rule, task, by in product(grid["widths"], grid["rules"], grid["tasks"], PARAMETRIZATIONS):
        if by == "none" or width != grid["widths"][0]:  # at the base width, both are one model
            yield rule, task, by, width


def losses(grid: dict[str, Any], rule: str, task: str, by: str, width: int) -> dict[str, float | None]:
    """Trains a cell, and returns the mean validation loss of each rate over the seeds; None if a seed diverged."""
    settings = grid["tasks"][task]
    instance = get_task(task, **settings["params"])
    model = ModelSpec(
        rule=rule,
        vocab_size=instance.vocab_size,
        d_model=width,
        layers=grid["layers"],
        heads=width // HEAD_DIM,
        chunk_size=32,
        base_width=grid["widths"][0] if by == "mup" else None,
    )
    members = [
        (model, TrainSpec(steps=settings["steps"], batch_size=settings["batch_size"], lr=rate, evaluations=1))
        for rate in grid["rates"]
    ]
    means: dict[str, float | None] = {}
    trials = train_together(instance, members, range(1, grid["seeds"] + 1))
    for rate, trial in zip(grid["rates"], trials, strict=True):
        values = [run.final("validation", "loss") for run in trial.runs]
        mean = math.fsum(values) / len(values)
        means[f"{rate:.4g}"] = mean if math.isfinite(mean) else None
    return means


def best_rate(by_rate: dict[str, float | None]) -> float | None:
    """Returns the rate of least loss, given losses by rate; None if it is the smallest or the largest of the rates.

    >>> round(best_rate({"0.01": 2.0, "0.02": 1.0, "0.04": 2.0}), 4)
    0.02
    """
    points = [(math.log(float(rate)), loss) for rate, loss in by_rate.items() if loss is not None]
    least = min(range(len(points)), key=lambda i: points[i][1])
    if least in (0, len(by_rate) - 1):
        return None
    if least == len(points) - 1:  # the next rate diverged
        return math.exp(points[least][0])
    (x0, y0), (x1, y1), (x2, y2) = points[least - 1 : least + 2]
    step = (x2 - x0) / 2
    return math.exp(x1 + step * (y0 - y2) / (2 * (y0 - 2 * y1 + y2))) if y0 - 2 * y1 + y2 else math.exp(x1)


def summary(grid: dict[str, Any], by_cell: dict[str, dict[str, float | None]]) -> list[dict[str, Any]]:
    """Returns the best rate of each width, for each rule, task and parametrization whose cells are all trained."""
    rows = []
    first = grid["widths"][0]
    for rule, task, by in product(grid["rules"], grid["tasks"], PARAMETRIZATIONS):
        keys = {width: f"{rule}/{task}/{'none' if width == first else by}/{width}" for width in grid["widths"]}
        if not all(key in by_cell for key in keys.values()):
            continue
        best = {width: best_rate(by_cell[key]) for width, key in keys.items()}
        inside = [rate for rate in best.values() if rate is not None]
        whole = len(inside) == len(best)
        rows.append(
            {
                "rule": rule,
                "task": task,
                "parametrization": by,
                "best": best,
                "spread": max(inside) / min(inside) if whole else None,
                "least_loss": {
                    width: min(v for v in by_cell[key].values() if v is not None) for width, key in keys.items()
                },
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further cell begins")
    for name, kind in (("rules", str), ("widths", int), ("rates", float), ("tasks", str)):
        parser.add_argument(f"--{name}", type=kind, nargs="+")
    for name in ("seeds", "layers", "steps"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args(arguments)
    grid = {**(TOY if options.toy else GPU)}
    for name in ("rules", "widths", "rates", "seeds", "layers"):
        grid[name] = getattr(options, name) or grid[name]
    tasks = {task: grid["tasks"][task] for task in options.tasks or grid["tasks"]}
    grid["tasks"] = {task: {**part, "steps": options.steps or part["steps"]} for task, part in tasks.items()}
    grid = json.loads(json.dumps(grid))
    out: dict[str, Any] = {"given": grid, "losses": {}, "seconds": 0.0}
    if options.out.exists():
        out = json.loads(options.out.read_text())
        if out["given"] != grid:
            raise SystemExit(f"{options.out}: holds another measurement: give another --out")
    began = time.monotonic()
    for cell in cells(grid):
        key = "/".join(map(str, cell))
        if key in out["losses"] or time.monotonic() - began > options.limit:
            continue
        start = time.monotonic()
        out["losses"][key] = losses(grid, *cell)
        out["seconds"] += time.monotonic() - start
        print(f"{key}: best {best_rate(out['losses'][key])} ({time.monotonic() - start:.0f} s)", flush=True)
        out |= {
            "best": summary(grid, out["losses"]),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            "versions": {
                "deltalab": deltalab.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        options.out.write_text(json.dumps(out, indent=1) + "\n")
    left = sum("/".join(map(str, cell)) not in out["losses"] for cell in cells(grid))
    print(f"{left} cells left: run the same command again" if left else json.dumps(out["best"], indent=1))


if __name__ == "__main__":
    main()
