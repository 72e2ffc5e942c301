"""The settings of a training, as data, and the test of whether two trainings can run as one."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from deltalab.errors import InputError, unknown
from deltalab.gates import Gate
from deltalab.models.spec import LATER, ModelSpec
from deltalab.training.schedule import DECAYS, STABLE, learning_rate

MOST = {"steps": 10**9, "batch_size": 2**20, "evaluations": 10**5, "eval_batches": 10**6}
"""The largest value of each whole number in `TrainSpec`."""
MOST_SECONDS = 1e9
"""The largest `seconds`."""
MOST_RATE = 1e38
"""The largest lr, weight_decay and clip."""

CHOICES = {
    "optimizer": ("adamw", "muon"),
    "precision": ("auto", "fp32", "bf16"),
    "device": ("auto", "cpu", "cuda"),
    "schedule": ("cosine", "linear", "constant", "wsd"),
    "decay": DECAYS,
}
"""The settings that take one of a few words, with these words."""

OF_A_ROW = ("lr", "weight_decay", "warmup", "clip", "betas", "schedule", "final", "stable", "decay")
"""The settings that trials of one stack may each have their own."""


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """A training by AdamW or Muon, with linear warm-up, a decay, and clipping of the gradient's norm.

    Attributes:
        steps: The batches to train on; with `seconds`, the most of them.
        batch_size: The sequences of a batch.
        lr: The largest learning rate.
        optimizer: adamw; or muon, which moves the matrices of the blocks by orthogonal steps as large as AdamW's, with
            the first of `betas` as momentum, and all else by AdamW.
        weight_decay: The weight decay.
        warmup: The share of the steps in which the learning rate rises.
        clip: The largest norm of the gradient; 0 for no limit.
        betas: The betas of AdamW.
        schedule: How the learning rate falls after the warm-up: cosine, linear, constant, or wsd (warm-up, stable,
            decay: constant, and falling over the last of the steps).
        final: The share of lr at which the decay ends; without effect on `constant`.
        stable: The share of the steps after which wsd decays.
        decay: How wsd decays: linear, cosine, or sqrt (1 - x^(1/2) at the share x of the decay).
        z_loss: The weight of the squared logarithm of softmax's denominator, added to each loss that is trained on.
        evaluations: The number of measurements on the validation split, evenly spaced, the last one at the end.
        eval_batches: The batches of `batch_size` sequences in the fixed validation split, and again in the test split.
        precision: `fp32`, or `bf16` for autocast over fp32 weights. `auto` is bf16 on a GPU of compute capability 8.0
            or later, and fp32 on others and on a CPU.
        device: `cpu` or `cuda`. `auto` is a GPU if there is one.
        seconds: The seconds of training steps after which a run ends, unless `steps` ends it before; None for no end.
            The learning rate follows whichever of the two is nearer to its end. It is no `deadline`, which is of the
            study: a trial that has taken so long fails, and all that it does counts.

    Raises:
        InputError: A value is out of range, such as no steps or a negative rate.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    steps: int
    batch_size: int
    lr: float
    optimizer: Literal["adamw", "muon"] = field(default="adamw", metadata=LATER)
    weight_decay: float = 0.1
    warmup: float = 0.1
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = field(default="cosine", metadata=LATER)
    final: float = field(default=0.0, metadata=LATER)
    stable: float = field(default=STABLE, metadata=LATER)
    decay: Literal["linear", "cosine", "sqrt"] = field(default="linear", metadata=LATER)
    z_loss: float = field(default=0.0, metadata=LATER)
    evaluations: int = 10
    eval_batches: int = 4
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seconds: float | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "evaluations", "eval_batches"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                problem = f"train.{name} must be a whole number of at least 1, not {value!r}"
                raise InputError(problem, key=f"train.{name}")
            if value > MOST[name]:
                raise InputError(f"train.{name} must be at most {MOST[name]:,}, not {value:,}", key=f"train.{name}")
        for name, high in (
            ("lr", MOST_RATE),
            ("weight_decay", MOST_RATE),
            ("warmup", 1),
            ("clip", MOST_RATE),
            ("final", 1),
            ("stable", 1),
            ("z_loss", 1),
        ):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= high:
                problem = f"train.{name} must be a finite number from 0 to {high:g}, not {value!r}"
                raise InputError(problem, key=f"train.{name}")
            # 1 and 1.0 must give the same trial.
            object.__setattr__(self, name, float(value))
        if self.seconds is not None:
            if not _is_number(self.seconds) or not 0 < self.seconds <= MOST_SECONDS:
                raise InputError(
                    f"train.seconds must be a number above 0 and at most {MOST_SECONDS:g}, not {self.seconds!r}",
                    key="train.seconds",
                )
            object.__setattr__(self, "seconds", float(self.seconds))
        betas = self.betas
        if (
            not isinstance(betas, list | tuple)
            or len(betas) != 2
            or not all(_is_number(b) and 0 <= b < 1 for b in betas)
        ):
            raise InputError(f"train.betas must be two numbers in [0, 1), not {betas!r}", key="train.betas")
        object.__setattr__(self, "betas", tuple(map(float, betas)))
        if self.evaluations > self.steps:
            problem = f"train.evaluations {self.evaluations} exceed steps {self.steps}"
            raise InputError(problem, key="train.evaluations")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), allowed, where=f"train.{name}")
        if self.schedule == "constant" and self.final:
            raise InputError("train.final has no effect on a constant schedule: leave it out")
        for name, default in (("stable", STABLE), ("decay", "linear")):
            if self.schedule != "wsd" and getattr(self, name) != default:
                problem = f"train.{name} has no effect on a {self.schedule} schedule, only on wsd: leave it out"
                raise InputError(problem, key=f"train.{name}")

    def evaluated_at(self) -> list[int]:
        """Returns the steps after which the validation split is measured."""
        return [round(self.steps * (i + 1) / self.evaluations) for i in range(self.evaluations)]

    def learning_rate(self, step: float) -> float:
        """Returns the learning rate of the update that follows `step` updates.

        Examples:
            >>> spec = TrainSpec(steps=100, batch_size=1, lr=1.0)
            >>> [round(spec.learning_rate(step), 3) for step in (0, 9, 10, 55, 100)]
            [0.1, 1.0, 1.0, 0.5, 0.0]
        """
        return learning_rate(
            self.lr,
            step,
            self.steps,
            warmup=round(self.warmup * self.steps),
            kind=self.schedule,
            final=self.final,
            stable=self.stable,
            decay=self.decay,
        )


