"""The model of a study's arm: the candidate that the report shows, with the seed that is best on validation.

The test split chooses nothing.
"""

import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltalab.data.text_tokenizers import BYTES
from deltalab.errors import InputError, unknown
from deltalab.export.recipe import of_trial
from deltalab.export.source import Source, model_fields
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_task, rule_plugin
from deltalab.store import Store, TrialRow
from deltalab.store.models import Artifact
from deltalab.study.answers.answer import answer, format_interval
from deltalab.study.answers.recorded_scores import Measured
from deltalab.study.running import weights_at_url
from deltalab.study.specs.ladder_sizes import task_of
from deltalab.tasks import Task
from deltalab.training.spec import TrainSpec


@dataclass(frozen=True)
class BestRun:
    """A run of an arm. said: the line that names it."""

    source: Source
    said: str


def best_run(store: Store, study_id: int, *, arm: str | None, best: bool, task: str | None) -> BestRun:
    """The run of an arm that a study recommends, with its weights where they are kept.

    arm: its name. best: instead of a name, the arm whose score the report has as the best, the base where none is
    better. task: its name, None where the study has one.

    The candidate is the one that the report shows: of several, the best on validation over all seeds. The seed is the
    candidate's best on validation.

    Raises `InputError` where neither an arm nor `best` is given, or both, for an arm or a task that the study lacks,
    for an arm without a confirmed run, for weights that are missing or changed, and for a rule that has changed since.
    """
    study = store.study(study_id)
    arms = store.arms(study_id)
    names = [row.name for row in arms]
    if best and arm is not None:
        raise InputError(f"--arm {arm} and --best: give one of them")
    if not best and arm is None:
        raise InputError(f"say which arm: --arm NAME, of {', '.join(names)}; or --best, the best of the report")
    if arm is not None and arm not in names:
        raise unknown("arm", arm, names, where=f"study '{study.name}'")
    tasks = study.provenance["tasks"]
    if task is None and len(tasks) > 1:
        raise InputError(f"study '{study.name}' has several tasks: name one of {', '.join(tasks)} with --task")
    task = task or next(iter(tasks))
    if task not in tasks:
        raise unknown("task", task, tasks, where=f"study '{study.name}'")
    why = ""
    if arm is None:
        arm, why = _best_arm(store, study_id, task)
    about = tasks[task]
    metric = about["metric"]
    ledger = Measured(store, study_id, store.trials(study_id), study.spec)
    number = ledger.scores(task, about, arms).shown(arm)
    validation = {
        (trial.key, seed): value
        for trial in ledger.of(arm, task)
        if trial.number == number
        for seed, value in ledger.finals.get(trial.key, {}).get(("validation", metric), {}).items()
    }
    if not validation:
        raise InputError(f"study '{study.name}' has no confirmed run of arm '{arm}' on task '{task}' yet")
    first = max if about["maximize"] else min
    key, seed = first(validation, key=lambda run: validation[run])
    trial = next(row for row in ledger.trials if row.key == key)
    name = trial.config["rule"]["name"]
    model = ModelSpec.of({**trial.config["model"], "rule": trial.config["rule"]})
    _refuse_changed(trial, model, study.provenance)
    named = task_of(task, study.spec.get("scales"), list(study.spec["task"]))
    kind = str(study.spec["task"][named].get("task", named))
    kept = {(trial.key, run.seed): artifact for trial, run, artifact in store.artifacts(study_id, arm)}
    train, made = _train(trial), get_task(kind, **about["parameters"])
    source = Source(
        model=model,
        weights=partial(_weights, kept[key, seed]) if (key, seed) in kept else None,
        recipe={
            **of_trial(train, made.length, seed, key),
            "trial": _trial(trial, made, model, train, seed),
        },
        provenance={
            "study": study.address,
            "id": study.id,
            "arm": arm,
            "task": task,
            "rule": name,
            "seed": seed,
            "trial": key,
            "git": study.provenance["git"],
        },
        scores={f"validation {metric}": validation[key, seed]},
        tokenizer=BYTES if kind == "text" and model.vocab_size == 256 else None,
    )
    return BestRun(source, f"{study.address}, id {study.id}, arm {arm}{why}: seed {seed}, its best on validation")


def _best_arm(store: Store, study_id: int, task: str) -> tuple[str, str]:
    """The arm with the best score in the report's table, the base where none is better; and how it compares."""
    table = next(table for table in answer(store, study_id).tables if table.task == task)
    rows = [row for row in table.rows if math.isfinite(row.score.mean)]
    if not rows:
        raise InputError(f"no arm has a score on task '{task}' yet: run the study first, or name one with --arm")
    sign = 1 if table.maximize else -1
    # Of equals the base comes first, which `max` keeps.
    ordered = sorted(rows, key=lambda row: not row.is_base)
    found = max(ordered, key=lambda row: sign * row.score.mean)
    score = f"{table.metric} {format_interval(found.score)}"
    if found.is_base:
        return found.arm, f" (no arm has a better {score})"
    against = f", {format_interval(found.difference, '+')} over the base" if found.difference else ""
    return found.arm, f" ({score}{against}: {found.verdict})"


def _refuse_changed(trial: TrialRow, model: ModelSpec, provenance: Mapping[str, Any]) -> None:
    """Raises `InputError` where the file of any layer's rule is not the one that was trained.

    A study of an earlier release recorded the file of the model's own rule alone.
    """
    trained = {**provenance.get("rules", {}), trial.rule: trial.rule_hash}
    for name in dict.fromkeys(rule.name for rule in model.rules()):
        if rule_plugin(name).hash != trained.get(name, rule_plugin(name).hash):
            raise InputError(f"rule '{name}' has changed since it was trained: run the study again, then export")


def _weights(artifact: Artifact) -> dict[str, Tensor]:
    """Raises `InputError` for a file that is missing, or is not the one that was recorded."""
    file = artifact.path
    try:
        data = weights_at_url.read(file)
    except InputError:
        raise
    except Exception as error:  # each kind of URL has errors of its own
        says = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{file}: the weights cannot be read: {says}; --no-weights exports without") from None
    if hashlib.sha256(data).hexdigest() != artifact.sha256:
        raise InputError(f"{file}: the weights are not those that were recorded")
    found: dict[str, Tensor] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return found


def _train(trial: TrialRow) -> TrainSpec:
    """The trial's training, on the kind of device that it ran on."""
    train = TrainSpec(**trial.config["train"])
    on_cpu = str(trial.hardware.get("device", "")).startswith("CPU")
    return replace(train, device="cpu" if on_cpu else "cuda")


def _trial(trial: TrialRow, task: Task, model: ModelSpec, train: TrainSpec, seed: int) -> dict[str, Any]:
    """The trial's own training, as `retrain.rebuild` takes it."""
    return {
        "task": {"name": task.name, "version": task.version, "parameters": asdict(task)},
        "model": model_fields(model),
        "train": asdict(train),
        "seed": seed,
        "hardware": dict(trial.hardware),
    }
