"""Functions that bring their own gradients, for one run and for a stack of runs alike."""

from typing import Any

import torch
from torch import Tensor


class Stacked(torch.autograd.Function):
    """Its tensors may have runs in front of all else: under `vmap` it is called once, with all of them.

    What PyTorch would generate goes through a stack run by run where an operator has no rule, as `addcmul_` has none.
    """

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        out = cls.apply(*(_first(one, dim, info.batch_size) for one, dim in zip(args, in_dims, strict=True)))  # type: ignore[no-untyped-call]
        return out, (0,) * len(out) if isinstance(out, tuple) else 0


def _first(given: Any, dim: int | None, count: int) -> Any:
    if not isinstance(given, Tensor):
        return given
    return given.expand(count, *given.shape) if dim is None else given.movedim(dim, 0)
