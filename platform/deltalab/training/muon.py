"""Muon: the matrices of the blocks move by orthogonal steps, all else by AdamW.

`Muon` trains many runs at once, for studies. `MuonWithAdamW` trains one model, for engines. Exported folders hold a
copy of this module.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""The coefficients a, b, c of the iteration X <- a X + (b A + c A^2) X with A = X X^T."""
ITERATIONS = 5
LEAST_NORM = 1e-7
"""The least norm by which a matrix is divided."""
AS_ADAMW = 0.2
"""The root mean square of AdamW's steps, which Muon's get too, so that both take one lr and one weight decay."""


def orthogonal(x: Tensor) -> Tensor:
    """Returns matrices [..., a, b] with the singular vectors of x and singular values near 1, by five iterations.

    References:
        Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """The steps of the matrices of n runs, beside an AdamW that takes those of everything else.

    The average of the gradient is AdamW's own, so that Muon's momentum is the first of its betas. A step of a matrix
    [a, b] is 0.2 max(a, b)^(1/2) lr O, where O is orthogonal: its root mean square is that of a step of AdamW.

    Args:
        places: The matrices, by shape: where each begins in a row.

    References:
        Liu et al. 2025, arXiv:2502.16982, for the size of a step and the weight decay.
    """

    def __init__(self, places: Mapping[torch.Size, Sequence[int]]) -> None:
        self.places = {shape: list(starts) for shape, starts in places.items()}

    def taken(self, rows: Tensor) -> list[Tensor]:
        """Copies the matrices [n, m, a, b] of each shape out of rows [n, P]."""
        return [
            torch.stack([rows[:, i : i + shape.numel()].view(-1, *shape) for i in starts], dim=1)
            for shape, starts in self.places.items()
        ]

    def step(
        self,
        weights: Tensor,
        before: list[Tensor],
        grad: Tensor,
        average: Tensor,
        lr: Tensor,
        decay: Tensor,
        beta: Tensor,
    ) -> None:
        """Replaces AdamW's step of the matrices.

        Args:
            weights: The weights of the runs after the step of AdamW, [n, P].
            before: What `taken` returned for the weights before it.
            grad: The clipped gradient, [n, P].
            average: AdamW's average of the gradient after its step, [n, P].
            lr: The learning rate of each run, [n]; 0 for a run that stays.
            decay: lr times the weight decay of each run, [n]; 0 for a run that stays.
            beta: The first of the betas of each run, [n].
        """
        rate, shrink, share = (x.view(-1, 1, 1, 1) for x in (lr, 1 - decay, beta))
        for (shape, starts), old, g, mean in zip(
            self.places.items(), before, self.taken(grad), self.taken(average), strict=True
        ):
            # In bf16 on a GPU, as in the authors' code; a CPU has no fast products in bf16.
            ahead = g.lerp(mean, share.expand_as(g))
            way = orthogonal(ahead.bfloat16() if g.is_cuda else ahead).to(old.dtype)
            new = shrink * old - AS_ADAMW * max(shape) ** 0.5 * rate * way
            for number, start in enumerate(starts):
                weights[:, start : start + shape.numel()] = new[:, number].flatten(1)


class MuonWithAdamW(torch.optim.AdamW):
    """Muon for the groups of parameters with `muon`, and AdamW for the others, with the steps of a study.

    A parameter [a, b] is a matrix, and a parameter [n, a, b] holds n of them. Of a parameter that several processes
    share, each process gathers the momentum, makes the whole step, and takes its own part of it.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates all parameters."""
        groups = [group for group in self.param_groups if group.get("muon")]
        grads = {p: p.grad for group in groups for p in group["params"]}
        for p in grads:
            p.grad = None  # AdamW passes over parameters without a gradient
        loss = super().step(closure)
        for group in groups:
            for p in group["params"]:
                p.grad = grads[p]
                if p.grad is not None:
                    self._move(p, group["lr"], group["lr"] * group["weight_decay"], group["betas"][0])
        return loss

    def _move(self, p: Tensor, lr: float, decay: float, beta: float) -> None:
        """Makes the step of one parameter: see `Muon`."""
        state = self.state[p]
        if not state:
            # Optimizers of torch that load a state look for the number of steps.
            state["step"], state["exp_avg"] = torch.zeros(()), torch.zeros_like(p)
        state["step"] += 1
        assert p.grad is not None
        ahead = p.grad.lerp(state["exp_avg"].lerp_(p.grad, 1 - beta), beta)
        size = AS_ADAMW * max(p.shape[-2:]) ** 0.5 * lr
        p.mul_(1 - decay).sub_(_orthogonal_part(ahead.bfloat16() if ahead.is_cuda else ahead).to(p.dtype), alpha=size)


def _orthogonal_part(x: Tensor) -> Tensor:
    """Returns `orthogonal(x)`. Of a tensor that processes share, it computes the whole, and returns each its part."""
    if not hasattr(x, "device_mesh"):
        return orthogonal(x)
    # Import late: the import takes a second, and few models are shared.
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(x, DTensor)
    return distribute_tensor(orthogonal(x.full_tensor()), x.device_mesh, x.placements, src_data_rank=None)
