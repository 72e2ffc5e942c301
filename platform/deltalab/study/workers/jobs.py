"""The messages between the driver and a worker: stacks of jobs, records, and why a stack is lost.

This module does not import torch, so that processes that only pass messages on start without it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deltalab.store import ArtifactRecord, RuleRecord, RunRecord, TrialRecord
from deltalab.training.time_budget import reached

if TYPE_CHECKING:
    from deltalab.models.spec import ModelSpec
    from deltalab.training.train import TrainSpec

IMPORTING = "importing the rule and the task"
"""The name of the activity in which a child imports its plugins."""


@dataclass(frozen=True)
class Job:
    """Everything that a worker needs to run one trial, as JSON.

    Attributes:
        key: SHA-256 of what the trial computes.
        arm: The trial's arm.
        task: The task's name in the study.
        task_kind: The task's name in the registry.
        task_version: The task's version.
        stage: Whether the trial tunes or confirms.
        number: The number of the candidate.
        values: The candidate's values by path.
        config: Rule, model and train, with every setting spelled out.
        task_params: The parameters of the task.
        seeds: The seeds of the trial's runs.
        plugins: (kind, name, file, hash) of the code that the trial runs.
        rule_source: The rule's source at planning time; a worker's file may have changed since.
        gpu: The share of a GPU that a stack takes; 0 for none.
        deadline: Seconds that the trial may take; None without a limit.
        decode: Whether the time of a decoding step is measured.
        engine: The study's section `engine`; None for deltalab's own training.
    """

    key: str
    arm: str
    task: str
    task_kind: str
    task_version: int
    stage: Literal["tune", "confirm"]
    number: int
    values: dict[str, Any]
    config: dict[str, Any]
    task_params: dict[str, Any]
    seeds: tuple[int, ...]
    plugins: tuple[tuple[str, str, str, str], ...]
    rule_source: str
    gpu: float = 0.0
    deadline: float | None = None
    decode: bool = False
    engine: dict[str, Any] | None = None

    @cached_property
    def specs(self) -> "tuple[ModelSpec, TrainSpec]":
        """The model and the training. The job's plugins must have been loaded."""
        from deltalab.models.spec import ModelSpec
        from deltalab.training.train import TrainSpec

        train = TrainSpec(**self.config["train"])
        if train.device == "auto" and not self.gpu:
            # A worker that asked Ray for no GPU still sees all GPUs, and every worker would take the first.
            train = replace(train, device="cpu")
        return ModelSpec.of({**self.config["model"], "rule": self.config["rule"]}), train


class Lost(Exception):
    """A stack ended without results. The message says why; its last line is the reason, in a few words.

    Attributes:
        of: "trial" if the rule or the task caused the loss; "infrastructure" if the process, machine or disk did, so
            that the same stack may well succeed when it runs again.
        at: The place in a training where a signal ended or stopped the process while the rule or the task computed,
            such as "at step 3 of 6 (step)"; None if the rule or the task had no part in the loss.
    """

    def __init__(self, reason: str, of: Literal["trial", "infrastructure"], at: str | None = None) -> None:
        """Keeps the cause and the place beside the reason."""
        super().__init__(reason)
        self.of, self.at = of, at


def late(job: Job, step: int) -> str:
    """Says that a trial was not done by its deadline."""
    train = job.config["train"]
    at = reached(step, train["steps"], train.get("seconds"))
    return f"the trial is not done after its deadline of {job.deadline:g} s, at {at}"


def interrupted_stacks_in(runs: Path) -> list[tuple[str, ...]]:
    """Lists the stacks of several jobs that left a checkpoint but no result.

    A stack is a tuple of its jobs' keys.

    Args:
        runs: The folder of weights and checkpoints.
    """
    listed = sorted((runs / "checkpoints").glob("*.json"))
    return [tuple(json.loads(file.read_text())) for file in listed if file.with_suffix(".pt").exists()]


def checkpoint_file(stack: Sequence[Job], runs: Path) -> Path:
    """The file of a stack's checkpoint in the folder of weights and checkpoints."""
    keys = [job.key for job in stack]
    name = keys[0] if len(keys) == 1 else hashlib.sha256("".join(keys).encode()).hexdigest()
    return runs / "checkpoints" / f"{name}.pt"


def forget_checkpoint(stack: Sequence[Job], runs: Path) -> None:
    """Removes the checkpoint of a killed stack that will not run again with the same jobs."""
    from deltalab.training.train import forget_partial

    file = checkpoint_file(stack, runs)
    forget_partial(file)
    for suffix in (".json", ".pt"):
        file.with_suffix(suffix).unlink(missing_ok=True)


def stack_to_json(stack: Sequence[Job]) -> str:
    """Writes a stack as text, to be sent from the driver to a worker."""
    return json.dumps([asdict(job) for job in stack])


def stack_from_json(text: str) -> list[Job]:
    """Reads the stack that `stack_to_json` wrote."""
    return [
        Job(**{**job, "seeds": tuple(job["seeds"]), "plugins": tuple(map(tuple, job["plugins"]))})
        for job in json.loads(text)
    ]


def record_to_json(record: TrialRecord) -> str:
    """Writes a record as text, to be sent from a worker to the driver."""
    return json.dumps(asdict(record))


def record_from_json(text: str) -> TrialRecord:
    """Reads the record that `record_to_json` wrote."""
    trial: dict[str, Any] = json.loads(text)
    runs = [
        RunRecord(
            **{
                **run,
                "metrics": [tuple(metric) for metric in run["metrics"]],
                "artifacts": [ArtifactRecord(**artifact) for artifact in run["artifacts"]],
            }
        )
        for run in trial["runs"]
    ]
    return TrialRecord(**{**trial, "rule": RuleRecord(**trial["rule"]), "runs": runs})
