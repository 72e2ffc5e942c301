"""One recurrence of the algebra, given as operands, in the fastest form that a backend has."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.ops import reference
from deltalab.ops.backends import NONE, Kernels, ScanKernel, automatic, available, lacks_triton
from deltalab.ops.lowering import Lowered, by_channel, lowered, lowers
from deltalab.rule import Operands, State
from deltalab.structure import Transition

Backend: TypeAlias = Literal["auto", "recurrent", "chunked", "triton"]


def recurrence(
    transition: Transition,
    x: Operands,
    *,
    dtype: torch.dtype,
    scale: float,
    state: State | None = None,
    backend: Backend = "auto",
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Runs the recurrence of `structure.Transition`: o [B, T, H, V] and the next state; both in fp32 at least, or o in
    `dtype` from a kernel. It applies neither `Operands.output` nor the carry.

    x: `Operands` with B, T and H in full. dtype: of a kernel's products. state: one [B, H, K, V] in a tuple, two with a
    fit; None for an empty one. cu_seqlens: only where `packs`.
    Raises `InputError` for backend `triton` where no kernel takes these operands.
    """
    token_by_token = backend == "recurrent" or (backend == "auto" and x.k.shape[1] == 1)
    low = _lowered(transition, x)
    wide = by_channel(low)
    if kernel := kernel_for(wide, dtype, backend):
        low = wide
        if backend == "triton":
            no_growth(low.x.g)
        o, after = kernel(low.transition, low.x, dtype=dtype, scale=scale, state=state, cu_seqlens=cu_seqlens)
    elif token_by_token:
        return reference.recurrent(transition, x, scale=scale, state=state)
    else:
        o, after = reference.chunked(low.transition, low.x, scale=scale, state=state, chunk_size=chunk_size)
    return low.finish(o, after, scale)


def packs(transition: Transition, x: Operands, dtype: torch.dtype, backend: Backend) -> bool:
    """Whether `recurrence` takes packed sequences: only the kernels do, and only without rewriting."""
    return not lowers(transition, x) and kernel_for(Lowered(transition, x), dtype, backend) is not None


def _lowered(transition: Transition, x: Operands) -> Lowered:
    return lowered(transition, x) if lowers(transition, x) else Lowered(transition, x)


def kernel_for(low: Lowered, dtype: torch.dtype, backend: Backend) -> ScanKernel | None:
    """The kernel that a backend takes for a recurrence, if any."""
    kernels = allowed(backend, low.x.u.device.type)
    if kernels.scan is None or kernels.takes is None:
        return None
    return kernels.scan if backend == "triton" or kernels.takes(low.transition, low.x, dtype) else None


def allowed(backend: Backend, device: str) -> Kernels:
    """The kernels that a backend may take. Raises `InputError` where it asks for them and there are none."""
    if backend == "auto":
        return automatic(device)
    if backend != "triton":
        return NONE
    if missing := lacks_triton(device):
        raise InputError(f"backend 'triton' needs {missing}: use 'auto', 'chunked' or 'recurrent'")
    return available(device)


def no_growth(g: Tensor | None) -> None:
    """Raises `InputError` if a log-decay is positive.

    Waits for the device, so only for a kernel that was asked for by name; and not under vmap or while a CUDA graph is
    captured, where values cannot be read.
    """
    if g is None or torch._C._functorch.is_batchedtensor(g):
        return
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if not capturing and bool((g > 0).any()):
        raise InputError("g is a log-decay and at most 0: the Triton kernels do not take a state that grows")
