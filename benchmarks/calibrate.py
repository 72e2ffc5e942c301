"""Measures in simulated studies how often a study's statistics are wrong, and how often they find an effect.

    python benchmarks/calibrate.py --out benchmarks/calibration.json

The modules of `calibration/` simulate the studies, each one question. The script takes four hours on one core.
`python benchmarks/calibration/items.py` is a script of its own, on the intervals of models that share items.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from calibration.distributions import distributions
from calibration.early_decisions import early_decisions
from calibration.looks import further_looks, sequential
from calibration.many_studies import ARMS, EFFECT, USED, Bench, Checked
from calibration.margins import margins
from calibration.means_over_tasks import over_tasks_coverage, over_tasks_error, over_tasks_power
from calibration.power import powers
from calibration.seed_choices import choices, collapses, decided, failures, families
from calibration.trends import extrapolation, transfer_tau
from calibration.tuning_designs import CANDIDATES, designs
from calibration.unbalanced import unbalanced_error, unbalanced_power, unbalanced_tuned

import deltalab

PARTS: dict[str, Callable[[Bench], Iterator[dict[str, Any]]]] = {
    part.__name__: part
    for part in (
        designs,
        powers,
        distributions,
        sequential,
        early_decisions,
        choices,
        failures,
        collapses,
        decided,
        families,
        further_looks,
        margins,
        over_tasks_error,
        over_tasks_coverage,
        over_tasks_power,
        extrapolation,
        transfer_tau,
        unbalanced_error,
        unbalanced_tuned,
        unbalanced_power,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="writes the figures as JSON")
    parser.add_argument("--repeats", type=int, default=6000, help="studies of each kind")
    parser.add_argument("--checks", type=int, default=10, help="studies of each kind that go through deltalab's own")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="some of the parts")
    options = parser.parse_args()
    start = time.perf_counter()
    bench = Bench(options.repeats, Checked(options.checks))
    figures: dict[str, list[dict[str, Any]]] = {}
    for name, part in PARTS.items():
        if not options.only or name in options.only:
            figures[name] = []
            for row in part(bench):
                print(" ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
                figures[name].append(row)
    checked = {key: value for key, value in vars(bench.checked).items() if key != "per"}
    print(checked, f"{time.perf_counter() - start:.0f} s")
    if bench.checked.differ:
        raise SystemExit("the fast path and deltalab.statistics.joint_test differ")
    if options.out:
        report = {
            "repeats": options.repeats,
            "arms": ARMS,
            "effect": EFFECT,
            "candidates": CANDIDATES,
            "constant": USED,
            "seed": 15,
            "seconds": round(time.perf_counter() - start),
            "checked": checked,
            "machine": {"device": platform.machine(), "cores": os.cpu_count(), "system": platform.platform()},
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "scipy": scipy.__version__,
                "deltalab": deltalab.__version__,
            },
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **figures,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
