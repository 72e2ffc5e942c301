"""A/A studies: what a study finds between arms that are alike."""

import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.folders import ROOT

from deltalab.cli.app import main
from deltalab.errors import InputError
from deltalab.statistics.joint_test import ALPHA, Look, compare, flips, follow, one_look
from deltalab.statistics.looks import spread_looks
from deltalab.statistics.seed_choice import Run, Scores
from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, TrialRecord
from deltalab.study.forecast import calibration

STUDY = """
name: tiny
task: {mqar: {length: 16, pairs: 2, vocab_size: 32}}
base:
  rule: comba
  model: {d_model: 16, layers: 1, heads: 1, mlp: false}
  train: {steps: 2, batch_size: 4, lr: 1e-2, evaluations: 2, eval_batches: 1}
ablate: [d]
tune: {train.lr: {log_uniform: [1e-3, 1e-1]}, trials: 2}
seeds: 2
"""
Platform = Callable[..., tuple[int, str, str]]
ABOUT = {"metric": "accuracy", "maximize": True, "chance": 0.1, "version": 1, "bounds": [0.0, 1.0], "parameters": {}}


def recorded(db: Path, count: int, tasks: tuple[str, ...] = ("mqar",), **spec: object) -> int:
    """A ledger with a study of a base and three arms, two candidates each, and the study's id."""
    random = np.random.default_rng(0)
    arms = ["base", "a", "b", "c"]
    with Store.open(db) as store:
        records = [ArmRecord(arm, arm == "base", {} if arm == "base" else {"x": arm}, {}) for arm in arms]
        given = {"seeds": count, "family": "task", **spec}
        study = store.begin_study("s", None, "id", given, records, {"tasks": dict.fromkeys(tasks, ABOUT)})
        for arm in arms:
            for task in tasks:
                for number in range(2):
                    runs = []
                    for seed in range(1, count + 1):
                        score = float(np.clip(0.5 + 0.2 * number + 0.05 * random.normal(), 0, 1))
                        metrics = [("validation", "accuracy", 9, score), ("test", "accuracy", 9, score)]
                        runs.append(RunRecord(seed, "done", None, metrics))
                    record = TrialRecord(
                        key=f"{arm} {task} {number}",
                        task=task,
                        task_version=1,
                        stage="confirm",
                        config={},
                        state="done",
                        started_at=0.0,
                        finished_at=1.0,
                        seconds=1.0,
                        rule=RuleRecord("comba", "h", "source"),
                        parameters=1,
                        state_size=1,
                        tokens_per_second=1.0,
                        hardware={},
                        runs=runs,
                    )
                    store.record_trial(study, arm, record, number, {"train.lr": number + 1.0})
    return study


def scores(runs: dict[str, list[list[float]]]) -> Scores:
    """Arms' validation scores by candidate and seed; the test score is 0.01 less."""
    found = {
        arm: {
            number: {seed + 1: Run(value, value - 0.01) for seed, value in enumerate(values)}
            for number, values in enumerate(by_candidate)
        }
        for arm, by_candidate in runs.items()
    }
    seeds = {arm: range(1, len(by_candidate[0]) + 1) for arm, by_candidate in runs.items()}
    return Scores("base", True, 0.0, found, seeds)


def test_residuals_keep_whole_seeds_and_have_the_means_of_the_base() -> None:
    pool = calibration.residuals(scores({"base": [[0.4, 0.6], [0.2, 0.4]], "a": [[0.0, 0.4], [0.9, 0.7]]}))
    validation = [[0.4, 0.2], [0.6, 0.4], [0.3, 0.4], [0.7, 0.2]]
    np.testing.assert_allclose(pool[..., 0], validation, atol=1e-12)
    np.testing.assert_allclose(pool[..., 1], np.array(validation) - 0.01, atol=1e-12)


def test_a_run_that_did_not_finish_stays_so_and_scores_stay_within_their_bounds() -> None:
    pool = calibration.residuals(scores({"base": [[0.8, 1.0, math.nan]], "a": [[0.0, 0.5, 0.1]]}), bounds=(0.0, 1.0))
    np.testing.assert_allclose(pool[:, 0, 0], [0.8, 1.0, math.nan, 0.7, 1.0, 0.8])


def test_an_arm_without_one_of_the_candidates_of_the_base_is_left_out() -> None:
    assert len(calibration.residuals(scores({"base": [[0.4, 0.6], [0.2, 0.4]], "a": [[0.0, 0.4]]}))) == 2


def test_a_study_keeps_its_promise(tmp_path: Path) -> None:
    db = tmp_path / "l.db"
    study = recorded(db, 6)
    with Store.open(db) as store:
        (found,) = calibration.simulated(store, study, repeats=150)
    assert (found.tasks, found.arms, found.looks, found.pool, found.studies) == (["mqar"], 3, [6], 24, 150)
    assert 0 < found.wrong <= 0.1
    assert found.low < found.wrong < found.high
    assert found.coverage == 1 - found.wrong
    assert found.says.startswith("No sign that the promise is broken")


def test_more_seeds_of_the_base_are_those_of_the_study(tmp_path: Path) -> None:
    db = tmp_path / "l.db"
    study = recorded(db, 6, seeds={"arms": 6, "base": 12})
    with Store.open(db) as store:
        (found,) = calibration.simulated(store, study, repeats=6)
    assert (found.looks, found.seeds_of_base, found.arms) == ([6], 12, 3)
    assert found.coverage == 1 - found.wrong
    assert "3 arms beside the base, 6 seeds, and 12 of the base, drawn from 24" in str(found)


