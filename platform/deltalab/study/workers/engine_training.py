"""Trains the runs of a trial by an engine of real training, and measures them as the task does.

The runs of a trial train one after another, each in its own folder. A run that was killed goes on from its newest
checkpoint, and a run that has trained is only measured again.
"""

import json
import logging
import math
import shutil
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deltalab.data.token_shards import Packed
from deltalab.engines import checkpoints, outcome
from deltalab.engines.deltalab_train.milestones import is_milestone, step_of
from deltalab.engines.launch import start
from deltalab.engines.machines import version_of
from deltalab.engines.preparation import prepare
from deltalab.evaluation import evaluate, results
from deltalab.evaluation.harness import HarnessOptions
from deltalab.evaluation.model_folder import open_model
from deltalab.evaluation.suites.measure import SuiteOptions, measure
from deltalab.evaluation.suites.suite import suites_among
from deltalab.export.recipe import make_recipe
from deltalab.export.source import Source
from deltalab.export.write import export
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_task
from deltalab.study.workers.jobs import Job, Lost
from deltalab.tasks import Task
from deltalab.tasks.text import Text
from deltalab.training.beat import Beat
from deltalab.training.device import hardware
from deltalab.training.evaluation import Metric
from deltalab.training.spec import TrainSpec
from deltalab.training.time_budget import STEPS
from deltalab.training.train import RunResult, TrialResult
from deltalab.training.trainer import LockStep

_log = logging.getLogger("deltalab")


