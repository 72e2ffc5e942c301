"""Advances the runs of one or several trials together, in stacks, and measures them."""

import ctypes
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from deltalab.errors import InputError
from deltalab.models.layer import initialize
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.tasks import IGNORE, Batch, Task
from deltalab.tasks.batches import Feed
from deltalab.training.spec import TrainSpec, stackable
from deltalab.training.stack import BLOCK, Adam, Layout, Moments, Stack

EVALUATION_SEED = 0
"""The seed of every validation and test batch: the split is fixed, whatever the run's own seed."""

SATURATED = {"cpu": 3 * 2**17, "cuda": 2**28}
"""Numbers of an activation [n, B, T, d] from which on a larger n does not pay.

On two CPU cores that train at a time, Comba in one layer, with freed memory kept, ms a step and run, alone and in
stacks: 11.3, 7.3 of 5 and 6.9 of 9 at B T d = 2^15; 16.8, 15.6 of 4, 13.0 of 6 and 14.3 of 9 at 2^16; 28.0, 27.9 of 3
and 26.3 of 4 at 2^17: operators that take longer than their dispatch gain little, and then leave the cache. On a GPU it
bounds memory alone.
"""

Metric: TypeAlias = tuple[str, str, int, float]

Sums: TypeAlias = tuple[list[tuple[int, list[str]]], Tensor]
"""Of a stack's evaluation: totals and counts [N, 2] on its device; beside each the run's number and metrics' names."""


@dataclass(frozen=True)
class RunResult:
    """One seed. metrics: (split, name, step, value). diverged_at: the first step whose loss was not finite."""

    seed: int
    diverged_at: int | None
    metrics: list[Metric]
    weights: dict[str, Tensor]

    def final(self, split: str, name: str) -> float:
        """The last value of a metric; NaN where the run diverged."""
        values = [value for s, n, _, value in self.metrics if (s, n) == (split, name)]
        return values[-1] if values and self.diverged_at is None else math.nan


@dataclass
class _Run:
    """One seed of one member: what it has shown, and what it is while it is in no stack."""

    member: int
    seed: int
    state: Moments
    metrics: list[Metric] = field(default_factory=list)
    diverged_at: int | None = None


