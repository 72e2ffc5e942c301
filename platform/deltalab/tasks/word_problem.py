"""Word problems of small groups: a model must track a permutation under steps that do not commute."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, permutations
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.errors import unknown
from deltalab.tasks.randomness import Random
from deltalab.tasks.splits import share_out, shared_from
from deltalab.tasks.task import Batch, Task, surprisal

GROUPS = {"S3": 3, "A5": 5, "S5": 5}
"""The number of points that the permutations of a group move."""


@dataclass(frozen=True, kw_only=True)
class WordProblem(Task):
    """The word problem of a group: the target at each position is the product of the inputs so far.

    Inputs x_1 ... x_L are uniform in a group G, and targets are y_i = y_{i-1} x_i with y_0 = 1. Token g is the g-th
    permutation of the group in lexicographic order, so that 0 is the identity. In a product, the left factor acts
    first.

    S3 is solvable. A5 and S5 are not, and their word problem is complete for NC1, out of reach for a fixed number of
    layers with diagonal transitions.

    The metrics are `sequence_accuracy`, the share of sequences with every y_i right, and `accuracy`, the share of right
    positions. `chance` is the `sequence_accuracy` of guesses, the mean of |G|^-L over `test_lengths`.

    A checksum decides whether a sequence belongs to training, validation or test (`share_out`).

    Attributes:
        group: The group: S3 (6 elements), A5 (60) or S5 (120), the permutations of 3 or 5 points, in A5 the even ones.
        length: L in training.
        test_lengths: L in validation and test, each under the label of the length. The metric is the mean over all.

    Raises:
        InputError: A length is below 4 (S3) or 2 (A5, S5), or `test_lengths` are empty or not distinct.

    Examples:
        >>> batch = WordProblem(group="S3", length=6).batch("train", 1, seed=0, step=0)
        >>> batch.inputs, batch.targets
        (tensor([[5, 5, 2, 4, 0, 2]]), tensor([[5, 0, 2, 1, 1, 3]]))

    References:
        Merrill, Petty and Sabharwal 2024, arXiv:2404.08819.
    """

    name: ClassVar[str] = "word_problem"
    version: ClassVar[int] = 1
    metric: ClassVar[str] = "sequence_accuracy"
    maximize: ClassVar[bool] = True
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    example: ClassVar[Mapping[str, object]] = {"group": "S3"}

    group: str
    length: int = 32
    test_lengths: tuple[int, ...] = (32, 64, 128, 256, 500)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group not in GROUPS:
            raise unknown("group", self.group, GROUPS, where=f"task '{self.name}'")
        least = shared_from(self.vocab_size)
        self.require(self.length >= least, "length", f"must be at least {least}")
        self.require(len(self.test_lengths) > 0, "test_lengths", "must name a length")
        self.require(min(self.test_lengths) >= least, "test_lengths", f"must all be at least {least}")
        self.require(len(set(self.test_lengths)) == len(self.test_lengths), "test_lengths", "must all be different")

    @property
    def vocab_size(self) -> int:
        return len(elements(self.group))

    @property
    def chance(self) -> float:
        return sum(float(self.vocab_size) ** -length for length in self.test_lengths) / len(self.test_lengths)

    def evaluations(self) -> Mapping[str, Task]:
        return {str(length): replace(self, length=length) for length in self.test_lengths}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        words = random.integers("words", self.vocab_size, size, self.length)
        whole = torch.full((size,), self.length, device=random.device)
        words = share_out(words, whole, self.vocab_size, split, random)
        # A round makes each place hold the product of the last 2 span words up to the place.
        table, products, span = _table(self.group, random.device), words.clone(), 1
        while span < self.length:
            products[:, span:] = table[products[:, :-span], products[:, span:]]
            span *= 2
        return Batch(words, products)

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        right = logits.argmax(-1).view_as(batch.targets) == batch.targets
        nats = surprisal(batch, logits).double()
        count = nats.new_tensor(len(nats))
        return {
            "sequence_accuracy": (right.all(1).double().sum(), nats.new_tensor(len(right))),
            "accuracy": (right.double().sum(), count),
            "loss": (nats.sum(), count),
        }


@cache
def elements(group: str) -> list[tuple[int, ...]]:
    """Returns the permutations of a group in lexicographic order. A permutation sends point i to element[i].

    Examples:
        >>> elements("S3")[:3], len(elements("A5")), len(elements("S5"))
        ([(0, 1, 2), (0, 2, 1), (1, 0, 2)], 60, 120)
    """
    all_permutations = permutations(range(GROUPS[group]))
    return [element for element in all_permutations if group != "A5" or _is_even(element)]


def _is_even(element: tuple[int, ...]) -> bool:
    return sum(a > b for a, b in combinations(element, 2)) % 2 == 0


@cache
def _table(group: str, device: torch.device) -> Tensor:
    """Returns the product of each row's element, which acts first, and each column's element, [n, n]."""
    group_elements = elements(group)
    number = {element: i for i, element in enumerate(group_elements)}
    rows = [[number[tuple(second[point] for point in first)] for second in group_elements] for first in group_elements]
    return torch.tensor(rows, device=device)
