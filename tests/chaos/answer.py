"""What a study came to, read from the ledger's tables by SQL of our own: all but ids, times and the machine."""

import hashlib
import json
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

TABLES = {
    "studies": "SELECT identity, name, profile, state FROM study",
    "arms": (
        "SELECT study.identity, arm.name, arm.position, arm.is_base, arm.change, arm.config "
        "FROM arm JOIN study ON study.id = arm.study_id"
    ),
    "places": (
        'SELECT study.identity, arm.name, arm_trial.number, trial.key, arm_trial."values" FROM arm_trial '
        "JOIN arm ON arm.id = arm_trial.arm_id JOIN study ON study.id = arm.study_id "
        "JOIN trial ON trial.id = arm_trial.trial_id"
    ),
    "trials": (
        "SELECT key, task, task_version, stage, config, state, parameters, state_size, rule_version.name, "
        "rule_version.hash FROM trial JOIN rule_version ON rule_version.id = trial.rule_version_id"
    ),
    "runs": "SELECT key, seed, run.state, diverged_at FROM run JOIN trial ON trial.id = run.trial_id",
    "metrics": (
        "SELECT key, seed, split, metric.name, step, value FROM metric JOIN run ON run.id = metric.run_id "
        "JOIN trial ON trial.id = run.trial_id WHERE metric.name != 'decode_us'"
    ),
    "artifacts": (
        "SELECT key, seed, kind, sha256, bytes FROM artifact JOIN run ON run.id = artifact.run_id "
        "JOIN trial ON trial.id = run.trial_id"
    ),
}
"""One query a table. A query has every column but ids, times, paths and what tells of the machine."""


def answer(url: str | Path) -> dict[str, list[str]]:
    """Every row of every table as a line of JSON, sorted: equal answers are equal byte by byte."""
    address = str(url) if "://" in str(url) else f"sqlite:///{url}"
    engine = create_engine(address)
    try:
        with engine.connect() as connection:
            return {name: sorted(map(_line, connection.execute(text(sql)))) for name, sql in TABLES.items()}
    finally:
        engine.dispose()


def _line(row: Any) -> str:
    return json.dumps([_plain(value) for value in row], sort_keys=True)


def _plain(value: Any) -> Any:
    """PostgreSQL gives JSON columns as objects and truth as bool; SQLite as text and 0 or 1."""
    if isinstance(value, str) and value[:1] in '{["':
        return json.loads(value)
    return int(value) if isinstance(value, bool) else value


def digest(found: dict[str, list[str]]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]


def lost(right: dict[str, list[str]], found: dict[str, list[str]]) -> int:
    """Results that the undisturbed ledger has and this one lacks."""
    return sum(len(set(right[name]) - set(found[name])) for name in ("places", "trials", "runs", "metrics"))


def doubled(found: dict[str, list[str]]) -> int:
    """Rows that stand twice."""
    return sum(len(rows) - len(set(rows)) for rows in found.values())


def differences(right: dict[str, list[str]], found: dict[str, list[str]]) -> list[str]:
    """The first lines of each table that only one of the two ledgers has."""
    lines = []
    for name in right:
        lines += [f"{name}: lacks {row}" for row in sorted(set(right[name]) - set(found[name]))[:3]]
        lines += [f"{name}: has too {row}" for row in sorted(set(found[name]) - set(right[name]))[:3]]
        if len(found[name]) != len(set(found[name])):
            lines.append(f"{name}: {len(found[name]) - len(set(found[name]))} rows stand twice")
    return lines
