"""The training for torchtitan 0.3: a `ModelSpec`, and a configuration.

torchrun -m torchtitan.train --module deltalab_train.titan_03 --config pretrain
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.trainer as torchtitan_trainer
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import BaseLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import TORCH_DTYPE_MAP, CommConfig, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.protocols import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from deltalab.training.recipe_keys import micro_batch

from . import FOLDER, titan
from .titan import RECIPE

if not hasattr(dist, "set_timeout"):
    # torchtitan 0.3.0 calls this function, which torch 2.13 does not have yet.
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
titan.keep_as_asked(CheckpointManager)
titan.goes_on(Trainer)


def _whole(inputs: torch.Tensor, labels: torch.Tensor, others: dict[str, Any], *_: Any) -> tuple[Any, ...]:
    """Leaves sequences whole, which the model cuts itself. Of the labels, whose number is counted, a part is left."""
    return inputs, labels.flatten()[:: RECIPE["context_parallel"]], others


torchtitan_trainer.prepare_context_parallel_input = _whole


class Pretraining(titan.Pretraining, BaseModel):  # type: ignore[misc]
    """The exported model with its loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):  # type: ignore[misc]
        """The configuration of the model, which is empty."""

        def update_from_config(self, *, config: Any, **_: Any) -> None:
            """Does nothing: the exported folder alone describes the model."""

        def get_nparams_and_flops(self, model: torch.nn.Module, seq_len: int) -> tuple[int, int]:
            """Returns the number of parameters, and the operations of a token."""
            return titan.parameters_and_flops(model)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.make()

    def verify_module_protocol(self) -> None:
        """Does nothing. The model initializes its own parameters, so its parts need not be torchtitan's modules."""


class Adapter(titan.SameNames, StateDictAdapter):  # type: ignore[misc]
    """The adapter of state dicts."""


class Loader(titan.Loader, BaseDataLoader):  # type: ignore[misc]
    """The training rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """The configuration of the rows, which is empty."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.start(dp_rank, dp_world_size)


class Validation(Validator):  # type: ignore[misc]
    """Measures the loss of the validation rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):  # type: ignore[misc]
        """The configuration of the validation."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **parts: Any) -> None:
        self.config, self.rank, self.world = config, dp_rank, dp_world_size
        self.context, self.metrics = parts["validation_context"], parts["metrics_processor"]

    def should_validate(self, step: int) -> bool:
        """Returns whether validation is due after a step."""
        return titan.due(step)

    def validate(self, model_parts: list[torch.nn.Module], step: int) -> None:
        """Measures the loss, and hands it to the metrics."""
        loss = titan.validation_loss(model_parts[0], self.rank, self.world, device_type, self.context)
        self.metrics.log_validation(loss=loss, step=step)


class Loss(BaseLoss):  # type: ignore[misc]
    """Divides the sum of losses that the model returns by the number of target tokens of all processes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):  # type: ignore[misc]
        """The configuration of the loss, which is empty."""

    def __init__(self, config: Config, **_: Any) -> None:
        pass

    def __call__(
        self, loss: torch.Tensor, labels: torch.Tensor, global_valid_tokens: Any = None, **_: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the loss per token, and an empty dictionary of further values."""
        return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


class Metrics(MetricsProcessor):  # type: ignore[misc]
    """torchtitan's metrics, which deltalab's logger writes."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """The configuration of the metrics."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        self.logger = titan.MetricsLogger()


class Schedulers(LRSchedulersContainer):  # type: ignore[misc]
    """The learning rates, which are a study's."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):  # type: ignore[misc]
        """The configuration of the learning rates, of which torchtitan prints the warm-up."""

        def build(self, *, optimizers: Any, training_steps: int) -> LRSchedulersContainer:
            """Makes the schedulers."""
            return LRSchedulersContainer(optimizers, titan.factor)


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """A tokenizer that does nothing, because packed data holds tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """The configuration of the tokenizer, which is empty."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Is never called."""
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Is never called."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Is never called."""
        raise NotImplementedError


def _parallelize(
    model: Pretraining,
    *,
    parallel_dims: Any,
    training: TrainingConfig,
    compile_config: CompileConfig,
    **_: Any,
) -> titan.Pretraining:
    """Returns the model, shared among the processes as torchtitan's configuration asks."""
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    return titan.parallelize(
        model,
        parallel_dims.get_mesh(names),
        dtypes=(TORCH_DTYPE_MAP[training.mixed_precision_param], TORCH_DTYPE_MAP[training.mixed_precision_reduce]),
        backend=compile_config.backend if compile_config.enable else None,
        offload=training.enable_cpu_offload,
    )


class Optimizers(OptimizersContainer):  # type: ignore[misc]
    """The optimizer."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """The configuration of the optimizer, which is torchtitan's own."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> type[torch.optim.Optimizer]:
        return titan.OPTIMIZERS[name]


def _optimizer() -> Optimizers.Config:
    """Returns the optimizer with a study's learning rates and weight decays."""
    optimizer = RECIPE["optimizer"]
    shared = {"betas": tuple(optimizer["betas"]), "eps": optimizer["eps"]}
    with torch.device("meta"):
        model = Pretraining(Pretraining.Config())
    return Optimizers.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=f"^({'|'.join(map(re.escape, names))})$",
                optimizer_name=optimizer["name"],
                optimizer_kwargs={**shared, **options},
            )
            for names, options in titan.groups(model)
        ],
        implementation="fused" if device_type != "cpu" else "foreach",
    )


def pretrain() -> Trainer.Config:
    """Returns torchtitan's configuration for the recipe."""
    return Trainer.Config(
        model_spec=ModelSpec(
            name="deltalab",
            flavor="exported",
            model=Pretraining.Config(),
            parallelize_fn=_parallelize,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=Adapter,
        ),
        hf_assets_path=str(FOLDER),
        dump_folder=str(titan.run_folder()),
        metrics=Metrics.Config(log_freq=RECIPE["log"]["every"], disable_color_printing=True),
        tokenizer=NoTokenizer.Config(),
        dataloader=Loader.Config(),
        loss=Loss.Config(),
        optimizer=_optimizer(),
        lr_scheduler=Schedulers.Config(warmup_steps=RECIPE["schedule"]["warmup_steps"]),  # for torchtitan's log alone
        training=TrainingConfig(
            local_batch_size=micro_batch(RECIPE, titan.processes()),
            global_batch_size=RECIPE["batch"]["sequences"],
            seq_len=RECIPE["batch"]["length"],
            max_norm=RECIPE["clip"] or float("inf"),
            steps=RECIPE["steps"],
            mixed_precision_param=titan.precision(device_type),
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor", context_parallel_degree=RECIPE["context_parallel"]
        ),
        checkpoint=CheckpointManager.Config(
            enable=True,
            folder="checkpoints",
            interval=RECIPE["checkpoint"]["every"],
            keep_latest_k=0,  # `titan.keep_as_asked` removes old checkpoints
            async_mode="async",
            last_save_model_only=False,
            initial_load_path=titan.weights_to_load(),
            initial_load_in_hf=titan.weights_to_load() is not None,
        ),
        activation_checkpoint=None,  # `titan.parallelize` does it
        compile=CompileConfig(enable=RECIPE["compile"], components=["model"]),
        comm=CommConfig(trace_buf_size=0),
        validator=Validation.Config(
            enable=RECIPE["validation"]["sequences"] > 0, freq=RECIPE["validation"]["every"], steps=1
        ),
        debug=DebugConfig(enable_structured_logging=False),
    )
