"""Trains an exported folder by transformers' Trainer, with FSDP2 on several GPUs.

accelerate launch -m deltalab_train.with_trainer
"""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from deltalab.data.token_shards import Packed, Split
from deltalab.models.model import build_model
from deltalab.training.muon import MuonWithAdamW
from deltalab.training.recipe_keys import micro_batch, rate_factor

from . import FOLDER, folder, launcher, lock, metrics_file
from .batches import Rows, batch
from .clock import Clock
from .kept import named_checkpoints, remove_oldest

CHECKPOINTS = "checkpoints"
SPENT = "seconds.json"
"""The file of a checkpoint with the seconds of its steps, where time ends the training."""


class TrainingRows(Dataset[Any]):
    """The rows of a whole training, in the recipe's order."""

    def __init__(self, rows: Rows, count: int) -> None:
        self.rows, self.count = rows, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.rows[index]


class FirstRows(Dataset[Any]):
    """The first rows of a split, for validation."""

    def __init__(self, split: Split, length: int, count: int) -> None:
        self.split, self.length, self.count = split, length, min(count, split.rows(length))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.split.row(index, self.length)


class Collate:
    """Makes batches of the model's inputs from rows, with the token after each as `shift_labels`.

    Trainer counts `shift_labels`, and only if there are `labels`.
    """

    def __init__(self, length: int, documents: str) -> None:
        self.length, self.documents = length, documents

    def __call__(self, rows: Sequence[tuple[Any, Any]]) -> dict[str, Tensor]:
        """Makes the inputs of a batch."""
        packed, targets = batch(list(rows), self.length, self.documents)
        tokens, bounds = packed["tokens"], packed.get("cu_seqlens")
        inputs = {"input_ids": tokens, "labels": tokens, "shift_labels": targets}
        if bounds is not None:
            bounds = bounds.long()
            lengths = bounds.diff()
            inputs["position_ids"] = (torch.arange(tokens.shape[1]) - bounds[:-1].repeat_interleave(lengths))[None]
        return inputs


class Deterministic(Trainer):  # type: ignore[misc]
    """A Trainer that reads rows in order. It decays only matrices, and scales their learning rate by `base_width`.

    Args:
        recipe: The recipe, with all settings.
        clock: The time of the steps, which the learning rates follow.
        **given: The arguments of Trainer.
    """

    def __init__(self, recipe: Mapping[str, Any], clock: Clock, **given: Any) -> None:
        self.recipe, self.clock = recipe, clock
        super().__init__(**given)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    def get_decay_parameter_names(self, model: nn.Module, *_: Any) -> list[str]:
        """Returns the names of all matrices."""
        return [name for name, parameter in model.named_parameters() if parameter.dim() > 1]

    def create_optimizer(self, *models: Any) -> torch.optim.Optimizer:
        """Makes Trainer's AdamW, or Muon. Parameters whose learning rate is scaled get separate groups.

        Args:
            *models: The model, which transformers passes from release 5.3 on.
        """
        model, settings = next(iter(models), self.model), self.recipe["optimizer"]
        if settings["name"] == "muon":
            groups = model.parameter_groups(settings["weight_decay"], settings["lr"], muon=True)
            options = {name: settings[name] for name in ("lr", "betas", "eps")}
            self.optimizer = MuonWithAdamW(groups, **options, fused=torch.cuda.is_available())
            return self.optimizer
        optimizer: torch.optim.Optimizer = super().create_optimizer(*models)
        for scaled in model.parameter_groups(self.args.weight_decay, self.args.learning_rate):
            ids = set(map(id, scaled["params"])) if "lr" in scaled else set()
            for group in [group for group in optimizer.param_groups if any(id(p) in ids for p in group["params"])]:
                inside, outside = ([p for p in group["params"] if (id(p) in ids) == wanted] for wanted in (True, False))
                group["params"] = outside
                optimizer.add_param_group({**group, **scaled, "params": inside})
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Makes the scheduler of the recipe, whose rates are a study's."""

        def factor(step: int) -> float:
            self.clock.tick(step)
            return rate_factor(self.recipe, step, self.clock.spent)

        scheduler = LambdaLR(optimizer or self.optimizer, factor)
        self.lr_scheduler, self._created_lr_scheduler = scheduler, True
        return scheduler

    def _maybe_log_save_evaluate(self, *given: Any, **named: Any) -> None:
        with self.clock.stopped():
            super()._maybe_log_save_evaluate(*given, **named)


