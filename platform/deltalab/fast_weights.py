"""States that are the weights of a model, trained online by gradient descent with momentum and decay (TTT, Titans).

These rules are outside the algebra of `structure`, because the gradient need not be linear in the state. The tokens of
a mini-batch are computed in parallel: all their gradients are taken at the weights with which the mini-batch begins.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.rule import State, UpdateRule

Weights = tuple[Tensor, ...]

NEWTON = 16
"""The steps of Newton's method for an implicit gradient: enough for fp64, with p from 1 to 4 and smooth from 1e-6."""


class Learner(Protocol):
    """A model f from x [..., n, K] to [..., n, V], with matrices W_j as weights, and its loss."""

    def start(self, heads: int, key_dim: int, value_dim: int) -> Weights:
        """Returns the fixed weights that every sequence starts from, [H, rows, columns] each."""

    def predict(self, x: Tensor, times: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Returns f(x). `times(y, j)` returns y W_j, with a W_j for each of the n inputs."""

    def gradients(
        self, k: Tensor, v: Tensor, weights: Weights, step: Tensor | None = None
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        """Returns the gradient a_i d_i^T of the loss at each pair (k_i, v_i), with respect to each W_j.

        Args:
            k: Keys, [..., n, K].
            v: Values, [..., n, V].
            weights: Each W_j, [..., rows, columns].
            step: The step size of each token, [..., n]. The gradients are then taken at the weights after the step.
                With None, they are taken at `weights`.

        Returns:
            The pair a [..., n, rows] and d [..., n, columns] of each W_j.
        """


class Descent(NamedTuple):
    """The numbers that define the update at each token, [B, T, H] or [H] each.

    Attributes:
        theta: The step size.
        alpha: The factor of W; None for 1.
        eta: The factor of the momentum Z; None for 0.
        late: Whether the gradient is taken at alpha_t W_{t'} and not at W_{t'}. True needs mini-batches of one token.
        implicit: Whether the gradient is taken at W_t, after the step. True needs `late`, no momentum, a learner
            `Linear` without a norm, and mini-batches of one token.
    """

    theta: Tensor
    alpha: Tensor | None = None
    eta: Tensor | None = None
    late: bool = False
    implicit: bool = False


@dataclass(frozen=True, kw_only=True)
class FastWeights(UpdateRule):
    """A rule whose state is the weights W_j of a `Learner`.

        Z_t = eta_t Z_{t-1} - theta_t grad loss(W_{t'}; k_t, v_t)
        W_t = alpha_t W_{t-1} + Z_t
        o_t = scale f(q_t; W_t)

    Here t' is the last token before the mini-batch of t. Mini-batches of `mini_batch` tokens follow each other from the
    first token of a sequence on, also if the sequence arrives in parts. A subclass returns the `learner` and turns its
    gates into a `descent`. It may declare `mini_batch` as a knob.

    The state holds each W_j [B, H, rows, columns]. With momentum, it also holds each Z_j. With mini-batches of several
    tokens, it also holds each W_j at the start of the mini-batch, and an empty tensor [B, H, n, 0] whose n is the
    number of tokens of the mini-batch that have passed.

    Attributes:
        mini_batch: The tokens of a mini-batch.
        momentum: Whether there is a momentum Z.
    """

    mini_batch: int = 1
    momentum: bool = False

    @property
    @abstractmethod
    def learner(self) -> Learner:
        """The model whose weights are the state."""

    @abstractmethod
    def descent(self, gates: Mapping[str, Tensor]) -> Descent:
        """Returns the numbers that define the update at each token, computed from the rule's gates."""

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        batch, _, heads, key_dim = k.shape
        start = _start(self, heads, key_dim, v.shape[-1], v.device, dtype)
        weights = tuple(w.expand(batch, *w.shape).contiguous() for w in start)
        return self._packed(weights, tuple(torch.zeros_like(w) for w in weights), weights, 0)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        dtype = torch.promote_types(v.dtype, torch.float32)
        *factors, late, implicit = self.descent(gates)
        theta, alpha, eta = (None if x is None else x.to(dtype).expand(k.shape[:3]).transpose(1, 2) for x in factors)
        q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
        weights, momentum, start, passed = self._unpacked(state)
        out, t = [], 0
        while t < q.shape[2]:
            tokens = slice(t, t + self.mini_batch - passed)
            at = tuple(alpha[:, :, tokens, None] * w for w in start) if late and alpha is not None else start
            step = theta[:, :, tokens] if implicit and theta is not None else None
            gradients = self.learner.gradients(k[:, :, tokens], v[:, :, tokens], at, step)
            path = _path(*(None if x is None else x[:, :, tokens] for x in (theta, alpha, eta)))
            out.append(self.learner.predict(q[:, :, tokens], _times(weights, momentum, gradients, path)))
            weights, momentum = _after(weights, momentum, gradients, path)
            size = out[-1].shape[2]
            t, passed = t + size, (passed + size) % self.mini_batch
            start = start if passed else weights
        return scale * torch.cat(out, dim=2).transpose(1, 2), self._packed(weights, momentum, start, passed)

    def _packed(self, weights: Weights, momentum: Weights, start: Weights, passed: int) -> State:
        state = weights + momentum * self.momentum
        if self.mini_batch > 1:
            state += (*start, weights[0].new_empty(*weights[0].shape[:2], passed, 0))
        return state

    def _unpacked(self, state: State) -> tuple[Weights, Weights, Weights, int]:
        passed = 0
        if self.mini_batch > 1:
            state, passed = state[:-1], state[-1].shape[2]
        count = len(state) // (1 + self.momentum + (self.mini_batch > 1))
        weights, *more_parts = (state[i : i + count] for i in range(0, len(state), count))
        momentum = more_parts[0] if self.momentum else ()
        return weights, momentum, more_parts[-1] if self.mini_batch > 1 else weights, passed


@cache
def _start(
    rule: FastWeights, heads: int, key_dim: int, value_dim: int, device: torch.device, dtype: torch.dtype
) -> Weights:
    """Makes the start weights once for each device. A CUDA graph cannot draw on the host, or copy from the host."""
    if device.type == "meta":  # without numbers, which may be too many for the host
        with device:
            return tuple(w.to(dtype) for w in rule.learner.start(heads, key_dim, value_dim))
    return tuple(w.to(device, dtype) for w in rule.learner.start(heads, key_dim, value_dim))


class _Path(NamedTuple):
    """The factors that give W at every one of n tokens, and Z at the last token, from the gradients G_i.

        W_t = of_now_t W_0 + of_momentum_t Z_0 - sum_i of_gradients_{ti} G_i
        Z_n = kept Z_0 - sum_i added_i G_i

    Attributes:
        of_now: [..., n].
        of_momentum: [..., n].
        of_gradients: [..., n, n], lower triangular.
        kept: [...].
        added: [..., n].
    """

    of_now: Tensor
    of_momentum: Tensor
    of_gradients: Tensor
    kept: Tensor
    added: Tensor


def _path(theta: Tensor | None, alpha: Tensor | None, eta: Tensor | None) -> _Path:
    """Unrolls the recurrence over n tokens. Arguments are [..., n]. It never divides, because a factor may be 0."""
    assert theta is not None
    steps = torch.diag_embed(theta)
    of_now, of_momentum, kept = torch.ones_like(theta[..., 0]), torch.zeros_like(theta[..., 0]), None
    of_gradients, added = torch.zeros_like(theta), torch.zeros_like(theta)
    rows = []
    for t in range(theta.shape[-1]):
        added = steps[..., t, :] if eta is None else eta[..., t, None] * added + steps[..., t, :]
        kept = torch.zeros_like(of_now) if eta is None else eta[..., t] if kept is None else eta[..., t] * kept
        if alpha is not None:
            of_now, of_momentum = alpha[..., t] * of_now, alpha[..., t] * of_momentum
            of_gradients = alpha[..., t, None] * of_gradients
        of_momentum, of_gradients = of_momentum + kept, of_gradients + added
        rows.append((of_now, of_momentum, of_gradients))
    assert kept is not None
    weights, momentum, gradients = (torch.stack(parts, dim=2) for parts in zip(*rows, strict=True))
    return _Path(weights, momentum, gradients, kept, added)


def _times(
    weights: Weights, momentum: Weights, gradients: tuple[tuple[Tensor, Tensor], ...], path: _Path
) -> Callable[[Tensor, int], Tensor]:
    def times(x: Tensor, j: int) -> Tensor:
        a, d = gradients[j]
        y = path.of_now[..., None] * (x @ weights[j]) - (path.of_gradients * (x @ a.mT)) @ d
        return y + path.of_momentum[..., None] * (x @ momentum[j]) if momentum else y

    return times


def _after(
    before: Weights, momentum: Weights, gradients: tuple[tuple[Tensor, Tensor], ...], path: _Path
) -> tuple[Weights, Weights]:
    """Returns W and Z after the last token."""
    after = []
    for j, (a, d) in enumerate(gradients):
        w = path.of_now[..., -1, None, None] * before[j] - (path.of_gradients[..., -1, :, None] * a).mT @ d
        after.append(w + path.of_momentum[..., -1, None, None] * momentum[j] if momentum else w)
    kept = path.kept[..., None, None]
    next_momentum = [
        kept * z - (path.added[..., None] * a).mT @ d for z, (a, d) in zip(momentum, gradients, strict=False)
    ]
    return tuple(after), tuple(next_momentum)


@dataclass(frozen=True)
class Regression:
    """The output and the loss of a learner, computed from the output z [..., n, V] of its last layer.

        f = x~ + LN(z),   loss = 1/p sum_c (e_c^2 + smooth)^(p/2),   e = f - v

    Attributes:
        norm: Whether LN is the layer norm over V, without scale or shift. Otherwise LN(z) = z.
        residual: Whether x~ is the input, cut or filled with zeros to V channels. Otherwise x~ = 0.
        p: The exponent. p = 2 is half the squared error, without `smooth`. Any other p has the slope
            e (e^2 + smooth)^(p/2 - 1), which is sign(e) |e|^(p - 1) rounded off at 0.
        smooth: The number that rounds the slope off at 0.
    """

    norm: bool = False
    residual: bool = False
    p: float = 2.0
    smooth: float = 1e-6

    def predict(self, x: Tensor, z: Tensor) -> Tensor:
        """Returns f for inputs x [..., n, K] and z [..., n, V]."""
        f = _layer_norm(z)[0] if self.norm else z
        return f + F.pad(x, (0, z.shape[-1] - x.shape[-1])) if self.residual else f

    def slope(self, k: Tensor, v: Tensor, z: Tensor, step: Tensor | None = None) -> Tensor:
        """Returns the gradient of the loss with respect to z. The gradient can itself be differentiated.

        Args:
            k: Keys, [..., n, K].
            v: Values, [..., n, V].
            z: The outputs of the last layer, [..., n, V].
            step: The step sizes [..., n] of an implicit gradient. It is taken at the point z - step * gradient, which
                Newton's method finds. It cannot be combined with a norm. With None, the gradient is taken at z.
        """
        e = self.predict(k, z) - v
        if step is not None:
            assert not self.norm
            e = self._moved(e, step[..., None])
        if self.p != 2:
            e = e * (e.square() + self.smooth) ** (self.p / 2 - 1)
        if not self.norm:
            return e
        normed, deviation = _layer_norm(z)
        slope = e - e.mean(-1, keepdim=True) - normed * (e * normed).mean(-1, keepdim=True)
        return slope / deviation

    def _moved(self, start: Tensor, step: Tensor) -> Tensor:
        """Solves e + step e (e^2 + smooth)^(p/2 - 1) = start for e.

        The left side rises with e. For positive e, it is concave if p < 2 and convex if p > 2. So Newton's method,
        begun at 0 or at `start`, approaches the solution from one side.
        """
        if self.p == 2:
            return start / (1 + step)

        def newton(e: Tensor) -> Tensor:
            square = e.square()
            wide = square + self.smooth
            excess = e + step * e * wide ** (self.p / 2 - 1) - start
            return e - excess / (1 + step * wide ** (self.p / 2 - 2) * ((self.p - 1) * square + self.smooth))

        with torch.no_grad():
            e = start if self.p > 2 else torch.zeros_like(start)
            for _ in range(NEWTON):
                e = newton(e)
        # The solution does not depend on the point where a Newton step begins. So the gradient of this last step alone
        # is the gradient of the exact solution.
        return newton(e)


def _layer_norm(z: Tensor) -> tuple[Tensor, Tensor]:
    centered = z - z.mean(-1, keepdim=True)
    deviation = (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return centered / deviation, deviation


@dataclass(frozen=True)
class Linear:
    """The learner f whose last layer computes z = S^T x, with S [K, V].

    S starts at 0. With a norm, S starts at fixed random numbers, because 0 has no direction.

    Attributes:
        head: The output and the loss.
    """

    head: Regression

    def start(self, heads: int, key_dim: int, value_dim: int) -> Weights:
        if self.head.norm:
            return (_drawn(heads, key_dim, value_dim, key_dim),)
        return (torch.zeros(heads, key_dim, value_dim),)

    def predict(self, x: Tensor, times: Callable[[Tensor, int], Tensor]) -> Tensor:
        return self.head.predict(x, times(x, 0))

    def gradients(
        self, k: Tensor, v: Tensor, weights: Weights, step: Tensor | None = None
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        along = None if step is None else step * k.square().sum(-1)  # a step moves S^T k by this times the slope
        return ((k, self.head.slope(k, v, k @ weights[0], along)),)


@dataclass(frozen=True)
class MLP:
    """The learner f whose last layer computes z = W_2^T gelu(W_1^T x), with W_1 [K, 4K] and W_2 [4K, V].

    The weights start at fixed random numbers, because weights of 0 have no gradient.

    Attributes:
        head: The output and the loss.
    """

    head: Regression

    def start(self, heads: int, key_dim: int, value_dim: int) -> Weights:
        hidden = 4 * key_dim
        return _drawn(heads, key_dim, hidden, key_dim), _drawn(heads, hidden, value_dim, 1, seed=1)

    def predict(self, x: Tensor, times: Callable[[Tensor, int], Tensor]) -> Tensor:
        return self.head.predict(x, times(F.gelu(times(x, 0), approximate="tanh"), 1))

    def gradients(
        self, k: Tensor, v: Tensor, weights: Weights, step: Tensor | None = None
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        assert step is None
        first, second = weights
        z = k @ first
        inner = F.gelu(z, approximate="tanh")
        slope = self.head.slope(k, v, inner @ second)
        return (k, _gelu_slope(z) * (slope @ second.mT)), (inner, slope)


def _gelu_slope(x: Tensor) -> Tensor:
    """Returns the derivative of x / 2 (1 + tanh(c (x + 0.044715 x^3))) with c = sqrt(2 / pi)."""
    c = math.sqrt(2 / math.pi)
    tanh = (c * (x + 0.044715 * x.pow(3))).tanh()
    return (1 + tanh) / 2 + x / 2 * (1 - tanh.square()) * c * (1 + 3 * 0.044715 * x.square())


def _drawn(heads: int, rows: int, columns: int, norm: float, *, seed: int = 0) -> Tensor:
    """Draws N(0, 0.02^2), the start of TTT, from a fixed seed, and multiplies by norm^(1/2).

    TTT's inputs are longer by this factor.
    """
    generator = torch.Generator().manual_seed(seed)
    return 0.02 * math.sqrt(norm) * torch.empty(heads, rows, columns).normal_(generator=generator)
