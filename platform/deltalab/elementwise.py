"""Rules whose state has no keys: each channel is a linear recurrence h_t = a_t h_{t-1} + b_t of its own (LRU, Griffin).

A rule gives a, b and the readout. The parallel form, the Triton kernels, gradients and decoding come from here.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltalab.errors import InputError
from deltalab.ops.backends import available, lacks_triton
from deltalab.ops.vmap import Folded
from deltalab.rule import State, UpdateRule

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of q, k and v that the Triton kernels take."""

LEAST_SQUARE = 2.5e-7
"""The least 1 - a^2 that `complement` takes the root of. So its slope is at most 1000, as Griffin's is."""


@dataclass(frozen=True)
class Terms:
    """The terms of h_t = a_t h_{t-1} + b_t for every token, with channels of any shape C.

    Attributes:
        a: The factor, of modulus at most 1, [B, T, H, *C], or [H, *C] if it is the same for every token.
        b: What is added, [B, T, H, *C]. a and b are complex if the rule is, and real otherwise.
        output: Makes o [B, T, H, V], without the scale, from h [B, T, H, *C].
        before: Whether `output` takes h_{t-1} in place of h_t.
        kept: The tensors after the last token, in the form of `Elementwise.kept`.
    """

    a: Tensor
    b: Tensor
    output: Callable[[Tensor], Tensor]
    before: bool = False
    kept: State = ()


Scan = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes h [B, T, *D] from a [B, 1 or T, *D], b [B, T, *D] and h_0 [B, *D], all real or all complex."""


@dataclass(frozen=True, kw_only=True)
class Elementwise(UpdateRule):
    """A rule whose state is h, with a linear recurrence for each channel.

        h_t = a_t h_{t-1} + b_t
        o_t = scale output(h_t)

    The state is h [B, H, *C], or its real and imaginary parts [B, H, *C, 2], and then the tensors of `kept`.

    Attributes:
        is_complex: Whether h is complex.
    """

    is_complex: ClassVar[bool] = False

    def channels(self, key_dim: int, value_dim: int) -> tuple[int, ...]:
        """Returns C, the shape of a head's channels: (V,) by default, and ((V + 1) // 2,) for a complex rule."""
        return ((value_dim + 1) // 2,) if self.is_complex else (value_dim,)

    def kept(self, k: Tensor, v: Tensor) -> State:
        """Returns what `terms` needs of earlier tokens besides h, for an empty sequence; no tensors by default.

        The tensors begin with [B, H].

        Args:
            k: Keys, [B, T, H, K]. Only their shape, dtype and device matter.
            v: Values, [B, T, H, V]. Only their shape, dtype and device matter.
        """
        return ()

    @abstractmethod
    def terms(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], kept: State) -> Terms:
        """Returns the terms of the recurrence.

        Args:
            q: Queries in at least fp32, [B, T, H, K].
            k: Keys in at least fp32, [B, T, H, K].
            v: Values in at least fp32, [B, T, H, V].
            gates: Each gate by its symbol, in the shape of its `per`, but [H, 1] where that is [H].
            kept: What `kept` returned, or `Terms.kept` of the tokens before.
        """

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        shape = (*self.channels(k.shape[-1], v.shape[-1]), *[2] * self.is_complex)
        return (v.new_zeros(v.shape[0], v.shape[2], *shape, dtype=dtype), *self.kept(k, v))

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        return self._advanced(q, k, v, gates, scale, state, scan)

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        kernel = available(v.device.type).elementwise
        if kernel is None:
            raise InputError(f"the kernels need {lacks_triton(v.device.type)}: use backend 'chunked'")
        return self._advanced(q, k, v, gates, scale, state, kernel)

    def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
        if v.dtype not in DTYPES:
            return f"the Triton kernels take q, k and v in bf16, fp16 or fp32, not {v.dtype}"
        return None

    def _advanced(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], scale: float, state: State, run: Scan
    ) -> tuple[Tensor, State]:
        start, *kept = state
        q, k, v = (x.to(start.dtype) for x in (q, k, v))
        wide = {name: (x[:, None] if x.dim() == 1 else x).to(start.dtype) for name, x in gates.items()}
        terms = self.terms(q, k, v, wide, tuple(kept))
        if self.is_complex:
            start = torch.view_as_complex(start.contiguous())
        a, b = (x.to(start.dtype) for x in (terms.a, terms.b))
        if a.dim() < b.dim():
            a = a.expand(b.shape[0], 1, *b.shape[2:])
        h = run(a, b, start)
        o = terms.output(torch.cat([start[:, None], h[:, :-1]], dim=1) if terms.before else h)
        last = torch.view_as_real(h[:, -1]) if self.is_complex else h[:, -1]
        return scale * o, (last, *terms.kept)


def paired(x: Tensor) -> Tensor:
    """Returns x [.., V] as complex numbers [.., (V + 1) // 2]: the first half of the channels plus i times the rest.

    If V is odd, the last number is real.
    """
    half = (x.shape[-1] + 1) // 2
    real, imaginary = x[..., :half], x[..., half:]
    return torch.complex(real, F.pad(imaginary, (0, half - imaginary.shape[-1])))


