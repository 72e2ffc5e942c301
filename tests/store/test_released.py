"""A recorded ledger is taken on: the same trials have the same keys, and none runs again."""

import json
import re
import sqlite3
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.folders import STUDIES
from typer.testing import CliRunner

from deltalab.cli.app import app
from deltalab.store import Store
from deltalab.study.forecast.power import spreads
from deltalab.study.planning.known_trials import known_trials
from deltalab.study.planning.make import make_plan
from deltalab.study.reports.report import report
from deltalab.study.running import run
from deltalab.study.specs.study_file import load_study
from deltalab.study.workers.worker import Worker

RELEASED = Path(__file__).parent / "released"


def trial_keys() -> dict[str, str]:
    """A hash of the keys of the first trials of every shipped study and profile, but for those on a user's data."""
    found = {}
    for path in sorted(STUDIES.glob("*.yaml")):
        profiles = yaml.safe_load(path.read_text()).get("profiles", {})
        for profile in [None, *(name for name, change in profiles.items() if not _needs_data(change))]:
            plan = make_plan(load_study(path, profile=profile), profile=profile)
            keys = [plan.job(arm, "confirm", 0, {}).key for arm in plan.arms]
            found[path.stem + (f":{profile}" if profile else "")] = sha256(" ".join(keys).encode()).hexdigest()
    return found


def _needs_data(profile: dict[str, Any]) -> bool:
    """Returns whether a profile reads packed data or images of the user's."""
    return "engine" in profile or "image_folder" in profile.get("task", {})


@pytest.mark.slow
def test_trials_of_the_shipped_studies_keep_their_keys() -> None:
    assert trial_keys() == json.loads((RELEASED / "trial_keys.json").read_text())


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Its study chose each arm's rate on one tuning seed, and confirmed it with two others."""
    with sqlite3.connect(tmp_path / "ledger.db") as made:
        made.executescript((RELEASED / "ledger.sql").read_text())
    Store.upgrade(tmp_path / "ledger.db")
    return tmp_path / "ledger.db"


def test_a_trial_with_given_values_keeps_its_key(ledger: Path) -> None:
    plan = make_plan(load_study(RELEASED / "study.yaml"))
    arms = {(arm.name, arm.task): arm for arm in plan.arms}
    with Store.open(ledger) as store:
        trials = [trial for trial in store.trials(store.study("released").id) if trial.stage == "confirm"]
    assert len(trials) == len(arms) == 8
    for trial in trials:
        job = plan.job(arms[trial.arm, trial.task], "confirm", 0, trial.values)
        assert (job.key, job.seeds) == (trial.key, tuple(trial.runs))


def test_a_released_ledger_is_reported(ledger: Path) -> None:
    with Store.open(ledger) as store:
        study = store.study("released")
        found = report(store, study.id)
        for table in found.tables:
            assert [row.arm for row in table.rows] == ["base", "gka", "rdn", "hybrid"]
            assert [row.verdict for row in table.rows] == ["base"] + 3 * ["undecidable: needs 6 seeds"]
            for row in table.rows:
                assert (row.score.n, row.score.missing, row.chose) == (2, 0, 2)
                assert set(row.tuned) == {"train.lr"}
        best = report(store, study.id, which="tune")
        assert [row.tuned for row in best.tables[0].rows] == [row.tuned for row in found.tables[0].rows]
        known = spreads(store, make_plan(load_study(RELEASED / "study.yaml")).tasks)
    assert known == [], "two seeds say nothing of a spread"


def test_a_study_without_tuning_takes_a_released_ledgers_trials_on(
    ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each arm with the rate that it was confirmed with."""
    given = yaml.safe_load((RELEASED / "study.yaml").read_text())
    del given["tune"]
    with Store.open(ledger) as store:
        rate = {
            (trial.arm, trial.task): trial.values["train.lr"] for trial in store.trials(1) if trial.stage == "confirm"
        }
    for task in given["task"]:
        for name, change in {"base": given["base"], **given["arms"]}.items():
            change["train"] = {**given["base"]["train"], "lr": rate[name, task]}
        file = tmp_path / f"{task}.yaml"
        file.write_text(yaml.safe_dump({**given, "task": {task: given["task"][task]}}))
        monkeypatch.setattr(Worker, "execute", refuse)
        result = run.run_study_file(file, db=ledger, executor="inline")
        assert (result.trials, result.known, result.failed) == (4, 4, 0)


def test_a_plan_says_which_trials_of_a_released_ledger_it_does_not_know_and_why(ledger: Path) -> None:
    file = RELEASED / "study.yaml"
    with Store.open(ledger) as store:

        def told(*words: str) -> str | None:
            return known_trials(make_plan(load_study(file, overrides=words)), store)

        beside = "Beside study 1, 'released', of deltalab 0.1.0,"
        assert told() == f"The ledger knows 0 of the first 16 trials. {beside} 16 differ in the tuned train.lr."
        lr = next(row.values["train.lr"] for row in store.trials(1) if row.stage == "confirm")
        assert told("tune=", f"base.train.lr={lr}", "seeds=3", "arms.new.rule=gla", "base.train.steps=5") == (
            f"The ledger knows 0 of the first 10 trials. {beside} 8 differ in seeds and train.steps; "
            "2 are of an arm or a task that has no trial there."
        )
        assert told("name=other") is None, "of another study the ledger has nothing to say"
        known = told("tune=", f"base.train.lr={lr}")
        assert known is not None
        assert re.match(
            rf"The ledger knows [1-8] of the first 8 trials(\.$|\. {beside} [1-7] differ in train.lr\.$)", known
        )


def test_commands_say_why_a_released_study_trains_anew(
    ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = CliRunner()
    planned = runner.invoke(app, ["study", "plan", str(RELEASED / "study.yaml"), "--db", str(ledger), "--json"])
    line = "The ledger knows 0 of the first 16 trials. Beside study 1, 'released', of deltalab 0.1.0, "
    assert any(note.startswith(line) for note in json.loads(planned.stdout)["notes"]), planned.output
    monkeypatch.setattr(Worker, "execute", refuse)
    with pytest.raises(AssertionError, match="run again"):
        run.run_study_file(RELEASED / "study.yaml", db=ledger, executor="inline", unchecked=True)
    assert f"study 'released': {line}" in caplog.text


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a known trial was run again")
