"""Functions with gradients of their own, for one run and for a stack of runs."""

from typing import Any

import torch
from torch import Tensor


class Stacked(torch.autograd.Function):
    """A function whose tensors may have one more leading dimension, of runs: `vmap` calls it once for all runs.

    The rule that PyTorch generates would call operators without a batching rule, such as `addcmul_`, run by run.
    """

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        out = cls.apply(*(_first(one, dim, info.batch_size) for one, dim in zip(args, in_dims, strict=True)))  # type: ignore[no-untyped-call]
        return out, (0,) * len(out) if isinstance(out, tuple) else 0


def _first(given: Any, dim: int | None, count: int) -> Any:
    if not isinstance(given, Tensor):
        return given
    return given.expand(count, *given.shape) if dim is None else given.movedim(dim, 0)


class Folded(torch.autograd.Function):
    """A function whose tensors all begin with the batch, given and returned: `vmap` calls it once for all runs.

    For a rule's own kernel, `UpdateRule.fused`: the runs of a stack become one larger batch, so that the kernel sees
    the shapes that it was written for. Take gradients outside of vmap: vmap(f)(x).sum().backward().
    """

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        runs = info.batch_size
        given = (_first(one, dim, runs) for one, dim in zip(args, in_dims, strict=True))
        out = cls.apply(*(one.flatten(0, 1) if isinstance(one, Tensor) else one for one in given))  # type: ignore[no-untyped-call]
        if isinstance(out, Tensor):
            return _runs(out, runs), 0
        return tuple(_runs(one, runs) for one in out), (0,) * len(out)


def _runs(x: Tensor, runs: int) -> Tensor:
    split: Tensor = x.unflatten(0, (runs, x.shape[0] // runs))
    return split