def stackable(first: tuple[ModelSpec, TrainSpec], second: tuple[ModelSpec, TrainSpec]) -> bool:
    """Returns whether two trials of a task can train together, as rows of one stack.

    They may differ only in what each row has for itself: `OF_A_ROW`, and the values that gates start at.

    Examples:
        >>> model, spec = ModelSpec(rule="comba", vocab_size=16), TrainSpec(steps=10, batch_size=4, lr=1e-2)
        >>> stackable((model, spec), (model, replace(spec, lr=1e-3)))
        True
        >>> stackable((model, spec), (model, replace(spec, batch_size=8)))
        False
        >>> stackable((model, spec), (replace(model, rule={"name": "comba", "d": {"head": {"init": 1}}}), spec))
        True
    """
    numbers = {name: getattr(first[1], name) for name in OF_A_ROW}
    if replace(second[1], **numbers) != first[1] or replace(second[0], rule=first[0].rule) != first[0]:
        return False
    rule, other_rule = first[0].make_rule(), second[0].make_rule()
    return type(rule) is type(other_rule) and all(
        _alike(value, other_rule.knobs()[name]) for name, value in rule.knobs().items()
    )


def _alike(first: object, second: object) -> bool:
    """Returns whether two knobs are equal. Two gates are equal even if their parameters start at different values."""
    if not isinstance(first, Gate) or not isinstance(second, Gate):
        return first == second

    def function(gate: Gate) -> tuple[object, ...]:
        closed = getattr(gate.value, "__closure__", None) or ()
        code = getattr(gate.value, "__code__", gate.value)
        return code, [cell.cell_contents for cell in closed], gate.per, gate.rank, gate.of, list(gate.parameters)

    return function(first) == function(second)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
