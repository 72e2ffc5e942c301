"""Trains one configuration with all its seeds in lock-step, and measures it.

A trial's seeds advance together and are judged together: what watches a trial sees all of them at every
evaluation. `NUMERICS` is part of a trial's identity.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from deltalab.errors import InputError, unknown
from deltalab.gates import Gate
from deltalab.layer import RuleLayer
from deltalab.model import Model, ModelSpec, build_model, parameter_groups
from deltalab.tasks import IGNORE, Task

NUMERICS = 2
"""Raise it with every change to what a trial computes: trials recorded under another number run again."""

EVALUATION_SEED = 0
"""The seed of every validation and test batch: the split is fixed, whatever the run's own seed."""

Metric: TypeAlias = tuple[str, str, int, float]


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """How to train, as data: AdamW, linear warm-up, cosine to 0, clipping of the gradient's norm.

    steps, batch_size, lr, weight_decay. warmup: share of the steps. clip: largest norm, 0 for none.
    evaluations: how often the validation split is measured, evenly spaced, the last at the end.
    eval_batches: batches of `batch_size` in the fixed validation split, and again in the test split.
    precision: bf16 is autocast over fp32 weights; `auto` is bf16 on a GPU and fp32 on a CPU.
    device: `auto` is a GPU where there is one.

    Raises `InputError` for values that make no training.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    steps: int
    batch_size: int
    lr: float
    weight_decay: float = 0.1
    warmup: float = 0.1
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    evaluations: int = 10
    eval_batches: int = 4
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "evaluations", "eval_batches"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"train.{name} must be a whole number of at least 1, not {value!r}")
        for name, high in (("lr", math.inf), ("weight_decay", math.inf), ("warmup", 1), ("clip", math.inf)):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= high:
                bounds = f"from 0 to {high}" if math.isfinite(high) else "of at least 0"
                raise InputError(f"train.{name} must be a finite number {bounds}, not {value!r}")
            # One value, one identity: 1 and 1.0 are the same trial.
            object.__setattr__(self, name, float(value))
        betas = self.betas
        if (
            not isinstance(betas, list | tuple)
            or len(betas) != 2
            or not all(_is_number(b) and 0 <= b < 1 for b in betas)
        ):
            raise InputError(f"train.betas must be two numbers in [0, 1), not {betas!r}")
        object.__setattr__(self, "betas", tuple(map(float, betas)))
        if self.evaluations > self.steps:
            raise InputError(f"train.evaluations {self.evaluations} exceed steps {self.steps}")
        for name, allowed in (("precision", ("auto", "fp32", "bf16")), ("device", ("auto", "cpu", "cuda"))):
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), allowed, where=f"train.{name}")

    def evaluated_at(self) -> list[int]:
        """The steps after which the validation split is measured."""
        return [round(self.steps * (i + 1) / self.evaluations) for i in range(self.evaluations)]

    def learning_rate(self, step: int) -> float:
        """Of the update that follows `step` updates.

        >>> spec = TrainSpec(steps=100, batch_size=1, lr=1.0)
        >>> [round(spec.learning_rate(step), 3) for step in (0, 9, 10, 55, 100)]
        [0.1, 1.0, 1.0, 0.5, 0.0]
        """
        warm = round(self.warmup * self.steps)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(self.steps - warm, 1)))


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


@dataclass(frozen=True)
class TrialResult:
    """All seeds of one configuration, and what it cost. state_size: elements held after a whole sequence."""

    runs: list[RunResult]
    parameters: int
    state_size: int
    tokens_per_second: float
    hardware: dict[str, str]


@dataclass
class _Seed:
    """One run in flight. `bad` is the first step with a non-finite loss, -1 while there is none."""

    seed: int
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    bad: Tensor
    loss: Tensor
    metrics: list[Metric] = field(default_factory=list)

    @property
    def diverged_at(self) -> int | None:
        bad = int(self.bad)
        return None if bad < 0 else bad


class LockStep:
    """The seeds of one trial, advanced together.

    `advance(step)` takes all of them from their step to that one; `measure(split)` evaluates all of them.
    A diverged seed stops where it is and says so.
    """

    def __init__(self, task: Task, model: ModelSpec, spec: TrainSpec, seeds: Sequence[int]) -> None:
        if not seeds or len(set(seeds)) != len(seeds):
            raise InputError(f"seeds must be distinct and at least one, not {list(seeds)}")
        if model.vocab_size != task.vocab_size:
            raise InputError(f"model.vocab_size {model.vocab_size} is not task '{task.name}''s {task.vocab_size}")
        if model.readout != task.readout:
            raise InputError(f"model.readout '{model.readout}' is not task '{task.name}''s '{task.readout}'")
        self.task, self.spec = task, spec
        self.device = torch.device(_device(spec.device))
        self.bf16 = spec.precision == "bf16" or (spec.precision == "auto" and self.device.type == "cuda")
        self.step = 0
        self.seconds = 0.0
        self.seeds = [self._start(model, seed) for seed in seeds]

    def _start(self, spec: ModelSpec, seed: int) -> _Seed:
        model = build_model(spec, seed=seed).to(self.device)
        groups = parameter_groups(model, self.spec.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=self.spec.lr, betas=self.spec.betas, fused=True)
        minus = torch.full((), -1, device=self.device)
        return _Seed(seed, model, optimizer, bad=minus, loss=torch.zeros((), device=self.device))

    def advance(self, until: int) -> None:
        """Trains every seed up to `until` updates, and records the last training loss."""
        started = time.perf_counter()
        for step in range(self.step, until):
            lr = self.spec.learning_rate(step)
            for run in self.seeds:
                self._update(run, step, lr)
        self.step = until
        for run in self.seeds:
            if run.diverged_at is None:
                run.metrics.append(("train", "loss", until, float(run.loss)))
        self.seconds += time.perf_counter() - started

    def _update(self, run: _Seed, step: int, lr: float) -> None:
        # On a CPU the flag costs nothing to read; on a GPU reading it at every step would stall the device.
        if self.device.type == "cpu" and run.diverged_at is not None:
            return
        batch = self.task.batch("train", self.spec.batch_size, run.seed, step, self.device)
        scored = batch.targets != IGNORE
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            logits = run.model(batch.inputs, where=scored)
        loss = F.cross_entropy(logits.float(), batch.targets[scored])
        run.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), self.spec.clip or math.inf)
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        run.optimizer.step()
        run.loss = loss.detach()
        now = torch.isfinite(run.loss) & torch.isfinite(norm)
        run.bad = torch.where((run.bad < 0) & ~now, step, run.bad)

    @torch.no_grad()
    def measure(self, split: str) -> None:
        """Adds every metric of the task, over the fixed split, to each seed that has not diverged: plain and by label,
        as `Task.evaluations` says.

        And `output_rms`: the largest root mean square of a layer's output before its norm, which an unstable rule
        betrays itself by.
        """
        evaluations = self.task.evaluations()
        for run in self.seeds:
            if run.diverged_at is not None:
                continue
            sums: dict[str, tuple[Tensor, Tensor]] = {}
            for label, task in evaluations.items():
                ends = [f"@{label}" if label else "", *([] if "" in evaluations else [""])]
                for i in range(self.spec.eval_batches):
                    for name, (total, count) in self._measured(run.model, task, split, i).items():
                        for end in ends:
                            before = sums.get(name + end, (torch.zeros_like(total), torch.zeros_like(count)))
                            sums[name + end] = (before[0] + total, before[1] + count)
            # A metric that nothing counted towards has no value.
            found = {name: float(total) / float(count) for name, (total, count) in sums.items() if float(count)}
            if all(map(math.isfinite, found.values())):
                run.metrics.extend((split, name, self.step, value) for name, value in found.items())
            else:
                run.bad = torch.full_like(run.bad, self.step)

    def _measured(self, model: torch.nn.Module, task: Task, split: str, step: int) -> dict[str, tuple[Tensor, Tensor]]:
        batch = task.batch(split, self.spec.batch_size, EVALUATION_SEED, step, self.device)
        with _output_rms(model) as sizes, torch.autocast(self.device.type, torch.bfloat16, self.bf16):
            logits = model(batch.inputs, where=batch.targets != IGNORE)
        largest = torch.stack(sizes).max()
        return {**task.measure(batch, logits.float()), "output_rms": (largest, torch.ones_like(largest))}

    def costs(self) -> list[Metric]:
        """What a trained model asks of its user, exact and the same for all seeds: state and arithmetic.

        flops_per_token: of the matrix products of a forward pass over a sequence, without embeddings and logits.
        """
        network = cast(Model, self.seeds[0].model)
        tokens = torch.zeros(1, self.task.length, dtype=torch.long, device=self.device)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            network.hidden(tokens)
        flops = counter.get_total_flops() / self.task.length
        state = network.state_size(self.task.length)
        return [("cost", "flops_per_token", self.step, flops), ("cost", "state_size", self.step, float(state))]

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "seconds": self.seconds,
            "seeds": [
                {
                    "model": run.model.state_dict(),
                    "optimizer": run.optimizer.state_dict(),
                    "bad": run.bad,
                    "loss": run.loss,
                    "metrics": run.metrics,
                }
                for run in self.seeds
            ],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.step, self.seconds = saved["step"], saved["seconds"]
        for run, one in zip(self.seeds, saved["seeds"], strict=True):
            run.model.load_state_dict(one["model"])
            run.optimizer.load_state_dict(one["optimizer"])
            run.bad, run.loss = one["bad"], one["loss"]
            run.metrics = [tuple(metric) for metric in one["metrics"]]


@contextmanager
def _output_rms(model: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Collects the root mean square of every rule's output while the model runs."""
    sizes: list[Tensor] = []

    def keep(_: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        sizes.append(args[0].float().square().mean().sqrt())

    handles = [layer.norm.register_forward_pre_hook(keep) for layer in model.modules() if isinstance(layer, RuleLayer)]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()


def train(
    task: Task,
    model: ModelSpec,
    spec: TrainSpec,
    seeds: Sequence[int],
    *,
    test: bool = False,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60.0,
    watch: Callable[[int, list[RunResult]], bool | None] | None = None,
) -> TrialResult:
    """Trains all seeds of one configuration: `train_together` with one member, and the same otherwise."""

    def alone(_: int, step: int, runs: list[RunResult]) -> bool | None:
        return None if watch is None else watch(step, runs)

    (result,) = train_together(
        task,
        [(model, spec)],
        seeds,
        test=test,
        checkpoint=checkpoint,
        checkpoint_seconds=checkpoint_seconds,
        watch=alone,
    )
    return result


def stackable(one: tuple[ModelSpec, TrainSpec], other: tuple[ModelSpec, TrainSpec]) -> bool:
    """Whether two trials of a task can train together: they differ in nothing but numbers that each run has for itself.

    These are lr, weight_decay, warmup, clip and betas, and what gates start at.

    >>> model, spec = ModelSpec(rule="comba", vocab_size=16), TrainSpec(steps=10, batch_size=4, lr=1e-2)
    >>> stackable((model, spec), (model, replace(spec, lr=1e-3)))
    True
    >>> stackable((model, spec), (model, replace(spec, batch_size=8)))
    False
    >>> stackable((model, spec), (replace(model, rule={"name": "comba", "d": {"head": {"init": 1}}}), spec))
    True
    """
    own = {name: getattr(one[1], name) for name in ("lr", "weight_decay", "warmup", "clip", "betas")}
    if replace(other[1], **own) != one[1] or replace(other[0], rule=one[0].rule) != one[0]:
        return False
    rule, another = one[0].make_rule(), other[0].make_rule()
    return type(rule) is type(another) and all(
        _alike(mine, another.knobs()[name]) for name, mine in rule.knobs().items()
    )


def _alike(one: object, other: object) -> bool:
    """Whether knobs are equal but for what a gate's parameters start at: its value is the same function of them."""
    if not isinstance(one, Gate) or not isinstance(other, Gate):
        return one == other

    def function(gate: Gate) -> tuple[object, ...]:
        closed = getattr(gate.value, "__closure__", None) or ()
        code = getattr(gate.value, "__code__", gate.value)
        return code, [cell.cell_contents for cell in closed], gate.per, gate.rank, gate.of, list(gate.parameters)

    return function(one) == function(other)


def train_together(
    task: Task,
    members: Sequence[tuple[ModelSpec, TrainSpec]],
    seeds: Sequence[int],
    *,
    test: bool = False,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60.0,
    watch: Callable[[int, int, list[RunResult]], bool | None] | None = None,
) -> list[TrialResult]:
    """Trains all seeds of each member, a configuration, as alone; members are pairwise `stackable`.

    test: measure the test split at the end; tuning never does.
    checkpoint: a file to go on from and to save to, at most every `checkpoint_seconds`; removed at the end.
        On a CPU a continued training is bit-equal to an uninterrupted one.
    watch: called after each evaluation with the member's number, the step and its runs so far, while the member goes
        on; where it returns True the member ends there, and what it raises ends the training.
    Returns the results in the members' order. Raises `InputError` for members that cannot train together.
    """
    for member in members:
        if not stackable(members[0], member):
            raise InputError("members of a stack differ in more than lr, weight_decay, warmup, clip, betas and starts")
    trials = [LockStep(task, model, spec, seeds) for model, spec in members]
    ended = [False] * len(trials)
    if checkpoint is not None and checkpoint.exists():
        saves = torch.load(checkpoint, map_location=trials[0].device, weights_only=True)
        ended = saves["ended"]
        for trial, save in zip(trials, saves["trials"], strict=True):
            trial.load_state_dict(save)
    saved = time.monotonic()
    for step in members[0][1].evaluated_at():
        going = [
            i
            for i, trial in enumerate(trials)
            if step > trial.step and not ended[i] and any(run.diverged_at is None for run in trial.seeds)
        ]
        for i in going:
            trials[i].advance(step)
            trials[i].measure("validation")
        if going and checkpoint is not None and time.monotonic() - saved >= checkpoint_seconds:
            _save({"ended": ended, "trials": [trial.state_dict() for trial in trials]}, checkpoint)
            saved = time.monotonic()
        for i in going:
            ended[i] = watch is not None and watch(i, step, _results(trials[i])) is True
    if test:
        for trial, gone in zip(trials, ended, strict=True):
            if not gone:
                trial.measure("test")
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return [_result(trial) for trial in trials]


def _result(trial: LockStep) -> TrialResult:
    first = trial.seeds[0].model
    costs = trial.costs()
    for run in trial.seeds:
        run.metrics += costs
    tokens = trial.spec.batch_size * trial.task.length * trial.step * len(trial.seeds)
    return TrialResult(
        runs=_results(trial, weights=True),
        parameters=sum(p.numel() for p in first.parameters()),
        state_size=first.state_size(trial.task.length),  # type: ignore[operator]
        tokens_per_second=tokens / max(trial.seconds, 1e-9),
        hardware=hardware(trial.device),
    )


def hardware(device: torch.device) -> dict[str, str]:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    return {"device": name, "torch": torch.__version__, "host": os.uname().nodename}


def _results(trial: LockStep, *, weights: bool = False) -> list[RunResult]:
    return [
        RunResult(
            run.seed,
            run.diverged_at,
            list(run.metrics),
            {name: value.detach().cpu() for name, value in run.model.state_dict().items()} if weights else {},
        )
        for run in trial.seeds
    ]


def _save(state: dict[str, Any], file: Path) -> None:
    """Whole or not at all: a kill while writing leaves the checkpoint before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(file)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _device(wanted: str) -> str:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("train.device is cuda, and this machine has no GPU that torch can use")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
