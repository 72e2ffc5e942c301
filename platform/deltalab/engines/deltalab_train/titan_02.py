"""The training for torchtitan 0.2.2: a `TrainSpec`, and defaults of its configuration.

torchrun -m torchtitan.train --job.custom_config_module deltalab_train.titan_02
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import torch
import torchtitan.config.job_config as settings
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.validate import BaseValidator
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.model import BaseModelArgs, ModelProtocol
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.tools.utils import device_type

from deltalab.training.recipe_keys import micro_batch

from . import FOLDER, titan
from .titan import RECIPE

NAME = "deltalab"
titan.keep_as_asked(CheckpointManager)


@dataclass
class ModelArgs(BaseModelArgs):  # type: ignore[misc]
    """The model's arguments, of which there are none."""

    def update_from_config(self, job_config: Any, **_: Any) -> None:
        """Does nothing: the exported folder alone describes the model."""

    def get_nparams_and_flops(self, model: torch.nn.Module, seq_len: int) -> tuple[int, int]:
        """Returns the number of parameters, and the operations of a token."""
        return titan.parameters_and_flops(model)


class Pretraining(titan.Pretraining, ModelProtocol):  # type: ignore[misc]
    """The exported model with its loss."""

    def __init__(self, model_args: ModelArgs) -> None:
        super().__init__(model_args)
        self.make()


class Adapter(titan.SameNames, StateDictAdapter):  # type: ignore[misc]
    """The adapter of state dicts."""


