"""Counts the floating-point operations and the bytes of a call, to compare them with what the hardware can do."""

import functools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from deltalab.authoring.inputs import draw
from deltalab.bench.results import Shape
from deltalab.ops.scan import scan
from deltalab.rule import UpdateRule

CHUNK = 64
"""The number of tokens in a chunk of the algorithm whose operations are counted."""
COUNTED = 256
"""The number of tokens in the shorter of the two sequences on which a rule outside the algebra is counted."""


def flops(rule: UpdateRule, shape: Shape) -> float | None:
    """Returns the operations in the matrix products of a forward call of a rule's chunked algorithm.

    Chunks have 64 tokens. For a rule outside the algebra, the operations of its PyTorch form are counted at two
    lengths, and a cost that is linear or quadratic in T is fitted to the two counts. A rule with a window is counted at
    T itself.

    Returns:
        The operations; None if PyTorch counts no products in the rule's form.
    """
    tokens, transition = shape.batch * shape.length * shape.heads, rule.transition
    k, v = shape.key_dim, shape.value_dim
    if transition is None and getattr(rule, "window", False):
        return tokens / shape.length * _counted(rule, shape.length, k, v) or None
    if transition is None:
        short, long = (_counted(rule, length, k, v) for length in (COUNTED, 2 * COUNTED))
        squared = (long - 2 * short) / (2 * COUNTED**2)
        return tokens * (short / COUNTED + squared * (shape.length - COUNTED)) or None
    k, v = rule.key_width(k), rule.value_width(v)
    # The operations per token of a chunk. A read computes r k^T, the product of r k^T with the written values, and r S.
    # A write computes k^T times the values.
    read, write = 2 * (CHUNK * k + CHUNK * v + k * v), 2 * k * v
    # A tied erase costs a read and the inverse. A free erase has two more products of each kind, for a beside k.
    erase = {"none": 0.0, "tied": read + 2 / 3 * CHUNK**2, "free": 3 * read - 2 * k * v + 2 / 3 * CHUNK**2}
    per_step = read + write + erase[transition.low_rank]
    # With a second state, the first state is also read at k, for its prediction.
    return tokens * transition.steps * (2 * per_step + read if rule.second_state else per_step)


@functools.cache
def _counted(rule: UpdateRule, length: int, key_dim: int, value_dim: int) -> int:
    """Counts the operations of a rule's PyTorch form in one head."""
    x = draw(rule, batch=1, length=length, heads=1, key_dim=key_dim, value_dim=value_dim).map(Tensor.float)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        scan(rule, x.q, x.k, x.v, x.gates, backend="chunked", chunk_size=CHUNK)
    return int(counter.get_total_flops())


def attention_flops(shape: Shape) -> float:
    """Returns the operations of a forward call of causal softmax attention."""
    return shape.batch * shape.heads * shape.length**2 * (shape.key_dim + shape.value_dim)


def size(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def forward_bytes(inputs: Iterable[Tensor], o: Tensor) -> int:
    """Returns the bytes that a forward call must move: it reads each input once and writes o."""
    return size(inputs) + o.nbytes


def training_bytes(inputs: Iterable[Tensor], o: Tensor) -> int:
    """Returns the bytes that forward and backward must move.

    Backward reads the inputs and the gradient of o, and writes the gradients of the inputs.
    """
    return 3 * size(inputs) + 2 * o.nbytes


def decode_bytes(inputs: Mapping[str, Tensor]) -> int:
    """Returns the bytes that a call on one token must move: it reads each input, and writes the parts of the state."""
    return size(inputs.values()) + size(part for name, part in inputs.items() if "state" in name)
