"""Measures stacks of runs on the fixed validation and test splits, and counts what a model costs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deltalab.models.dead_parameters import dead_parameters
from deltalab.models.model import Model
from deltalab.models.parts.experts import idle_parameters
from deltalab.ops.fused.loss import capped
from deltalab.ops.peers.scans import PACKAGES
from deltalab.own_module import OwnModule
from deltalab.tasks import IGNORE, Batch, Task
from deltalab.training.beat import EVALUATION, Beat, unheard
from deltalab.training.stack import Stack

EVALUATION_SEED = 0
"""The seed of every validation and test batch: the splits are the same for runs of all seeds."""

Metric: TypeAlias = tuple[str, str, int, float]
"""The split, the name, the step and the value of a metric."""

Sums: TypeAlias = tuple[list[tuple[int, list[str]]], Tensor]
"""The N sums of one stack: a list of run and metric names for each sum, and the totals and counts [N, 2] on the device.
"""


class Evaluation:
    """Measures every metric of a task in all its `evaluations`.

    It also measures `output_rms`, the largest root mean square of a layer's output before its norm. An unstable rule
    has a large `output_rms`.

    Args:
        task: The task.
        batch_size: The rows of a batch.
        batches: The batches of each evaluation. `Task.evaluated` may change both numbers.
        device: The device of the stacks.
        bf16: Whether products are in bf16.
        beat: Called before each batch.
    """

    def __init__(
        self,
        task: Task,
        batch_size: int,
        batches: int,
        device: torch.device,
        *,
        bf16: bool,
        beat: Beat = unheard,
    ) -> None:
        self.task, self.batch_size, self.batches, self.device, self.bf16 = task, batch_size, batches, device, bf16
        self.beat = beat
        self._drawn: dict[tuple[str, str, int], tuple[Batch, Tensor]] = {}

    @torch.no_grad()
    def sums(self, stack: Stack, split: str) -> Sums:
        """Measures a stack on a split, without waiting for the device."""
        evaluations = self.task.evaluations()
        names: list[tuple[int, list[str]]] = []
        values: list[Tensor] = []
        for label, task in evaluations.items():
            suffixes = [f"@{label}" if label else "", *([] if "" in evaluations else [""])]
            rows, batches = self.task.evaluated(task, split, self.batch_size, self.batches)
            for i in range(batches):
                self.beat(EVALUATION)
                for number, metrics in enumerate(self._on_batch(stack, split, label, task, i, rows)):
                    for name, pair in metrics.items():
                        names.append((number, [name + end for end in suffixes]))
                        values += pair
        return names, torch.stack([value.double() for value in values]).view(-1, 2)

    def _on_batch(
        self, stack: Stack, split: str, label: str, task: Task, i: int, rows: int
    ) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        """Yields the metrics of each run of a stack on batch i, as (total, count)."""
        if (split, label, i) not in self._drawn:
            batch = task.batch(split, rows, EVALUATION_SEED, i, self.device)
            self._drawn[split, label, i] = batch, (batch.targets != IGNORE).flatten().nonzero().squeeze(1)
        batch, scored = self._drawn[split, label, i]
        features, sizes = stack.measure(batch.inputs)
        heads = stack.layout.unpack(stack.state.weights)[stack.layout.head]
        for feature, head, size in zip(features, heads, sizes, strict=True):
            with torch.autocast(self.device.type, torch.bfloat16, self.bf16):
                logits = capped(F.linear(feature.flatten(0, 1)[scored], head), stack.model.spec.logit_cap)
            yield {**task.measure(batch, logits.float()), "output_rms": (size, torch.ones_like(size))}


def means(sums: Sums, runs: int) -> list[dict[str, float] | None]:
    """Returns the metrics of each run of a stack; None for a run with a metric that is not finite.

    A metric whose count is 0 is left out.
    """
    labels, values = sums
    sums_of_runs: list[dict[str, tuple[float, float]]] = [{} for _ in range(runs)]
    for (number, names), (total, count) in zip(labels, values.tolist(), strict=True):
        for name in names:
            before = sums_of_runs[number].get(name, (0.0, 0.0))
            sums_of_runs[number][name] = before[0] + total, before[1] + count
    metrics = [{name: total / count for name, (total, count) in run.items() if count} for run in sums_of_runs]
    return [run if all(map(math.isfinite, run.values())) else None for run in metrics]


def costs(model: Model, length: int, step: int) -> list[Metric]:
    """Returns the costs of using a model on `length` tokens, which depend neither on its weights nor on its device.

    The cost `flops_per_token` counts the matrix products of a forward pass, without embedding and logits; the products
    of a scan are those of its chunks. The cost `state_size` counts the elements of the rule's memory of one sequence,
    and `kv_cache` those of them that grow with the sequence. `conv_cache` counts what is held beside the memory: see
    `CacheSize`. `dead_parameters` counts the parameters that do nothing, unless the blocks are too large for it.

    A module of another author runs on the model's device. On a GPU its kernels, and those of rules beside it, hide
    their products from the counter: then `flops_per_token` is not known, and left out.

    Args:
        model: The model.
        length: The tokens of the sequence.
        step: The step that is recorded with the costs.
    """
    count = dead_parameters(model.spec, length)
    dead: list[Metric] = [] if count is None else [("cost", "dead_parameters", step, float(count))]
    device = model.embed.weight.device.type
    if device == "cpu" and model.spec.backend not in PACKAGES:
        return [*_counted(model, length, step), *dead]
    if model.spec.foreign():  # its kernels would read from `meta`, which has no memory
        with torch.autocast(device, torch.bfloat16), _launched() as kernels:
            counted = _counted(model, length, step)
        hidden = kernels or not all(isinstance(rule, OwnModule) for rule in model.spec.rules())
        return [cost for cost in counted if not (hidden and cost[1] == "flops_per_token")] + dead
    try:
        return [*counted_without_numbers(model, length, step), *dead]
    except Exception:  # a rule may read values, which tensors on `meta` do not have
        return [*_counted(model, length, step), *dead]


def counted_without_numbers(model: Model, length: int, step: int) -> list[Metric]:
    """Returns `costs`, counted on PyTorch's device `meta`.

    A GPU's kernels hide their products from the counter, and would be compiled for the count alone.
    """
    with torch.device("meta"):
        return _counted(Model(replace(model.spec, backend="auto")), length, step)


@contextmanager
def _launched() -> Iterator[list[Any]]:
    """Collects what Triton says of each kernel that is launched."""
    from triton.knobs import runtime

    kernels: list[Any] = []
    runtime.launch_enter_hook.add(kernels.append)
    try:
        yield kernels
    finally:
        runtime.launch_enter_hook.remove(kernels.append)


def _counted(model: Model, length: int, step: int) -> list[Metric]:
    # Count with the plain attention: other attentions of a CPU hide their products from the counter.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        size = model.cache_size(length)
    found = {
        "flops_per_token": counter.get_total_flops() / length - 2 * idle_parameters(model),
        "state_size": size.state,
        "kv_cache": size.kv,
        "conv_cache": size.conv,
    }
    if math.isnan(size.state):  # a module that does not say what it holds
        del found["state_size"], found["kv_cache"]
    return [("cost", name, step, float(value)) for name, value in found.items()]
