"""Further metrics that a study compares: each has a table, and a seed without a value says nothing of its arm."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deltalab.store import Store
from deltalab.study.answers.answer import Answer, answer
from deltalab.study.running.run import run_study_file

STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"text": {"length": 16, "times": []}},
    "base": {
        "rule": "gated_deltanet",
        "model": {"d_model": 8, "layers": 1, "heads": 1},
        "train": {"steps": 2, "batch_size": 2, "lr": 0.01, "evaluations": 1, "eval_batches": 1},
    },
    "arms": {"comba": {"rule": "comba"}},
    "compare": {"text": ["loss", "bits_per_byte_quarter_1"]},
    "seeds": 6,
}


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    db = tmp_path_factory.mktemp("lab") / "lab.db"
    run_study_file(STUDY, db=db, executor="inline", unchecked=True)
    return db


def found(db: Path) -> Answer:
    with Store.open(db) as store:
        return answer(store, 1)


def test_each_metric_has_a_table_of_the_same_family(db: Path) -> None:
    tables = {table.task: table for table in found(db).tables}
    assert list(tables) == ["text", "text: loss", "text: bits_per_byte_quarter_1"]
    assert [table.metric for table in tables.values()] == ["bits_per_byte", "loss", "bits_per_byte_quarter_1"]
    assert not any(table.maximize for table in tables.values())
    others = [row.metrics for row in tables["text"].rows]
    assert all("loss" not in metrics and "bits_per_byte_quarter_2" in metrics for metrics in others)
    with Store.open(db) as store:
        values = [row.value for row in store.final_metrics(1, metrics={("test", "loss")})]
    means = [row.score.mean for row in tables["text: loss"].rows]
    assert sorted(means) == pytest.approx(sorted([sum(values[:6]) / 6, sum(values[6:]) / 6]))


def test_a_seed_without_a_value_says_nothing_of_its_arm(db: Path, tmp_path: Path) -> None:
    torn = tmp_path / "lab.db"
    with closing(sqlite3.connect(db)) as source, closing(sqlite3.connect(torn)) as copy:
        source.backup(copy)
        joined = "run JOIN arm_trial USING (trial_id) JOIN arm ON arm.id = arm_id"
        runs = f"(SELECT run.id FROM {joined} WHERE arm.name = 'comba'"
        copy.execute(f"DELETE FROM metric WHERE split = 'test' AND name = 'loss' AND run_id IN {runs} AND seed = 2)")
        copy.execute(f"DELETE FROM metric WHERE split = 'test' AND name LIKE '%quarter_1' AND run_id IN {runs})")
        copy.commit()
    whole, left = ({table.task: table for table in found(file).tables} for file in (db, torn))
    before, after = (tables["text: loss"].rows[1] for tables in (whole, left))
    assert (before.score.n, after.score.n) == (6, 5)
    assert not [warning for warning in left["text: loss"].warnings if "did not finish" in warning]
    assert left["text: bits_per_byte_quarter_1"].rows[1].verdict == "not measured"
    assert left["text"].rows[1].score == whole["text"].rows[1].score
