"""Rules whose state enters a nonlinear function, so that tokens must follow each other (sLSTM).

A rule gives the cell of one token. The loop over tokens, its gradients and decoding come from here. A cell that the
kernels know runs in one launch for all tokens.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.ops.backends import available, lacks_triton
from deltalab.rule import State, UpdateRule

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of q, k and v that the Triton kernels take."""

WIDEST = 64
"""The widest head that the kernels take: four matrices [V, V] must fit into the registers of a program."""


class Drive(NamedTuple):
    """What a cell reads besides the state, in the dtype of the state.

    Attributes:
        tokens: What each token brings, [B, T, H, ...]; for the cell `lstm`, z~, i~, f~ and o~ as [B, T, H, 4, V].
        weights: What is the same for all tokens, [H, ...]; for the cell `lstm`, R as [H, 4, V, V].
    """

    tokens: Tensor
    weights: Tensor


@dataclass(frozen=True, kw_only=True)
class Nonlinear(UpdateRule):
    """A rule whose state is a nonlinear function of the state before.

        o_t, state_t = cell(x_t, R, state_{t-1})

    Attributes:
        kernel: The kernel that computes the cell; None if there is none. `lstm` computes `exponential_lstm`.
    """

    kernel: ClassVar[Literal["lstm"] | None] = None

    @abstractmethod
    def drive(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor]) -> Drive:
        """Returns what the cell reads besides the state.

        Args:
            q: Queries in at least fp32, [B, T, H, K].
            k: Keys in at least fp32, [B, T, H, K].
            v: Values in at least fp32, [B, T, H, V].
            gates: Each gate by its symbol, in the shape of its `per`.
        """

    @abstractmethod
    def cell(self, token: Tensor, weights: Tensor, state: State) -> tuple[Tensor, State]:
        """Computes o [B, H, V], without the scale, and the next state, from what one token brings, [B, H, ...]."""

    @property
    def log_sigmoid(self) -> bool:
        """Whether the cell `lstm` has a sigmoid as its forget gate, and not an exponential function."""
        return True

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        drive = self._driven(q, k, v, gates, state)
        outputs = []
        for token in drive.tokens.unbind(1):
            o, state = self.cell(token, drive.weights, state)
            outputs.append(o)
        return scale * torch.stack(outputs, dim=1), state

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        kernel = available(v.device.type).lstm
        if kernel is None:
            raise InputError(f"the kernels need {lacks_triton(v.device.type)}: use backend 'chunked'")
        drive = self._driven(q, k, v, gates, state)
        o, state = kernel(*drive, state, log_sigmoid=self.log_sigmoid)
        return scale * o, state

    def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
        if self.kernel is None:
            return f"the cell of rule '{self.name}' has no Triton kernel"
        if v.dtype not in DTYPES:
            return f"the Triton kernels take q, k and v in bf16, fp16 or fp32, not {v.dtype}"
        if v.shape[-1] > WIDEST:
            return f"the kernel of '{self.kernel}' takes values of width up to {WIDEST}, not {v.shape[-1]}"
        return None

    def _driven(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], state: State) -> Drive:
        dtype = state[0].dtype
        wide = {name: x.to(dtype) for name, x in gates.items()}
        return self.drive(q.to(dtype), k.to(dtype), v.to(dtype), wide)


def lstm_state(v: Tensor) -> State:
    """Returns the empty state (h, c, n, m) of `exponential_lstm` for values like v [B, T, H, V], each [B, H, V]."""
    zeros = torch.zeros_like(v[:, 0], dtype=torch.promote_types(v.dtype, torch.float32))
    return zeros, zeros.clone(), zeros.clone(), torch.full_like(zeros, -torch.inf)


def exponential_lstm(token: Tensor, weights: Tensor, state: State, *, log_sigmoid: bool) -> tuple[Tensor, State]:
    """Computes one token of an LSTM with exponential gates, a normalizer and a stabilizer.

        z, i, f, o = x_t + R h_{t-1},   log f = log sigmoid(f) or f
        m_t = max(log f + m_{t-1}, i)
        c_t = exp(log f + m_{t-1} - m_t) c_{t-1} + exp(i - m_t) tanh(z)
        n_t = exp(log f + m_{t-1} - m_t) n_{t-1} + exp(i - m_t)
        h_t = sigmoid(o) c_t / n_t

    The first token makes n = 1, and n never falls below 1 after it.

    Args:
        token: x_t, [B, H, 4, V].
        weights: R, [H, 4, V, V], from the channel of h in the third dimension to that of the gate in the fourth.
        state: h, c, n and m, [B, H, V] each.
        log_sigmoid: Whether the forget gate is a sigmoid, and not an exponential function.

    Returns:
        h_t, and the next state.

    References:
        sLSTM, arXiv:2405.04517, Eq. 8-17.
    """
    h, c, n, m = state
    z, i, f, o = (token + torch.einsum("bhv,hgvw->bhgw", h, weights)).unbind(2)
    f = torch.nn.functional.logsigmoid(f) if log_sigmoid else f
    most = torch.maximum(f + m, i)
    keep, write = (f + m - most).exp(), (i - most).exp()
    c, n = keep * c + write * z.tanh(), keep * n + write
    h = o.sigmoid() * c / n
    return h, (h, c, n, most)
