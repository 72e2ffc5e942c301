"""Trains many runs of one shape as one model. One tensor holds the parameters of all runs.

On a GPU, one CUDA graph takes a step of all runs.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from deltalab.models.layer import RuleLayer
from deltalab.models.model import Model, places
from deltalab.models.parts.module_layer import ModuleLayer
from deltalab.ops.backends import automatic
from deltalab.ops.fused.loss import labelled, linear_cross_entropy
from deltalab.tasks import IGNORE
from deltalab.tasks.batches import SentBatches, TrainingBatches
from deltalab.training.beat import FIRST_STEPS, STEP, Beat, unheard
from deltalab.training.optimizer import Adam, AdamW, Layout, Moments

BLOCK = 64
"""The number of steps that the host prepares at a time, while a GPU takes earlier steps.

To prepare a step is to compute its random addresses and rates.
"""

WARM_UP = 3
"""The number of steps before a CUDA graph is captured. They compile kernels and allocate workspaces of libraries."""

_log = logging.getLogger("deltalab")


class Unstackable(RuntimeError):
    """A rule or a task uses an operation that `torch.func.vmap` cannot run for several runs at once."""


class Stack:
    """n runs that train as one.

    `advance` takes the runs from step to step. Steps read nothing back from the device. On a GPU, a step is one CUDA
    graph.

    Args:
        model: The model of all runs.
        layout: The places of the model's parameters in a row.
        batches: The batches of the runs.
        state: The state of the runs, which is changed in place.
        runs: The settings of AdamW for each run.
        muon: Whether the matrices of the blocks are trained by Muon.
        bf16: Whether products are in bf16.
        z_loss: As in `TrainSpec`.
        pool: The memory pool of CUDA graphs.
        beat: Called before each step; see `training.beat`.

    Attributes:
        optimizer: The optimizer of all runs. Its `bad` and `loss` are the results of each run.
        eager: The reason why a GPU trains without a CUDA graph; None if there is no such reason.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        batches: TrainingBatches | SentBatches,
        state: Moments,
        runs: Sequence[Adam],
        *,
        bf16: bool,
        muon: bool = False,
        z_loss: float = 0.0,
        pool: Any = None,
        beat: Beat = unheard,
    ) -> None:
        self.model, self.layout, self.batches, self.state = model, layout, batches, state
        self.bf16, self.pool, self.beat, self.z_loss = bf16, pool, beat, z_loss
        self.device = state.weights.device
        self.optimizer = AdamW(runs, layout, self.device, BLOCK, muon=muon)
        self.overfull = torch.zeros((), dtype=torch.bool, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager: str | None = None
        self._warm = 0

    def __len__(self) -> int:
        return len(self.optimizer.runs)

    @property
    def steps(self) -> int:
        """The steps that this stack has taken, as far as the first of them, which compile."""
        return self._warm + (self.graph is not None)

    def advance(self, begin: int, end: int) -> None:
        """Trains the runs from `begin` updates to `end` updates."""
        for first in range(begin, end, BLOCK):
            last = min(first + BLOCK, end)
            # Compute the rates before the copies to a GPU, which synchronize.
            rates = self.optimizer.rates_of(first, last)
            self.batches.load(first, last)
            self.optimizer.load(first, rates)
            self._run(first, last)

    def _run(self, first: int, last: int) -> None:
        for step in range(first, last):
            # Steps of a GPU are launched ahead of time. Only at the copies of a block is it known that the steps
            # before them are done.
            if step == first or self.device.type == "cpu":
                self.beat(STEP if self._warm >= WARM_UP else FIRST_STEPS, step)
            if self.graph is None and self._warm >= WARM_UP and self.eager is None and self.device.type == "cuda":
                self._capture()
            if self.graph is not None:
                self.graph.replay()
            # Read the flags on a CPU alone: reading them at every step would stall a GPU.
            elif self.device.type == "cpu" and bool((self.optimizer.bad >= 0).all()):
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
        """Takes one step of all runs. A CUDA graph can hold the step: tensors stay in place, and none is read back."""
        inputs, targets = self.batches.draw(self.optimizer.row)
        weights = self.state.weights.detach().requires_grad_()
        losses = self.losses(weights, inputs, targets)
        (grad,) = torch.autograd.grad(losses.sum(), weights)
        with torch.no_grad():
            self.optimizer.step(self.state, losses.detach(), grad)

    def losses(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Computes the loss of each run [n], a mean over labelled positions, and the balance loss of experts.

        Args:
            weights: The weights of the runs, [n, P].
            inputs: The tokens, [n, B, T].
            targets: The token to predict at each position, or `IGNORE`, [n, B, T].
        """
        parameters = self.layout.unpack(weights)
        most, at = self.batches.task.most_scored, None
        if most < targets.shape[-1]:
            self.overfull |= ((targets != IGNORE).sum(-1) > most).any()
            at, targets = labelled(targets, most, ignore=IGNORE)
        if at is None or automatic(self.device.type).rms_norm is not None:
            features, balance = self._features(parameters, inputs, at)
        else:
            # On a CPU, keep all places in the last norm: the order of its gradient's sum decides the last bit.
            features, balance = self._features(parameters, inputs)
            features = places(features, at)
        head = parameters[self.layout.head]
        dtype = torch.bfloat16 if self.bf16 else features.dtype
        x, cap = features.flatten(1, 2).to(dtype), self.model.spec.logit_cap
        loss = linear_cross_entropy(x, head.to(dtype), targets.flatten(1), ignore=IGNORE, cap=cap, z=self.z_loss)
        return loss if balance is None else loss + balance

    def _features(
        self, parameters: dict[str, Tensor], inputs: Tensor, at: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes features [n, B, T, d] for inputs [n, B, T], or [n, B, m, d] at the places `at` [n, B, m].

        The second value is the balance loss of each run, [n]; None if there is none.
        """
        arguments = (inputs,) if at is None else (inputs, at)

        def features(parameters: dict[str, Tensor], *arguments: Tensor) -> tuple[Tensor, ...]:
            vectors: tuple[Tensor, ...] = functional_call(_Features(self.model), _under(parameters), arguments)
            return vectors

        with torch.autocast(self.device.type, torch.bfloat16, self.bf16):
            if len(self) == 1:
                # One run gains nothing from vmap, whose batch of one slows some kernels.
                run_parameters = {name: rows.squeeze(0) for name, rows in parameters.items()}
                found = tuple(part[None] for part in features(run_parameters, *(rows[0] for rows in arguments)))
            else:
                found = vmap(features, randomness="same")(parameters, *arguments)
        return found[0], found[1] if len(found) > 1 else None

    @torch.no_grad()
    def measure(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Computes features [n, B, T, d] for inputs [B, T] that all runs share, and the output size of each run, [n].

        The output size is the largest root mean square of a layer's output before its norm.
        """

        def measure_run(parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            with _output_rms(self.model) as sizes:
                features: Tensor = functional_call(_Features(self.model), _under(parameters), (inputs,))[0]
            return features, torch.stack(sizes).max()

        parameters = self.layout.unpack(self.state.weights)
        with _evaluating(self.model), torch.autocast(self.device.type, torch.bfloat16, self.bf16):
            if len(self) == 1:
                features, size = measure_run({name: rows[0] for name, rows in parameters.items()})
                return features[None], size[None]
            vectors_and_sizes: tuple[Tensor, Tensor] = vmap(measure_run, randomness="same")(parameters)
            return vectors_and_sizes


class _Features(nn.Module):
    """A module whose call is `Model.read`, without a None, for `functional_call` and `vmap`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, at: Tensor | None = None) -> tuple[Tensor, ...]:
        features, balance = self.model.read(tokens, at)
        return (features,) if balance is None else (features, balance)


def _under(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": rows for name, rows in parameters.items()}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Takes a model out of training, which matters to the dropout of a user's module."""
    model.eval()
    try:
        yield
    finally:
        model.train()


@contextmanager
def _output_rms(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the root mean square of the output of every rule, and every module, while the model runs."""
    sizes: list[Tensor] = []

    def keep(o: Tensor) -> None:
        sizes.append(o.float().square().mean().sqrt())

    layers = list(model.modules())
    handles = [
        layer.norm.register_forward_pre_hook(lambda _, args: keep(args[0]))
        for layer in layers
        if isinstance(layer, RuleLayer)
    ]
    handles += [
        layer.register_forward_hook(lambda _, args, y: keep(y)) for layer in layers if isinstance(layer, ModuleLayer)
    ]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()
