"""What the Triton kernels of the algebra take, known without loading them."""

import torch

from deltalab.rule import Operands
from deltalab.structure import Transition

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of q, k and v that the kernels take."""

MOST_KEYS = 256
"""The largest K that the kernels take, padding included: a block holds all of K."""


def hindrance(transition: Transition, operands: Operands, dtype: torch.dtype) -> str | None:
    """Returns why no kernel takes a recurrence, as a clause; None if one does, forward and backward.

    Args:
        transition: The transition, as `ops.lowering` leaves it.
        operands: The operands, as `ops.lowering` leaves them.
        dtype: The dtype of q, k and v.
    """
    if dtype not in DTYPES:
        return f"the Triton kernels take q, k and v in bf16, fp16 or fp32, not {dtype}"
    if (key_dim := operands.k.shape[-1]) > MOST_KEYS:
        return f"the Triton kernels take q and k with K up to {MOST_KEYS}, not {key_dim}"
    if operands.fit is not None and (transition.decay == "diagonal" or operands.a is not None):
        return "a second state over a diagonal decay or a free low rank has no Triton kernel"
    if operands.a is not None and transition.decay != "diagonal":
        return "a free low rank without a diagonal decay has no Triton kernel"
    return None
