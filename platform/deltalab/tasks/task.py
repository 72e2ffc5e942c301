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
"""The largest absolute value of a whole number among a task's parameters."""
MOST_LENGTH = 2**20
"""The largest number of tokens in a sequence, in training and in evaluation."""
MOST_VOCABULARY = 2**24
"""The largest number of tokens that a task tells apart."""

_IN_WORDS: dict[type, str] = {
    bool: "true or false", int: "an integer", float: "a finite number", str: "text", NoneType: "null",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of tokens, and the token to predict at each position; or images, and their classes.

    Attributes:
        inputs: The tokens, int64 [B, T]. For a task with `patches`, the patches of images, float32 [B, T, D].
        targets: The token to predict at each position, int64 [B, T], which is shifted already: the model predicts
            `targets[:, t]` at position t. `IGNORE` marks positions that are not scored.
    """

    inputs: Tensor
    targets: Tensor

    @cached_property
    def labels(self) -> Tensor:
        """The targets that are scored, [N], row-major. They are computed once, because their count waits for a GPU."""
        return self.targets[self.targets != IGNORE]


MARGINS = dict.fromkeys(("accuracy", "scaled_accuracy", "exact_match", "sequence_accuracy", "bits_per_byte"), 0.01)
"""The least difference of a metric that matters, where neither a study nor its task says: a point of accuracy, or 0.01
bits."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A proxy task, whose dataclass fields are its parameters, as a study file writes them.

    A subclass declares `name`, `version`, `metric` and `maximize`. It has `vocab_size` and `length` as parameters or as
    properties, and it defines `chance`, `draw` and `measure`. It checks its parameters with `require` in
    `__post_init__`, after `super().__post_init__()` has checked their types.

    Attributes:
        name: The name of the task in a study file.
        version: A number to raise with every change of a batch or a metric.
        metric: The name of the metric that decides.
        maximize: Whether a larger metric is better.

    Raises:
        InputError: A parameter has the wrong type or breaks a rule of the task.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    metric: ClassVar[str]
    maximize: ClassVar[bool]
    bounds: ClassVar[tuple[float, float] | None] = None
    """The least and the greatest value of `metric`, which intervals of the report stay within; None without bounds."""
    example: ClassVar[Mapping[str, object]] = {}
    """Parameters to show and to check a task that cannot be made without any."""
    readout: ClassVar[str] = "position"
    """The `ModelSpec.readout` that the task needs."""
    shortcuts: ClassVar[frozenset[str]] = frozenset()
    """The ways to an answer that the task means to teach, which `task check` else takes for mistakes.

    `distance`: the answer stands at a fixed distance before the question, as in a copy. `class`: one plain number, such
    as a count of tokens, decides it. `facts`: a pair of tokens has the same answer in all splits.
    """

    if TYPE_CHECKING:  # a real property would forbid a parameter of the same name

        @property
        def vocab_size(self) -> int:
            """The number of tokens, which are the integers in [0, vocab_size)."""

        @property
        def length(self) -> int:
            """T, the number of tokens in a sequence."""

        @property
        def ceiling(self) -> float | None:
            """The best `metric` that any model can have, whatever noise the answers have; None where it is not stated.

            Without noise, where the inputs decide every answer, it is that of right answers alone.
            """

        @property
        def train_examples(self) -> int | None:
            """The number of examples that a seed trains on; None if every example is new.

            Each batch draws from these examples with replacement. Each row of `draw` must then depend on its own row of
            `random` alone.
            """

        @property
        def patches(self) -> tuple[int, int, int] | None:
            """The rows and columns of an image's patches, and the numbers of a patch; None for tokens.

            `length` is then rows x columns, `vocab_size` the number of classes, and the class is the target of the
            last patch.
            """

    else:
        ceiling = None
        train_examples = None
        patches = None

    @property
    def margin(self) -> float:
        """The least difference of `metric` that matters, unless a study says otherwise; 0 if any difference does."""
        return MARGINS.get(self.metric, 0.0)

    @property
    def train_tokens(self) -> int | None:
        """The tokens that a seed can train on; None without a bound. A plan divides a run's tokens by this number."""
        return None if self.train_examples is None else self.train_examples * self.length

    @property
    def most_scored(self) -> int:
        """The largest number of scored positions in a training example. Other positions get no logits."""
        return self.length

    @property
    @abstractmethod
    def chance(self) -> float:
        """The `metric` of a model that has only learned which tokens can be answers."""

    @abstractmethod
    def draw(self, split: str, size: int, random: Random) -> Batch:
        """Draws examples on `random.device`, from nothing but `random`.

        Args:
            split: The split, one of `SPLITS`.
            size: The number of examples.
            random: The random numbers.
        """

    @abstractmethod
    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Measures the metrics on a batch.

        An evaluation divides the sum of the totals of its batches by the sum of the counts.

        Args:
            batch: The batch.
            logits: The logits at the N positions where `batch.targets != IGNORE`, row-major, [N, vocab_size].

        Returns:
            Metric -> (total, count), 0-dim each. Among the metrics are `metric` and "loss", in nats per scored token. A
                count may be 0. Reports show the metrics other than `metric`, and test none of them.
        """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for parameter in fields(self):
            kind, value = hints[parameter.name], getattr(self, parameter.name)
            kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
            # Equal values must give the same trial: 1 and 1.0, or a tuple and the list that JSON makes of the tuple.
            value = float(value) if float in kinds and type(value) is int else _frozen(value)
            object.__setattr__(self, parameter.name, value)
            self.require(_fits(value, kind), parameter.name, f"must be {_in_words(kind)}")
            self.require(_small(value), parameter.name, f"must be between -{MOST:,} and {MOST:,}")
            if parameter.name in ("length", "vocab_size"):
                largest = MOST_LENGTH if parameter.name == "length" else MOST_VOCABULARY
                self.require(
                    not isinstance(value, int) or value <= largest, parameter.name, f"must be at most {largest:,}"
                )

    def require(self, right: bool, parameter: str, rule: str) -> None:
        """Checks a rule about a parameter.

        Args:
            right: Whether the rule holds.
            parameter: The name of the parameter.
            rule: The rule, as the message says it: "must be even".

        Raises:
            InputError: The rule does not hold. The message names the task, the parameter, the rule and the value.
        """
        if not right:
            value = getattr(self, parameter)
            problem = f"parameter '{parameter}' {rule}, not {value!r}"
            raise InputError(problem, where=f"task '{self.name}'", key=parameter)

    def batch(self, split: str, size: int, seed: int, step: int, device: torch.device | str = "cpu") -> Batch:
        """Returns a batch, which is the same on every device and does not depend on earlier draws.

        Args:
            split: The split, one of `SPLITS`.
            size: The number of examples.
            seed: The stream of batches.
            step: The number of the batch in its stream.
            device: The device of the batch.

        Raises:
            InputError: The split does not exist, or the size is below 1.
        """
        if split not in SPLITS:
            raise unknown("split", split, SPLITS, where=f"task '{self.name}'")
        if size < 1:
            raise InputError(f"task '{self.name}': a batch has at least 1 example, not {size}")
        now, pool = (Random(self.address(split, seed, at), torch.device(device)) for at in (step, "pool"))
        return self.drawn(split, size, now, pool)

    def address(self, split: str, seed: int, step: int | str) -> str:
        """Returns the address of a batch's random numbers.

        The step "pool" gives the address from which the `train_examples` are drawn.
        """
        at = step if isinstance(step, str) else int(index(step))
        return f"{self.name}/{self.version}/{split}/{int(index(seed))}/{at}"

    def drawn(self, split: str, size: int, now: Random, pool: Random) -> Batch:
        """Draws a batch of new examples from `now`; with `train_examples`, `now` chooses examples of `pool`."""
        if split != "train" or self.train_examples is None:
            return self.draw(split, size, now)
        return self.draw(split, size, replace(pool, rows=now.integers("examples", self.train_examples, size)))

    def evaluations(self) -> Mapping[str, "Task"]:
        """Returns the tasks that validation and test draw from, by label, with the same `vocab_size`.

        Override this method for a task that is judged at other lengths or settings than it trains at. The metrics of a
        label are recorded as METRIC@LABEL, such as accuracy@128, and METRIC is over all labels together. If there is a
        label "", METRIC is over this label alone.
        """
        return {"": self}

    def evaluated(self, other: "Task", split: str, size: int, batches: int) -> tuple[int, int]:
        """Returns the size and the number of the batches on which one of the `evaluations` is measured.

        Override this method to measure fewer of longer examples. With 0 batches for validation, the test split alone is
        measured.

        Args:
            other: The task of the evaluation.
            split: The split.
            size: The size of a batch in the study.
            batches: The number of batches in the study.
        """
        return size, batches

    def fed_by_cpu(self, device: torch.device) -> bool:
        """Returns whether a device cannot hold the training data. The CPU then draws the batches and sends them."""
        return False

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the data that the task reads, a part of a trial's identity; "" for generated data."""
        return ""


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _small(value: object) -> bool:
    """Returns whether no whole number in a value is larger than `MOST`."""
    return all(map(_small, value)) if isinstance(value, tuple) else not isinstance(value, int) or abs(value) <= MOST


def _fits(value: object, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_fits(value, option) for option in get_args(kind))
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
    """Returns -log softmax(logits)[target] in nats, [N].

    Args:
        batch: The batch.
        logits: The logits at its N scored positions, [N, V].
    """
    return functional.cross_entropy(logits.float(), batch.labels, reduction="none")


def one_answer(batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns sums and counts of accuracy and loss, where each sequence has one target, at its last token.

    Args:
        batch: The batch.
        logits: The logits at those targets, [B, V].
    """
    right = (logits.argmax(-1) == batch.targets[:, -1]).double()
    nats = surprisal(batch, logits).double()
    count = nats.new_tensor(len(nats))
    return {"accuracy": (right.sum(), count), "loss": (nats.sum(), count)}