def unpaired(z: Tensor, width: int) -> Tensor:
    """Returns channels [.., width] of complex numbers z: the real parts, then as many imaginary parts as fit."""
    return torch.cat([z.real, z.imag[..., : width - z.shape[-1]]], dim=-1)


def turning(size: Tensor, angle: Tensor) -> Tensor:
    """Returns size exp(i angle)."""
    return torch.complex(size * angle.cos(), size * angle.sin())


def complement(g: Tensor) -> Tensor:
    """Returns sqrt(1 - a^2) for a = exp(g), the factor that keeps the size of a state with inputs of size 1.

    The root of a number below `LEAST_SQUARE` is that of `LEAST_SQUARE`, because its slope would have no bound.

    Args:
        g: The logarithm of a, at most 0.

    References:
        The bound: Griffin, arXiv:2402.19427, Appendix A.
    """
    return (-torch.expm1(2 * g)).clamp_min(LEAST_SQUARE).sqrt()


def zero_order_hold(dt: Tensor, rate: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the factors of h and of u for one step of h' = A h + u with a constant u and A = -rate + i omega.

        a = exp(dt A),   (a - 1) / A

    Args:
        dt: The length of a step, positive.
        rate: The rate of decay, positive.
        omega: The angular frequency.

    References:
        S4D, arXiv:2206.11893, Section 3.1.
    """
    a = turning((-dt * rate).exp(), dt * omega)
    return a, (a - 1) / torch.complex(-rate, omega)


def running_max(x: Tensor, fade: Tensor, start: Tensor) -> Tensor:
    """Returns m_t = max(m_{t-1} + fade_t, x_t) in log2(T) rounds, after each of which m looks back twice as far.

    Args:
        x: [B, T, ...].
        fade: At most 0, in the shape of x.
        start: m_0, [B, ...].
    """
    m = torch.cat([torch.maximum(x[:, :1], (start + fade[:, 0])[:, None]), x[:, 1:]], dim=1)
    total, span = fade, 1
    while span < m.shape[1]:
        m = torch.cat([m[:, :span], torch.maximum(m[:, span:], m[:, :-span] + total[:, span:])], dim=1)
        total = torch.cat([total[:, :span], total[:, span:] + total[:, :-span]], dim=1)
        span *= 2
    return m


def scan(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """Computes `Scan` in PyTorch. Gradients run the same recurrence backward, without a graph of single steps."""
    if b.shape[1] == 1:
        return a * start[:, None] + b
    h: Tensor = _Scan.apply(a, b, start)  # type: ignore[no-untyped-call]
    return h


class _Scan(Folded):
    @staticmethod
    def forward(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        return _scanned(a, b, start)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        a, _, start = inputs
        ctx.save_for_backward(a, start, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_h: Tensor) -> tuple[Tensor, ...]:
        a, start, h = ctx.saved_tensors
        # d_b_t = d_h_t + conj(a_{t+1}) d_b_{t+1}. The first factor of the reversed sequence multiplies an empty state.
        factors = a if a.shape[1] == 1 else torch.cat([a[:, :1], a[:, 1:].flip(1)], dim=1)
        d_b = _scanned(factors.conj().resolve_conj(), d_h.flip(1), torch.zeros_like(start)).flip(1)
        d_a = d_b * torch.cat([start[:, None], h[:, :-1]], dim=1).conj()
        return d_a.sum(1, keepdim=True) if a.shape[1] == 1 else d_a, d_b, a[:, 0].conj() * d_b[:, 0]


def _scanned(a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """Computes `Scan` in about 3 sqrt(T) operations.

    Blocks of sqrt(T) tokens are computed side by side, each as if its state were empty. Then the state before each
    block, times the product of the factors since, is added. Products of numbers of at most 1 do not overflow.
    """
    h = torch.empty_like(b, memory_format=torch.contiguous_format)
    size = math.isqrt(b.shape[1])
    blocks = b.shape[1] // size
    inside, within = (x[:, : blocks * size].unflatten(1, (blocks, size)) for x in (b, h))
    if a.shape[1] == 1:
        factors = a[:, :, None].expand(-1, -1, size, *a.shape[2:])
    else:
        factors = a[:, : blocks * size].unflatten(1, (blocks, size))
    since = torch.empty(factors.shape, dtype=a.dtype, device=a.device)
    within[:, :, 0], since[:, :, 0] = inside[:, :, 0], factors[:, :, 0]
    for i in range(1, size):
        within[:, :, i] = torch.addcmul(inside[:, :, i], factors[:, :, i], within[:, :, i - 1])
        since[:, :, i] = factors[:, :, i] * since[:, :, i - 1]
    for j in range(blocks):
        within[:, j] += since[:, min(j, since.shape[1] - 1)] * state[:, None]
        state = within[:, j, -1]
    for t in range(blocks * size, b.shape[1]):
        h[:, t] = torch.addcmul(b[:, t], a[:, min(t, a.shape[1] - 1)], state)
        state = h[:, t]
    return h
