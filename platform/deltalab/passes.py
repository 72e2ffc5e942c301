"""Rules of several recurrences, one after the other, and recurrences that are read along their values.

A pass is a recurrence of the algebra. So a rule of passes gets the parallel form, the kernels and their gradients from
its operands alone, as a rule of the algebra does.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from deltalab.ops.arguments import check_operands, filled
from deltalab.ops.recurrence import Backend, recurrence
from deltalab.rule import Operands, State, UpdateRule
from deltalab.structure import Transition

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_KEYS = 256
"""What the Triton kernels take: dtypes of q, k and v, and the widest keys."""


class Run(Protocol):
    """Runs one pass: o [B, T, H, V] and the next states, in at least fp32 or, from a kernel, o in v's dtype."""

    def __call__(
        self, transition: Transition, x: Operands, /, *, state: State | None, scale: float = 1.0
    ) -> tuple[Tensor, State]: ...


@dataclass(frozen=True, kw_only=True)
class Passes(UpdateRule):
    """A rule that computes `passes`. `initial_state` gives the states of all passes, in a tuple."""

    @abstractmethod
    def passes(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Mapping[str, Tensor],
        *,
        scale: float,
        state: State,
        run: Run,
    ) -> tuple[Tensor, State]:
        """Computes o [B, T, H, V], scale included, and the next states, as `mix`, with a `run` for each pass."""

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Any
    ) -> tuple[Tensor, State]:
        return self.passes(q, k, v, gates, scale=scale, state=state, run=partial(_run, v.dtype, "chunked"))

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Any
    ) -> tuple[Tensor, State]:
        return self.passes(q, k, v, gates, scale=scale, state=state, run=partial(_run, v.dtype, "triton"))

    def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
        if v.dtype not in DTYPES:
            return f"the Triton kernels take q, k and v in bf16, fp16 or fp32, not {v.dtype}"
        if self.key_width(k.shape[-1]) > MOST_KEYS:
            return f"the Triton kernels take keys of width up to {MOST_KEYS}, not {self.key_width(k.shape[-1])}"
        return None


def _run(
    dtype: torch.dtype,
    backend: Backend,
    transition: Transition,
    x: Operands,
    /,
    *,
    state: State | None,
    scale: float = 1.0,
) -> tuple[Tensor, State]:
    _check(transition, x, x.u.shape[-1])
    if backend == "chunked" and x.r.shape[1] == 1:
        backend = "recurrent"
    return recurrence(transition, filled(transition, x), dtype=dtype, scale=scale, state=state, backend=backend)


def _check(transition: Transition, x: Operands, value_dim: int) -> None:
    batch, length, heads, key_dim = x.r.shape
    check_operands("a pass", transition, x, (batch, length, heads, key_dim, value_dim), second_state=x.fit is not None)


def read_values(run: Run, transition: Transition, x: Operands, *, state: State | None) -> tuple[Tensor, State]:
    """A pass that reads along the values: o_t = S_t r_t [B, T, H, K] for r [B, T, H, V], and the next state.

    A state with a decay of its own for each channel of the *value* is the transpose of one with a diagonal decay, and
    this reads it (gated slot attention, arXiv:2409.07146). S_t r_t is the gradient of <r_t, S_t^T z> in z. So forward
    runs a pass and its gradient, and backward another pass and its gradient, whatever the transition; `read`, `d` and
    a fit have no meaning here.
    """
    _check(transition, replace(x, r=x.k[:, transition.steps - 1 :: transition.steps]), x.u.shape[-1])
    x = filled(transition, x)
    given = {f.name: value for f in fields(x) if f.name != "r" and isinstance(value := getattr(x, f.name), Tensor)}
    first = x.u.new_zeros(x.k.shape[0], x.k.shape[2], x.k.shape[3], x.u.shape[3]) if state is None else state[0]
    o, last = _read_values(run, transition, tuple(given), x.r, first, *given.values())
    return o, (last,)


@_disable_dynamo  # `torch.compiler.disable` would load the compiler here, at import.
def _read_values(*given: Any) -> tuple[Tensor, Tensor]:
    """`_ReadValues` outside of compiled code, which cannot differentiate within its forward pass."""
    found: tuple[Tensor, Tensor] = _ReadValues.apply(*given)  # type: ignore[no-untyped-call]
    return found


class _ReadValues(torch.autograd.Function):
    @staticmethod
    def forward(
        run: Run, transition: Transition, names: tuple[str, ...], r: Tensor, state: Tensor, *given: Tensor
    ) -> Any:
        tokens = given[names.index("k")].shape
        with torch.enable_grad():
            z = r.new_zeros(*r.shape[:3], tokens[-1], requires_grad=True)
            o, (last,) = run(transition, Operands(r=z, **_named(names, given)), state=(state,))
            (read,) = torch.autograd.grad(o, z, r.to(o.dtype))
        return read.detach(), last.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.run, ctx.transition, ctx.names, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor, d_last: Tensor) -> tuple[Any, ...]:
        r, *given = ctx.saved_tensors
        with torch.enable_grad():
            state, *leaves = (one.detach().requires_grad_() for one in given)
            o, (last,) = ctx.run(ctx.transition, Operands(r=d.to(r.dtype), **_named(ctx.names, leaves)), state=(state,))
            found = torch.autograd.grad(
                (o, last), (state, *leaves), (r.to(o.dtype), d_last.to(last.dtype)), materialize_grads=True
            )
        return None, None, None, o.detach().to(r.dtype), *found

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        folded = [
            (one.expand(size, *one.shape) if dim is None else one.movedim(dim, 0)).flatten(0, 1)
            for one, dim in zip(args[3:], in_dims[3:], strict=True)
        ]
        out = _ReadValues.apply(*args[:3], *folded)  # type: ignore[no-untyped-call]
        return tuple(one.unflatten(0, (size, -1)) for one in out), (0, 0)


def _named(names: tuple[str, ...], values: Any) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))