def most_stacked(task: Task, model: ModelSpec, spec: TrainSpec) -> int:
    """How many runs are best trained as one."""
    return max(1, SATURATED[_device(spec.device)] // (spec.batch_size * task.length * model.d_model))


class LockStep:
    """The seeds of all members, advanced together.

    `advance(step, split)` takes all of them from their step to that one and evaluates them; `measure(split)` only that.
    A diverged seed stops where it is and says so; `end(member)` stops a member's.

    most: how many runs at most make a stack; where None what pays on the device.
    """

    def __init__(
        self,
        task: Task,
        members: Sequence[tuple[ModelSpec, TrainSpec]],
        seeds: Sequence[int],
        *,
        most: int | None = None,
    ) -> None:
        model, spec = members[0]
        if not seeds or len(set(seeds)) != len(seeds):
            raise InputError(f"seeds must be distinct and at least one, not {list(seeds)}")
        if not all(stackable(members[0], member) for member in members):
            raise InputError("members that train together differ in numbers alone: lr, weight_decay, ...")
        if model.vocab_size != task.vocab_size:
            raise InputError(f"model.vocab_size {model.vocab_size} is not task '{task.name}''s {task.vocab_size}")
        if model.readout != task.readout:
            raise InputError(f"model.readout '{model.readout}' is not task '{task.name}''s '{task.readout}'")
        self.task, self.spec, self.specs = task, spec, [spec for _, spec in members]
        self.device = torch.device(_device(spec.device))
        if self.device.type == "cpu":
            _keep_freed_memory()
        self.bf16 = spec.precision == "bf16" or (spec.precision == "auto" and self.device.type == "cuda")
        self.step = 0
        self.seconds = 0.0
        self.trained = 0
        self.graph = ""
        self.ended = [False] * len(members)
        self.network = build_model(model).to(self.device)
        self.layout = Layout(self.network)
        self.most = most or most_stacked(task, model, spec)
        models = [one for one, _ in members]
        # Members of one model start from the same weights, which are drawn once.
        starts = {number: self._started(models[number], seeds) for number in {models.index(one) for one in models}}
        self.runs = [
            _Run(number, seed, start)
            for number, one in enumerate(models)
            for seed, start in zip(seeds, starts[models.index(one)], strict=True)
        ]
        self._rates = [list(map(spec.learning_rate, range(spec.steps))) for spec in self.specs]
        self._batches: dict[tuple[str, str, int], tuple[Batch, Tensor]] = {}
        self.stacks: list[tuple[list[_Run], Stack]] = []
        self._graphs = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._stack()

    def _started(self, model: ModelSpec, seeds: Sequence[int]) -> list[Moments]:
        built, found = build_model(model), []
        for seed in seeds:
            initialize(built, seed)
            row = self.layout.pack(built.state_dict()).to(self.device)
            found.append(Moments(row, torch.zeros_like(row), torch.zeros_like(row)))
        return found

    def going(self, run: _Run) -> bool:
        return run.diverged_at is None and not self.ended[run.member]

    def _stack(self) -> None:
        """Makes stacks of the runs that still go, as even as can be, and always the same ones together."""
        self.stacks = []
        size = math.ceil(len(self.runs) / math.ceil(len(self.runs) / self.most))
        for first in range(0, len(self.runs), size):
            runs = [run for run in self.runs[first : first + size] if self.going(run)]
            if runs:
                self.stacks.append((runs, self._stacked(runs)))

    def _stacked(self, runs: list[_Run]) -> Stack:
        specs = [self.specs[run.member] for run in runs]
        return Stack(
            self.network,
            self.layout,
            Feed(self.task, self.spec.batch_size, [run.seed for run in runs], self.device, BLOCK),
            Moments(*map(torch.stack, zip(*(run.state for run in runs), strict=True))),
            [
                Adam(self._rates[run.member], spec.weight_decay, spec.betas, spec.clip)
                for run, spec in zip(runs, specs, strict=True)
            ],
            bf16=self.bf16,
            pool=self._graphs,
        )

    def advance(self, until: int, split: str | None = None) -> None:
        """Trains every run up to `until` updates, records the last training loss, and then measures `split`.

        A GPU is given the evaluation before anything of the training is looked at, and goes on without a pause.
        """
        begun = _moment(self.device)
        for _, stack in self.stacks:
            stack.advance(self.step, until)
        done = _moment(self.device)
        self.trained += sum(len(runs) for runs, _ in self.stacks) * (until - self.step)
        self.step = until
        measured = [] if split is None else self._measured(split)
        for runs, stack in self.stacks:
            if bool(stack.overfull):
                raise InputError(
                    f"task '{self.task.name}' scores more positions of an example than its most_scored, "
                    f"{self.task.most_scored}"
                )
            for run, bad, loss in zip(runs, stack.bad.tolist(), stack.loss.tolist(), strict=True):
                if bad >= 0:
                    run.diverged_at = bad
                else:
                    run.metrics.append(("train", "loss", until, loss))
            if self.device.type == "cuda":
                self.graph = f"none: {stack.eager}" if stack.eager else "whole step"
        self.seconds += _between(begun, done)
        if split is not None:
            self._record(split, measured)
        self._keep()

    def end(self, member: int) -> None:
        """Trains and measures this member no more."""
        self.ended[member] = True
        self._keep()

    def _keep(self) -> None:
        """Takes what goes on no longer out of its stack."""
        stacks = []
        for runs, stack in self.stacks:
            if not all(map(self.going, runs)):
                self._store(runs, stack)
                runs = [run for run in runs if self.going(run)]
                if not runs:
                    continue
                stack = self._stacked(runs)
            stacks.append((runs, stack))
        self.stacks = stacks

    def _store(self, runs: list[_Run], stack: Stack) -> None:
        for i, run in enumerate(runs):
            run.state = Moments(*(part[i].clone() for part in stack.state))

    def measure(self, split: str) -> None:
        """Adds every metric of the task, over the fixed split, to each run that goes on: plain and by label,
        as `Task.evaluations` says.

        And `output_rms`: the largest root mean square of a layer's output before its norm, which an unstable rule
        betrays itself by.
        """
        self._record(split, self._measured(split))
        self._keep()

    @torch.no_grad()
    def _measured(self, split: str) -> list[Sums]:
        """Of each stack, without a look at any of it."""
        evaluations, found = self.task.evaluations(), []
        for _, stack in self.stacks:
            named: list[tuple[int, list[str]]] = []
            values: list[Tensor] = []
            for label, task in evaluations.items():
                ends = [f"@{label}" if label else "", *([] if "" in evaluations else [""])]
                for i in range(self.spec.eval_batches):
                    for number, measured in enumerate(self._on_batch(stack, split, label, task, i)):
                        for name, pair in measured.items():
                            named.append((number, [name + end for end in ends]))
                            values += pair
            found.append((named, torch.stack([value.double() for value in values]).view(-1, 2)))
        return found

    def _record(self, split: str, measured: list[Sums]) -> None:
        for (runs, _), (named, values) in zip(self.stacks, measured, strict=True):
            sums: list[dict[str, tuple[float, float]]] = [{} for _ in runs]
            for (number, names), (total, count) in zip(named, values.tolist(), strict=True):
                for name in names:
                    before = sums[number].get(name, (0.0, 0.0))
                    sums[number][name] = before[0] + total, before[1] + count
            for run, found in zip(runs, sums, strict=True):
                if run.diverged_at is not None:
                    continue
                # A metric that nothing counted towards has no value.
                means = {name: total / count for name, (total, count) in found.items() if count}
                if all(map(math.isfinite, means.values())):
                    run.metrics.extend((split, name, self.step, value) for name, value in means.items())
                else:
                    run.diverged_at = self.step

    def _on_batch(
        self, stack: Stack, split: str, label: str, task: Task, i: int
    ) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        """The metrics of each run of a stack on one batch, as (total, count)."""
        if (split, label, i) not in self._batches:
            batch = task.batch(split, self.spec.batch_size, EVALUATION_SEED, i, self.device)
            self._batches[split, label, i] = batch, (batch.targets != IGNORE).flatten().nonzero().squeeze(1)
        batch, scored = self._batches[split, label, i]
        features, sizes = stack.measure(batch.inputs)
        heads = stack.layout.unpack(stack.state.weights)[stack.layout.head]
        for feature, head, size in zip(features, heads, sizes, strict=True):
            with torch.autocast(self.device.type, torch.bfloat16, self.bf16):
                logits = F.linear(feature.flatten(0, 1)[scored], head)
            yield {**task.measure(batch, logits.float()), "output_rms": (size, torch.ones_like(size))}

    def costs(self) -> list[Metric]:
        """What a trained model asks of its user, exact and the same for all runs: state and arithmetic.

        flops_per_token: of the matrix products of a forward pass over a sequence, without embeddings and logits.
        """
        tokens = torch.zeros(1, self.task.length, dtype=torch.long, device=self.device)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.network.hidden(tokens)
        flops = counter.get_total_flops() / self.task.length
        state = self.network.state_size(self.task.length)
        return [("cost", "flops_per_token", self.step, flops), ("cost", "state_size", self.step, float(state))]

    def results(self, member: int, *, weights: bool = False) -> list[RunResult]:
        """The runs of a member so far, in the order of the seeds."""
        found = [run for run in self.runs if run.member == member]
        if weights:
            self._store_all()
        return [
            RunResult(run.seed, run.diverged_at, list(run.metrics), self._weights(run) if weights else {})
            for run in found
        ]

    def _weights(self, run: _Run) -> dict[str, Tensor]:
        parameters = self.layout.unpack(run.state.weights[None])
        return {name: parameters[name][0].to("cpu", copy=True) for name in self.network.state_dict()}

    def _store_all(self) -> None:
        for runs, stack in self.stacks:
            self._store(runs, stack)

    def how(self) -> dict[str, str]:
        """What the training's speed depends on besides the device."""
        return {"stack": str(min(self.most, len(self.runs))), "cuda_graph": self.graph} if self.graph else {}

    def state_dict(self) -> dict[str, Any]:
        self._store_all()
        return {
            "step": self.step,
            "seconds": self.seconds,
            "trained": self.trained,
            "ended": self.ended,
            "runs": [
                {"state": tuple(run.state), "metrics": run.metrics, "diverged_at": run.diverged_at} for run in self.runs
            ],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.step, self.seconds, self.trained = saved["step"], saved["seconds"], saved["trained"]
        self.ended = list(saved["ended"])
        for run, one in zip(self.runs, saved["runs"], strict=True):
            run.state, run.diverged_at = Moments(*one["state"]), one["diverged_at"]
            run.metrics = [tuple(metric) for metric in one["metrics"]]
        self._stack()


def _moment(device: torch.device) -> float | torch.cuda.Event:
    """When the device has done what it was given so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    """Seconds."""
    seconds: float = begin.elapsed_time(end) / 1e3 if isinstance(begin, torch.cuda.Event) else end - begin
    return seconds


def _device(wanted: str) -> str:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("train.device is cuda, and this machine has no GPU that torch can use")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


@cache
def _keep_freed_memory() -> None:
    """Has glibc keep what is freed for what is asked for next.

    Each large tensor is otherwise given back to the system, and its pages are faults when it is made again: 500 to 1300
    faults and 10 to 25% of a step's time in a stack of 5 (Comba, B T d = 2^15). Other C libraries have no such option.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)
