"""How the best learning rate moves with the width, with `model.base_width` and without.

    python benchmarks/transfer.py --out transfer.json                  one GPU: widths 64 to 512, three rules
    python benchmarks/transfer.py --out transfer.json --toy            two CPU cores: widths 32 to 256, one rule

Trains every learning rate of a grid at every width, on MQAR and on text, and finds the best rate of each width. A cell
is one rule, task, parametrization and width. The JSON file is written after every cell, and a second call goes on where
the first one ended: `--limit` seconds after its start, a call begins no further cell.

The best rate is the lowest point of a parabola through the three losses around the least one, over the logarithm of
the rate. Rates that transfer have a `spread` near 1: the largest best rate over the least.
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


def cells(given: dict[str, Any]) -> Iterator[tuple[str, str, str, int]]:
    """Rule, task, parametrization and width of every cell; narrow models first."""
    for width, rule, task, by in product(given["widths"], given["rules"], given["tasks"], PARAMETRIZATIONS):
        if by == "none" or width != given["widths"][0]:  # the least width is the base width, where both are one model
            yield rule, task, by, width


def losses(given: dict[str, Any], rule: str, task: str, by: str, width: int) -> dict[str, float | None]:
    """The mean validation loss of each rate over the seeds; None where a seed diverged."""
    about = given["tasks"][task]
    made = get_task(task, **about["params"])
    model = ModelSpec(
        rule=rule,
        vocab_size=made.vocab_size,
        d_model=width,
        layers=given["layers"],
        heads=width // HEAD_DIM,
        chunk_size=32,
        base_width=given["widths"][0] if by == "mup" else None,
    )
    members = [
        (model, TrainSpec(steps=about["steps"], batch_size=about["batch_size"], lr=rate, evaluations=1))
        for rate in given["rates"]
    ]
    found: dict[str, float | None] = {}
    for rate, trial in zip(given["rates"], train_together(made, members, range(1, given["seeds"] + 1)), strict=True):
        values = [run.final("validation", "loss") for run in trial.runs]
        mean = math.fsum(values) / len(values)
        found[f"{rate:.4g}"] = mean if math.isfinite(mean) else None
    return found


def best_rate(found: dict[str, float | None]) -> float | None:
    """The rate of least loss between the rates tried; None where it is the least or the largest of them.

    >>> round(best_rate({"0.01": 2.0, "0.02": 1.0, "0.04": 2.0}), 4)
    0.02
    """
    known = [(math.log(float(rate)), loss) for rate, loss in found.items() if loss is not None]
    at = min(range(len(known)), key=lambda i: known[i][1])
    if at in (0, len(found) - 1):
        return None
    if at == len(known) - 1:  # the next rate diverged
        return math.exp(known[at][0])
    (x0, y0), (x1, y1), (x2, y2) = known[at - 1 : at + 2]
    step = (x2 - x0) / 2
    return math.exp(x1 + step * (y0 - y2) / (2 * (y0 - 2 * y1 + y2))) if y0 - 2 * y1 + y2 else math.exp(x1)


def summary(given: dict[str, Any], found: dict[str, dict[str, float | None]]) -> list[dict[str, Any]]:
    """The best rate of each width, for each rule, task and parametrization whose cells are all there."""
    rows = []
    first = given["widths"][0]
    for rule, task, by in product(given["rules"], given["tasks"], PARAMETRIZATIONS):
        keys = {width: f"{rule}/{task}/{'none' if width == first else by}/{width}" for width in given["widths"]}
        if not all(key in found for key in keys.values()):
            continue
        best = {width: best_rate(found[key]) for width, key in keys.items()}
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
                    width: min(v for v in found[key].values() if v is not None) for width, key in keys.items()
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
    given = {**(TOY if options.toy else GPU)}
    for name in ("rules", "widths", "rates", "seeds", "layers"):
        given[name] = getattr(options, name) or given[name]
    tasks = {task: given["tasks"][task] for task in options.tasks or given["tasks"]}
    given["tasks"] = {task: {**about, "steps": options.steps or about["steps"]} for task, about in tasks.items()}
    given = json.loads(json.dumps(given))
    out: dict[str, Any] = {"given": given, "losses": {}, "seconds": 0.0}
    if options.out.exists():
        out = json.loads(options.out.read_text())
        if out["given"] != given:
            raise SystemExit(f"{options.out}: holds another measurement: give another --out")
    began = time.monotonic()
    for cell in cells(given):
        key = "/".join(map(str, cell))
        if key in out["losses"] or time.monotonic() - began > options.limit:
            continue
        start = time.monotonic()
        out["losses"][key] = losses(given, *cell)
        out["seconds"] += time.monotonic() - start
        print(f"{key}: best {best_rate(out['losses'][key])} ({time.monotonic() - start:.0f} s)", flush=True)
        out |= {
            "best": summary(given, out["losses"]),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            "versions": {
                "deltalab": deltalab.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        options.out.write_text(json.dumps(out, indent=1) + "\n")
    left = sum("/".join(map(str, cell)) not in out["losses"] for cell in cells(given))
    print(f"{left} cells left: run the same command again" if left else json.dumps(out["best"], indent=1))


if __name__ == "__main__":
    main()
