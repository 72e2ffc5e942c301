"""Rules that compute several recurrences one after the other, and recurrences that are read along their values.

Each of these recurrences is called a pass, and belongs to the algebra. So a rule made of passes only gives the operands
of each pass. It then has the parallel form, the kernels and their gradients, as a rule of the algebra has.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from deltalab.kernel_limits import DTYPES, MOST_KEYS
from deltalab.ops.arguments import check_operands, filled
from deltalab.ops.recurrence import Backend, recurrence
from deltalab.rule import Operands, State, UpdateRule, fields_of
from deltalab.structure import Transition


class Run(Protocol):
    """A function that runs one pass, and returns o [B, T, H, V] and the next states.

    The returned tensors are in at least fp32, except for the o of a kernel, which is in v's dtype.
    """

    def __call__(
        self, transition: Transition, x: Operands, /, *, state: State | None, scale: float = 1.0
    ) -> tuple[Tensor, State]: ...


@dataclass(frozen=True, kw_only=True)
class Passes(UpdateRule):
    """A rule that computes `passes`. Its `initial_state` returns the states of all passes as a tuple."""

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
        """Computes o and the next states, as `mix` does, by calling `run` once for each pass.

        Args:
            q: Queries, [B, T, H, K].
            k: Keys, [B, T, H, K].
            v: Values, [B, T, H, V].
            gates: Each gate by its symbol, in the shape of its `per`.
            scale: The factor of o.
            state: The states of all passes.
            run: Runs one pass.

        Returns:
            o [B, T, H, V] with the scale, and the next states of all passes.
        """

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
    """Runs a pass that reads along the values: o_t = S_t r_t.

    The function serves a state that has a decay for each channel of the *value*. The transpose of this state has a
    diagonal decay, so that a pass can compute the transpose.

    S_t r_t is the gradient of <r_t, S_t^T z> with respect to z. So, for any transition, the forward pass runs a
    recurrence and its gradient, and the backward pass runs another recurrence and its gradient. The operands `read`,
    `d` and `fit` have no meaning here.

    Args:
        run: Runs one pass.
        transition: The transition of the state.
        x: The operands, with r [B, T, H, V].
        state: The state before the first token, as a tuple of one tensor; None for an empty state.

    Returns:
        o [B, T, H, K], and the next state as a tuple of one tensor.

    References:
        Gated slot attention, arXiv:2409.07146.
    """
    _check(transition, replace(x, r=x.k[:, transition.steps - 1 :: transition.steps]), x.u.shape[-1])
    x = filled(transition, x)
    tensors = {name: value for name, value in fields_of(x).items() if name != "r" and isinstance(value, Tensor)}
    before = x.u.new_zeros(x.k.shape[0], x.k.shape[2], x.k.shape[3], x.u.shape[3]) if state is None else state[0]
    # To leave compiled code loads the compiler, which takes seconds where nothing is compiled.
    read = _read_outside_of_compiled_code if torch.compiler.is_compiling() else _read_values
    o, last = read(run, transition, tuple(tensors), x.r, before, *tensors.values())
    return o, (last,)


def _read_values(*inputs: Any) -> tuple[Tensor, Tensor]:
    output: tuple[Tensor, Tensor] = _ReadValues.apply(*inputs)  # type: ignore[no-untyped-call]
    return output


@_disable_dynamo  # `torch.compiler.disable` would load the compiler here, at import.
def _read_outside_of_compiled_code(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Calls `_ReadValues`. Compiled code cannot differentiate in a forward pass."""
    return _read_values(*inputs)


class _ReadValues(torch.autograd.Function):
    @staticmethod
    def forward(
        run: Run, transition: Transition, names: tuple[str, ...], r: Tensor, state: Tensor, *tensors: Tensor
    ) -> Any:
        key_shape = tensors[names.index("k")].shape
        with torch.enable_grad():
            z = r.new_zeros(*r.shape[:3], key_shape[-1], requires_grad=True)
            o, (last,) = run(transition, Operands(r=z, **_named(names, tensors)), state=(state,))
            (read,) = torch.autograd.grad(o, z, r.to(o.dtype))
        return read.detach(), last.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.run, ctx.transition, ctx.names, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor, d_last: Tensor) -> tuple[Any, ...]:
        r, *tensors = ctx.saved_tensors
        with torch.enable_grad():
            state, *leaves = (tensor.detach().requires_grad_() for tensor in tensors)
            o, (last,) = ctx.run(ctx.transition, Operands(r=d.to(r.dtype), **_named(ctx.names, leaves)), state=(state,))
            gradients = torch.autograd.grad(
                (o, last), (state, *leaves), (r.to(o.dtype), d_last.to(last.dtype)), materialize_grads=True
            )
        return None, None, None, o.detach().to(r.dtype), *gradients

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        folded = [
            (tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)).flatten(0, 1)
            for tensor, dim in zip(args[3:], in_dims[3:], strict=True)
        ]
        out = _ReadValues.apply(*args[:3], *folded)  # type: ignore[no-untyped-call]
        return tuple(tensor.unflatten(0, (size, -1)) for tensor in out), (0, 0)


def _named(names: tuple[str, ...], values: Any) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))
