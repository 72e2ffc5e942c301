"""Mends Triton's interpreter, which computes with the bit patterns of bf16 numbers as if they were whole numbers.

Seen with Triton 3.4 to 3.7: it keeps bf16 as uint16, converts it on a cast and in a reduction alone, and so returns
garbage for a product of matrices or a sum of two bf16 tensors.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

COMPUTE = ("unary_op", "binary_op", "ternary_op", "create_dot")
"""The methods by which the interpreter computes."""


def mend() -> None:
    """Has the interpreter, where it is on, compute with bf16 in fp32 and round the result, in this process."""
    if not knobs.runtime.interpret:
        return
    for name in COMPUTE:
        method = getattr(InterpreterBuilder, name)
        if not hasattr(method, "of_triton"):
            setattr(InterpreterBuilder, name, _in_fp32(method))


def _in_fp32(method: Any) -> Any:
    def computed(self: Any, *given: Any) -> Any:
        wide = [_widened(x) for x in given]
        found = method(self, *wide)
        narrow = any(a is not b for a, b in zip(given, wide, strict=True)) and method.__name__ != "create_dot"
        if narrow and found.data.dtype == np.float32:
            return TensorHandle(torch.from_numpy(found.data).bfloat16().view(torch.uint16).numpy(), tl.bfloat16)
        return found

    computed.of_triton = method  # type: ignore[attr-defined]
    return computed


def _widened(x: Any) -> Any:
    if not isinstance(x, TensorHandle) or x.dtype.scalar != tl.bfloat16:
        return x
    bits = torch.from_numpy(np.ascontiguousarray(x.data)).view(torch.bfloat16)
    return TensorHandle(bits.float().numpy(), tl.float32)
