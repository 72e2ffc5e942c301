"""Attention over depth: what a mixer or an MLP reads of the outputs before it, in place of their sum."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deltalab.models.start import Started, Zeros
from deltalab.ops.fused.norm import RMSNorm


class Outputs(NamedTuple):
    """The outputs of the mixers and MLPs so far.

    Attributes:
        sources: The embedding, and the sum of each group of outputs that is full, each [B, T, d].
        rest: The sum of the outputs since; None if there are none.
        held: The number of outputs in `rest`.
    """

    sources: tuple[Tensor, ...]
    rest: Tensor | None = None
    held: int = 0

    def joined(self, output: Tensor, group: int) -> "Outputs":
        """Returns the outputs with one more."""
        rest = output if self.rest is None else self.rest + output
        if self.held + 1 == group:
            return Outputs((*self.sources, rest))
        return Outputs(self.sources, rest, self.held + 1)

    def at(self, places: Callable[[Tensor], Tensor]) -> "Outputs":
        """Returns the outputs at some places, which a function takes from [B, T, d]."""
        rest = None if self.rest is None else places(self.rest)
        return Outputs(tuple(map(places, self.sources)), rest, self.held)


class DepthNorm(Started):
    """h = sum_i a_i x_i over the sources x_i, and the norm of h. a = softmax_i(w^T norm(x_i)), with a learned w.

    It stands where a `ResidualNorm` does, for which h is the sum of all outputs. w starts at 0, so that h starts as the
    mean of the sources.

    Args:
        width: The width d of an output.
        group: The number of outputs whose sum is one source.
        eps: The number that the norms add to a mean square.

    References:
        Kimi Team 2026, "Attention residuals", arXiv:2603.15031. `group` 1 is their full form, more their block form.
    """

    def __init__(self, width: int, group: int, eps: float) -> None:
        super().__init__()
        self.group = group
        self.keys, self.norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.query = self.drawn("query", Zeros(), width)

    def forward(self, x: Tensor | Outputs, branch: Tensor | None) -> tuple[Outputs, Tensor]:
        """Computes the outputs so far, and the normed mean of their sources.

        Args:
            x: The outputs before the last, or the embedding [B, T, d].
            branch: The last output, [B, T, d]; None if there is none.
        """
        outputs = Outputs((x,)) if isinstance(x, Tensor) else x
        if branch is not None:
            outputs = outputs.joined(branch, self.group)
        sources = [*outputs.sources, *(() if outputs.rest is None else (outputs.rest,))]
        weights = torch.stack([(self.keys(source) * self.query).sum(-1, keepdim=True) for source in sources]).softmax(0)
        mean = sum(weight * source for weight, source in zip(weights, sources, strict=True))
        assert isinstance(mean, Tensor)
        return outputs, self.norm(mean)
