"""Blocks replayed as CUDA graphs: the host launches two graphs per step, and not thousands of kernels."""

import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WARM_UP = 2
"""The number of forward and backward passes before the capture, in which kernels are compiled."""


class Captured(NamedTuple):
    """The inputs that a graph was captured for, and is right for.

    Attributes:
        shape: The shape of x.
        dtype: The dtype of x.
        products: The dtype that autocast gives products; None without autocast.
    """

    shape: torch.Size
    dtype: torch.dtype
    products: torch.dtype | None

    @classmethod
    def of(cls, x: Tensor) -> "Captured":
        """Describes x under the autocast that is on."""
        autocast = torch.is_autocast_enabled(x.device.type)
        return cls(x.shape, x.dtype, torch.get_autocast_dtype(x.device.type) if autocast else None)


class BlockGraphs:
    """The blocks of a model as two CUDA graphs, forward and backward, captured for the first x [B, T, d] that trains.

    The graphs hold activations in memory of their own, as much as a step takes without graphs. Weights must keep their
    place in memory. So blocks under FSDP cannot be captured: FSDP gathers their weights anew for each step.
    """

    def __init__(self, blocks: nn.ModuleList) -> None:
        self.blocks = blocks
        self.captured: Captured | None = None
        self.replay: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        self.before: weakref.ref[_Pass] | None = None

    def take(self, x: Tensor) -> bool:
        """Returns whether the graphs can compute the blocks for x [B, T, d].

        They can in training on a GPU, if x has the shape and dtype that the graphs were captured for. They cannot while
        a backward pass is due, because another forward pass would overwrite the activations that it needs.
        """
        trains = x.is_cuda and x.requires_grad and torch.is_grad_enabled() and self.blocks.training
        last = None if self.before is None else self.before()
        if last is not None and last.due:
            return False
        return trains and self.captured in (None, Captured.of(x))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the two summands x and branch that the last block returns."""
        if self.replay is None:
            self.replay = self._captured(x)
        forward_pass = _Pass()
        self.before = weakref.ref(forward_pass)
        return self.replay(_Watched.apply(x, forward_pass))  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.blocks,)  # a copy makes its own capture

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockGraphs":
        return type(self)(deepcopy(self.blocks, memo))

    def _captured(self, x: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        self.captured = Captured.of(x)
        # Keep no cast of autocast: it would be freed while the graph still reads it.
        with torch.autocast(
            x.device.type, self.captured.products, enabled=self.captured.products is not None, cache_enabled=False
        ):
            inputs = (torch.zeros_like(x, requires_grad=True),)
            replay: Any = torch.cuda.make_graphed_callables(_All(self.blocks), inputs, num_warmup_iters=WARM_UP)
        for parameter in self.blocks.parameters():
            # Copy the gradient: it lies in the graph's memory, which the next replay overwrites.
            parameter.register_hook(torch.clone)
        return replay  # type: ignore[no-any-return]


class _Pass:
    """A forward pass, which lives as long as the graph of autograd; `due` is whether its backward pass is to come."""

    due = True


class _Watched(torch.autograd.Function):
    """Returns x itself, before the first block. So its backward pass comes after the backward passes of all blocks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, now: _Pass) -> Tensor:
        ctx.now = now
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.now.due = False
        return gradient, None


class _All(nn.Module):
    """A module that runs the blocks one after another, and takes x alone."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        branch: Tensor | None = None
        for block in self.blocks:
            x, branch, _ = block(x, branch)
        assert branch is not None
        return x, branch
