"""Computes a recurrence of the algebra from its operands, in the fastest form that a backend has."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.ops import reference
from deltalab.ops.backends import NONE, Kernels, ScanKernel, automatic, available, lacks_triton
from deltalab.ops.lowering import Lowered, by_channel, for_kernels, lowered
from deltalab.ops.peers.scans import PACKAGES, scan_by
from deltalab.rule import Operands, State
from deltalab.structure import Transition

Backend: TypeAlias = Literal["auto", "recurrent", "chunked", "triton", "fla", "flash_qla"]
"""The forms of a recurrence; see `scan`."""


def recurrence(
    transition: Transition,
    operands: Operands,
    *,
    dtype: torch.dtype,
    scale: float,
    state: State | None = None,
    backend: Backend = "auto",
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Runs the recurrence of `structure.Transition`. It applies neither `Operands.output` nor the carry.

    Args:
        transition: The transition of the state.
        operands: The operands with B, T and H in full.
        dtype: The dtype of a kernel's products.
        scale: The factor of the output.
        state: One state [B, H, K, V] in a tuple, two with a fit, or None for an empty state.
        backend: As in `scan`.
        chunk_size: As in `scan`.
        cu_seqlens: The bounds of packed sequences, allowed only where `packs` returns True.

    Returns:
        o [B, T, H, V] and the next state, both in at least fp32, or o in `dtype` from a kernel.

    Raises:
        InputError: No kernel of a backend that was asked for by name takes these operands.
    """
    token_by_token = backend == "recurrent" or (backend == "auto" and operands.k.shape[1] == 1)
    low = _for(backend, transition, operands)
    if low is not None and (kernel := kernel_for(low, dtype, backend)):
        if backend != "auto":
            no_growth(low.operands.g)
        o, next_state = kernel(
            low.transition, low.operands, dtype=dtype, scale=scale, state=state, cu_seqlens=cu_seqlens
        )
    elif token_by_token:
        return reference.recurrent(transition, operands, scale=scale, state=state)
    else:
        low = lowered(transition, operands)
        o, next_state = reference.chunked(low.transition, low.operands, scale=scale, state=state, chunk_size=chunk_size)
    return low.finish(o, next_state, scale)


def packs(transition: Transition, operands: Operands, dtype: torch.dtype, backend: Backend) -> bool:
    """Whether `recurrence` takes packed sequences: only the kernels do, and only if no row depends on another one."""
    if operands.sign is not None or (low := _for(backend, transition, operands)) is None or low.later:
        return False
    return kernel_for(low, dtype, backend) is not None


def _for(backend: Backend, transition: Transition, operands: Operands) -> Lowered | None:
    """The recurrence as the kernels of a backend take it; None if the backend has none."""
    if backend in PACKAGES:
        return by_channel(lowered(transition, operands))
    return None if allowed(backend, operands.u.device.type).scan is None else for_kernels(transition, operands)


def kernel_for(low: Lowered, dtype: torch.dtype, backend: Backend) -> ScanKernel | None:
    """The kernel that a backend takes for a recurrence, if any."""
    if backend in PACKAGES:
        return scan_by(backend, low.operands.u.device.type)
    kernels = allowed(backend, low.operands.u.device.type)
    if kernels.scan is None or kernels.takes is None:
        return None
    return kernels.scan if backend == "triton" or kernels.takes(low.transition, low.operands, dtype) else None


def allowed(backend: Backend, device: str) -> Kernels:
    """The kernels that a backend may take.

    Raises:
        InputError: The backend asks for kernels, and there are none.
    """
    if backend == "auto":
        return automatic(device)
    if backend != "triton":
        return NONE
    if missing := lacks_triton(device):
        raise InputError(f"backend 'triton' needs {missing}: use 'auto', 'chunked' or 'recurrent'")
    return available(device)


def no_growth(g: Tensor | None) -> None:
    """Checks that no log-decay is positive.

    The check waits for the device, so it is only for a kernel that was asked for by name. Under vmap, and while a CUDA
    graph is captured, values cannot be read, and nothing is checked.

    Raises:
        InputError: A log-decay is positive.
    """
    if g is None or torch._C._functorch.is_batchedtensor(g):
        return
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if not capturing and bool((g > 0).any()):
        raise InputError("g is a log-decay and at most 0: the Triton kernels do not take a state that grows")
