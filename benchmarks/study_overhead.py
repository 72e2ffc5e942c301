"""Measures the time that a study of real trainings takes beside them: planning, starting, recording, reporting.

    python benchmarks/study_overhead.py --engine accelerate torchtitan none --out benchmarks/study_overhead_cpu.json

A toy study trains 4 arms with 3 seeds each, one run after another in a driver without workers; `none` trains by
deltalab itself, which stacks the seeds of an arm. A training begins where its trial does and ends where this is
recorded, so that the engine's own start and the measurement of the weights are parts of it. What is left of the
command's time is that of the study.

On a machine that others use, the time of the clock says little. The seconds of cores are therefore counted as well: of
the command, and of the same command again, which plans, asks the ledger and reports, and finds all trainings done.
"""

import argparse
import json
import resource
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import yaml
from engine_kills import Lab, study

SEEDS = 3
ARMS = {"comba": {"rule": "comba"}, "deltanet": {"rule": "deltanet"}, "gla": {"rule": "gla"}}


def toy(engine: str) -> dict[str, Any]:
    """Returns the study: 4 arms of 400 steps each, on two processes of an engine."""
    whole = study("accelerate" if engine == "none" else engine) | {"arms": ARMS, "seeds": SEEDS}
    if engine == "none":
        del whole["engine"]
    return whole


def measure(engine: str) -> dict[str, Any]:
    """Runs the study of an engine, and returns its time and that of its trainings, in seconds."""
    with tempfile.TemporaryDirectory() as temporary:
        lab = Lab(Path(temporary), "accelerate")
        (lab.folder / "s.yaml").write_text(yaml.safe_dump(toy(engine)))
        wall, cores = run(lab)
        again, cores_again = run(lab)
        with closing(sqlite3.connect(lab.folder / "whole.db")) as ledger:
            trials, trained = ledger.execute("SELECT count(*), sum(seconds) FROM trial").fetchone()
            (runs,) = ledger.execute("SELECT count(*) FROM run WHERE state = 'done'").fetchone()
    return {
        "engine": engine, "arms": 1 + len(ARMS), "runs": runs, "trials": trials, "seconds": wall, "trained": trained,
        "again": again, "cores": cores, "cores_again": cores_again,
    }  # fmt: skip


def run(lab: Lab) -> tuple[float, float]:
    """Runs the study, and returns its seconds by the clock, and by the cores of all its processes."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    if lab.start("whole").wait():
        raise SystemExit((lab.folder / "whole.log").read_text()[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, cores


def main() -> None:
    """Measures the engines that are asked for, and writes a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=("torchtitan", "accelerate", "none"), default=["accelerate"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for engine in given.engine:
        rows.append(measure(engine))
        print(rows[-1], flush=True)
    if given.out:
        given.out.write_text(json.dumps({"torch": torch.__version__, "studies": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
