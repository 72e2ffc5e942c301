"""Chooses the model of a study's arm: the candidate that the report shows, with the seed that is best on validation.

The test split has no part in the choice.
"""

import hashlib
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltalab.data.text_tokenizers import BYTES
from deltalab.errors import InputError, unknown
from deltalab.export.recipe import make_recipe
from deltalab.export.source import Source, model_fields
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_task, rule_plugin
from deltalab.store import Store, TrialRow
from deltalab.store.models import Artifact
from deltalab.study.answers.answer import answer
from deltalab.study.answers.recorded_scores import RecordedScores
from deltalab.study.answers.wording import format_interval
from deltalab.study.running import weights_at_url
from deltalab.study.specs.recorded_study import RecordedTask, recorded_tasks
from deltalab.tasks import Task
from deltalab.tasks.text import Text
from deltalab.training.spec import TrainSpec


@dataclass(frozen=True)
class BestRun:
    """The run of an arm that is exported.

    Attributes:
        source: The run's model and recipe, from which the export starts.
        summary: A line that names the run.
    """

    source: Source
    summary: str


def best_run(store: Store, study_id: int, *, arm: str | None, best: bool, task: str | None) -> BestRun:
    """Returns the run that a study recommends for an arm, with its weights if they are kept.

    The candidate is the one that the report shows: the best on validation over all seeds. Among its seeds, the run has
    the seed that is best on validation.

    Args:
        store: The ledger.
        study_id: The study.
        arm: The name of the arm; None if `best` is true.
        best: Whether to take the arm with the best score in the report, or the base if no arm is better.
        task: The name of the task; None if the study has a single one.

    Raises:
        InputError: If both `arm` and `best` are given, or neither is; if the study lacks the arm or the task; if the
            arm has no confirmed run; if weights are missing or changed; or if the rule has changed in the meantime.
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
    tasks = recorded_tasks(study)
    if task is None and len(tasks) > 1:
        raise InputError(f"study '{study.name}' has several tasks: name one of {', '.join(tasks)} with --task")
    task = task or next(iter(tasks))
    if task not in tasks:
        raise unknown("task", task, tasks, where=f"study '{study.name}'")
    why = ""
    if arm is None:
        arm, why = _best_arm(store, study_id, task)
    recorded = tasks[task]
    ledger = RecordedScores(store, study, store.trials(study_id))
    number = ledger.scores(recorded, arms).shown(arm)
    validation = {
        (trial.key, seed): value
        for trial in ledger.of(arm, task)
        if trial.number == number
        for seed, value in ledger.finals.get(trial.key, {}).get(("validation", recorded.metric), {}).items()
    }
    if not validation:
        raise InputError(f"study '{study.name}' has no confirmed run of arm '{arm}' on task '{task}' yet")
    key, seed = max(validation, key=lambda run: recorded.sign * validation[run])
    trial = next(row for row in ledger.trials if row.key == key)
    name = trial.config["rule"]["name"]
    model = ModelSpec.of({**trial.config["model"], "rule": trial.config["rule"]})
    _refuse_changed(trial, model, study.provenance)
    named = ledger.spec.task_of(task)
    kind = str(study.spec["task"][named].get("task", named))
    kept = {(trial.key, run.seed): artifact for trial, run, artifact in store.artifacts(study_id, arm)}
    train, instance = _train(trial), get_task(kind, **recorded.parameters)
    source = Source(
        model=model,
        weights=partial(_weights, kept[key, seed]) if (key, seed) in kept else None,
        recipe={
            **make_recipe(train, instance.length, seed, origin=f"trial {key}"),
            "trial": _trial(trial, instance, model, train, seed),
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
        scores={f"validation {recorded.metric}": validation[key, seed]},
        tokenizer=_tokenizer(instance, recorded),
    )
    return BestRun(source, f"{study.address}, id {study.id}, arm {arm}{why}: seed {seed}, its best on validation")


def _tokenizer(task: Task, recorded: RecordedTask) -> str | None:
    """Returns the tokenizer of a task's text; None of other tasks, and if the packed data have changed."""
    if not isinstance(task, Text):
        return None
    if task.packed is None:
        return BYTES
    return str(task.packed.folder) if task.fingerprint() == recorded.fingerprint else None


def _best_arm(store: Store, study_id: int, task: str) -> tuple[str, str]:
    """The arm with the best score in the report's table, or the base if no arm is better; and a text on its verdict."""
    table = next(table for table in answer(store, study_id, importances=False).tables if table.task == task)
    best = table.best
    if best is None:
        raise InputError(f"no arm has a score on task '{task}' yet: run the study first, or name one with --arm")
    equal = [row.arm for row in table.rows if row.score.mean == best.score.mean]
    if len(equal) > 1:
        raise InputError(
            f"arms {', '.join(equal)} have the same {table.metric} {best.score.mean:.4g}, so that none is best: name "
            "one with --arm"
        )
    score = f"{table.metric} {format_interval(best.score)}"
    if best.is_base:
        return best.arm, f" (no arm has a better {score})"
    against = f", {format_interval(best.difference, '+')} over the base" if best.difference else ""
    return best.arm, f" ({score}{against}: {best.verdict})"


def _refuse_changed(trial: TrialRow, model: ModelSpec, provenance: Mapping[str, Any]) -> None:
    """Raises `InputError` if the file of any layer's rule is not the file that was trained.

    Studies of earlier releases recorded the file of the model's main rule alone.
    """
    trained = {**provenance.get("rules", {}), trial.rule: trial.rule_hash}
    for name in dict.fromkeys(rule.name for rule in model.rules()):
        if rule_plugin(name).hash != trained.get(name, rule_plugin(name).hash):
            raise InputError(f"rule '{name}' has changed since it was trained: run the study again, then export")


def _weights(artifact: Artifact) -> dict[str, Tensor]:
    """The weights of an artifact. Raises `InputError` if the file is missing or is not the recorded one."""
    file = artifact.path
    try:
        data = weights_at_url.read(file)
    except InputError:
        raise
    except Exception as error:  # each kind of URL raises its own errors
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{file}: the weights cannot be read: {reason}; --no-weights exports without") from None
    if hashlib.sha256(data).hexdigest() != artifact.sha256:
        raise InputError(f"{file}: the weights are not those that were recorded")
    weights: dict[str, Tensor] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return weights


def _train(trial: TrialRow) -> TrainSpec:
    """The trial's settings of training, with the kind of device that the trial ran on."""
    train = TrainSpec(**trial.config["train"])
    on_cpu = str(trial.hardware.get("device", "")).startswith("CPU")
    return replace(train, device="cpu" if on_cpu else "cuda")


def _trial(trial: TrialRow, task: Task, model: ModelSpec, train: TrainSpec, seed: int) -> dict[str, Any]:
    """The description of the trial from which `retrain.rebuild` trains it again."""
    return {
        "task": {"name": task.name, "version": task.version, "parameters": asdict(task)},
        "model": model_fields(model),
        "train": asdict(train),
        "seed": seed,
        "hardware": dict(trial.hardware),
    }
