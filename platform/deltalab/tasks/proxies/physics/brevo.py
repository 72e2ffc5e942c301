"""Brevo: all ancestors of a node in a graph, in topological order. Tests the breadth of reasoning without words."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.proxies.task import Proxy
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch


@dataclass(frozen=True, kw_only=True)
class Brevo(Proxy):
    """Brevo of *Physics of Language Models*: name the ancestors of a node, parents before children.

    n = `nodes` nodes are distinct tokens from [0, `names`). The first r of them have no parents, with r uniform in
    1 ... (n - 1)//4 + 1. Each later node i has d parents among the nodes before it, with d uniform in
    1 ... min(i, `parents`). The edges stand as parent child in random order among blank pairs, which fill up to the
    most edges that there can be. Then QUERY q ANSWER a1 a2 ... follow, where q is the last node, and the targets from
    ANSWER on are its ancestors: next is always the one of which all parents have been named, and of several the one
    that stands first among the edges. Tokens `names` to `names` + 2 are QUERY, ANSWER and the blank.

    The metric is accuracy over the ancestors. `chance` is the accuracy of naming any token, 1/`names`.

    What separates rules: before the first answer, a model must find all ancestors and the sources among them, which
    takes as many layers as the graph is deep, or a state that updates sets of nodes as edges come. Edges come in random
    order, so that one pass over them with a linear state does not give what is reached in several steps.

    As in the source: how the graph is drawn, edges in random order, the query of the last node, teacher forcing.
    Different: any number of children; one of several right orders is the right one; q itself and the end are not
    asked, since they need no graph; n is fixed, and a node is one token.

    Attributes:
        nodes: n.
        parents: The most parents of a node.
        names: The number of tokens that can be nodes.

    Raises:
        InputError: There are fewer than 4 nodes, no parents, or fewer `names` than nodes.

    Examples:
        >>> batch = Brevo(nodes=4, parents=2, names=6).batch("train", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[1, 3, 8, 8, 3, 4, 8, 8, 3, 5, 6, 5, 7, 1, 3]])
        >>> batch.targets[:, -3:]
        tensor([[   1,    3, -100]])

    References:
        Allen-Zhu 2025, Physics of Language Models: Part 4.1, ssrn.5240330, task Brevo; github.com/facebookresearch/
        PhysicsLM4.
    """

    name: ClassVar[str] = "brevo"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"nodes": 8, "parents": 2, "names": 16}

    nodes: int = 10
    parents: int = 3
    names: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.nodes >= 4, "nodes", "must be at least 4")
        self.require(self.parents >= 1, "parents", "must be at least 1")
        self.require(self.names >= self.nodes, "names", f"must be at least nodes = {self.nodes}")

    @property
    def _edges(self) -> int:
        """The most edges that there can be."""
        return sum(min(i, self.parents) for i in range(self.nodes))

    @property
    def length(self) -> int:
        return 2 * self._edges + 3 + self.nodes - 2

    @property
    def vocab_size(self) -> int:
        return self.names + 3

    @property
    def most_scored(self) -> int:
        return self.nodes - 1

    @property
    def chance(self) -> float:
        return 1 / self.names

    def draw(self, split: str, size: int, random: Random) -> Batch:
        query, answer, blank = range(self.names, self.names + 3)
        nodes = self.nodes
        names = random.distinct("names", self.names, size, nodes)
        parent, child, there = self._graph(size, random)
        order = random.distinct("order", self._edges, size, self._edges)
        parent, child, there = (x.gather(1, order) for x in (parent, child, there))

        # Where each node stands first; edges that are not there write behind the last node.
        place = 2 * torch.arange(self._edges, device=random.device).expand(size, -1)
        ends = torch.where(there[:, None], torch.stack([parent, child], dim=1), nodes)
        never = torch.full((size, nodes + 1), 2 * self._edges, device=random.device)
        first = never.scatter_reduce(1, ends.flatten(1), torch.cat([place, place + 1], dim=1), "amin")[:, :nodes]

        # has_parent[b, i, j]: j is a parent of i.
        index = torch.where(there, child * nodes + parent, nodes**2)
        has_parent = torch.zeros(size, nodes**2 + 1, dtype=torch.bool, device=random.device)
        has_parent = has_parent.scatter(1, index, True)[:, :-1].view(size, nodes, nodes)
        found = in_order(has_parent, first)
        named = torch.where(found < 0, blank, names.gather(1, found.clamp(min=0)))

        pairs = torch.stack([parent, child], dim=2).flatten(1)
        edges = torch.where(there.repeat_interleave(2, dim=1), names.gather(1, pairs), blank)
        asked = names[:, -1:]
        marks = (torch.full_like(asked, mark) for mark in (query, answer))
        inputs = torch.cat([edges, next(marks), asked, next(marks), named[:, :-1]], dim=1)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, -named.shape[1] :] = torch.where(found < 0, IGNORE, named)
        return Batch(inputs, targets)

    def _graph(self, size: int, random: Random) -> tuple[Tensor, Tensor, Tensor]:
        """Returns parent, child and whether there is such an edge, [B, `_edges`]."""
        nodes = self.nodes
        child, nth = _slots(nodes, self.parents, random.device)
        roots = 1 + random.integers("roots", (nodes - 1) // 4 + 1, size, 1)
        node = torch.arange(nodes, device=random.device)
        count = 1 + random.integers("count", node.clamp(1, self.parents), size, nodes)
        chosen = random.integers("parents", 2**62, size, nodes, nodes)
        ranked = torch.where(node >= node[:, None], 2**62, chosen).sort(dim=2, stable=True).indices
        parent = ranked.flatten(1)[:, child * nodes + nth]
        there = (nth < count[:, child]) & (child >= roots)
        return parent, child.expand(size, -1), there


def in_order(has_parent: Tensor, first: Tensor) -> Tensor:
    """Returns the ancestors of the last node, parents before children, and -1 behind them, [B, n - 1].

    Args:
        has_parent: Whether node j is a parent of node i, [B, i, j].
        first: The number of each node, [B, n]; of several nodes that can be next, the one with the least is.

    Examples:
        >>> parents = torch.zeros(1, 4, 4, dtype=torch.bool)
        >>> parents[0, [3, 3, 1], [1, 0, 0]] = True
        >>> in_order(parents, torch.tensor([[9, 8, 7, 6]]))
        tensor([[ 0,  1, -1]])
    """
    nodes = has_parent.shape[1]
    wanted = has_parent[:, -1]
    for _ in range(nodes - 2):
        wanted = wanted | (has_parent & wanted[:, :, None]).any(1)
    found = []
    for _ in range(nodes - 1):
        ready = wanted & ~(has_parent & wanted[:, None]).any(2)
        choice = torch.where(ready, first, 2**31).argmin(1, keepdim=True)
        found.append(torch.where(ready.any(1, keepdim=True), choice, -1))
        wanted = wanted & (torch.arange(nodes, device=first.device) != found[-1])
    return torch.cat(found, dim=1)


@cache
def _slots(nodes: int, parents: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the child of each edge that there can be, and which of its parents the edge is for."""
    slots = [(child, nth) for child in range(nodes) for nth in range(min(child, parents))]
    child, nth = torch.tensor(slots).T
    return child.to(device), nth.to(device)
