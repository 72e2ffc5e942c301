"""Finds the Triton kernels that a device has. The platform reaches kernels only through this module."""

import functools
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from deltalab.rule import Operands, State
from deltalab.structure import Ridge, Transition

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

OLDEST_TRITON = (3, 4)
"""The first release with the tensor descriptors by which the kernels load their tiles."""

OLDEST_GPU = (8, 0)
"""The first compute capability whose GPUs multiply matrices in bf16 and tf32, as the kernels do."""

ENTRIES = __name__.removesuffix("backends") + "triton_kernels"
"""The module that imports the kernels. In an exported folder, its copy lies beside the copy of this file."""

_log = logging.getLogger("deltalab")


class ScanKernel(Protocol):
    """`Kernels.scan`."""

    def __call__(
        self,
        transition: Transition,
        operands: Operands,
        /,
        *,
        dtype: torch.dtype,
        scale: float,
        state: State | None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Computes the recurrence."""
        ...


class RegressionKernel(Protocol):
    """`Kernels.regression`."""

    def __call__(
        self,
        ridge: Ridge,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        /,
        *,
        scale: float,
        state: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Computes the regression."""
        ...


class CarryKernel(Protocol):
    """`Kernels.carry`."""

    def __call__(
        self, u: Tensor, e: Tensor, b: Tensor, turn: Tensor, start: Tensor, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Carries a pair of states."""


class ElementwiseKernel(Protocol):
    """`Kernels.elementwise`."""

    def __call__(self, a: Tensor, b: Tensor, start: Tensor, /) -> Tensor:
        """Computes `elementwise.Scan`."""
        ...


class LSTMKernel(Protocol):
    """`Kernels.lstm`."""

    def __call__(
        self, x: Tensor, weights: Tensor, state: tuple[Tensor, ...], /, *, log_sigmoid: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes h for all tokens, and the next state."""
        ...


class CrossEntropyKernel(Protocol):
    """`Kernels.cross_entropy`."""

    def __call__(self, logits: Tensor, targets: Tensor, count: Tensor, /, *, ignore: int) -> Tensor:
        """Computes the losses."""
        ...


class AdamWKernel(Protocol):
    """`Kernels.adamw`."""

    def __call__(
        self,
        weights: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        losses: Tensor,
        /,
        *,
        bad: Tensor,
        loss: Tensor,
        begin: Tensor,
        row: Tensor,
        rates: Tensor,
        betas: Tensor,
        new: Tensor,
        clip: Tensor,
        eps: float,
        decayed: int,
        scaled: int,
        share: float,
    ) -> None:
        """Takes one step."""
        ...


class IntegersKernel(Protocol):
    """`Kernels.integers`."""

    def __call__(
        self,
        starts: Tensor,
        rows: Tensor | None,
        shape: tuple[int, ...],
        /,
        *,
        shift: int = 0,
        below: int | Tensor | None = None,
    ) -> Tensor:
        """Draws integers."""
        ...


class ExponentialKernel(Protocol):
    """`Kernels.exponential`."""

    def __call__(self, starts: Tensor, rows: Tensor | None, shape: tuple[int, ...], /, *, terms: int) -> Tensor:
        """Draws from the exponential distribution."""
        ...


class DistinctKernel(Protocol):
    """`Kernels.distinct`."""

    def __call__(self, starts: Tensor, rows: Tensor | None, shape: tuple[int, ...], /, *, below: int) -> Tensor:
        """Draws numbers that are distinct."""
        ...


class Kernels(NamedTuple):
    """The kernels that a device has; None stands for a kernel that the device lacks.

    Attributes:
        triton: Whether kernels run at all, so that a rule may launch its own.
        scan: Computes the function of `reference.recurrent`.
        takes: Says whether `scan` has a kernel for a transition and its operands with products in a dtype.
        regression: Computes the function of `ridge.regression`.
        carry: Computes the function of `coupled.carried`, for tensors whose first dimension is that of the heads.
        elementwise: Computes the function of `elementwise.Scan`.
        lstm: Computes `nonlinear.exponential_lstm` for all tokens.
        rms_norm: Takes x, branch, weight, gate, eps and the dtype of the result, and returns the norm and the sum, as
            `ops.fused.norm`.
        convolve: Takes x, taps, past, widths, key_dim, how many of q, k and v get SiLU, whether unit norm follows, and
            each token's place within its sequence if sequences are packed.
        swiglu: Computes SiLU(a) * b for [.., 2 D], with a and b side by side.
        embed: Looks up rows [n, N, d] of weights [n, V, d] for tokens [n, N].
        cross_entropy: Computes losses [n, m] of logits [n, m, V] for `ops.fused.loss`, and puts the gradient of the
            logits in their place.
        adamw: Takes one step of a stack of runs, in place, for `training.stack`.
        integers: Draws for `tasks.randomness`.
        exponential: Draws for `tasks.randomness`.
        distinct: Draws for `tasks.randomness`.
        most_distinct: The most numbers that `distinct` draws at a time.
    """

    triton: bool = False
    scan: ScanKernel | None = None
    takes: Callable[[Transition, Operands, torch.dtype], bool] | None = None
    regression: RegressionKernel | None = None
    carry: CarryKernel | None = None
    elementwise: ElementwiseKernel | None = None
    lstm: LSTMKernel | None = None
    rms_norm: (
        Callable[
            [Tensor, Tensor | None, Tensor | None, Tensor | None, float, torch.dtype],
            tuple[Tensor, Tensor],
        ]
        | None
    ) = None
    convolve: (
        Callable[
            [Tensor, Tensor | None, Tensor | None, Sequence[int], int, int, bool, Tensor | None],
            tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        ]
        | None
    ) = None
    swiglu: Callable[[Tensor], Tensor] | None = None
    embed: Callable[[Tensor, Tensor], Tensor] | None = None
    cross_entropy: CrossEntropyKernel | None = None
    adamw: AdamWKernel | None = None
    integers: IntegersKernel | None = None
    exponential: ExponentialKernel | None = None
    distinct: DistinctKernel | None = None
    most_distinct: int = 0


NONE = Kernels()
_loaded = NONE
"""The kernels, once `lacks_triton` has loaded them. It is a global because torch.compile reads globals,
but takes no `Kernels` as a constant result."""


def constant(function: F) -> F:
    """Makes the function's result a constant of a compiled graph.

    `torch.compiler.assume_constant_result` does the same, but loads the compiler, half the time that a command starts
    in.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def once(function: Callable[[str], T]) -> "functools._lru_cache_wrapper[T]":
    """Caches what a function finds on the machine, and makes it a constant of compiled graphs."""
    return functools.cache(constant(function))


def shown(version: Sequence[int]) -> str:
    """Writes a version with its dots."""
    return ".".join(map(str, version))


@once
def lacks_triton(device: str) -> str | None:
    """Returns what the kernels need on this type of device and lack, or None.

    If they lack nothing, loads them.
    """
    global _loaded
    try:
        import triton
    except ImportError:
        return "the package triton"
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        return f"Triton {shown(OLDEST_TRITON)} or later, not {triton.__version__}"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device != "cuda" and not interpreted:
        return "a GPU, or TRITON_INTERPRET=1"
    if not interpreted and torch.cuda.is_available() and (found := torch.cuda.get_device_capability()) < OLDEST_GPU:
        return f"a GPU of compute capability {shown(OLDEST_GPU)} or later, not {shown(found)}"
    entries = importlib.import_module(ENTRIES)
    if not interpreted and (missing := entries.lacks_assembler()):
        return str(missing)
    _loaded = entries.KERNELS
    return None


def available(device: str) -> Kernels:
    """The kernels that run on this type of device, for a caller that asks for them by name."""
    return _loaded if lacks_triton(device) is None else NONE


@once
def _unasked(device: str) -> bool:
    """Returns whether the backend `auto` takes kernels on this type of device; logs once why it does not."""
    if device != "cuda":
        _log.info("no GPU: backend 'auto' takes 'chunked'")
        return False
    missing = lacks_triton(device)
    if missing:
        _log.warning("backend 'auto' takes 'chunked': kernels need %s", missing)
    return missing is None


def automatic(device: str) -> Kernels:
    """The kernels to take if nobody asks for kernels by name: those of a GPU, none on a CPU."""
    return available(device) if _unasked(device) else NONE
