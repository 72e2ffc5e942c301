"""Many runs of one shape as one model: their parameters are rows of one tensor, and a step of all is one graph."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from deltalab.models.layer import RuleLayer
from deltalab.models.model import Model, parameter_groups, places
from deltalab.ops.backends import automatic
from deltalab.ops.loss import labelled, linear_cross_entropy
from deltalab.tasks import IGNORE
from deltalab.tasks.batches import Feed

BLOCK = 64
"""Steps whose addresses and rates are made ready at a time: by the host, while a GPU takes those before."""

WARM_UP = 3
"""Steps before a CUDA graph is captured, in which kernels are compiled and libraries make their workspaces."""

ALIGNED = 32
"""Elements that a parameter begins at a multiple of: 128 bytes, which any kernel is content with."""

EPS = 1e-8

_log = logging.getLogger("deltalab")


class Unstackable(RuntimeError):
    """A rule or task does something that `torch.func.vmap` cannot do for several runs at once."""


class Adam(NamedTuple):
    """How one run is optimized: AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), eps 1e-8, and clipping.

    lr: of every step, from the first on. clip: of the gradient's norm, 0 for none.
    """

    lr: Sequence[float]
    weight_decay: float
    betas: tuple[float, float]
    clip: float


class Layout:
    """Where a model's parameters lie in a row of P numbers: those that decay first, in [0, `decayed`)."""

    def __init__(self, model: nn.Module) -> None:
        decaying, free = ({id(p) for p in group["params"]} for group in parameter_groups(model, 1.0))
        named = dict(model.named_parameters())
        self.names = [n for kind in (decaying, free) for n, p in named.items() if id(p) in kind]
        self.shapes = [named[name].shape for name in self.names]
        self.sizes = [-(-shape.numel() // ALIGNED) * ALIGNED for shape in self.shapes]
        self.decayed = sum(
            size for name, size in zip(self.names, self.sizes, strict=True) if id(named[name]) in decaying
        )
        self.width = sum(self.sizes)
        self.head = next(name for name, p in named.items() if p is getattr(model, "head", None))

    def pack(self, state: Mapping[str, Tensor]) -> Tensor:
        """[P]; what fills gaps is 0, and stays it."""
        row = torch.zeros(self.width)
        for name, part in zip(self.names, row.split(self.sizes), strict=True):
            part[: state[name].numel()] = state[name].detach().flatten()
        return row

    def unpack(self, rows: Tensor) -> dict[str, Tensor]:
        """Of rows [n, P] each parameter [n, ...], as views."""
        parts = zip(self.names, self.shapes, rows.split(self.sizes, dim=1), strict=True)
        return {name: part[:, : shape.numel()].unflatten(1, shape) for name, shape, part in parts}


class Moments(NamedTuple):
    """What runs are between two steps, [n, P] each: weights, and AdamW's averages of gradients and of their squares."""

    weights: Tensor
    first: Tensor
    second: Tensor


class Stack:
    """n runs that train as one.

    `advance` takes them from step to step; `bad [n]` is the step at which a run's loss or gradient was not finite, -1
    while there is none, and from which on its weights stay as they are; `loss [n]` is that of the last step.

    Steps run without a look at the device, on a GPU as one CUDA graph. `eager` says why there is none where one could
    not be captured.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        feed: Feed,
        state: Moments,
        runs: Sequence[Adam],
        *,
        bf16: bool,
        pool: Any = None,
    ) -> None:
        self.model, self.layout, self.feed, self.state, self.runs = model, layout, feed, state, list(runs)
        self.bf16, self.pool = bf16, pool
        self.device = state.weights.device
        n = len(runs)
        with self.device:
            self.bad = torch.full((n,), -1)
            self.loss = torch.zeros(n)
            self.overfull = torch.zeros((), dtype=torch.bool)
            self.begin, self.row = torch.zeros(2, dtype=torch.int64).unbind()
            self.rates = torch.zeros(BLOCK, 3, n, 1)
            self.clip = torch.tensor([run.clip or torch.inf for run in runs])
            # Both in Python's precision: in fp32, 1 - 0.999 is off by 1e-5 of itself.
            betas = [*zip(*(run.betas for run in runs), strict=True)]
            self.betas = torch.tensor(betas)[..., None]
            self.new = torch.tensor([[1 - beta for beta in each] for each in betas])[..., None]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager: str | None = None
        self._warm = 0

    def __len__(self) -> int:
        return len(self.runs)

    def advance(self, begin: int, end: int) -> None:
        """The updates that follow `begin` updates, until there are `end`."""
        for first in range(begin, end, BLOCK):
            last = min(first + BLOCK, end)
            # A copy to a GPU waits for it: what the host has to reckon is done by then.
            rates = torch.tensor([self._rates(step) for step in range(first, last)])[..., None]
            self.feed.load(first, last)
            self.rates[: last - first] = rates
            self.begin.fill_(first)
            self.row.zero_()
            self._run(last - first)

    def _rates(self, step: int) -> list[list[float]]:
        """lr weight_decay, lr / (1 - beta_1^t) and (1 - beta_2^t)^(1/2), of each run."""
        lr = [run.lr[step] for run in self.runs]
        return [
            [rate * run.weight_decay for rate, run in zip(lr, self.runs, strict=True)],
            [rate / (1 - run.betas[0] ** (step + 1)) for rate, run in zip(lr, self.runs, strict=True)],
            [(1 - run.betas[1] ** (step + 1)) ** 0.5 for run in self.runs],
        ]

    def _run(self, count: int) -> None:
        for _ in range(count):
            if self.graph is None and self._warm >= WARM_UP and self.eager is None and self.device.type == "cuda":
                self._capture()
            if self.graph is not None:
                self.graph.replay()
            # On a CPU the flags cost nothing to read; on a GPU reading them at every step would stall the device.
            elif self.device.type == "cpu" and bool((self.bad >= 0).all()):
                return
            else:
                self._eagerly()

    def _eagerly(self) -> None:
        try:
            self.update()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self._warm or len(self) == 1:
                raise
            raise Unstackable(str(error).splitlines()[0]) from error
        self._warm += 1

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                self.update()
        except Exception as error:
            cause = error if isinstance(error, torch.OutOfMemoryError) else error.__context__
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            self.eager = (str(cause or error).strip().splitlines() or [type(error).__name__])[0]
            _log.warning("training goes without a CUDA graph, and slower: %s", self.eager)
        else:
            self.graph = graph

    def update(self) -> None:
        """One step of all runs, a function of tensors that stay where they are, and without a look at any."""
        inputs, targets = self.feed.draw(self.row)
        weights = self.state.weights.detach().requires_grad_()
        losses = self.losses(weights, inputs, targets)
        (grad,) = torch.autograd.grad(losses.sum(), weights)
        with torch.no_grad():
            self._step(losses.detach(), grad)

    def losses(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Of each run [n], the mean over labelled positions; inputs and targets [n, B, T], weights [n, P]."""
        parameters = self.layout.unpack(weights)
        most, at = self.feed.task.most_scored, None
        if most < targets.shape[-1]:
            self.overfull |= ((targets != IGNORE).sum(-1) > most).any()
            at, targets = labelled(targets, most, ignore=IGNORE)
        if at is None or automatic(self.device.type).rms_norm is not None:
            features = self._features(parameters, inputs, at)
        else:
            # On a CPU the last norm's gradient is a sum over all places, whose order results depend on to the last bit.
            features = places(self._features(parameters, inputs), at)
        head = parameters[self.layout.head]
        dtype = torch.bfloat16 if self.bf16 else features.dtype
        return linear_cross_entropy(features.flatten(1, 2).to(dtype), head.to(dtype), targets.flatten(1), ignore=IGNORE)

    def _features(self, parameters: dict[str, Tensor], inputs: Tensor, at: Tensor | None = None) -> Tensor:
        """[n, B, T, d] for inputs [n, B, T], or [n, B, m, d] at their places `at` [n, B, m]."""
        given = (inputs,) if at is None else (inputs, at)

        def features(parameters: dict[str, Tensor], *given: Tensor) -> Tensor:
            found: Tensor = functional_call(_Features(self.model), _under(parameters), given)
            return found

        with torch.autocast(self.device.type, torch.bfloat16, self.bf16):
            if len(self) == 1:
                # Nothing to be gained, and to some kernels a plain batch is dearer than none.
                one = {name: rows.squeeze(0) for name, rows in parameters.items()}
                return features(one, *(rows[0] for rows in given))[None]
            return vmap(features, randomness="same")(parameters, *given)

    def _step(self, losses: Tensor, grad: Tensor) -> None:
        """AdamW with each run's own rates, on the gradient [n, P] clipped to each run's own norm."""
        adamw = automatic(self.device.type).adamw
        if adamw is not None:
            adamw(
                *self.state, grad, losses, bad=self.bad, loss=self.loss, begin=self.begin, row=self.row,
                rates=self.rates, betas=self.betas, new=self.new, clip=self.clip, eps=EPS, decayed=self.layout.decayed,
            )  # fmt: skip
        else:
            self._adamw(losses, grad)
        self.row.add_(1)

    def _adamw(self, losses: Tensor, grad: Tensor) -> None:
        decay, rate, root = self.rates.index_select(0, self.row.view(1))[0]
        norm = grad.norm(dim=1)
        fine = (self.bad < 0) & losses.isfinite() & norm.isfinite()
        self.bad.copy_(torch.where((self.bad < 0) & ~fine, self.begin + self.row, self.bad))
        self.loss.copy_(losses)
        moves = fine[:, None]
        grad = torch.where(moves, grad * (self.clip / (norm + 1e-6)).clamp(max=1)[:, None], 0)
        weights, first, second = self.state
        first.lerp_(grad, self.new[0])
        second.mul_(self.betas[1]).addcmul_(grad, grad * self.new[1])
        weights[:, : self.layout.decayed].mul_(torch.where(moves, 1 - decay, 1))
        weights.sub_(torch.where(moves, first / (second.sqrt() / root + EPS) * rate, 0))

    @torch.no_grad()
    def measure(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Features [n, B, T, d] for inputs [B, T] that all runs share, and the largest root mean square of a layer's
        output before its norm, [n]."""

        def measured(parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            with _output_rms(self.model) as sizes:
                features: Tensor = functional_call(_Features(self.model), _under(parameters), (inputs,))
            return features, torch.stack(sizes).max()

        parameters = self.layout.unpack(self.state.weights)
        with torch.autocast(self.device.type, torch.bfloat16, self.bf16):
            if len(self) == 1:
                features, size = measured({name: one[0] for name, one in parameters.items()})
                return features[None], size[None]
            found: tuple[Tensor, Tensor] = vmap(measured, randomness="same")(parameters)
            return found


class _Features(nn.Module):
    """`Model.features` as what a call of it is, for `functional_call`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, at: Tensor | None = None) -> Tensor:
        return self.model.features(tokens, at)


def _under(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": one for name, one in parameters.items()}


@contextmanager
def _output_rms(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the root mean square of every rule's output while the model runs."""
    sizes: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        sizes.append(args[0].float().square().mean().sqrt())

    handles = [layer.norm.register_forward_pre_hook(keep) for layer in model.modules() if isinstance(layer, RuleLayer)]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()
