"""Says in one line whether a rule has Triton kernels, and what hinders them."""

import torch

from deltalab.authoring.inputs import Inputs, draw
from deltalab.kernel_limits import hindrance
from deltalab.ops.lowering import for_kernels
from deltalab.ops.scan import operands
from deltalab.passes import Passes
from deltalab.rule import UpdateRule

WIDTH = 64
"""The K and V of a head for which the line holds."""


def kernel_line(rule: UpdateRule, *, key_dim: int = WIDTH, value_dim: int = WIDTH) -> str:
    """Returns whether a rule has kernels, forward and backward, for bf16, and what hinders them, without a GPU.

    Args:
        rule: The rule with its settings.
        key_dim: K.
        value_dim: V.

    Examples:
        >>> from deltalab.registry import get_rule
        >>> kernel_line(get_rule("comba"))
        'forward and backward: the kernels of a scalar decay'
        >>> kernel_line(get_rule("huber_deltanet"))
        'none: the rule is outside the algebra and brings no kernel of its own'
    """
    x = _narrow(draw(rule, batch=1, length=2, heads=1, key_dim=key_dim, value_dim=value_dim))
    if rule.brings_kernel:
        if why := rule.lacks_kernel(x.k, x.v):
            return f"none: {why}"
        whose = "those of its passes" if isinstance(rule, Passes) else "its own"
        return f"forward and backward: {whose}"
    if rule.transition is None:
        return "none: the rule is outside the algebra and brings no kernel of its own"
    of_rule = operands(rule, x.q, x.k, x.v, x.gates)
    low = for_kernels(rule.transition, of_rule)
    if why := hindrance(low.transition, low.operands, x.v.dtype):
        return f"none: {why}"
    decay = "a decay by channel" if low.transition.decay == "diagonal" else "a scalar decay"
    return f"forward and backward: the kernels of {decay}"


def _narrow(x: Inputs) -> Inputs:
    """q, k and v in bf16, and gates in fp32, as in training."""
    half, full = torch.bfloat16, torch.float32
    gates = {name: gate.to(full) for name, gate in x.gates.items()}
    return Inputs(x.q.to(half), x.k.to(half), x.v.to(half), gates)
