"""Depo: the k-th successor in a cycle that is given as shuffled pairs. Tests the depth of reasoning without words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.proxies.task import Proxy
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch


@dataclass(frozen=True, kw_only=True)
class Depo(Proxy):
    """Depo of *Physics of Language Models*: which node is k steps after q?

    n = `nodes` distinct tokens from [0, `names`) form a cycle x1 -> x2 -> ... -> xn -> x1. The sequence has its n pairs
    x(i) x(i+1) in random order, and then `queries` questions k q a, where q is a node that was not asked before, k is
    uniform in 1 ... `hops`, and the target at q is a, the node k steps after q. Token `names` + k - 1 stands for k.

    The metric is accuracy. `hops_1`, `hops_2`, ... are the accuracies at each k. `chance` is the accuracy of naming any
    token, 1/`names`; naming any node of the cycle has 1/n.

    What separates rules: each hop is a recall whose key is the result of the last, so that a model needs about log2(k)
    layers that compose pairs, or k layers that look up (Sanford et al. 2024, arXiv:2402.09268). A recurrent rule must
    also hold n pairs without interference: an error of one recall is the key of the next.

    As in the source: pairs of one cycle in random order, uniform k, distinct nodes in the questions, answers that stay
    in the context. Different: n is fixed, a node is one token, and only its answer is scored.

    Attributes:
        nodes: n.
        hops: The greatest k.
        queries: The number of questions.
        names: The number of tokens that can be nodes.

    Raises:
        InputError: There are fewer than 3 nodes, `hops` or `queries` are outside of [1, n), or `names` are below n.

    Examples:
        >>> batch = Depo(nodes=4, hops=2, queries=2, names=6).batch("train", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[2, 3, 1, 5, 3, 1, 5, 2, 6, 5, 2, 6, 1, 5]])
        >>> batch.targets[:, 8:]
        tensor([[-100,    2, -100, -100,    5, -100]])

    References:
        Allen-Zhu 2025, Physics of Language Models: Part 4.1, ssrn.5240330, task Depo; github.com/facebookresearch/
        PhysicsLM4.
    """

    name: ClassVar[str] = "depo"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"nodes": 8, "hops": 2, "queries": 4, "names": 16}

    nodes: int = 16
    hops: int = 4
    queries: int = 8
    names: int = 48

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.nodes >= 3, "nodes", "must be at least 3")
        for name in ("hops", "queries"):
            inside = 1 <= getattr(self, name) < self.nodes
            self.require(inside, name, f"must be at least 1 and below nodes = {self.nodes}")
        self.require(self.names >= self.nodes, "names", f"must be at least nodes = {self.nodes}")

    @property
    def length(self) -> int:
        return 2 * self.nodes + 3 * self.queries

    @property
    def vocab_size(self) -> int:
        return self.names + self.hops

    @property
    def most_scored(self) -> int:
        return self.queries

    @property
    def chance(self) -> float:
        return 1 / self.names

    def draw(self, split: str, size: int, random: Random) -> Batch:
        cycle = random.distinct("cycle", self.names, size, self.nodes)
        order = random.distinct("order", self.nodes, size, self.nodes)
        pairs = torch.stack([cycle.gather(1, order), cycle.gather(1, (order + 1) % self.nodes)], dim=2)
        asked = random.distinct("asked", self.nodes, size, self.queries)
        more = random.integers("hops", self.hops, size, self.queries)
        answers = cycle.gather(1, (asked + more + 1) % self.nodes)
        questions = torch.stack([self.names + more, cycle.gather(1, asked), answers], dim=2)
        inputs = torch.cat([pairs.flatten(1), questions.flatten(1)], dim=1)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, 2 * self.nodes + 1 :: 3] = answers
        return Batch(inputs, targets)

    def kinds(self, batch: Batch) -> dict[str, Tensor]:
        hops = batch.inputs[:, :-1][batch.targets[:, 1:] != IGNORE] - self.names + 1
        return {f"hops_{k}": hops == k for k in range(1, self.hops + 1)}
