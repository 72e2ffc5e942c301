"""Writes a rule that a search found to a plugin file, as a new rule."""

import json
from pathlib import Path
from typing import Any

from deltalab.authoring.files.rule_file import write_rule
from deltalab.authoring.files.scaffold import free_name, write_file
from deltalab.errors import InputError, unknown
from deltalab.registry import get_rule, list_rules, rule_plugin
from deltalab.rule import UpdateRule
from deltalab.store import Store
from deltalab.study.answers.recorded_scores import RecordedScores
from deltalab.study.specs.recorded_study import RecordedSpec
from deltalab.study.specs.setting_paths import model_part, training_part


def rule_from_search(store: Store, study_id: int, *, arm: str, name: str, out: Path | None = None) -> Path:
    """Writes the rule of an arm that a search found to a plugin file, as a new rule.

    Args:
        store: The ledger.
        study_id: The id of the study.
        arm: The name of the arm, such as found_1.
        name: The name of the new rule.
        out: The file to write; None is plugins/NAME.py.

    Returns:
        The file that was written.

    Raises:
        InputError: The study has no search; the search did not find the arm or has not confirmed it; the file of the
            arm's rule has changed since; the rule cannot be written as a file; the name is no identifier or is taken;
            or the new file exists or cannot be written. In all these cases no
            file is written.
    """
    free_name(name, "rule", list_rules())
    file = Path("plugins", f"{name}.py") if out is None else out
    if file.suffix != ".py":
        raise InputError(f"--out {file}: a rule's file ends in .py")
    rule, origin = found_rule(store, study_id, arm)
    return write_file(file, write_rule(rule, name, origin))


def found_rule(store: Store, study_id: int, arm: str) -> tuple[UpdateRule, str]:
    """Returns the rule of an arm that a search found, and a paragraph on where the rule comes from.

    Raises:
        InputError: The study has no search; the search did not find the arm or has not confirmed it; or the file of the
            arm's rule has changed since.
    """
    study = store.study(study_id)
    if not RecordedSpec(study.spec).is_search:
        raise InputError(f"study '{study.name}' has no search, so that none of its rules was found by one")
    names = [row.name for row in store.arms(study_id) if not row.is_base]
    if arm not in names:
        raise unknown("arm", arm, names, where=f"the search of study '{study.name}'")
    trials = [row for row in store.trials(study_id) if row.arm == arm and row.stage == "confirm"]
    if not trials:
        raise InputError(f"study '{study.name}' has not confirmed arm '{arm}' yet: deltalab study run {study.address}")
    trial = trials[0]
    spec = dict(trial.config["rule"])
    kind = str(spec.pop("name"))
    if rule_plugin(kind).hash != trial.rule_hash:
        raise InputError(f"rule '{kind}' has changed since it was trained: run the study again first")
    # Each task has its own settings of training, so only the settings of the model are named.
    values = "; ".join(f"{path} {_text(value)}" for path, value in model_part(trial.values).items())
    git = study.provenance["git"]
    origin = f"Found by the search of study {study.address}, id {study.id}, as its arm {arm}"
    origin += f", at git {git['commit']}: {kind} with {values}. " if git else f": {kind} with {values}. "
    ledger, arms = RecordedScores(store, study, store.trials(study_id)), store.arms(study_id)
    for name, task in ledger.tasks.items():
        best = ledger.scores(task, arms).shown(arm)
        chosen = next((row.values for row in trials if (row.task, row.number) == (name, best)), {})
        if tuned := "; ".join(f"{path} {_text(value)}" for path, value in training_part(chosen).items()):
            origin += f"On {name} it was tuned to {tuned}. "
    origin += "deltalab rule from-search wrote this file."
    return get_rule(kind, **spec), origin


def _text(value: Any) -> str:
    """The value of a setting as JSON, except that a word has no quotes."""
    return value if isinstance(value, str) else json.dumps(value)
