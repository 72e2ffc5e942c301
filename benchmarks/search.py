"""Measures the search itself on scores that are computed, not trained: its results, its finalists and its costs.

    python benchmarks/search.py --out search.json            # all parts, about an hour of one core
    python benchmarks/search.py --only regret --samplers mixed,random --landscapes needle

The parts (--only) are:

- regret: the share of the hypervolume of the true front that the candidates have missed after 64 and 256 trials, on
  each of the landscapes (--landscapes) of `landscapes.py`. The true front has the best learning rate of each layout.
  Each sampler draws as in a study, with the control's fifth at random; `random` draws all at random. `needle found` is
  the share of the repeats in which a candidate was the needle. With --noise, the samplers are told scores with such a
  standard deviation, and the regret is that of the scores without noise. `mixed+evolution` shares the places with the
  proposer that comes with deltalab.
- kept: the share of the hypervolume of 64 random candidates that 8 finalists keep. Noisy scores choose the finalists,
  and scores without noise give the shares. `before` takes the front by noisy scores first, then the others by score.
- draw: ms of a draw with 500 and 5,000 known results, which includes drawing, adding and telling.
- trials: ms of a trial that does nothing, in a study of 5,000: the time of the schedule, the ledger and the executor.

CPU seconds are those of this process. Wall seconds also depend on the other work of the machine.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from landscapes import LANDSCAPES, LR, Landscape, Layout, Point

from deltalab.statistics.pareto import front
from deltalab.store import RunRecord
from deltalab.study.planning.tuning_candidates import PROPOSED_FROM, RANDOM_FROM
from deltalab.study.running import run
from deltalab.study.searching import evolution
from deltalab.study.searching.phase import WINDOW, begin_draws, controls_by, finalists
from deltalab.study.searching.rivals import Rivals
from deltalab.study.specs.sections.budget import Searching
from deltalab.study.workers import train_stack
from deltalab.study.workers.jobs import Job
from deltalab.study.workers.worker import Worker
from deltalab.training.device import device_name

PLAIN = LANDSCAPES["plain"]


def drawn_candidates(
    landscape: Landscape, sampler: str, trials: int, repeat: int, noise: float
) -> tuple[list[Layout], list[Point]]:
    """Returns the candidates of a study's search and their points, in their order."""
    sampler, _, proposer = sampler.partition("+")
    space = Searching.model_validate({**landscape.space, "trials": trials, "sampler": sampler})
    live = begin_draws(f"regret {repeat}", space, [False, False, False])
    rivals = Rivals(f"regret {repeat}")
    error = random.Random(f"noise {repeat}")
    candidates: list[Layout] = []
    running: deque[tuple[Point, str, Layout]] = deque()
    drawn = {"control": 0, "sampler": 0, "proposed": 0}
    for number in range(trials):
        while len(running) >= WINDOW:
            point, told_of, of = running.popleft()
            live.tell(point)
            rivals.learn(told_of, point, of)
        control = drawn["control"] < controls_by(number, trials, space.controls)
        kind = "control" if control else rivals.turn(number) if proposer else "sampler"
        if kind == "proposed":
            knobs = {path: knob.model_dump(mode="json") for path, knob in space.searched.items()}
            front_now = [{"values": values} for _, values in rivals.front]
            request = {
                "space": knobs,
                "front": front_now,
                "tried": candidates,
                "wanted": 1,
                "seed": f"{repeat}/{number}",
            }
            bred = evolution.propose(request)["proposals"]
            candidate = bred[0]["values"] if bred else live.draw(PROPOSED_FROM + drawn[kind], "random")
        else:
            first = RANDOM_FROM if control else 0
            candidate = live.draw(first + drawn[kind], "random" if control else space.sampler)
        drawn[kind] += 1
        live.add(candidate)
        candidates.append(candidate)
        score, *costs = landscape.evaluate(candidate)
        running.append(((score + error.gauss(0, noise), costs[0], costs[1]), kind, candidate))
    return candidates, [*map(landscape.evaluate, candidates)]