class Record(TrainerCallback):  # type: ignore[misc]
    """Writes `metrics.jsonl`, names each checkpoint once it is complete, and removes the oldest checkpoints."""

    def __init__(self, run: Path, recipe: dict[str, Any], clock: Clock) -> None:
        self.run, self.recipe, self.clock = run, recipe, clock
        self.tokens_a_step = recipe["batch"]["sequences"] * recipe["batch"]["length"]
        self.trainer: Trainer | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts the clock at the first step."""
        if not hasattr(self, "since"):
            self.since, self.step = time.perf_counter(), state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Asks for a validation after the last step, which may be that in which the time ends."""
        if self.clock.over:
            control.should_training_stop = control.should_log = control.should_save = True
        if args.do_eval and (self.clock.over or state.global_step == state.max_steps):
            control.should_evaluate = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Writes the values of a step, with the speed since the values before."""
        if not state.is_world_process_zero:
            return
        names = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
        values = [("train", short, float(logs[name])) for name, short in names.items() if name in logs]
        values += [("validation", "loss", float(logs["eval_loss"]))] if "eval_loss" in logs else []
        if "loss" in logs:
            now = time.perf_counter()
            speed = (state.global_step - self.step) * self.tokens_a_step / (now - self.since)
            self.since, self.step = now, state.global_step
            values.append(("train", "tokens_per_second", speed))
            if torch.cuda.is_available():
                values.append(("train", "memory_gib", torch.cuda.max_memory_reserved() / 2**30))
        metrics_file.append(state.global_step, values)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts the clock anew, since validation is not training."""
        self.since, self.step = time.perf_counter(), state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Renames the checkpoint that Trainer has completed, and removes the oldest beyond those to keep."""
        assert self.trainer is not None
        self.trainer.accelerator.wait_for_everyone()
        if state.is_world_process_zero:
            folder = self.run / CHECKPOINTS
            target = folder / f"step-{state.global_step}"
            shutil.rmtree(target, ignore_errors=True)
            whole = folder / f"checkpoint-{state.global_step}"
            if self.clock.seconds is not None:
                (whole / SPENT).write_text(json.dumps(self.clock.spent))
            whole.rename(target)
            if self.clock.seconds is not None:
                metrics_file.append(state.global_step, [("train", "seconds", self.clock.spent)])
            remove_oldest(folder, self.recipe["checkpoint"]["keep"], self.recipe["milestones"])
        self.trainer.accelerator.wait_for_everyone()
        self.since, self.step = time.perf_counter(), state.global_step


def main() -> None:
    """Trains the folder from the newest complete checkpoint, or from the start."""
    recipe, run = folder.recipe(), Path(os.environ["DELTALAB_RUN"])
    lock_file = lock.share(run)
    launcher.end_with_launcher()
    world, on_gpu = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.is_available()
    size, length, count = micro_batch(recipe, world), recipe["batch"]["length"], recipe["batch"]["sequences"]
    data = Packed(os.environ["DELTALAB_DATA"])
    config = AutoConfig.from_pretrained(FOLDER, trust_remote_code=True)
    if folder.weights():
        model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        model.model.load_state_dict(build_model(folder.spec(), seed=recipe["seed"]).state_dict())
    model.z_loss = recipe["z_loss"]
    if world == 1 and recipe["graphs"] and not recipe["activation_checkpointing"] and not recipe["compile"]:
        model.model.graph_blocks()
    validation = FirstRows(data.split("validation"), length, recipe["validation"]["sequences"])
    optimizer = recipe["optimizer"]
    clock = Clock(recipe["seconds"])
    record = Record(run, recipe, clock)
    trainer = Deterministic(
        recipe,
        clock,
        model=model,
        args=TrainingArguments(
            output_dir=str(run / CHECKPOINTS),
            max_steps=recipe["steps"],
            per_device_train_batch_size=size,
            per_device_eval_batch_size=size,
            gradient_accumulation_steps=count // (size * world),
            learning_rate=optimizer["lr"],
            weight_decay=optimizer["weight_decay"],
            adam_beta1=optimizer["betas"][0],
            adam_beta2=optimizer["betas"][1],
            adam_epsilon=optimizer["eps"],
            optim="adamw_torch_fused" if on_gpu else "adamw_torch",
            max_grad_norm=recipe["clip"],
            bf16=on_gpu and recipe["precision"] == "bf16",
            gradient_checkpointing=recipe["activation_checkpointing"],
            torch_compile=recipe["compile"],
            seed=recipe["seed"],
            use_cpu=not on_gpu,
            logging_steps=recipe["log"]["every"],
            logging_first_step=True,
            do_eval=len(validation) > 0,
            eval_strategy="steps" if len(validation) else "no",
            eval_steps=recipe["validation"]["every"],
            prediction_loss_only=True,
            save_strategy="steps",
            save_steps=recipe["checkpoint"]["every"],
            remove_unused_columns=False,
            report_to=[],
            disable_tqdm=True,
            **_sharded(world, on_gpu),
        ),
        train_dataset=TrainingRows(Rows(data.split("train"), length, recipe["seed"]), recipe["steps"] * count),
        eval_dataset=validation if len(validation) else None,
        data_collator=Collate(length, recipe["batch"]["documents"]),
        callbacks=[record],
    )
    if trainer.is_fsdp_enabled:
        model.shard_gates()
    record.trainer = trainer
    checkpoints = named_checkpoints(run / CHECKPOINTS)
    if checkpoints and clock.seconds is not None:
        clock.spent = json.loads((checkpoints[-1] / SPENT).read_text())
    trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    lock_file.close()


def _sharded(world: int, on_gpu: bool) -> dict[str, Any]:
    """Returns the arguments of Trainer for FSDP2, empty if there is one process or no GPU."""
    if world == 1 or not on_gpu:  # Accelerate has no FSDP on CPUs
        return {}
    shards = {"version": 2, "transformer_layer_cls_to_wrap": ["Block"], "state_dict_type": "SHARDED_STATE_DICT"}
    # Older releases of transformers wrap no layers if fsdp is True. Releases with the translation below warn that words
    # such as full_shard will go.
    translated = hasattr(TrainingArguments, "_apply_legacy_fsdp_to_config")
    return {"fsdp": True if translated else "full_shard auto_wrap", "fsdp_config": shards}


if __name__ == "__main__":
    main()
