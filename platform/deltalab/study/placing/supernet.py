"""Trains a supernet, whose layers each hold the rule and attention, and scores placements with its weights.

At each step one mixer of each layer computes: a placement is drawn that has as many attention layers as the base, all
with the same probability. So the weights minimize the mean loss over placements, E_m L(w, m). Everything but the mixers
is shared.

References:
    Guo et al. 2019, arXiv:1904.00420, for one path at a time, drawn uniformly.
    Gu et al. 2025 (Jet-Nemotron), arXiv:2508.15884, for the placement of attention.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any, cast

import torch
from torch import Tensor, nn

from deltalab.errors import InputError
from deltalab.models.block import Block
from deltalab.models.layer import RuleLayer
from deltalab.models.model import Model, build_model
from deltalab.models.parts.cache import LayerCache
from deltalab.models.parts.module_layer import ModuleLayer
from deltalab.models.spec import ModelSpec
from deltalab.ops.packing import Sequences
from deltalab.study.placing.placements import Placement
from deltalab.study.planning.plan import TUNE_SEEDS_FROM
from deltalab.tasks import Task
from deltalab.tasks.batches import SentBatches, TrainingBatches
from deltalab.training.device import device_type, multiplies_bf16
from deltalab.training.evaluation import Evaluation, means
from deltalab.training.optimizer import Adam, Layout, Moments
from deltalab.training.spec import TrainSpec
from deltalab.training.stack import BLOCK, Stack

SEED = TUNE_SEEDS_FROM
"""The seed of a supernet's start and batches, which no confirmation has."""

SAVED_EVERY = 20.0
"""Seconds between two checkpoints, at least."""


class Either(nn.Module):
    """The two mixers of a layer, of which one computes.

    Args:
        rule: The mixer with the rule.
        attention: The mixer with attention.

    Attributes:
        attends: Whether attention computes.
    """

    def __init__(self, rule: RuleLayer | ModuleLayer, attention: RuleLayer | ModuleLayer) -> None:
        super().__init__()
        self.rule, self.attention, self.attends = rule, attention, False

    def advance(
        self,
        x: Tensor,
        cache: LayerCache | None = None,
        *,
        cu_seqlens: Tensor | Sequences | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, LayerCache]:
        """Computes the output of one mixer, as `RuleLayer.advance` describes."""
        mixer = self.attention if self.attends else self.rule
        if isinstance(mixer, ModuleLayer):
            return mixer.advance(x, cache, cu_seqlens=cu_seqlens)
        return mixer.advance(x, cache, cu_seqlens=cu_seqlens, first=first)


def of_both(model: ModelSpec) -> Model:
    """Makes the model of a supernet. Each mixer starts as in a model of that mixer alone, from `SEED`.

    Args:
        model: A hybrid; its places of attention do not matter.
    """
    network = build_model(replace(model, attention=(), window=0), seed=SEED)
    attention = build_model(replace(model, attention=tuple(range(model.depth))), seed=SEED)
    for block, other in zip(network.blocks, attention.blocks, strict=True):
        mixers = cast(Block, block).mixer, cast(Block, other).mixer
        cast(Any, block).mixer = Either(*mixers)
    return network


def drawn(step: int, layers: int, count: int) -> Placement:
    """Returns the placement of a training step, one of all with the same probability, from `SEED` and the step alone.

    Args:
        step: The updates before the step.
        layers: The layers of the model.
        count: The layers with attention.
    """
    return tuple(sorted(Random(f"supernet {SEED}, step {step}").sample(range(layers), count)))


class Supernet:
    """A supernet in training, on the device of its `train`.

    Args:
        task: The task.
        model: The hybrid; as many layers have attention at each step as in it.
        train: The training.

    Attributes:
        step: The updates so far.
    """

    def __init__(self, task: Task, model: ModelSpec, train: TrainSpec) -> None:
        self.task, self.train, self.step = task, train, 0
        self.layers, self.count = model.depth, sum(map(model.is_attention, range(model.depth)))
        self.device = torch.device(device_type(train.device))
        bf16 = train.precision == "bf16" or (train.precision == "auto" and multiplies_bf16(self.device))
        self._network = of_both(model).to(self.device)
        layout = Layout(self._network)
        row = layout.pack(self._network.state_dict()).to(self.device)[None]
        batches = SentBatches if task.fed_by_cpu(self.device) else TrainingBatches
        self._stack = Stack(
            self._network,
            layout,
            batches(task, train.batch_size, [SEED], self.device, BLOCK),
            Moments(row, torch.zeros_like(row), torch.zeros_like(row)),
            [Adam([*map(train.learning_rate, range(train.steps))], train.weight_decay, train.betas, train.clip)],
            bf16=bf16,
            muon=train.optimizer == "muon",
            z_loss=train.z_loss,
        )
        self._stack.eager = "the mixers change from step to step"  # which a CUDA graph could not follow
        self._evaluation = Evaluation(task, train.batch_size, train.eval_batches, self.device, bf16=bf16)

    def advance(self, tell: Callable[[int, float], None], save: Callable[[], None]) -> None:
        """Trains to the end.

        Args:
            tell: Called with the step and the loss as often as a training evaluates.
            save: Called `SAVED_EVERY` seconds after it was called last, and at the end.

        Raises:
            InputError: A loss or a gradient was not finite.
        """
        saved, told = time.monotonic(), {*self.train.evaluated_at()}
        while self.step < self.train.steps:
            self._place(drawn(self.step, self.layers, self.count))
            self._stack.advance(self.step, self.step + 1)
            self.step += 1
            if self.step not in told:
                continue
            if (bad := int(self._stack.optimizer.bad[0])) >= 0:
                raise InputError(f"the supernet diverged at step {bad}: lower train.lr", key="train.lr")
            tell(self.step, float(self._stack.optimizer.loss[0]))
            if self.step == self.train.steps or time.monotonic() - saved >= SAVED_EVERY:
                save()
                saved = time.monotonic()

    def score(self, placement: Placement) -> float:
        """Returns the task's metric of a placement on validation, with the shared weights; NaN if it is not finite."""
        self._place(placement)
        metrics = means(self._evaluation.sums(self._stack, "validation"), 1)[0]
        return math.nan if metrics is None else metrics[self.task.metric]

    def _place(self, placement: Placement) -> None:
        """Has attention compute in the layers of a placement, and the rule in the others."""
        for layer, block in enumerate(self._network.blocks):
            cast(Any, block).mixer.attends = layer in placement

    def state_dict(self) -> dict[str, Any]:
        """Returns all that a checkpoint needs."""
        return {"step": self.step, "state": tuple(self._stack.state)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self.step = saved["step"]
        for part, value in zip(self._stack.state, saved["state"], strict=True):
            part.copy_(value)
