"""Exports the weights of an arm from the ledger: of the seed that is best on validation, never on test."""

import hashlib
from pathlib import Path

import torch

from deltalab.errors import InputError, unknown
from deltalab.export.hf import export_hf
from deltalab.models.spec import ModelSpec
from deltalab.registry import rule_plugin
from deltalab.store import Store


def export_arm(store: Store, study_id: int, *, arm: str, task: str | None, directory: Path) -> int:
    """Exports the confirmed run of an arm that is best on validation, and returns its seed.

    Raises `InputError` for an arm or a task that the study lacks, an arm without confirmed weights, weights that are
    missing or changed, a rule whose file has changed since training, and as `export_hf` does.
    """
    study = store.study(study_id)
    arms = [row.name for row in store.arms(study_id)]
    if arm not in arms:
        raise unknown("arm", arm, arms, where=f"study '{study.name}'")
    tasks = study.provenance["tasks"]
    if task is None and len(tasks) > 1:
        raise InputError(f"study '{study.name}' has several tasks: name one of {', '.join(tasks)} with --task")
    task = task or next(iter(tasks))
    if task not in tasks:
        raise unknown("task", task, tasks, where=f"study '{study.name}'")
    metric, best = tasks[task]["metric"], max if tasks[task]["maximize"] else min
    scores = {
        (row.trial, row.seed): row.value
        for row in store.final_metrics(study_id, stage="confirm")
        if (row.arm, row.task, row.split, row.metric) == (arm, task, "validation", metric)
    }
    kept = {(trial.key, run.seed): (trial, artifact) for trial, run, artifact in store.artifacts(study_id, arm)}
    candidates = [found for found in scores if found in kept]
    if not candidates:
        raise InputError(f"study '{study.name}' has no confirmed weights of arm '{arm}' on task '{task}' yet")
    key, seed = best(candidates, key=lambda found: scores[found])
    trial, artifact = kept[key, seed]
    name = trial.config["rule"]["name"]
    trained = next(row.rule_hash for row in store.trials(study_id) if row.key == key)
    if rule_plugin(name).hash != trained:
        raise InputError(f"rule '{name}' has changed since it was trained: run the study again, then export")
    file = Path(artifact.path)
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{file}: the weights cannot be read: {error.strerror}") from None
    if digest != artifact.sha256:
        raise InputError(f"{file}: the weights are not those that were recorded")
    weights = torch.load(file, weights_only=True, map_location="cpu")
    provenance = {
        "study": study.name,
        "arm": arm,
        "task": task,
        "seed": seed,
        f"validation {metric}": scores[key, seed],
        "trial": key,
        "git": study.provenance["git"],
    }
    spec = ModelSpec.of({**trial.config["model"], "rule": trial.config["rule"]})
    export_hf(spec, weights, directory, provenance=provenance)
    return seed
