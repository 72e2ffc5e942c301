"""Counts the parameters of a model that do nothing, such as the projection of a vector whose strength is zero."""

from dataclasses import replace

import torch

from deltalab.models.model import build_model
from deltalab.models.parts.experts import Experts
from deltalab.models.spec import ModelSpec

ROWS, TOKENS = 4, 32
"""How many random sequences a block reads, and how long they are. They reach every slot that a rule routes to."""
NOISE = 0.1
"""The standard deviation of what is added to each parameter. One that starts at zero may hide those before it."""
MOST_COUNTED = 2**24
"""Parameters of the largest block whose gradient is computed, for which a plan has 200 MB and seconds."""

MOST_TOKENS = 4096
"""The longest sequence that a block reads here."""

_known: dict[tuple[str, int], int] = {}
_sizes: dict[str, int] = {}


def dead_parameters(model: ModelSpec, length: int, *, retried: bool = True) -> int | None:
    """Counts the elements of the blocks' parameters whose gradient is zero, whatever `length` tokens a model reads.

    A layer makes the parameters of every gate and vector that its rule declares. If a study switches off what they act
    on, they stay, take part in nothing, and count as parameters. Each kind of block is tried once in a process.

    Args:
        model: The specification of the model.
        length: The tokens of a sequence. A block reads fewer if these reach all of its parameters.
        retried: Whether a block with dead parameters after few tokens may read all of them.

    Returns:
        The number of elements, over all blocks; None if a block has more than `MOST_COUNTED` parameters, if some are
        dead after few tokens and the sequence has more than `MOST_TOKENS` or may not be read, and on a machine with a
        GPU for a module of another author. What the model raises when it runs passes through.
    """
    kinds = model.kinds()
    if any(_size(block) > MOST_COUNTED for _, block in kinds):
        return None
    if model.foreign() and torch.cuda.is_available():
        return None  # a module may run on GPUs alone
    dead = [_of_block(block, length, retried) for _, block in kinds]
    return sum(count * (n or 0) for (count, _), n in zip(kinds, dead, strict=True)) if None not in dead else None


def tried_elements(model: ModelSpec) -> int:
    """Returns how many parameters the different blocks of a model have together."""
    return sum(_size(block) for _, block in model.kinds())


def _size(block: ModelSpec) -> int:
    """Returns the number of a block's parameters."""
    if (key := repr(block)) not in _sizes:
        with torch.device("meta"):
            _sizes[key] = sum(p.numel() for p in build_model(block).blocks.parameters())
    return _sizes[key]


def _of_block(block: ModelSpec, length: int, retried: bool) -> int | None:
    """Counts in one block: after `TOKENS` tokens, and after all of them if these leave any parameter dead."""
    if block.patches is not None:  # A scan of an image reads all of its patches.
        return None if length > MOST_TOKENS else _counted(block, length)
    dead = _counted(block, min(length, TOKENS))
    if dead and length > TOKENS and (length > MOST_TOKENS or not retried):
        return None
    return dead and _counted(block, length)


def _counted(block: ModelSpec, length: int) -> int:
    if (key := (repr(block), length)) not in _known:
        dead = _without_gradient(block, length, NOISE)
        if any(mask.any() for mask in dead):
            # A bound, such as that of a step at 0, may hold a parameter that was moved to one side.
            dead = [a & b for a, b in zip(dead, _without_gradient(block, length, -NOISE), strict=True)]
        _known[key] = sum(int(mask.sum()) for mask in dead)
    return _known[key]


@torch.enable_grad()
def _without_gradient(block: ModelSpec, length: int, noise: float) -> list[torch.Tensor]:
    """Returns a mask for each parameter of a block: where its gradient is zero, after noise is added to each."""
    # With attention over depth, the first mixer reads the embedding alone, and weighs nothing.
    network = build_model(replace(block, layers=2 if block.attention_residuals else 1))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=draw))
    for part in network.modules():
        if isinstance(part, Experts):
            part.top = len(part.into.weight)  # any of them can be chosen, if not by these few tokens
    hidden, _ = network.transform(torch.randn(ROWS, length, block.d_model, generator=draw))
    (hidden * torch.randn(hidden.shape, generator=draw)).sum().backward()
    parameters = [(p, p.grad) for p in network.blocks[-1].parameters()]
    return [torch.ones_like(p, dtype=torch.bool) if grad is None else grad == 0 for p, grad in parameters]


def dead_parameters_text(arm: str, dead: int | None, parameters: int) -> str | None:
    """Says that an arm has parameters that do nothing; None if it has none, or if they were not counted.

    Examples:
        >>> dead_parameters_text("without_b", 1152, 17396)
        'without_b carries 1,152 of 17,396 parameters that do nothing.'
    """
    return f"{arm} carries {dead:,} of {parameters:,} parameters that do nothing." if dead else None
