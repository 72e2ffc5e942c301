"""Blocks replayed as CUDA graphs: the host launches two graphs a step where it would launch thousands of kernels."""

import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WARM_UP = 2
"""Forward and backward passes before the capture, in which kernels are compiled."""


class Captured(NamedTuple):
    """What a graph was captured for: it is right for nothing else."""

    shape: torch.Size
    dtype: torch.dtype
    products: torch.dtype | None

    @classmethod
    def of(cls, x: Tensor) -> "Captured":
        autocast = torch.is_autocast_enabled(x.device.type)
        return cls(x.shape, x.dtype, torch.get_autocast_dtype(x.device.type) if autocast else None)


class BlockGraphs:
    """The blocks of a model as two CUDA graphs, forward and backward, captured for the first x [B, T, d] that trains.

    They hold activations in memory of their own, as large as what a step takes without them. Weights must keep their
    place in memory: FSDP gathers them anew for each step, so that its blocks cannot be captured.
    """

    def __init__(self, blocks: nn.ModuleList) -> None:
        self.blocks = blocks
        self.captured: Captured | None = None
        self.replay: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        self.before: weakref.ref[_Pass] | None = None

    def take(self, x: Tensor) -> bool:
        """Whether the graphs compute these blocks of x [B, T, d]: in training on a GPU, in the first shape and dtype.

        They do not while a backward pass is due: another forward pass would overwrite what it needs.
        """
        trains = x.is_cuda and x.requires_grad and torch.is_grad_enabled() and self.blocks.training
        before = None if self.before is None else self.before()
        if before is not None and before.due:
            return False
        return trains and self.captured in (None, Captured.of(x))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x and the last branch, as the blocks one after another return them."""
        if self.replay is None:
            self.replay = self._captured(x)
        now = _Pass()
        self.before = weakref.ref(now)
        return self.replay(_Watched.apply(x, now))  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.blocks,)  # a copy captures for itself

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockGraphs":
        return type(self)(deepcopy(self.blocks, memo))

    def _captured(self, x: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        self.captured = Captured.of(x)
        # Casts that autocast keeps would be freed while the graph still reads them.
        with torch.autocast(
            x.device.type, self.captured.products, enabled=self.captured.products is not None, cache_enabled=False
        ):
            given = (torch.zeros_like(x, requires_grad=True),)
            replay: Any = torch.cuda.make_graphed_callables(_All(self.blocks), given, num_warmup_iters=WARM_UP)
        for parameter in self.blocks.parameters():
            # The gradient is the graph's own memory, which the next replay overwrites.
            parameter.register_hook(torch.clone)
        return replay  # type: ignore[no-any-return]


class _Pass:
    """A forward pass, which lives as long as the graph of autograd does. due: whether its backward pass is."""

    due = True


class _Watched(torch.autograd.Function):
    """x itself. Its backward pass is the last of the blocks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, now: _Pass) -> Tensor:
        ctx.now = now
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.now.due = False
        return gradient, None


class _All(nn.Module):
    """The blocks one after another, from x alone."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        branch: Tensor | None = None
        for block in self.blocks:
            x, branch, _ = block(x, branch)
        assert branch is not None
        return x, branch