def test_looks_and_the_family_are_those_of_the_study(tmp_path: Path) -> None:
    db = tmp_path / "l.db"
    study = recorded(db, 9, ("mqar", "text"), family="study", seeds={"at_least": 6, "at_most": 9})
    with Store.open(db) as store:
        (found,) = calibration.simulated(store, study, repeats=10)
    assert found.tasks == ["mqar", "text"]
    assert (found.looks[0], found.looks[-1]) == (6, 9)


def test_with_too_few_seeds_no_verdict_can_be_false(tmp_path: Path) -> None:
    db = tmp_path / "l.db"
    study = recorded(db, 5)
    with Store.open(db) as store:
        (found,) = calibration.simulated(store, study, repeats=20)
    assert (found.wrong, found.coverage) == (0, 1)
    assert found.says == "With 5 seeds the study cannot reach a verdict, so none can be false."


def test_a_promise_that_is_broken_is_called_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seeds that all carry their arm's luck are no repeats of the procedure."""
    db = tmp_path / "l.db"
    study = recorded(db, 6)
    monkeypatch.setattr(
        calibration,
        "_study",
        lambda by_arm, like, block, plain=calibration._study: plain(
            [np.broadcast_to(drawn[:1], drawn.shape) + 1e-6 * drawn for drawn in by_arm], like, block
        ),
    )
    with Store.open(db) as store:
        (found,) = calibration.simulated(store, study, repeats=20)
    assert found.low > 0.05
    assert found.says.startswith("The promise is broken")


def test_a_study_without_runs_is_refused(tmp_path: Path) -> None:
    with Store.open(tmp_path / "l.db") as store:
        records = [ArmRecord("base", True, {}, {}), ArmRecord("a", False, {"x": 1}, {})]
        study = store.begin_study("s", None, "id", {"seeds": 6, "family": "task"}, records, {"tasks": {"mqar": ABOUT}})
        with pytest.raises(InputError, match="too few runs on task 'mqar' to draw from"):
            calibration.simulated(store, study)


def test_flips_beyond_twelve_seeds_are_a_group_whose_first_seeds_take_all_signs_alike() -> None:
    signs = flips(15)
    rows = {tuple(row) for row in signs}
    assert all(tuple(a * b) in rows for a, b in zip(signs[:50], signs[-50:], strict=True))
    for seeds in (6, 9, 12):
        _, counts = np.unique(signs[:, :seeds] * signs[:, :1], axis=0, return_counts=True)
        assert len(set(counts)) == 1, "so that a look counts as many flips as it decided"
    assert (flips(20)[:, :15] == signs).all(), "so that a later look sees the flips of an earlier one"
    assert np.abs(signs.T @ signs / len(signs) - np.eye(15)).max() == 0, "no two seeds flip together"


def test_an_arm_that_stopped_goes_on_competing_with_its_seeds_repeated() -> None:
    noisy, other = [3.0, -3.1, 3.2, -3.0, 3.1, -3.2], [1.0, 2.0, 1.5, -0.3, 1.8, 0.9, 1.1, 0.2, -0.6]
    first, second = follow([noisy, other], (Look(6, 1e-6), Look(9, ALPHA)))
    assert (first.stopped, first.difference.n, second.difference.n) == ("hopeless", 6, 9)
    assert second.difference.p == compare([np.resize(noisy, 9), other])[1].p


def test_the_benchmark_finds_what_a_study_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench = importlib.import_module("calibration.many_studies")
    random = np.random.default_rng(1)
    for looks in (one_look(9), spread_looks(6, 13)):
        d = random.normal(size=(4, 3, looks[-1].seeds)) + np.array([2.0, 1.0, 0.0])[:, None]
        told, took, _ = bench.follow(d, looks)
        found = [follow(list(study), looks, intervals=False) for study in d]
        assert told.tolist() == [[outcome.difference.decided for outcome in study] for study in found]
        assert took.tolist() == [[outcome.difference.n for outcome in study] for study in found]
        assert 0 < told.sum() < told.size


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Platform:
    """The command, in this process and a folder with a study: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(STUDY)

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["platform", "study", "calibrate", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def test_the_command_prints_what_was_found(platform: Platform, tmp_path: Path) -> None:
    recorded(tmp_path / "deltalab.db", 6)
    code, out, _ = platform("s", "--repeats", 10)
    assert code == 0
    assert "mqar: 10 A/A studies, 3 arms beside the base, 6 seeds, drawn from 24" in out
    code, out, _ = platform("s", "--repeats", 10, "--json")
    (found,) = json.loads(out)
    assert (code, found["studies"], found["tasks"]) == (0, 10, ["mqar"])


def test_the_command_says_in_a_line_that_the_study_must_run_first(platform: Platform, tmp_path: Path) -> None:
    without_ledger = platform("study.yaml")
    recorded(tmp_path / "deltalab.db", 6)
    for code, out, error in (without_ledger, platform("study.yaml")):
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert "run it first (deltalab study run study.yaml), or give --real" in error


@pytest.mark.slow
def test_real_runs_are_trained_once(platform: Platform, tmp_path: Path) -> None:
    code, out, error = platform("study.yaml", "--real", "--repeats", 5)
    assert code == 0, error
    assert "mqar: 5 A/A studies, 1 arm beside the base, 2 seeds, drawn from 4" in out
    assert platform("study.yaml", "--real", "--repeats", 5)[:2] == (0, out)
    with Store.open(tmp_path / "deltalab.db") as store:
        (study,) = store.studies()
        trials = store.trials(study.id)
    assert study.name == "tiny_calibration"
    assert [sorted(trial.runs) for trial in trials] == [[1, 2, 3, 4]] * 2
