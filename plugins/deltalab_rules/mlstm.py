"""mLSTM of xLSTM: a matrix memory with an exponential input gate, a normalizer and a stabilizer."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate, parameterization
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@parameterization
def log_gate(init: float = 0.0) -> Gate:
    """W x + c, the logarithm of an exponential gate, without bounds; c starts at `init`."""
    return Gate(
        per="token",
        low=-torch.inf,
        high=torch.inf,
        parameters={"bias": lambda shape, generator: torch.full(shape, float(init))},
        value=lambda z, p: z + p["bias"],
    )


@parameterization
def log_sigmoid(low: float = 3.0, high: float = 6.0) -> Gate:
    """log sigmoid(W x + c), the logarithm of a sigmoid gate; c starts evenly spaced over the heads from low to high."""
    return Gate(
        per="token",
        low=-torch.inf,
        high=0.0,
        parameters={"bias": lambda shape, generator: torch.linspace(low, high, shape[0])},
        value=lambda z, p: F.logsigmoid(z + p["bias"]),
    )


@dataclass(frozen=True, kw_only=True)
class MLSTM(UpdateRule):
    """m_t = max(g_t + m_{t-1}, i_t, 0),   m_0 = 0
    S_t = exp(g_t + m_{t-1} - m_t) S_{t-1} + exp(i_t - m_t) k_t v_t^T
    n_t = exp(g_t + m_{t-1} - m_t) n_{t-1} + exp(i_t - m_t) k_t
    o_t = scale S_t^T q_t / max(|scale n_t^T q_t|, exp(-m_t))

    Beck et al. 2024 (arXiv:2405.04517, Eq. 19-27 and App. A.3): i and g are the logarithms of the input gate and of the
    forget gate, sigmoid or exponential. n is a last column of S, with value 1. The stabilizer m is carried; o does not
    depend on it, and the 0 in its maximum, which is ours, only keeps exp(-m) at most 1. scale takes the place of their
    K ** -1/2 in k. Their output gate is the layer's. i: const(0) leaves the input gate out.

    Costs what sgla costs, with one value channel more.
    """

    name: ClassVar[str] = "mlstm"
    paper: ClassVar[str] = "arXiv:2405.04517"

    transition: Transition = DECAY
    i: Gate = knob(log_gate(), gates.const(0))
    g: Gate = knob(log_sigmoid(), log_gate(init=3))

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def value_width(self, value_dim: int) -> int:
        return value_dim + 1

    def carried(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (v.new_zeros(v.shape[0], v.shape[2], dtype=torch.promote_types(v.dtype, torch.float32)),)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, i: Tensor, g: Tensor, carry: tuple[Tensor, ...]) -> Operands:
        i = i.expand(k.shape[:3])
        m = _stabilizer(i, g, carry[0])
        before = torch.cat([carry[0][:, None], m[:, :-1]], dim=1)

        def output(o: Tensor) -> Tensor:
            return o[..., :-1] / torch.maximum(o[..., -1:].abs(), (-m)[..., None].exp().to(o))

        return Operands(
            r=q,
            k=k,
            u=F.pad(v, (0, 1), value=1.0),
            # m is at least g + m_{t-1} but for rounding.
            g=(g + before - m).clamp_max(0.0),
            beta=(i - m).exp(),
            carry=(m[:, -1],),
            output=output,
        )

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, i: Tensor, g: Tensor
    ) -> tuple[Tensor, State]:
        S, before = state
        m = torch.maximum(g + before, i).clamp_min(0.0)
        keep, write = (g + before - m).exp()[..., None], (i - m).exp()[..., None]
        C, n = S[..., :-1], S[..., -1]
        C = keep[..., None] * C + write[..., None] * k[..., None] * v[..., None, :]
        n = keep * n + write * k
        o = scale * torch.einsum("bhk,bhkv->bhv", q, C)
        o = o / torch.maximum((scale * (n * q).sum(-1)).abs(), (-m).exp())[..., None]
        return o, (torch.cat([C, n[..., None]], dim=-1), m)


def _stabilizer(i: Tensor, g: Tensor, start: Tensor) -> Tensor:
    """m_t = max(g_t + m_{t-1}, i_t, 0) from m_0 = start, [B, T, H], in log2(T) rounds.

    After each round m_t is the maximum over twice as many tokens, and `decay` their sum of g.
    """
    m, decay, span = i.clamp_min(0.0), g, 1
    m = torch.cat([torch.maximum(m[:, :1], g[:, :1] + start[:, None]), m[:, 1:]], dim=1)
    while span < m.shape[1]:
        m = torch.cat([m[:, :span], torch.maximum(m[:, span:], decay[:, span:] + m[:, :-span])], dim=1)
        decay = torch.cat([decay[:, :span], decay[:, span:] + decay[:, :-span]], dim=1)
        span *= 2
    return m