def measure_regret(
    landscape: Landscape, samplers: Sequence[str], repeats: int, noise: float, lengths: Sequence[int] = (64, 256)
) -> dict[str, Any]:
    """Measures the part `regret`.

    A search of 64 trials differs from the first 64 trials of 256, because the control's share is spread over all.
    """
    result: dict[str, Any] = {}
    for sampler in samplers:
        for trials in lengths:
            if sampler == "gp" and trials > 64:
                continue
            regrets, found = [], 0
            started = time.process_time()
            for repeat in range(repeats):
                candidates, points = drawn_candidates(landscape, sampler, trials, repeat, noise)
                regrets.append(landscape.regret(points))
                found += any(map(landscape.needle, candidates))
            took = time.process_time() - started
            figures = {
                "mean": statistics.fmean(regrets),
                "standard error": statistics.stdev(regrets) / repeats**0.5,
                "repeats": repeats,
                "ms a draw, CPU": 1e3 * took / repeats / trials,
            }
            if found:
                figures["needle found"] = found / repeats
            result.setdefault(f"{sampler}, noise {noise}" if noise else sampler, {})[str(trials)] = figures
            print("regret", sampler, trials, figures, flush=True)
    return result


def measure_kept(repeats: int) -> dict[str, Any]:
    """Measures the part `kept`. The noise is the standard deviation that is added to scores between 0 and 1."""

    def before(noisy: Sequence[Point], most: int) -> list[int]:
        first = set(front(noisy))
        return sorted(range(len(noisy)), key=lambda i: (i not in first, noisy[i][0]))[:most]

    def confirmed(noisy: Sequence[Point], most: int) -> list[int]:
        return finalists(noisy, most, metrics=[0])

    ways: dict[str, Callable[[Sequence[Point], int], list[int]]] = {"before": before, "contributions": confirmed}
    result: dict[str, Any] = {}
    for noise in (0.02, 0.05, 0.1):
        kept: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(repeats):
            draw = random.Random(repeat)
            drawn = [{**draw.choice(PLAIN.layouts), LR: 10 ** draw.uniform(-3, -1)} for _ in range(64)]
            points = [PLAIN.evaluate(candidate) for candidate in drawn]
            noisy = [(point[0] + draw.gauss(0, noise), *point[1:]) for point in points]
            for name, choose in ways.items():
                chosen = [points[i] for i in choose(noisy, 8)]
                kept[name].append((1 - PLAIN.regret(chosen)) / (1 - PLAIN.regret(points)))
        for name, shares in kept.items():
            figures = {"mean": statistics.fmean(shares), "standard error": statistics.stdev(shares) / repeats**0.5}
            result.setdefault(f"noise {noise}", {})[name] = figures
        print("kept", noise, result[f"noise {noise}"], flush=True)
    return {"repeats": repeats, **result}


def measure_draws(samplers: Sequence[str], counts: Sequence[int] = (500, 5000), draws: int = 300) -> dict[str, Any]:
    """Measures the part `draw`: the mean over more draws than lie between two renewals of the study."""
    result: dict[str, Any] = {}
    for sampler in samplers:
        for count in counts:
            space = Searching.model_validate({**PLAIN.space, "trials": 10_000, "sampler": sampler})
            live = begin_draws("draws", space, [False, False, False])
            ready = time.process_time()
            for number in range(count):
                candidate = live.draw(number, "random")
                live.add(candidate)
                live.tell(PLAIN.evaluate(candidate))
            started = time.process_time()
            for number in range(count, count + draws):
                candidate = live.draw(number, space.sampler)
                live.add(candidate)
                live.tell(PLAIN.evaluate(candidate))
            ended = time.process_time()
            figures = {"ms a draw, CPU": 1e3 * (ended - started) / draws, "s to begin with, CPU": started - ready}
            result.setdefault(sampler, {})[str(count)] = figures
            print("draw", sampler, count, figures, flush=True)
    return result


