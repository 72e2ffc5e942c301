"""Trains an exported folder by transformers' Trainer, with FSDP2 on several GPUs.

accelerate launch -m deltalab_train.with_trainer
"""

import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from deltalab.data.token_shards import Packed, Split
from deltalab.models.model import build_model
from deltalab.training.recipe import micro

from . import FOLDER, folder, lines, lock
from .batches import Rows, batch

CHECKPOINTS = "checkpoints"


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
    """Rows as the model takes them. Labels are the tokens themselves: the model shifts them."""

    def __init__(self, length: int, documents: str) -> None:
        self.length, self.documents = length, documents

    def __call__(self, rows: Sequence[tuple[Any, Any]]) -> dict[str, Tensor]:
        inputs, _ = batch(list(rows), self.length, self.documents)
        tokens, bounds = inputs["tokens"], inputs.get("cu_seqlens")
        labels = tokens.clone()
        found = {"input_ids": tokens, "labels": labels}
        if bounds is not None:
            bounds = bounds.long()
            lengths = bounds.diff()
            found["position_ids"] = (torch.arange(tokens.shape[1]) - bounds[:-1].repeat_interleave(lengths))[None]
            labels[0, bounds[:-1]] = -100  # nothing precedes the first token of a document
        return found


class Deterministic(Trainer):  # type: ignore[misc]
    """A Trainer that takes rows in their order, decays matrices alone, and trains them as `base_width` asks."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    def get_decay_parameter_names(self, model: nn.Module, *_: Any) -> list[str]:
        return [name for name, parameter in model.named_parameters() if parameter.dim() > 1]

    def create_optimizer(self, *given: Any) -> torch.optim.Optimizer:
        # From transformers 5.3 on, the model may be given.
        made: torch.optim.Optimizer = super().create_optimizer(*given)
        model = next(iter(given), self.model)
        groups = model.parameter_groups(self.args.weight_decay, self.args.learning_rate)
        for own in groups:
            scaled = set(map(id, own["params"])) if "lr" in own else set()
            for group in [group for group in made.param_groups if any(id(p) in scaled for p in group["params"])]:
                parts = [[p for p in group["params"] if (id(p) in scaled) == wanted] for wanted in (True, False)]
                group["params"] = parts[1]
                made.add_param_group({**group, **own, "params": parts[0]})
        return made


class Record(TrainerCallback):  # type: ignore[misc]
    """Writes `metrics.jsonl`, gives a checkpoint its name once it is complete, and removes the oldest."""

    def __init__(self, run: Path, tokens_a_step: int, keep: int) -> None:
        self.run, self.tokens_a_step, self.keep = run, tokens_a_step, keep
        self.trainer: Trainer | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not hasattr(self, "since"):
            self.since, self.step = time.perf_counter(), state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.do_eval and state.global_step == state.max_steps:
            control.should_evaluate = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        known = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
        values = [("train", short, float(logs[name])) for name, short in known.items() if name in logs]
        values += [("validation", "loss", float(logs["eval_loss"]))] if "eval_loss" in logs else []
        if "loss" in logs:
            now = time.perf_counter()
            speed = (state.global_step - self.step) * self.tokens_a_step / (now - self.since)
            self.since, self.step = now, state.global_step
            values.append(("train", "tokens_per_second", speed))
            if torch.cuda.is_available():
                values.append(("train", "memory_gib", torch.cuda.max_memory_reserved() / 2**30))
        lines.append(state.global_step, values)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.since, self.step = time.perf_counter(), state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer is not None
        self.trainer.accelerator.wait_for_everyone()
        if state.is_world_process_zero:
            kept = self.run / CHECKPOINTS
            target = kept / f"step-{state.global_step}"
            shutil.rmtree(target, ignore_errors=True)
            (kept / f"checkpoint-{state.global_step}").rename(target)
            for old in complete(kept)[: -self.keep]:
                shutil.rmtree(old)
        self.trainer.accelerator.wait_for_everyone()
        self.since, self.step = time.perf_counter(), state.global_step


def complete(kept: Path) -> list[Path]:
    """The complete checkpoints, from the oldest to the newest."""
    found = [(int(match[1]), each) for each in kept.glob("step-*") if (match := re.fullmatch(r"step-(\d+)", each.name))]
    return [each for _, each in sorted(found)]


def schedule(given: dict[str, Any]) -> dict[str, Any]:
    """The recipe's schedule as arguments of transformers."""
    about, lr, steps = given["schedule"], given["optimizer"]["lr"], given["steps"]
    kind, more = {
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": about["final"]}),
        "linear": ("polynomial", {"lr_end": lr * about["final"], "power": 1.0}),
        "constant": ("constant_with_warmup", {}),
        "wsd": (
            "warmup_stable_decay",
            {"num_decay_steps": round(0.1 * steps), "decay_type": "linear", "min_lr_ratio": about["final"]},
        ),
    }[about["kind"]]
    return {"lr_scheduler_type": kind, "lr_scheduler_kwargs": more, "warmup_steps": about["warmup_steps"]}


