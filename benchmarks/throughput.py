"""Measures how fast trials train, alone and in stacks, and how busy they keep a GPU.

    PYTHONPATH=platform:plugins python3 benchmarks/throughput.py --out out                # all parts, on a GPU
    python3 benchmarks/throughput.py --out out --small                                    # tiny, without a GPU

The script needs PyTorch and, for the kernels, Triton. The parts (--part NAME, repeatable; all by default) are:

- step: milliseconds of a trial's step on MQAR, 2 layers, vocabulary 8192, at each size of a stack.
- stacks: 4 learning rates x 5 seeds of one shape, one after another and as stacks.
- busy: the share of the wall time of a whole `train_together`, evaluations included, in which the GPU has a kernel.

A step includes data, forward, backward, clipping and AdamW. Times are those of the fastest of a few repeats of many
steps after warm-up: wall time on a GPU, CPU time elsewhere. OUT/throughput.json holds the rows of the table in full.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import deltalab
from deltalab.models.spec import ModelSpec
from deltalab.registry import add_plugin
from deltalab.training.train import TrainSpec, hardware, train_together
from deltalab.training.trainer import LockStep

RULES = ("attention", "gated_deltanet")
LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SEEDS = range(5)


@dataclass(frozen=True)
class Shape:
    """A model and its batches.

    Attributes:
        d_model: The width of the model.
        length: Tokens of a sequence.
        batch: Sequences of a batch.
        vocabulary: The number of tokens that the model knows.
        target: The milliseconds that a trial's step may take; None if there is no goal.
    """

    d_model: int
    length: int
    batch: int
    vocabulary: int = 8192
    target: float | None = None

    @property
    def pairs(self) -> int:
        return self.length // 16

    def __str__(self) -> str:
        return f"d {self.d_model}, L {self.length}, batch {self.batch}"


STEP = (Shape(128, 256, 256, target=2.2), Shape(64, 64, 512, target=0.8))
STACKS = {Shape(64, 64, 128): 3.0, Shape(256, 64, 128): 1.0}
"""How many times as fast as single trials stacks are to be."""

SMALL_STEP = (Shape(16, 32, 8, vocabulary=64),)
SMALL_STACKS = {Shape(16, 32, 8, vocabulary=64): 1.0, Shape(32, 64, 16, vocabulary=64): 1.0}


def trial(rule: str, shape: Shape, steps: int) -> tuple[Any, ModelSpec, TrainSpec]:
    """Makes a trial with Zoology's model: mixers alone, and attention without the additions of delta rules' layers."""
    task = deltalab.get_task("mqar", length=shape.length, pairs=shape.pairs, vocab_size=shape.vocabulary)
    plain = {"conv": 0, "output_norm": False, "output_gate": False} if rule == "attention" else {}
    heads = max(1, shape.d_model // 64)
    model = ModelSpec(
        rule=rule, vocab_size=shape.vocabulary, d_model=shape.d_model, layers=2, heads=heads, mlp=False, **plain
    )
    return task, model, TrainSpec(steps=steps, batch_size=shape.batch, lr=1e-3, evaluations=1)


def milliseconds(trial: LockStep, steps: int, repeats: int, warm: int) -> float:
    """Measures the milliseconds of a step of all runs."""
    trial.advance(warm)
    cuda = trial.device.type == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    taken = []
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
        began = clock()
        trial.advance(trial.step + steps)  # ends with a look at the losses
        taken.append((clock() - began) / steps * 1e3)
    return min(taken)


def measured(rule: str, shape: Shape, members: int, seeds: Sequence[int], most: int, small: bool) -> dict[str, Any]:
    """Measures a stack.

    Args:
        rule: The rule.
        shape: The model and its batches.
        members: The number of learning rates.
        seeds: The seeds of each learning rate.
        most: The most runs of a stack.
        small: Whether the steps are few.
    """
    steps, repeats, warm = (4, 2, 4) if small else (60, 3, 20)
    task, model, spec = trial(rule, shape, warm + steps * repeats)
    rates = [LEARNING_RATES[i % len(LEARNING_RATES)] for i in range(members)]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    lock = LockStep(task, [(model, replace(spec, lr=lr)) for lr in rates], seeds, most=most)
    runs = len(lock.runs)
    step_ms = milliseconds(lock, steps, repeats, warm)
    row = {
        "rule": rule,
        "shape": asdict(shape),
        "runs": runs,
        "stack": min(most, runs),
        "ms_per_trial_and_step": step_ms / runs,
        "cuda_graph": lock.how().get("cuda_graph"),
        "seconds_in_all": time.perf_counter() - began,
    }
    if torch.cuda.is_available():
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def step(small: bool) -> Iterator[dict[str, Any]]:
    """Measures a trial's step at each size of a stack."""
    for shape in SMALL_STEP if small else STEP:
        for rule in RULES:
            for size in (1, 3) if small else (1, 2, 4, 8, 16):
                row = tried(
                    lambda rule=rule, shape=shape, size=size: measured(rule, shape, 1, range(size), size, small)
                )
                yield {"part": "step", "what": f"{rule}, {shape}", "target": shape.target, **row}


