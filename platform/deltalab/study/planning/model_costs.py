"""Counts what a model holds and computes on one block of each kind, so that hundreds of models take seconds."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from deltalab.models.layer import LayerCache
from deltalab.models.model import Model
from deltalab.models.spec import ModelSpec

SAMPLE = 16
"""Tokens that a block is run on."""
MOST_COMPUTED = 2**21
"""Elements of one matrix of a block, or of the products of its queries and keys. A block with larger ones is counted
without numbers, on PyTorch's device `meta`, which takes longer for small blocks and no memory for large ones."""
UNEVEN = 0.05
"""The share of the base's state, parameters or flops by which an arm may differ without being marked."""


@dataclass(frozen=True)
class Sizes:
    """A model on sequences of T tokens.

    parameters: elements that are trained. state_size: elements held for one sequence after T tokens.
    flops_per_token: of the matrix products of a forward pass, without embedding and logits.
    """

    parameters: int
    state_size: int
    flops_per_token: float

    def named(self) -> dict[str, float]:
        """
        >>> Sizes(parameters=9, state_size=4, flops_per_token=2.5).named()
        {'state': 4, 'parameters': 9, 'flops': 2.5}
        """
        return {"state": self.state_size, "parameters": self.parameters, "flops": self.flops_per_token}


def uneven(base: Sizes, arm: Sizes) -> list[tuple[str, float]]:
    """The quantities in which an arm differs from the base by more than `UNEVEN`, each with the arm's over the base's.

    A quantity that only the arm has is infinitely many times the base's.

    >>> uneven(Sizes(100, 800, 50.0), Sizes(104, 2624, 25.0))
    [('state', 3.28), ('flops', 0.5)]
    """
    both = [(name, ours, arm.named()[name]) for name, ours in base.named().items()]
    apart = [(name, ours, theirs) for name, ours, theirs in both if abs(theirs - ours) > UNEVEN * ours]
    return [(name, theirs / ours if ours else math.inf) for name, ours, theirs in apart]


class Sizer:
    """Sizes of models; each kind of block is built and run once, and `built` counts them.

    `parameters` and `state_size` are exact. A state is run to T only where one more token makes it larger.
    `flops_per_token` leaves out what a chunk longer than `SAMPLE` adds.
    """

    def __init__(self) -> None:
        self.built = 0
        self._blocks: dict[tuple[str, int | None], _Blocks] = {}

    def sizes(self, model: ModelSpec, length: int) -> Sizes:
        """Counts a model at `length` tokens. Raises what the model raises when it is built or run."""
        alike: dict[str, list[ModelSpec]] = {}
        for layer in range(model.depth):
            one = replace(model.at(layer), vocab_size=1)
            alike.setdefault(repr(one), []).append(one)
        kinds = [(len(same), self._block(same[0], length)) for same in alike.values()]
        # Each token of the vocabulary has a row in the embedding, and one in the output matrix unless they are tied.
        rows = (model.vocab_size - 1) * (1 if model.tie_embeddings else 2)
        return Sizes(
            parameters=kinds[0][1].ends + rows * model.d_model + sum(n * block.parameters for n, block in kinds),
            state_size=sum(n * block.state_size for n, block in kinds),
            flops_per_token=sum(n * block.flops_per_token for n, block in kinds),
        )

    def _block(self, model: ModelSpec, length: int) -> "_Blocks":
        sample = self._counted(model, None if length > SAMPLE else length)
        return self._counted(model, length) if sample.grows else sample

    def _counted(self, model: ModelSpec, length: int | None) -> "_Blocks":
        key = repr(model), length
        if key not in self._blocks:
            self.built += 1
            self._blocks[key] = _count(model, length)
        return self._blocks[key]


@dataclass(frozen=True)
class _Blocks:
    """One of the equal blocks of a model.

    ends: parameters outside of the blocks. grows: whether the state was larger one token later.
    """

    ends: int
    parameters: int
    state_size: int
    flops_per_token: float
    grows: bool


@torch.no_grad()
def _count(model: ModelSpec, length: int | None) -> _Blocks:
    """Counts after `length` tokens, or after `SAMPLE` and one more where None."""
    width = model.heads * sum(model.head_dims)
    largest = max(
        model.d_model * max(width, model.mlp_width or 3 * model.d_model), model.heads * (length or 0) ** 2 // 8
    )
    device = torch.device("meta" if largest > MOST_COMPUTED else "cpu")
    with device:
        network = Model(model)
    held, flops, cache = _run(network, length or SAMPLE, device)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    grows = length is None and _held(network.hidden(token, cache)[1]) != held
    inside = sum(p.numel() for p in network.blocks.parameters())
    ends = sum(p.numel() for p in network.parameters()) - inside
    return _Blocks(ends, inside // model.depth, held // model.depth, flops / model.depth, grows)


def _run(network: Model, length: int, device: torch.device) -> tuple[int, float, list[LayerCache]]:
    """Elements held after `length` tokens, the flops of each token, and what is held."""
    # Other attentions of a CPU hide their products from the counter.
    with sdpa_kernel(SDPBackend.MATH), _Flops() as counter:
        _, cache = network.hidden(torch.zeros(1, length, dtype=torch.long, device=device))
    return _held(cache), counter.total / length, cache


class _Flops(TorchDispatchMode):
    """Counts what PyTorch's `FlopCounterMode` counts, without loading the compiler, which takes seconds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would load the compiler, to tell it to leave this class alone.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.total += flops(*args, **kwargs, out_val=out)
        return out


def _held(cache: list[LayerCache]) -> int:
    return sum(layer.numel() for layer in cache)
