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
        """Returns the outputs for all runs, and the position of the dimension of runs in each output."""
        stacked = (_runs_first(arg, dim, info.batch_size) for arg, dim in zip(args, in_dims, strict=True))
        out = cls.apply(*stacked)  # type: ignore[no-untyped-call]
        return out, (0,) * len(out) if isinstance(out, tuple) else 0


def _runs_first(arg: Any, dim: int | None, runs: int) -> Any:
    """A tensor with the dimension of runs in front; anything else as it is."""
    if not isinstance(arg, Tensor):
        return arg
    return arg.expand(runs, *arg.shape) if dim is None else arg.movedim(dim, 0)


class Folded(torch.autograd.Function):
    """A function whose inputs and outputs all begin with the batch: `vmap` calls it once for all runs.

    `Folded` is for a rule's own kernel, `UpdateRule.fused`. The runs of a stack become one larger batch, so that the
    kernel sees the shapes that it was written for. Take gradients outside of vmap: vmap(f)(x).sum().backward().
    """

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        """Returns the outputs for all runs, and the position of the dimension of runs in each output."""
        runs = info.batch_size
        stacked = (_runs_first(arg, dim, runs) for arg, dim in zip(args, in_dims, strict=True))
        out = cls.apply(*(arg.flatten(0, 1) if isinstance(arg, Tensor) else arg for arg in stacked))  # type: ignore[no-untyped-call]
        if isinstance(out, Tensor):
            return _unfolded(out, runs), 0
        return tuple(_unfolded(x, runs) for x in out), (0,) * len(out)


def _unfolded(x: Tensor, runs: int) -> Tensor:
    """A batch of all runs, with a dimension of runs in front."""
    split: Tensor = x.unflatten(0, (runs, x.shape[0] // runs))
    return split