def train_by_engine(job: Job, runs: Path, *, watch: Callable[[int], None] | None, beat: Beat) -> TrialResult:
    """Trains all seeds of a job by its engine.

    Args:
        job: The job, whose plugins have been loaded.
        runs: The folder of weights and checkpoints. The job's trainings lie in `engines/KEY/seed_SEED`.
        watch: Called with the share of the trainings that is done, as a step of one training.
        beat: Called at each step of which the engine tells.

    Raises:
        InputError: The engine does not take the model or the data.
        Lost: The engine was killed, or another process still trains a run.
        RuntimeError: The engine ended with an error.
    """
    task = get_task(job.task_kind, **job.task_params)
    assert isinstance(task, Text)  # as a plan demands
    assert job.engine is not None
    model, train = job.specs
    if train.precision == "auto":  # as in a trial, which trains in float32 on a CPU
        train = replace(train, precision="bf16" if job.gpu else "fp32")
    folder = runs / "engines" / job.key
    exported = folder / "model"
    if not (exported / "config.json").is_file():
        _export(job, model, train, task, exported)
    trained = []
    for done, seed in enumerate(job.seeds):

        def stepped(step: int, before: int = done) -> None:
            share = (before * train.steps + step) // len(job.seeds)
            beat("training by the engine", share)
            if watch is not None:
                watch(share)

        beat("starting the engine", done * train.steps // len(job.seeds))
        trained.append(_run(job, exported, folder / f"seed_{seed}", (model, train), task, seed, stepped, beat))
    engine, version = job.engine["name"], version_of(job.engine["name"])
    costs = {name: int(value) for split, name, _, value in trained[0][0].metrics if split == "cost"}
    return TrialResult(
        runs=[result for result, _ in trained],
        parameters=sum(value.numel() for value in trained[0][0].weights.values()),
        state_size=costs.get("state_size"),
        tokens_per_second=statistics.median(speed for _, speed in trained),
        hardware=hardware(torch.device("cuda" if job.gpu else "cpu"))
        | {"engine": f"{engine} {version}", "processes": str(int(job.gpu) or job.engine["processes"])},
    )


def _packed(task: Text) -> Packed:
    """Returns the packed data of a task, which a plan demands of every task for an engine."""
    assert task.packed is not None
    return task.packed


def _export(job: Job, model: ModelSpec, train: TrainSpec, task: Text, folder: Path) -> None:
    """Writes the model of a job, untrained, with the recipe that trains as the job says."""
    assert job.engine is not None
    recipe = f", by recipe {job.engine['recipe']}" if job.engine.get("recipe") else ""
    origin = f"arm {job.arm} on {job.task}{recipe}"
    source = Source(
        model=model,
        weights=None,
        recipe=make_recipe(train, task.length, job.seeds[0], origin=origin),
        provenance={"arm": job.arm, "task": job.task, "trial": job.key},
        scores={},
        tokenizer=str(_packed(task).folder),
    )
    export(source, folder, to="torchtitan" if job.engine["name"] == "torchtitan" else "hf")


def _run(
    job: Job,
    exported: Path,
    run: Path,
    member: tuple[ModelSpec, TrainSpec],
    task: Text,
    seed: int,
    stepped: Callable[[int], None],
    beat: Beat,
) -> tuple[RunResult, float]:
    """Trains and measures one seed. Returns its result, and its speed in tokens per second."""
    train = member[1]
    engine: Mapping[str, Any] = job.engine or {}
    of_study = {
        "seed": seed,
        "validation.every": max(1, train.steps // train.evaluations),
        "validation.sequences": train.eval_batches * train.batch_size,
        "milestones": engine["evaluate_every"] if job.stage == "confirm" else None,
    }
    settings = of_study | engine["settings"]
    try:
        launched = prepare(
            exported,
            _packed(task).folder,
            run=run,
            engine=engine["name"],
            gpus=int(job.gpu),
            processes=engine["processes"],
            given=[f"{key}={json.dumps(value)}" for key, value in settings.items()],
        )
        status = start(launched, say=lambda line: None, stepped=stepped)
    except outcome.Transient as error:
        raise Lost(str(error), "infrastructure") from error
    if status:
        reason = f"{outcome.last_error(run)}  (the whole output is in {run / 'log.txt'})"
        if outcome.was_killed(run, status):
            raise Lost(f"{engine['name']} was killed: {reason}", "infrastructure")
        raise RuntimeError(f"{engine['name']} ended with status {status}: {reason}")
    *older, newest = checkpoints.complete_checkpoints(run)
    reached = step_of(newest)
    # Before a kill, a run whose time ended it may have come further than after it.
    metrics = [metric for metric in _curves(run, task) if metric[2] <= reached]
    if not any((split, step) == ("validation", reached) for split, _, step, _ in metrics):
        shutil.rmtree(newest)  # the engine was killed after its last checkpoint, before it measured that
        raise Lost(f"{run}: the last step was not validated", "infrastructure")
    speeds = [value for split, name, _, value in metrics if (split, name) == ("train", "tokens_per_second")]
    speed = statistics.median(speeds) if speeds else math.nan
    lost_at = next((step for split, name, step, value in metrics if name == "loss" and not math.isfinite(value)), None)
    weights = checkpoints.read_checkpoint(newest)
    metrics = [metric for metric in metrics if math.isfinite(metric[3])]
    milestones = [each for each in older if lost_at is None and is_milestone(step_of(each), settings["milestones"])]
    for checkpoint in older:
        if checkpoint not in milestones:
            shutil.rmtree(checkpoint)
    if lost_at is not None:
        return RunResult(seed, lost_at, metrics, weights), speed
    beat("measuring the trained model")
    metrics += _measured(task, member, seed, weights, reached, test=job.stage == "confirm", beat=beat)
    if train.seconds is not None:
        metrics.append(("cost", STEPS, reached, float(reached)))
    if engine["evaluate"] and job.stage == "confirm":
        for checkpoint in milestones:
            beat(f"evaluating {checkpoint.name}")
            _evaluate(run, checkpoint, task, engine)
            shutil.rmtree(checkpoint)  # its values lie in the run's folder, also for a worker that goes on after a kill
        beat("evaluating the trained model")
        found = _evaluate(run, newest, task, engine)
        rows = [*results.earlier_rows(found, run), *(result.row() for result in found)]
        metrics += [
            ("test", f"{row['task']} {row['metric']}", row["step"], float(row["value"]))
            for row in rows
            if row["value"] is not None  # in the file, what is not finite
        ]
    return RunResult(seed, None, metrics, weights), speed


def _curves(run: Path, task: Text) -> list[Metric]:
    """Reads the curves of a run, with the validation loss in the task's own metric as well."""
    bits = 1 / (math.log(2) * task.bytes_per_token)
    last: dict[tuple[str, str, int], float] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        value = math.nan if row["value"] is None else row["value"]
        last[row["split"], row["name"], row["step"]] = value
        if (row["split"], row["name"]) == ("validation", "loss"):
            last["validation", task.metric, row["step"]] = value * bits
    return [(split, name, step, value) for (split, name, step), value in last.items()]


def _measured(
    task: Task,
    member: tuple[ModelSpec, TrainSpec],
    seed: int,
    weights: Mapping[str, torch.Tensor],
    step: int,
    *,
    test: bool,
    beat: Beat,
) -> list[Metric]:
    """Measures weights on the test split as a trial does, and counts the model's costs."""
    trial = LockStep(task, [member], [seed], beat=beat)
    ((_, stack),) = trial.stacks
    stack.state.weights.copy_(trial.layout.pack(weights)[None])
    trial.step = step
    if test:
        trial.measure("test")
    (result,) = trial.results(0)
    return [*result.metrics, *trial.costs()]


def _evaluate(run: Path, checkpoint: Path, task: Text, engine: Mapping[str, Any]) -> list[results.Result]:
    """Measures a checkpoint of a run on what the section `engine` evaluates, and keeps the values with the run."""
    suites, tasks = suites_among(engine["evaluate"])
    files = None if engine["files"] is None else Path(engine["files"])
    how = HarnessOptions(files=files)
    with open_model(str(checkpoint), trusted=True) as folder:
        found = evaluate.evaluate(folder, tasks, data=_packed(task), split="test", limit=engine["limit"], options=how)
        options = SuiteOptions(_packed(task), "test", task.length, engine["lengths"], engine["limit"], how)
        of_suites, left_out, _ = measure(folder, suites, options)
        about = {"weights": folder.weights, "data": str(_packed(task).folder)}
    for name, reason in left_out.items():
        _log.warning("engine.evaluate: left out %s: %s", name, reason)
    found += of_suites
    results.write(found, run, about)
    return found
