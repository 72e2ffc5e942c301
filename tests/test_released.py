"""A ledger made by a released version is taken on: the same trials have the same keys, and none runs again."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltalab.study import run
from deltalab.study.plan import make_plan
from deltalab.study.spec import load_study

RELEASED = Path(__file__).parent / "released"
STUDIES = Path(__file__).parents[1] / "studies"


def identities() -> dict[str, str]:
    """The identity of every shipped study and profile, which hashes the keys of its trials."""
    found = {}
    for path in sorted(STUDIES.glob("*.yaml")):
        for profile in [None, *yaml.safe_load(path.read_text()).get("profiles", {})]:
            plan = make_plan(load_study(path, profile=profile), profile=profile)
            found[path.stem + (f":{profile}" if profile else "")] = plan.identity
    return found


def test_trials_of_the_shipped_studies_keep_their_keys() -> None:
    assert identities() == json.loads((RELEASED / "identities.json").read_text())


def test_a_released_ledger_answers_without_running_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sqlite3.connect(tmp_path / "ledger.db") as ledger:
        ledger.executescript((RELEASED / "ledger.sql").read_text())

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a known trial was run again")

    monkeypatch.setattr(run, "execute", refuse)
    result = run.run_study(RELEASED / "study.yaml", db=tmp_path / "ledger.db", executor="inline")
    assert (result.trials, result.known, result.failed) == (24, 24, 0)
