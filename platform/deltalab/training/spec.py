"""How a model is trained, as data, and which trainings are alike enough to run as one."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from deltalab.errors import InputError, unknown
from deltalab.gates import Gate
from deltalab.models.spec import ModelSpec

MOST = {"steps": 10**9, "batch_size": 2**20, "evaluations": 10**5, "eval_batches": 10**6}
"""The most that a whole number of a training may be."""
MOST_RATE = 1e38
"""The most that lr, weight_decay and clip may be."""


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """How to train, as data: AdamW, linear warm-up, cosine decay to 0, clipping of the gradient's norm.

    steps: batches to train on. batch_size: sequences of a batch. lr: the largest learning rate. weight_decay: AdamW's.
    warmup: share of the steps. clip: largest norm of the gradient, 0 for none. betas: AdamW's.
    evaluations: how often the validation split is measured, evenly spaced, the last time at the end.
    eval_batches: batches of `batch_size` in the fixed validation split, and again in the test split.
    precision: `bf16` is autocast over fp32 weights; `auto` is bf16 on a GPU and fp32 on a CPU.
    device: `auto` is a GPU where there is one.

    Raises `InputError` for values out of range, such as no steps or a negative rate.
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
            if value > MOST[name]:
                raise InputError(f"train.{name} must be at most {MOST[name]:,}, not {value:,}")
        for name, high in (("lr", MOST_RATE), ("weight_decay", MOST_RATE), ("warmup", 1), ("clip", MOST_RATE)):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= high:
                raise InputError(f"train.{name} must be a finite number from 0 to {high:g}, not {value!r}")
            # Equal values are one trial: 1 and 1.0.
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
        """The learning rate of the update that follows `step` updates.

        >>> spec = TrainSpec(steps=100, batch_size=1, lr=1.0)
        >>> [round(spec.learning_rate(step), 3) for step in (0, 9, 10, 55, 100)]
        [0.1, 1.0, 1.0, 0.5, 0.0]
        """
        warm = round(self.warmup * self.steps)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(self.steps - warm, 1)))


def stackable(one: tuple[ModelSpec, TrainSpec], other: tuple[ModelSpec, TrainSpec]) -> bool:
    """Whether two trials of a task can train together, as rows of one stack.

    They may differ only in numbers that each row has for itself: lr, weight_decay, warmup, clip, betas, and the values
    that gates start at.

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
    """Whether two knobs are equal. Gates are, if they are the same function of parameters, wherever these start."""
    if not isinstance(one, Gate) or not isinstance(other, Gate):
        return one == other

    def function(gate: Gate) -> tuple[object, ...]:
        closed = getattr(gate.value, "__closure__", None) or ()
        code = getattr(gate.value, "__code__", gate.value)
        return code, [cell.cell_contents for cell in closed], gate.per, gate.rank, gate.of, list(gate.parameters)

    return function(one) == function(other)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
