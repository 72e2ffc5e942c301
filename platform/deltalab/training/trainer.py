"""Advances the runs of one or several trials together, in stacks, and records their metrics."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.models.layer import initialize
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.tasks import Task
from deltalab.tasks.batches import SentBatches, TrainingBatches
from deltalab.training.beat import Beat, unheard
from deltalab.training.device import device_type, moment, multiplies_bf16, seconds_between
from deltalab.training.evaluation import Evaluation, Metric, Sums, costs, means
from deltalab.training.optimizer import Adam, Layout, Moments
from deltalab.training.spec import OF_A_ROW, TrainSpec, stackable
from deltalab.training.stack import BLOCK, WARM_UP, Stack
from deltalab.training.time_budget import TimeBudget, TimedRates

SATURATED = {"cpu": 3 * 2**17, "cuda": 2**28}
"""The largest useful stack, as the elements n B T d beyond which stacking more runs no longer saves time.

n is the number of runs, and [n, B, T, d] is the shape of an activation. Measured on two CPU cores that both train, with
Comba in one layer, and with freed memory kept, in ms per step and run:

    B T d   alone   in stacks of n
    2^15    11.3    7.3 (5), 6.9 (9)
    2^16    16.8    15.6 (4), 13.0 (6), 14.3 (9)
    2^17    28.0    27.9 (3), 26.3 (4)