def stacks(small: bool) -> Iterator[dict[str, Any]]:
    """Measures trials one after another and as stacks."""
    for shape, demand in (SMALL_STACKS if small else STACKS).items():
        for rule in RULES:
            both = []
            for most in (1, len(LEARNING_RATES) * len(SEEDS)):
                row = tried(
                    lambda rule=rule, shape=shape, most=most: measured(
                        rule, shape, len(LEARNING_RATES), SEEDS, most, small
                    )
                )
                both.append(row)
                yield {"part": "stacks", "what": f"{rule}, {shape}", **row}
            alone, together = (row.get("ms_per_trial_and_step") for row in both)
            if alone and together:
                yield {"part": "stacks", "what": f"{rule}, {shape}", "ratio": alone / together, "demand": demand}


def busy(small: bool) -> Iterator[dict[str, Any]]:
    """Measures the share of the time of a training of 4 learning rates x 5 seeds in which the GPU has a kernel."""
    shape = SMALL_STEP[0] if small else STEP[1]
    for rule in RULES:
        task, model, spec = trial(rule, shape, 8 if small else 1000)
        spec = replace(spec, evaluations=2 if small else 5)
        members = [(model, replace(spec, lr=lr)) for lr in LEARNING_RATES]
        row: dict[str, Any] = {"part": "busy", "what": f"{rule}, {shape}", "demand": 0.9}
        train = partial(train_together, task, members, SEEDS, test=False)
        if not torch.cuda.is_available():
            yield {**row, "busy": None, "seconds": seconds(train)}
            continue
        train_together(task, [(m, replace(s, steps=10, evaluations=1)) for m, s in members], SEEDS, test=False)
        # A profiler slows the host and leaves kernels as they are: the wall time is that of a run without one.
        alone = seconds(train)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            traced = seconds(train)
        covered = union(
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in profiler.profiler.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA
        )
        yield {**row, "busy": covered / 1e9 / alone, "seconds": alone, "in_trace": covered / 1e9 / traced}


def seconds(work: Callable[[], object]) -> float:
    """Measures the wall time of work, that of the GPU included."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def union(spans: Iterator[tuple[int, int]]) -> int:
    """Returns the length that spans cover together.

    >>> union(iter([(0, 2), (5, 6), (1, 3)]))
    4
    """
    covered, reached = 0, 0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def tried(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns a measurement, or the error if the GPU has too little memory."""
    try:
        return measure()
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[1]
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return {"error": reason}


def line(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    parts = []
    if "ms_per_trial_and_step" in row:
        parts.append(f"stack {row['stack']:2d}  {row['ms_per_trial_and_step']:8.3f} ms per trial and step")
        parts.append(f"{row['peak_gib']:.1f} GiB" if "peak_gib" in row else "")
        parts.append(f"graph: {row['cuda_graph']}" if row["cuda_graph"] not in (None, "whole step") else "")
        parts.append(f"target {row['target']}" if row.get("target") else "")
    if "ratio" in row:
        parts.append(f"stacked is {row['ratio']:.2f} times as fast, at least {row['demand']:g} is wanted")
    if "busy" in row:
        share = (
            "no GPU"
            if row["busy"] is None
            else f"{row['busy']:.1%} of the time busy, {row['in_trace']:.1%} of a profiled run's, 90% is wanted"
        )
        parts.append(f"{share}, {row['seconds']:.1f} s")
    parts.append(row.get("error", ""))
    return f"{row['part']:7} {row['what']:40} " + "  ".join(part for part in parts if part)


PARTS = {"step": step, "stacks": stacks, "busy": busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if not deltalab.list_rules():  # not installed, as on a bare GPU image
        for file in sorted((Path(__file__).parents[1] / "plugins" / "deltalab_rules").glob("[!_]*.py")):
            add_plugin(file)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    file, rows = options.out / "throughput.json", []
    for part in options.part or PARTS:
        for row in PARTS[part](options.small):
            print(line(row), flush=True)
            rows.append(row)
            file.write_text(json.dumps({"hardware": hardware(device), "small": options.small, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
