"""The contract of a task: batches that depend on nothing but their address, and the metrics of an evaluation."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import index
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional

from deltalab.errors import InputError, unknown
from deltalab.tasks.randomness import Random

IGNORE = -100
"""The target at positions that are not scored."""

SPLITS = ("train", "validation", "test")

MOST = 2**31 - 1
"""The most that a whole number among a task's parameters may be, without its sign."""
MOST_LENGTH = 2**20
"""The most tokens of a sequence, in training and in evaluation."""
MOST_VOCABULARY = 2**24
"""The most tokens that a task may tell apart."""

_IN_WORDS: dict[type, str] = {
    bool: "true or false", int: "an integer", float: "a finite number", str: "text", NoneType: "null",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Batch:
    """`inputs [B, T]` and `targets [B, T]`, int64. The model is to predict `targets[:, t]` at position t (they are
    shifted already); `IGNORE` marks positions that are not scored."""

    inputs: Tensor
    targets: Tensor

    @cached_property
    def labels(self) -> Tensor:
        """The targets that are scored, [N], row-major. Computed once: counting them waits for a GPU."""
        return self.targets[self.targets != IGNORE]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A proxy task. Its dataclass fields are its parameters, as a study file gives them.

    A subclass states `name`, `version`, `metric` and `maximize`, whether a larger metric is better. It provides
    `vocab_size` and `length` (as parameters or as properties), `chance`, `draw` and `measure`. It checks its parameters
    with `require` in `__post_init__`, after `super().__post_init__()` has checked their types. Raise `version` whenever
    a batch or a metric changes.

    Raises `InputError` for a parameter of the wrong type or against the task's rules.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    metric: ClassVar[str]
    maximize: ClassVar[bool]
    bounds: ClassVar[tuple[float, float] | None] = None
    """The least and the greatest value of `metric`; None if it has no such. Intervals of the report stay inside."""
    example: ClassVar[Mapping[str, object]] = {}
    """Parameters for showing and checking a task that cannot be made without any."""
    readout: ClassVar[str] = "position"
    """The `ModelSpec.readout` that the task needs: where the logits of a position are read from."""

    if TYPE_CHECKING:  # a real property would stand in the way of a parameter of the same name

        @property
        def vocab_size(self) -> int:
            """Tokens are integers in [0, vocab_size)."""

        @property
        def length(self) -> int:
            """T, the tokens in a sequence."""

        @property
        def train_examples(self) -> int | None:
            """The number of examples that a seed trains on; each batch draws from them with replacement. None where
            every example is new. With a number, each row of `draw` must depend on its own row of `random` alone."""

    else:
        train_examples = None

    @property
    def train_tokens(self) -> int | None:
        """The tokens that a seed can train on, if they are finitely many. A plan divides a run's tokens by them."""
        return None if self.train_examples is None else self.train_examples * self.length

    @property
    def most_scored(self) -> int:
        """The most positions of a training example that are scored: no logits are computed for others."""
        return self.length

    @property
    @abstractmethod
    def chance(self) -> float:
        """The `metric` of a model that has learned only which tokens can be answers."""

    @abstractmethod
    def draw(self, split: str, size: int, random: Random) -> Batch:
        """Draws `size` examples on `random.device`, from nothing but `random`."""

    @abstractmethod
    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Metric -> (total, count), 0-dim. An evaluation divides the sum of totals of its batches by that of counts.

        `logits [N, vocab_size]` belong to the positions where `batch.targets != IGNORE`, row-major. Among the
        keys are `metric` and "loss" (nats per scored token). A count may be 0 in a batch.
        """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for parameter in fields(self):
            kind, value = hints[parameter.name], getattr(self, parameter.name)
            kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
            # Equal values are one trial: 1 and 1.0, and a tuple and the list that JSON makes of it.
            value = float(value) if float in kinds and type(value) is int else _frozen(value)
            object.__setattr__(self, parameter.name, value)
            self.require(_fits(value, kind), parameter.name, f"must be {_in_words(kind)}")
            self.require(_small(value), parameter.name, f"must be between -{MOST:,} and {MOST:,}")
            if parameter.name in ("length", "vocab_size"):
                most = MOST_LENGTH if parameter.name == "length" else MOST_VOCABULARY
                self.require(not isinstance(value, int) or value <= most, parameter.name, f"must be at most {most:,}")

    def require(self, right: bool, parameter: str, rule: str) -> None:
        """Raises `InputError` naming the task, the parameter, the rule that it breaks and its value."""
        if not right:
            value = getattr(self, parameter)
            raise InputError(f"task '{self.name}': parameter '{parameter}' {rule}, not {value!r}")

    def batch(self, split: str, size: int, seed: int, step: int, device: torch.device | str = "cpu") -> Batch:
        """Batch number `step` of the stream `seed` of a split. The integers are the same on every device, and do not
        depend on earlier draws.

        Raises `InputError` for an unknown split or a size below 1.
        """
        if split not in SPLITS:
            raise unknown("split", split, SPLITS, where=f"task '{self.name}'")
        if size < 1:
            raise InputError(f"task '{self.name}': a batch has at least 1 example, not {size}")
        now, pool = (Random(self.address(split, seed, at), torch.device(device)) for at in (step, "pool"))
        return self.drawn(split, size, now, pool)

    def address(self, split: str, seed: int, step: int | str) -> str:
        """The address of a batch's random numbers; with "pool" as the step, of those of the `train_examples`."""
        at = step if isinstance(step, str) else int(index(step))
        return f"{self.name}/{self.version}/{split}/{int(index(seed))}/{at}"

    def drawn(self, split: str, size: int, now: Random, pool: Random) -> Batch:
        """Draws new examples from `now`, or, with `train_examples`, the examples of `pool` that `now` chooses."""
        if split != "train" or self.train_examples is None:
            return self.draw(split, size, now)
        return self.draw(split, size, replace(pool, rows=now.integers("examples", self.train_examples, size)))

    def evaluations(self) -> Mapping[str, "Task"]:
        """Label -> the task that validation and test draw from, of the same `vocab_size`.

        Override it for a task that is judged at other lengths or settings than it trains at. Metrics of a label are
        recorded as METRIC@LABEL, such as accuracy@128, and METRIC is over all labels together. With a label "",
        METRIC is over that one alone.
        """
        return {"": self}

    def evaluated(self, other: "Task", split: str, size: int, batches: int) -> tuple[int, int]:
        """The size and number of the batches of a split that `other`, one of `evaluations`, is measured on, where a
        study gives `size` and `batches`. Override it to measure longer examples on fewer of them, or with 0 batches
        on the test split alone."""
        return size, batches

    def fed_by_cpu(self, device: torch.device) -> bool:
        """Whether `device` cannot hold the training data: the CPU then draws the batches and sends them."""
        return False

    def fingerprint(self) -> str:
        """SHA-256 of the data that the task reads, which is part of a trial's identity; "" for generated data."""
        return ""


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _small(value: object) -> bool:
    """Whether no whole number in it is larger than `MOST`."""
    return all(map(_small, value)) if isinstance(value, tuple) else not isinstance(value, int) or abs(value) <= MOST


def _fits(value: object, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        items = get_args(kind)
        if not isinstance(value, tuple):
            return False
        if items[-1] is Ellipsis:
            return all(_fits(item, items[0]) for item in value)
        return len(value) == len(items) and all(map(_fits, value, items))
    return type(value) is kind and not (isinstance(value, float) and not math.isfinite(value))


def _in_words(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return " or ".join(map(_in_words, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"[{', '.join('...' if item is Ellipsis else _in_words(item) for item in get_args(kind))}]"
    if kind not in _IN_WORDS:
        raise InputError(f"a parameter of a task is a bool, int, float, str or None, or a tuple of such, not {kind!r}")
    return _IN_WORDS[kind]


def surprisal(batch: Batch, logits: Tensor) -> Tensor:
    """-log softmax(logits)[target] in nats, `[N]`, for `logits [N, V]` at the scored positions of `batch`."""
    return functional.cross_entropy(logits.float(), batch.labels, reduction="none")
