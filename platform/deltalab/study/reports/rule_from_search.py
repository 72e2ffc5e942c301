"""The rule that a search found, as a file of its own."""

import json
from pathlib import Path
from typing import Any

from deltalab.authoring.scaffold import free_name, write_file
from deltalab.authoring.written import write_rule
from deltalab.errors import InputError, unknown
from deltalab.registry import get_rule, list_rules, rule_plugin
from deltalab.rule import UpdateRule
from deltalab.store import Store
from deltalab.study.answers.recorded_scores import Measured


def rule_from_search(store: Store, study_id: int, *, arm: str, name: str, out: Path | None = None) -> Path:
    """Writes the rule of an arm that a search found as a rule of its own, and returns the file.

    arm: found_1, say. name: of the new rule. out: the file, plugins/NAME.py by default.
    Raises `InputError` for a study without a search, an arm that it did not find or has not confirmed, a rule whose
    file has changed since, a rule that cannot be written so, a name that is no identifier or is taken, and a file that
    exists or cannot be written. Then nothing is written.
    """
    free_name(name, "rule", list_rules())
    file = Path("plugins", f"{name}.py") if out is None else out
    if file.suffix != ".py":
        raise InputError(f"--out {file}: a rule's file ends in .py")
    rule, about = found(store, study_id, arm)
    return write_file(file, write_rule(rule, name, about))


def found(store: Store, study_id: int, arm: str) -> tuple[UpdateRule, str]:
    """The rule of an arm that a search found, and a paragraph on where it comes from."""
    study = store.study(study_id)
    if not study.spec.get("search"):
        raise InputError(f"study '{study.name}' has no search, so that none of its rules was found by one")
    names = [row.name for row in store.arms(study_id) if not row.is_base]
    if arm not in names:
        raise unknown("arm", arm, names, where=f"the search of study '{study.name}'")
    trials = [row for row in store.trials(study_id) if row.arm == arm and row.stage == "confirm"]
    if not trials:
        raise InputError(f"study '{study.name}' has not confirmed arm '{arm}' yet: platform study run {study.address}")
    trial = trials[0]
    spec = dict(trial.config["rule"])
    kind = str(spec.pop("name"))
    if rule_plugin(kind).hash != trial.rule_hash:
        raise InputError(f"rule '{kind}' has changed since it was trained: run the study again first")
    # Each task has a training of its own.
    model = {path: value for path, value in trial.values.items() if not path.startswith("train.")}
    values = "; ".join(f"{path} {_said(value)}" for path, value in model.items())
    git = study.provenance["git"]
    about = f"Found by the search of study {study.address}, id {study.id}, as its arm {arm}"
    about += f", at git {git['commit']}: {kind} with {values}. " if git else f": {kind} with {values}. "
    ledger, arms = Measured(store, study_id, store.trials(study_id), study.spec), store.arms(study_id)
    for task, kept in study.provenance["tasks"].items():
        best = ledger.scores(task, kept, arms).shown(arm)
        own = next((row.values for row in trials if (row.task, row.number) == (task, best)), {})
        if tuned := "; ".join(f"{path} {_said(own[path])}" for path in own if path.startswith("train.")):
            about += f"On {task} it was tuned to {tuned}. "
    about += "platform rule from-search wrote this file."
    return get_rule(kind, **spec), about


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
