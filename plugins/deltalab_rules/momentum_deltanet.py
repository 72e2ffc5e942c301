"""DeltaNet with momentum: the delta rule's gradient steps, accelerated by the heavy ball method."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import Transition


@parameterization
def momentum(init: float = 0.1, max: float = 0.2) -> Gate:
    """eta = max sigmoid(b), learned for each head, starting at `init`."""
    if not 0 < init < max < 1:
        raise InputError(f"momentum: 0 < init < max < 1 must hold, not init {init:g} and max {max:g}")
    return Gate(
        per="head",
        low=0.0,
        high=float(max),
        parameters={"logit": gates.head_sigmoid(init=init / max).parameters["logit"]},
        value=lambda z, p: max * (z + p["logit"]).sigmoid(),
    )


@dataclass(frozen=True, kw_only=True)
class MomentumDeltaNet(UpdateRule):
    """Z_t = eta Z_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T
    S_t = S_{t-1} + Z_t,   o_t = scale S_t^T q_t

    Polyak's heavy ball on DeltaNet's loss, one step per token. Titans (arXiv:2501.00663, Eq. 9-10) has this momentum
    for a memory that is an MLP, by mini-batches. eta is constant in time and learned for each head; eta = 0 is
    DeltaNet. With c = eta / (1 - eta) and Y = S + c Z, the state [Y; Z] decays by the constants 1 and eta, and a
    gradient step is a write of low rank, w_t = beta_t k_t (v_t - S_{t-1}^T k_t)^T, into both:

        Y_t = Y_{t-1} + (1 + c) w_t,   Z_t = eta Z_{t-1} + w_t,   S_t = Y_t - c Z_t

    Two eigenvalues are neither 1 nor eta: their sum is 1 + eta - beta, their product eta. As a complex pair they turn,
    with modulus sqrt(eta).

    Products of steps are bounded, whatever the unit keys, if beta <= 2 (1 - eta)^2 / (1 + eta): no step then
    increases |Y|^2 + eta |Z|^2 / (1 - eta)^2. For beta up to 1 this is eta <= (5 - sqrt 17) / 4 = 0.219, so that eta
    is at most 0.2 here. The bound is tight: at beta = 1 and eta = 0.25, keys that turn by the same angle with every
    token multiply the state by 3e8 in 4096 tokens; from eta = 0.7 on, random keys make it diverge, too. Give a larger
    eta a smaller beta, such as `beta: {sigmoid: {max: 0.3}}` for eta up to 0.5.

    Costs what a delta rule with diagonal decay (kda) costs with keys of width 2 K.
    """

    name: ClassVar[str] = "momentum_deltanet"
    paper: ClassVar[str] = "arXiv:2501.00663"

    transition: Transition = Transition(name="momentum", decay="diagonal", low_rank="free", reads="state")
    beta: Gate = knob(gates.sigmoid(), gates.const(0.5))
    eta: Gate = knob(momentum(), gates.const(0.2), gates.const(0))

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (min(0.0, 1 - self.beta.high), 1.0)

    def key_width(self, key_dim: int) -> int:
        return 2 * key_dim

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, eta: Tensor) -> Operands:
        c = (eta / (1 - eta))[:, None]
        written = torch.cat([(1 + c) * k, k], dim=-1)
        g = eta.clamp_min(1e-30).log()[:, None].expand(-1, k.shape[-1])  # At eta = 0 the logarithm has no gradient.
        return Operands(
            r=torch.cat([q, -c * q], dim=-1),
            k=written,
            u=v,
            beta=beta,
            g=torch.cat([torch.zeros_like(g), g], dim=-1),
            a=-beta[..., None] * written,
            b=torch.cat([k, -c * k], dim=-1),
            exact_gradients=True,  # The gradient of eta is a sum over all tokens.
        )

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, beta: Tensor, eta: Tensor
    ) -> tuple[Tensor, State]:
        Y, Z = state[0].chunk(2, dim=-2)
        c, eta = (eta / (1 - eta))[..., None, None], eta[..., None, None]
        S = Y - c * Z
        error = v - torch.einsum("bhk,bhkv->bhv", k, S)
        Z = eta * Z + beta[..., None, None] * k[..., None] * error[..., None, :]
        S = S + Z
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (torch.cat([S + c * Z, Z], dim=-2),)
