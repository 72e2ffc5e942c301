"""The parts of a training by torchtitan that do not depend on its version."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torchtitan.components.metrics import BaseLogger

from deltalab.data.token_shards import Packed
from deltalab.models.model import Model, head_loss, parameter_groups
from deltalab.models.parts.context import Context
from deltalab.models.parts.experts import idle_parameters
from deltalab.models.rule_inputs.gates import shard_gates
from deltalab.models.start import initialize
from deltalab.training.muon import MuonWithAdamW
from deltalab.training.recipe_keys import micro_batch, rate_factor

from . import FOLDER, folder, launcher, lock, metrics_file
from .batches import IGNORE, Batches, Rows, held_out
from .clock import Clock
from .kept import remove_oldest

RECIPE = folder.recipe()
HELD = lock.share(Path(os.environ["DELTALAB_RUN"]))
"""The lock on the run. It lasts as long as this process, since nothing closes the file."""
launcher.end_with_launcher()
CLOCK = Clock(RECIPE["seconds"])

KEPT_BYTES = 4 * 2**30
"""Gathered weights of at most so many bytes stay on each GPU from the forward to the backward pass. Larger weights are
gathered again, which costs more time on the host than on the GPUs. A step of 394M parameters on two H200 takes 215 ms
if the weights are gathered again, and 187 ms if they stay."""
TOGETHER_BYTES = 200 * 2**20
"""Weights that stay are gathered by one call for as many blocks as hold so many bytes, and at least one. On another two
H200, a step of 394M takes 200 ms with a call for each block, and 188 ms with one for six."""


def run_folder() -> Path:
    """Returns the folder of the run."""
    return Path(os.environ["DELTALAB_RUN"])


def precision(device_type: str) -> str:
    """Returns the dtype of products, as torchtitan names it. A CPU trains in float32."""
    return "bfloat16" if RECIPE["precision"] == "bf16" and device_type != "cpu" else "float32"


def weights_to_load() -> str | None:
    """Returns the exported folder if it has weights to start from, else None."""
    return str(FOLDER) if folder.weights() else None


def packed() -> Packed:
    """Returns the packed data."""
    return Packed(os.environ["DELTALAB_DATA"])


class Pretraining(nn.Module):
    """The exported model with its loss. Its parameters have the names of the folder's `model.safetensors`.

    Attributes:
        model: The exported model.
        products: The dtype of autocast; None if FSDP2 sets the precision.
        context: The processes that share each sequence; None if a process has whole ones.
    """

    model: Model
    products: torch.dtype | None = None
    context: Context | None = None

    def make(self) -> None:
        """Makes the model. torchtitan's constructors differ from version to version, so they call this method."""
        self.model = Model(folder.spec())

    def forward(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Computes the sum of -log p over the targets [B, T] that are not `IGNORE`, given the tokens [B, T].

        In training, each has the recipe's z-loss and the balance loss of experts, so that the mean has it once. A
        process of a context computes the part of the sum that is its own.
        """
        part = None if self.context is None else self.context.part(tokens, cu_seqlens)
        if part is not None:
            tokens, targets, cu_seqlens = part.cut(tokens), part.cut(targets), part.cu_seqlens
        with torch.autocast(tokens.device.type, self.products, enabled=self.products is not None):
            features, balance = self.model.read(tokens, cu_seqlens=cu_seqlens, part=part)
            z = RECIPE["z_loss"] if self.training else 0.0
            cap = self.model.spec.logit_cap
            loss = head_loss(features, self.model.head, targets, ignore=IGNORE, count=1, cap=cap, z=z)
            return loss if balance is None else loss + balance * (targets != IGNORE).sum()

    def init_weights(self, buffer_device: torch.device | None = None, **_: Any) -> None:
        """Initializes each parameter as deltalab does, from the recipe's seed and the name of the parameter."""
        initialize(self.model, RECIPE["seed"])


def parameters_and_flops(model: nn.Module) -> tuple[int, int]:
    """Returns the number of parameters N, and the operations of a token's forward and backward pass, 6 N.

    Experts that a token does not use are no part of the operations.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    return count, 6 * (count - idle_parameters(model))


def parallelize(
    module: Pretraining, mesh: Any, *, dtypes: tuple[torch.dtype, torch.dtype], backend: str | None, offload: bool
) -> Pretraining:
    """Applies activation checkpointing and compilation to each block, then FSDP2 to each block and to the rest.

    A single GPU does not share parameters. There, autocast sets the precision, and blocks run as CUDA graphs.

    Processes that share sequences hold the gathered weights of all blocks during a step. If they gathered those of one
    block after another, each would wait at every block until the last process has reached it.

    Args:
        module: The model, which is changed in place.
        mesh: The processes that share the parameters, or a mesh of one process.
        dtypes: The dtype of products, and the dtype in which gradients are summed.
        backend: The backend of `torch.compile`; None does not compile.
        offload: Whether parameters and gradients lie in the memory of the CPU between their uses.
    """
    for block in module.model.blocks:
        if RECIPE["activation_checkpointing"]:
            # A wrapper around the block would change the names of its parameters.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if backend is not None:
            block.compile(backend=backend)
    if mesh.size() == 1 and dtypes[0] != torch.float32 and torch.cuda.is_available() and not offload:
        # FSDP2 would gather a copy of all weights in each step, and forbid CUDA graphs.
        module.products = dtypes[0]
        if backend is None and RECIPE["graphs"] and not RECIPE["activation_checkpointing"]:
            module.model.graph_blocks()
        return module
    options: dict[str, Any] = {"mesh": mesh}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    shard_gates(module, **options)
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    gathered = parameters_and_flops(module)[0] * dtypes[0].itemsize
    options["reshard_after_forward"] = gathered > KEPT_BYTES
    if RECIPE["context_parallel"] > 1:
        module.context = Context(RECIPE["context_parallel"])
        options["reshard_after_forward"] = False
    blocks = list(module.model.blocks) if module.context is None else []
    together = 1
    if blocks and not options["reshard_after_forward"]:
        together = max(1, TOGETHER_BYTES * len(blocks) // gathered)
    for first in range(0, len(blocks), together):
        fully_shard(blocks[first : first + together], **options)
    fully_shard(module, **options)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all processes
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
    return module


class SameNames:
    """An adapter of state dicts for torchtitan that changes nothing: `model.safetensors` has the model's own names."""

    @staticmethod
    def to_hf(state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the state dict unchanged."""
        return state_dict

    @staticmethod
    def from_hf(hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the state dict unchanged."""
        return hf_state_dict


OPTIMIZERS = {"adamw": torch.optim.AdamW, "muon": MuonWithAdamW}
"""The recipe's name of an optimizer -> its class."""


def groups(module: Pretraining) -> list[tuple[list[str], dict[str, Any]]]:
    """Returns (names of parameters, {lr, weight_decay, muon}) of each group of parameters, as a study groups them.

    The last group has the recipe's lr, which torchtitan's metrics then show.
    """
    optimizer, names = RECIPE["optimizer"], {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        (
            [names[id(parameter)] for parameter in group["params"]],
            {"lr": optimizer["lr"], **{name: value for name, value in group.items() if name != "params"}},
        )
        for group in parameter_groups(
            module.model, optimizer["weight_decay"], optimizer["lr"], muon=optimizer["name"] == "muon"
        )
        if group["params"]
    ]


class Loader:
    """The training rows as torchtitan's dataloader. Its state is the number of rows that all processes have seen.

    Where time ends the training, the time that is spent is part of the state.
    """

    def start(self, rank: int, world: int) -> None:
        """Begins the stream of rows, for group `rank` of `world` groups of processes that share their sequences."""
        rows = Rows(packed().split("train"), RECIPE["batch"]["length"], RECIPE["seed"])
        self.batches = Batches(rows, RECIPE, micro_batch(RECIPE, processes()), rank, world)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return map(_with_targets, self.batches)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the stream of rows."""
        return {"rows": self.batches.seen} | ({} if CLOCK.seconds is None else {"seconds": CLOCK.spent})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a place in the stream of rows."""
        if state_dict:
            self.batches.seen = state_dict["rows"]
            CLOCK.spent = state_dict.get("seconds", 0.0)


def _with_targets(pair: tuple[dict[str, Tensor], Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Returns a batch in the form that torchtitan expects, with the targets also among the inputs."""
    inputs, targets = pair
    # The model computes the loss itself, chunk by chunk, so that logits of all positions are never held at once.
    rest = {name: value for name, value in inputs.items() if name != "tokens"}
    return {"input": inputs["tokens"], "targets": targets, **rest}, targets


@torch.no_grad()
def validation_loss(model: nn.Module, rank: int, world: int, device: str, context: Any) -> float:
    """Computes the mean loss of the validation rows in nats a token, over all processes.

    Args:
        model: The model.
        rank: The number of the group of processes that share sequences, from 0.
        world: The number of these groups.
        device: The device of the model.
        context: A function that makes the context in which torchtitan runs the model.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with CLOCK.stopped():
        model.eval()  # no z-loss, and no balance loss of experts
        for pair in held_out(packed().split("validation"), RECIPE, micro_batch(RECIPE, processes()), rank, world):
            inputs, targets = _with_targets(pair)
            tokens = inputs.pop("input")
            with context():
                loss = model(tokens.to(device), **{name: value.to(device) for name, value in inputs.items()})
            sums += torch.stack([loss.double(), (targets != IGNORE).sum().to(device).double()])
        model.train()
        dist.all_reduce(sums)
        # Each process of a context has counted all targets of the sequences.
        return float(sums[0] / sums[1] * RECIPE["context_parallel"])


def due(step: int) -> bool:
    """Returns whether validation is due after a step."""
    return CLOCK.over or step == RECIPE["steps"] or not step % RECIPE["validation"]["every"]


def goes_on(trainer: type[Any]) -> None:
    """Makes a class of torchtitan's trainers end with the step in which the time ends."""
    goes_on = trainer.should_continue_training
    trainer.should_continue_training = lambda self: goes_on(self) and not CLOCK.over


class MetricsLogger(BaseLogger):  # type: ignore[misc]
    """Writes torchtitan's metrics to `metrics.jsonl`, in the first process."""

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Writes the metrics of a step. Of several learning rates, the last one is written."""
        values = {}
        for name, value in metrics.items():
            title = "lr" if name.startswith("lr/") else name
            if title in NAMES:
                split, short, factor = NAMES[title]
                factor *= dist.get_world_size() if title in PER_GPU else 1
                values[split, short] = split, short, float(value) * factor
        if dist.get_rank() == 0:
            metrics_file.append(step, values.values())


NAMES = {
    "loss_metrics/global_avg_loss": ("train", "loss", 1.0),
    "grad_norm": ("train", "grad_norm", 1.0),
    "lr": ("train", "lr", 1.0),
    "throughput(tps)": ("train", "tokens_per_second", 1.0),
    "mfu(%)": ("train", "mfu", 0.01),
    "memory/max_reserved(GiB)": ("train", "memory_gib", 1.0),  # the memory of CUDA graphs is reserved, not active
    "validation_metrics/loss": ("validation", "loss", 1.0),
}
"""torchtitan's name of a metric -> the split and the name in `metrics.jsonl`, and the factor between the units."""
PER_GPU = ("throughput(tps)",)
"""The metrics that torchtitan measures for one GPU."""


def keep_as_asked(manager: type[Any]) -> None:
    """Makes a class of torchtitan's checkpoint managers keep as many checkpoints as the recipe says, and the last one.

    torchtitan itself keeps up to two more: it removes old checkpoints before the new one has a folder, and none after
    the last step.
    """
    save = manager.save

    def save_and_remove(self: Any, curr_step: int, last_step: bool = False) -> Any:
        last_step = last_step or CLOCK.over
        due = last_step or not curr_step % RECIPE["checkpoint"]["every"]

        def remove() -> None:
            if dist.get_rank() == 0 and due:
                remove_oldest(run_folder() / "checkpoints", RECIPE["checkpoint"]["keep"], RECIPE["milestones"])

        remove()
        with CLOCK.stopped():
            saved = save(self, curr_step, last_step=last_step)
        if due and CLOCK.seconds is not None and dist.get_rank() == 0:
            metrics_file.append(curr_step, [("train", "seconds", CLOCK.spent)])
        if last_step:  # torchtitan waits until this checkpoint is whole
            remove()
        return saved

    manager.save = save_and_remove


def factor(step: int) -> float:
    """Returns the factor of the learning rates in the update that follows `step` updates."""
    CLOCK.tick(step)
    return rate_factor(RECIPE, step, CLOCK.spent)


def processes() -> int:
    """Returns the number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))
