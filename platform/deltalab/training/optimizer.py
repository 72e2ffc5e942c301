"""AdamW and Muon for many runs at once. Each run has a row of parameters, its own rates and its own clipping."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deltalab.models.model import parameter_groups
from deltalab.models.start import hidden_matrices
from deltalab.ops.backends import automatic
from deltalab.training.muon import Muon

ALIGNED = 32
"""Each parameter begins at a multiple of this number of elements: 128 bytes, the widest alignment that kernels need."""

EPS = 1e-8
"""The eps of AdamW."""


class Adam(NamedTuple):
    """The settings of AdamW and of clipping for one run.

    Attributes:
        lr: The learning rate of every step.
        weight_decay: The weight decay.
        betas: The decays of the averages of g and of g^2.
        clip: The largest norm of the gradient; 0 for no limit.

    References:
        Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    lr: Sequence[float]
    weight_decay: float
    betas: tuple[float, float]
    clip: float


class Layout:
    """The places of a model's parameters in a row of P numbers.

    Parameters with weight decay come first, in [0, `decayed`). The parameters in [0, `scaled`) have `share` times the
    learning rate.
    """

    def __init__(self, model: nn.Module) -> None:
        *scaled, decaying, free = parameter_groups(model, 1.0, 1.0)
        parameters = dict(model.named_parameters())
        names = {id(p): name for name, p in parameters.items()}
        kinds = [[names[id(p)] for p in group["params"]] for group in (*scaled, decaying, free)]
        self.names = [name for kind in kinds for name in kind]
        self.shapes = [parameters[name].shape for name in self.names]
        self.sizes = [-(-shape.numel() // ALIGNED) * ALIGNED for shape in self.shapes]
        ends = [sum(self.sizes[: sum(map(len, kinds[: i + 1]))]) for i in range(len(kinds))]
        self.decayed, self.width = ends[-2:]
        self.scaled, self.share = (ends[0], float(scaled[0]["lr"])) if scaled else (0, 1.0)
        starts = dict(zip(self.names, itertools.accumulate(self.sizes, initial=0), strict=False))
        self.matrices: dict[torch.Size, list[int]] = {}
        """Where the matrices of projections inside of the blocks begin, by shape: see `Muon`."""
        for name, matrices in hidden_matrices(model).items():
            start, shape = starts[name], matrices.shape[-2:]
            self.matrices.setdefault(shape, []).extend(range(start, start + matrices.numel(), shape.numel()))
        self.head = next(name for name, p in parameters.items() if p is getattr(model, "head", None))

    def pack(self, state: Mapping[str, Tensor]) -> Tensor:
        """Returns the row [P] of a model's state. Gaps between parameters are 0, and stay 0 in training."""
        row = torch.zeros(self.width)
        for name, part in zip(self.names, row.split(self.sizes), strict=True):
            part[: state[name].numel()] = state[name].detach().flatten()
        return row

    def unpack(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns each parameter [n, ...] of rows [n, P], as a view."""
        parts = zip(self.names, self.shapes, rows.split(self.sizes, dim=1), strict=True)
        return {name: part[:, : shape.numel()].view(len(rows), *shape) for name, shape, part in parts}


class Moments(NamedTuple):
    """The state of n runs between two steps, [n, P] each.

    Attributes:
        weights: The weights.
        first: AdamW's average of g.
        second: AdamW's average of g^2.
    """

    weights: Tensor
    first: Tensor
    second: Tensor


class AdamW:
    """AdamW for n runs, with tensors that stay where they are, so that a CUDA graph can hold a step.

    `load` makes at most `most` steps ready. `step` takes the step number `begin` + `row`, and adds 1 to `row`.

    Attributes:
        bad: The step at which a run's loss or gradient was not finite, [n]; -1 if there was none. From this step on,
            the weights of the run stay as they are.
        loss: The loss of the last step, [n].
    """

    def __init__(
        self, runs: Sequence[Adam], layout: Layout, device: torch.device, most: int, *, muon: bool = False
    ) -> None:
        self.runs, self.layout = list(runs), layout
        self.muon = Muon(layout.matrices) if muon else None
        n = len(runs)
        with device:
            self.bad = torch.full((n,), -1)
            self.loss = torch.zeros(n)
            self.begin, self.row = torch.zeros(2, dtype=torch.int64).unbind()
            self.rates = torch.zeros(most, 3, n, 1)
            self.lr = torch.zeros(most, n)
            self.clip = torch.tensor([run.clip or torch.inf for run in runs])
            # Subtract in Python's precision: in fp32, 1 - 0.999 has a relative error of 1e-5.
            betas = [*zip(*(run.betas for run in runs), strict=True)]
            self.betas = torch.tensor(betas)[..., None]
            self.new = torch.tensor([[1 - beta for beta in pair] for pair in betas])[..., None]

    def rates_of(self, begin: int, end: int) -> Tensor:
        """Returns the numbers of the steps from `begin` to `end` for all runs, [end - begin, 4, n, 1].

        The four numbers are lr weight_decay, lr / (1 - beta_1^t), (1 - beta_2^t)^(1/2) and lr.
        """
        return torch.tensor([self._rates(step) for step in range(begin, end)])[..., None]

    def load(self, begin: int, rates: Tensor) -> None:
        """Makes the steps from `begin` on ready. `rates` are the numbers that `rates_of` returned for them."""
        self.rates[: len(rates)] = rates[:, :3]
        self.lr[: len(rates)] = rates[:, 3, :, 0]
        self.begin.fill_(begin)
        self.row.zero_()

    def _rates(self, step: int) -> list[list[float]]:
        lr = [run.lr[step] for run in self.runs]
        return [
            [rate * run.weight_decay for rate, run in zip(lr, self.runs, strict=True)],
            [rate / (1 - run.betas[0] ** (step + 1)) for rate, run in zip(lr, self.runs, strict=True)],
            [(1 - run.betas[1] ** (step + 1)) ** 0.5 for run in self.runs],
            lr,
        ]

    def step(self, state: Moments, losses: Tensor, grad: Tensor) -> None:
        """Updates the state with a gradient, clipped to the norm of each run.

        Args:
            state: The state, which is changed in place.
            losses: The loss of each run, [n].
            grad: The gradient, [n, P].
        """
        adamw = automatic(grad.device.type).adamw
        before = [] if self.muon is None else self.muon.taken(state.weights)
        if adamw is not None:
            adamw(
                *state, grad, losses, bad=self.bad, loss=self.loss, begin=self.begin, row=self.row,
                rates=self.rates, betas=self.betas, new=self.new, clip=self.clip, eps=EPS,
                decayed=self.layout.decayed, scaled=self.layout.scaled, share=self.layout.share,
            )  # fmt: skip
        else:
            self._step(state, losses, grad)
        if self.muon is not None:
            norm = grad.norm(dim=1)
            clipped = torch.where(norm.isfinite()[:, None], grad * (self.clip / (norm + 1e-6)).clamp(max=1)[:, None], 0)
            moves = self.bad < 0
            lr = torch.where(moves, self.lr.index_select(0, self.row.view(1))[0], 0)
            decay = torch.where(moves, self.rates.index_select(0, self.row.view(1))[0, 0, :, 0], 0)
            self.muon.step(state.weights, before, clipped, state.first, lr, decay, self.betas[0, :, 0])
        self.row.add_(1)

    def _step(self, state: Moments, losses: Tensor, grad: Tensor) -> None:
        decay, rate, root = self.rates.index_select(0, self.row.view(1))[0]
        norm = grad.norm(dim=1)
        fine = (self.bad < 0) & losses.isfinite() & norm.isfinite()
        self.bad.copy_(torch.where((self.bad < 0) & ~fine, self.begin + self.row, self.bad))
        self.loss.copy_(losses)
        moves = fine[:, None]
        grad = torch.where(moves, grad * (self.clip / (norm + 1e-6)).clamp(max=1)[:, None], 0)
        weights, first, second = state
        first.lerp_(grad, self.new[0])
        second.mul_(self.betas[1]).addcmul_(grad, grad * self.new[1])
        weights[:, : self.layout.decayed].mul_(torch.where(moves, 1 - decay, 1))
        change = first / (second.sqrt() / root + EPS) * rate
        if self.layout.scaled:
            change[:, : self.layout.scaled] *= self.layout.share
        weights.sub_(torch.where(moves, change, 0))