Stacking saves the time to dispatch operators. So operators that take longer than their dispatch gain little, and large
stacks no longer fit in the cache. On a GPU, the bound only limits memory.
"""


@dataclass(frozen=True)
class RunResult:
    """The result of one seed of a trial.

    Attributes:
        seed: The seed.
        diverged_at: The first step whose loss or gradient, or a metric of whose evaluation, was not finite; None if the
            run did not diverge.
        metrics: The metrics, in the order in which they were recorded.
        weights: The weights by name; empty if they were not asked for.
    """

    seed: int
    diverged_at: int | None
    metrics: list[Metric]
    weights: dict[str, Tensor]

    def final(self, split: str, name: str) -> float:
        """Returns the last value of a metric; NaN if the run diverged."""
        values = [value for s, n, _, value in self.metrics if (s, n) == (split, name)]
        return values[-1] if values and self.diverged_at is None else math.nan


@dataclass
class _Run:
    """One seed of one member, with its metrics so far. It holds the state only while the run is in no stack."""

    member: int
    seed: int
    state: Moments
    metrics: list[Metric] = field(default_factory=list)
    diverged_at: int | None = None


def most_stacked(task: Task, model: ModelSpec, spec: TrainSpec) -> int:
    """Returns the number of runs that train fastest as one stack."""
    return max(1, SATURATED[device_type(spec.device)] // (spec.batch_size * task.length * model.d_model))


class LockStep:
    """Trains all seeds of all members together.

    A member is a configuration, a run is a member with one seed, and a stack is several runs that train as one. A run
    that diverges stops, and keeps the step in `diverged_at`.

    Args:
        task: The task.
        members: The model and the training of each member.
        seeds: The seeds.
        most: The largest number of runs in a stack; None for `most_stacked`.
        beat: Called before each step, and before each batch of an evaluation.

    Raises:
        InputError: The members are not `stackable` or do not fit the task, or seeds are equal.
    """

    def __init__(
        self,
        task: Task,
        members: Sequence[tuple[ModelSpec, TrainSpec]],
        seeds: Sequence[int],
        *,
        most: int | None = None,
        beat: Beat = unheard,
    ) -> None:
        model, spec = members[0]
        if not seeds or len(set(seeds)) != len(seeds):
            raise InputError(f"seeds must be distinct and at least one, not {list(seeds)}")
        if not all(stackable(members[0], member) for member in members):
            raise InputError(f"members that train together may differ in {', '.join(OF_A_ROW)} and where gates start")
        if model.vocab_size != task.vocab_size:
            raise InputError(f"model.vocab_size {model.vocab_size} is not task '{task.name}''s {task.vocab_size}")
        if model.readout != task.readout:
            raise InputError(f"model.readout '{model.readout}' is not task '{task.name}''s '{task.readout}'")
        if model.patches != task.patches:
            raise InputError(f"model.patches {model.patches} is not task '{task.name}''s {task.patches}")
        if spec.optimizer == "muon" and model.base_width is not None:
            raise InputError(
                "train.optimizer muon does not go with model.base_width: its steps have one size at all widths"
            )
        self.task, self.spec, self.specs = task, spec, [spec for _, spec in members]
        self.device = torch.device(device_type(spec.device))
        self.bf16 = spec.precision == "bf16" or (spec.precision == "auto" and multiplies_bf16(self.device))
        self.beat = beat
        self.step = 0
        self.seconds = 0.0
        self.passed = 0.0
        self.trained = 0
        self.graph = ""
        self.ended = [False] * len(members)
        self.network = build_model(model).to(self.device)
        self.layout = Layout(self.network)
        self.most = most or most_stacked(task, model, spec)
        models = [member_model for member_model, _ in members]
        # Members with the same model start from the same weights. Draw these once.
        starts = {
            number: self._started(models[number], seeds)
            for number in {models.index(member_model) for member_model in models}
        }
        self.runs = [
            _Run(number, seed, start)
            for number, member_model in enumerate(models)
            for seed, start in zip(seeds, starts[models.index(member_model)], strict=True)
        ]
        self.budget = None if spec.seconds is None else TimeBudget(spec.seconds, spec.steps)
        self._rates: list[Sequence[float]] = [
            list(map(spec.learning_rate, range(spec.steps))) if self.budget is None else TimedRates(spec, self.budget)
            for spec in self.specs
        ]
        self._evaluation = Evaluation(task, spec.batch_size, spec.eval_batches, self.device, bf16=self.bf16, beat=beat)
        self.stacks: list[tuple[list[_Run], Stack]] = []
        self._graphs = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._stack()

    def _started(self, model: ModelSpec, seeds: Sequence[int]) -> list[Moments]:
        network, moments = build_model(model), []
        for seed in seeds:
            initialize(network, seed)
            row = self.layout.pack(network.state_dict()).to(self.device)
            moments.append(Moments(row, torch.zeros_like(row), torch.zeros_like(row)))
        return moments

    def going(self, run: _Run) -> bool:
        """Returns whether a run still trains."""
        return run.diverged_at is None and not self.ended[run.member]

    def _stack(self) -> None:
        """Makes stacks of equal size from the runs that still train. The same runs always share a stack."""
        self.stacks = []
        size = math.ceil(len(self.runs) / math.ceil(len(self.runs) / self.most))
        for first in range(0, len(self.runs), size):
            runs = [run for run in self.runs[first : first + size] if self.going(run)]
            if runs:
                self.stacks.append((runs, self._stacked(runs)))

    def _stacked(self, runs: list[_Run]) -> Stack:
        specs = [self.specs[run.member] for run in runs]
        batches = SentBatches if self.task.fed_by_cpu(self.device) else TrainingBatches
        return Stack(
            self.network,
            self.layout,
            batches(self.task, self.spec.batch_size, [run.seed for run in runs], self.device, BLOCK),
            Moments(*map(torch.stack, zip(*(run.state for run in runs), strict=True))),
            [
                Adam(self._rates[run.member], spec.weight_decay, spec.betas, spec.clip)
                for run, spec in zip(runs, specs, strict=True)
            ],
            bf16=self.bf16,
            muon=self.spec.optimizer == "muon",
            z_loss=self.spec.z_loss,
            pool=self._graphs,
            beat=self.beat if self.budget is None else self._beat_by_time,
        )

    def _beat_by_time(self, what: str, step: int | None = None, ends: float = math.inf) -> None:
        """Tells the share of the training that is done as a step, which the number of steps alone would not tell."""
        assert self.budget is not None
        self.beat(what, None if step is None else int(self.budget.place(step)), ends)

    def advance(self, until: int, split: str | None = None) -> None:
        """Trains every run up to `until` updates, records the last training loss, and then measures `split`.

        If the time of the training ends before, so does the training. The evaluation is launched before any result of
        the training is read, so that a GPU does not wait for the host.
        """
        begin, began = moment(self.device), time.perf_counter()
        until = self._advanced(until)
        end = moment(self.device)
        self.passed += time.perf_counter() - began
        self.trained += sum(len(runs) for runs, _ in self.stacks) * (until - self.step)
        self.step = until
        sums = [] if split is None else self._measured(split)
        for runs, stack in self.stacks:
            if bool(stack.overfull):
                raise InputError(
                    f"task '{self.task.name}' scores more positions of an example than its most_scored, "
                    f"{self.task.most_scored}"
                )
            diverged, losses = stack.optimizer.bad.tolist(), stack.optimizer.loss.tolist()
            for run, step, loss in zip(runs, diverged, losses, strict=True):
                if step >= 0:
                    run.diverged_at = step
                else:
                    run.metrics.append(("train", "loss", until, loss))
            if self.device.type == "cuda":
                self.graph = f"none: {stack.eager}" if stack.eager else "whole step"
        self.seconds += seconds_between(begin, end)
        if split is not None:
            self._record(split, sums)
        self._keep()

    def _advanced(self, until: int) -> int:
        """Trains every run up to `until` updates, or to the end of the time. Returns the number of updates."""
        if self.budget is None:
            for _, stack in self.stacks:
                stack.advance(self.step, until)
            return until
        step = self.step
        while step < until and not self.budget.over:
            uncounted = [stack for _, stack in self.stacks if stack.steps <= WARM_UP]  # these steps compile
            last = min(until, step + (WARM_UP + 1 if uncounted else self.budget.next_block()))
            begin = moment(self.device)
            for _, stack in self.stacks:
                stack.advance(step, last)
            end = moment(self.device)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            runs = sum(len(runs) for runs, _ in self.stacks)  # which share the time
            self.budget.read(last, None if uncounted else seconds_between(begin, end) / runs)
            step = last
        return step

    def end(self, member: int) -> None:
        """Stops the runs of a member."""
        self.ended[member] = True
        self._keep()

    def _keep(self) -> None:
        """Takes runs that have stopped out of their stacks."""
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
        """Evaluates each run that still trains on a split, and adds the metrics to the run; see `Evaluation`."""
        self._record(split, self._measured(split))
        self._keep()

    def _measured(self, split: str) -> list[Sums]:
        return [self._evaluation.sums(stack, split) for _, stack in self.stacks]

    def _record(self, split: str, measured: list[Sums]) -> None:
        for (runs, _), sums in zip(self.stacks, measured, strict=True):
            for run, metrics in zip(runs, means(sums, len(runs)), strict=True):
                if run.diverged_at is not None:
                    continue
                if metrics is None:
                    run.diverged_at = self.step
                else:
                    run.metrics.extend((split, name, self.step, value) for name, value in metrics.items())

    def costs(self) -> list[Metric]:
        """Returns the costs of the trained model, which are equal for all runs; see `evaluation.costs`."""
        return costs(self.network, self.task.length, self.step)

    def results(self, member: int, *, weights: bool = False) -> list[RunResult]:
        """Returns the runs of a member so far, in the order of the seeds."""
        runs = [run for run in self.runs if run.member == member]
        if weights:
            self._store_all()
        return [
            RunResult(run.seed, run.diverged_at, list(run.metrics), self._weights(run) if weights else {})
            for run in runs
        ]

    def _weights(self, run: _Run) -> dict[str, Tensor]:
        parameters = self.layout.unpack(run.state.weights[None])
        return {name: parameters[name][0].to("cpu", copy=True) for name in self.network.state_dict()}

    def _store_all(self) -> None:
        for runs, stack in self.stacks:
            self._store(runs, stack)

    def how(self) -> dict[str, str]:
        """Returns what the time depends on: on a GPU the stack size, and whether there was a CUDA graph.

        On a CPU it is `core_share`, the share of the time that passed in which the training had its core.
        """
        if self.graph:
            return {"stack": str(min(self.most, len(self.runs))), "cuda_graph": self.graph}
        return {"core_share": f"{min(1.0, self.seconds / self.passed):.2f}"} if self.passed else {}

    def state_dict(self) -> dict[str, Any]:
        """Returns all that a checkpoint needs."""
        self._store_all()
        return {
            "step": self.step,
            "seconds": self.seconds,
            "passed": self.passed,
            "trained": self.trained,
            "ended": self.ended,
            "spent": 0.0 if self.budget is None else self.budget.spent,
            "runs": [
                {"state": tuple(run.state), "metrics": run.metrics, "diverged_at": run.diverged_at} for run in self.runs
            ],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self.step, self.seconds, self.trained = saved["step"], saved["seconds"], saved["trained"]
        self.passed = saved.get("passed", self.seconds)  # Early releases timed a CPU by the clock on the wall.
        self.ended = list(saved["ended"])
        if self.budget is not None:
            self.budget.go_on(self.step, saved["spent"])
        for run, saved_run in zip(self.runs, saved["runs"], strict=True):
            run.state, run.diverged_at = Moments(*saved_run["state"]), saved_run["diverged_at"]
            run.metrics = [tuple(metric) for metric in saved_run["metrics"]]
        self._stack()