def main() -> None:
    given, run = folder.recipe(), Path(os.environ["DELTALAB_RUN"])
    held = lock.share(run)
    world, on_gpu = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.is_available()
    size, length, count = micro(given, world), given["batch"]["length"], given["batch"]["sequences"]
    data = Packed(os.environ["DELTALAB_DATA"])
    config = AutoConfig.from_pretrained(FOLDER, trust_remote_code=True)
    if folder.weights():
        model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        model.model.load_state_dict(build_model(folder.spec(), seed=given["seed"]).state_dict())
    if world == 1 and given["graphs"] and not given["activation_checkpointing"] and not given["compile"]:
        model.model.graph_blocks()
    validation = FirstRows(data.split("validation"), length, given["validation"]["sequences"])
    optimizer = given["optimizer"]
    record = Record(run, count * length, given["checkpoint"]["keep"])
    trainer = Deterministic(
        model=model,
        args=TrainingArguments(
            output_dir=str(run / CHECKPOINTS),
            max_steps=given["steps"],
            per_device_train_batch_size=size,
            per_device_eval_batch_size=size,
            gradient_accumulation_steps=count // (size * world),
            learning_rate=optimizer["lr"],
            weight_decay=optimizer["weight_decay"],
            adam_beta1=optimizer["betas"][0],
            adam_beta2=optimizer["betas"][1],
            adam_epsilon=optimizer["eps"],
            optim="adamw_torch_fused" if on_gpu else "adamw_torch",
            max_grad_norm=given["clip"],
            **schedule(given),
            bf16=on_gpu and given["precision"] == "bf16",
            gradient_checkpointing=given["activation_checkpointing"],
            torch_compile=given["compile"],
            seed=given["seed"],
            use_cpu=not on_gpu,
            logging_steps=given["log"]["every"],
            logging_first_step=True,
            do_eval=len(validation) > 0,
            eval_strategy="steps" if len(validation) else "no",
            eval_steps=given["validation"]["every"],
            prediction_loss_only=True,
            save_strategy="steps",
            save_steps=given["checkpoint"]["every"],
            remove_unused_columns=False,
            report_to=[],
            disable_tqdm=True,
            **_sharded(world, on_gpu),
        ),
        train_dataset=TrainingRows(Rows(data.split("train"), length, given["seed"]), given["steps"] * count),
        eval_dataset=validation if len(validation) else None,
        data_collator=Collate(length, given["batch"]["documents"]),
        callbacks=[record],
    )
    if trainer.is_fsdp_enabled:
        model.shard_gates()
    record.trainer = trainer
    found = complete(run / CHECKPOINTS)
    trainer.train(resume_from_checkpoint=str(found[-1]) if found else None)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    held.close()


def _sharded(world: int, on_gpu: bool) -> dict[str, Any]:
    if world == 1 or not on_gpu:  # Accelerate has no FSDP on CPUs
        return {}
    shards = {"version": 2, "transformer_layer_cls_to_wrap": ["Block"], "state_dict_type": "SHARDED_STATE_DICT"}
    # Older releases wrap no layers where fsdp is True; those that translate its words warn that they will go.
    translated = hasattr(TrainingArguments, "_apply_legacy_fsdp_to_config")
    return {"fsdp": True if translated else "full_shard auto_wrap", "fsdp_config": shards}


if __name__ == "__main__":
    main()