STUDY: dict[str, Any] = {
    "name": "nothing",
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}},
    "base": {
        "rule": "linear_attention",
        "model": {"d_model": 64, "layers": 1, "heads": 1, "key_dim": 16, "mlp": False},
        "train": {"steps": 4, "batch_size": 4, "lr": 1e-2, "evaluations": 1, "eval_batches": 1},
    },
    "search": {
        "model.d_model": {"integers": [32, 1023]},
        "model.key_dim": {"integers": [8, 255]},
        "model.layers": {"choice": [1, 2, 3, 4]},
        "finalists": 1,
    },
    "seeds": 2,
}


def nothing(worker: Worker, stack: Sequence[Job], *_: Any) -> list[train_stack.TrialRecord]:
    """Replaces `Worker.execute`: records trials whose score, arithmetic and state follow from their settings."""
    records = []
    for job in stack:
        model, _ = job.specs
        size = float(model.d_model * model.key_dim) if model.key_dim else 1.0
        figures = {
            ("validation", "accuracy"): 0.5 + 0.5 * math.sin(size),
            ("cost", "flops_per_token"): size * model.d_model,
            ("cost", "state_size"): size,
        }
        metrics = [(*name, 4, value) for name, value in figures.items()]
        runs = [RunRecord(seed, "done", None, metrics, []) for seed in job.seeds]
        records.append(train_stack._record(job, time.time(), 1, runs=runs))
    return records


IN_RAY = """
import sys
if any("default_worker.py" in word for word in sys.orig_argv):
    import search
    search.Worker.execute = search.nothing
"""
"""The code that Python imports first in Ray's workers, with the folder of this file on its path."""


def measure_trials(trials: int) -> dict[str, Any]:
    """Measures the part `trials`."""
    Worker.execute = nothing  # type: ignore[method-assign, assignment]
    study = {**STUDY, "search": {**STUDY["search"], "trials": trials}}
    result: dict[str, Any] = {"trials": trials}
    for executor, workers in {"inline": {}, "ray": {"workers": 2}}.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "sitecustomize.py").write_text(IN_RAY)
            paths = [folder, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            wall, cpu = time.perf_counter(), time.process_time()
            ended = run.run_study_file(study, db=Path(folder) / "lab.db", executor=executor, unchecked=True, **workers)  # type: ignore[arg-type]
            assert not ended.failed
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        figures = {"ms a trial": 1e3 * wall / ended.trials, "ms a trial, CPU of the driver": 1e3 * cpu / ended.trials}
        result[executor] = figures
        print("trials", executor, figures, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("regret", "kept", "draw", "trials")
    parser.add_argument("--only", choices=parts, nargs="+", default=parts)
    parser.add_argument("--samplers", default="random,mixed,tpe,nsga2,nsga3")
    parser.add_argument("--landscapes", choices=LANDSCAPES, nargs="+", default=[*LANDSCAPES])
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--out", type=Path, help="figures are added to those in the file")
    options = parser.parse_args()
    measured: dict[str, Callable[[], dict[str, Any]]] = {
        "regret": lambda: {
            name: measure_regret(LANDSCAPES[name], options.samplers.split(","), options.repeats, options.noise)
            for name in options.landscapes
        },
        "kept": lambda: measure_kept(10 * options.repeats),
        "draw": lambda: measure_draws([each for each in options.samplers.split(",") if each != "random"]),
        "trials": lambda: measure_trials(options.trials),
    }
    before = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for part in options.only:
        figures = measured[part]()
        if part == "regret":
            known = before.get(part, {})
            figures = {**known, **{name: {**known.get(name, {}), **new} for name, new in figures.items()}}
        before[part] = {**before.get(part, {}), **figures} if part == "draw" else figures
        before["about"] = {
            "python": platform.python_version(),
            **{name: version(name) for name in ("optuna", "ray", "sqlalchemy")},
            "processor": device_name(torch.device("cpu")).partition(" on ")[0],
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if options.out:
            options.out.write_text(json.dumps(before, indent=2) + "\n")


if __name__ == "__main__":
    main()