class Loader(titan.Loader, BaseDataLoader):  # type: ignore[misc]
    """The training rows."""

    def __init__(self, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.start(dp_rank, dp_world_size)


class Validator(BaseValidator):  # type: ignore[misc]
    """Measures the loss of the validation rows."""

    def __init__(self, *, job_config: Any, dp_world_size: int, dp_rank: int, **parts: Any) -> None:
        super().__init__(job_config)
        self.rank, self.world = dp_rank, dp_world_size
        self.context, self.amp = parts["validation_context"], parts["maybe_enable_amp"]
        self.metrics = parts["metrics_processor"]

    def should_validate(self, step: int) -> bool:
        """Returns whether validation is due after a step."""
        return titan.due(step)

    def validate(self, model_parts: list[torch.nn.Module], step: int) -> None:
        """Measures the loss, and hands it to the metrics."""
        with self.amp:
            loss = titan.validation_loss(model_parts[0], self.rank, self.world, device_type, self.context)
        self.metrics.log_validation(loss=loss, step=step)


def _parallelize(model: Pretraining, parallel_dims: Any, job_config: Any) -> titan.Pretraining:
    """Returns the model, shared among the processes as torchtitan's configuration asks."""
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    alone = not parallel_dims.fsdp_enabled
    training = job_config.training
    return titan.parallelize(
        model,
        init_device_mesh(device_type, (1,)) if alone else parallel_dims.get_mesh(names),
        dtypes=(TORCH_DTYPE_MAP[training.mixed_precision_param], TORCH_DTYPE_MAP[training.mixed_precision_reduce]),
        backend=job_config.compile.backend if job_config.compile.enable else None,
        offload=training.enable_cpu_offload,
    )


class _Grouped(OptimizersContainer):  # type: ignore[misc]
    """The optimizer, with a study's learning rates and weight decays.

    Metrics show the learning rate of the first group, which is that of the recipe.
    """

    def __init__(self, model_parts: list[Pretraining], optimizer_config: Any) -> None:
        parameters = dict(model_parts[0].named_parameters())
        groups = [
            {"params": [parameters[name] for name in names], **options}
            for names, options in titan.groups(model_parts[0])[::-1]
        ]
        kind = optimizer_config.implementation
        options = {
            "lr": optimizer_config.lr,
            "betas": (optimizer_config.beta1, optimizer_config.beta2),
            "eps": optimizer_config.eps,
            "fused": kind == "fused",
            "foreach": kind == "foreach",
        }
        self.model_parts = model_parts
        self.optimizers = [titan.OPTIMIZERS[RECIPE["optimizer"]["name"]](groups, **options)]
        self._post_init([*parameters.values()], options)


def _metrics(job_config: Any, parallel_dims: Any, model_args: Any = None, tag: str | None = None) -> MetricsProcessor:
    """Returns torchtitan's metrics, which deltalab's logger writes."""
    metrics = MetricsProcessor(job_config, parallel_dims, tag)
    metrics.logger = titan.MetricsLogger()
    return metrics


def _sum(loss: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the loss unchanged, since the model has computed it already."""
    return loss


register_train_spec(
    NAME,
    TrainSpec(
        model_cls=Pretraining,
        model_args={"exported": ModelArgs()},
        parallelize_fn=_parallelize,
        pipelining_fn=None,
        build_optimizers_fn=lambda parts, config, parallel_dims: _Grouped(parts, config),
        build_lr_schedulers_fn=lambda optimizers, *_: LRSchedulersContainer(optimizers, titan.factor),
        build_dataloader_fn=Loader,
        build_tokenizer_fn=None,
        build_loss_fn=lambda job_config, **_: _sum,
        build_validator_fn=Validator,
        build_metrics_processor_fn=_metrics,
        state_dict_adapter=Adapter,
    ),
)


def _section(kind: type, /, **values: Any) -> tuple[type, Any]:
    """Returns a section of the configuration with changed defaults, and the field that makes the section."""
    fields = [(name, kind.__dataclass_fields__[name].type, value) for name, value in values.items()]  # type: ignore[attr-defined]
    section = make_dataclass(kind.__name__, fields, bases=(kind,))
    return section, field(default_factory=section)


def _sections() -> Iterator[tuple[str, tuple[type, Any]]]:
    """Yields the sections of the configuration that the recipe changes, each with its name."""
    optimizer, batch = RECIPE["optimizer"], RECIPE["batch"]
    dtype = titan.precision(device_type)

    def section(name: str, /, **values: Any) -> tuple[str, tuple[type, Any]]:
        kind: Callable[[], Any] = settings.JobConfig.__dataclass_fields__[name].type
        return name, _section(kind, **values)  # type: ignore[arg-type]

    yield section("job", dump_folder=str(titan.run_folder()), description=f"{FOLDER.name} by deltalab")
    yield section("model", name=NAME, flavor="exported", hf_assets_path=str(FOLDER))
    yield section("metrics", log_freq=RECIPE["log"]["every"], disable_color_printing=True)
    yield section(
        "optimizer",
        name="AdamW",
        lr=optimizer["lr"],
        beta1=optimizer["betas"][0],
        beta2=optimizer["betas"][1],
        eps=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        implementation="fused" if device_type != "cpu" else "foreach",
    )
    yield section("lr_scheduler", warmup_steps=RECIPE["schedule"]["warmup_steps"])  # for torchtitan's log alone
    yield section(
        "training",
        local_batch_size=micro_batch(RECIPE, titan.processes()),
        global_batch_size=batch["sequences"],
        seq_len=batch["length"],
        max_norm=RECIPE["clip"] or float("inf"),
        steps=RECIPE["steps"],
        mixed_precision_param=dtype,
    )
    yield section(
        "checkpoint",
        enable=True,
        folder="checkpoints",
        interval=RECIPE["checkpoint"]["every"],
        keep_latest_k=0,  # `titan.keep_as_asked` removes old checkpoints
        async_mode="async",
        last_save_model_only=False,
        initial_load_path=titan.weights_to_load(),
        initial_load_in_hf=titan.weights_to_load() is not None,
    )
    yield section("activation_checkpoint", mode="none")  # `titan.parallelize` does it
    yield section("compile", enable=RECIPE["compile"], components=field(default_factory=lambda: ["model"]))
    yield section("comm", trace_buf_size=0)
    yield section("validation", enable=RECIPE["validation"]["sequences"] > 0, freq=RECIPE["validation"]["every"])


JobConfig = make_dataclass("JobConfig", [(name, *section) for name, section in _sections()])
"""torchtitan's configuration, with the recipe as its defaults."""
