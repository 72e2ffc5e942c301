"""Ledgers that are copied between databases and compacted: no row is lost, doubled or changed."""

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text

from deltalab.cli.app import main
from deltalab.errors import InputError
from deltalab.store import ArmRecord, ArtifactRecord, RuleRecord, RunRecord, Store, TrialRecord, database, trainings
from deltalab.store.copies import whole_ledger
from deltalab.store.models import Base
from deltalab.store.studies import proposals, saved_views
from deltalab.store.studies.importances import keep_shares

BIG = 2**40


def quiet(_: str) -> None:
    pass


def study(store: Store, name: str = "s", arms: tuple[str, ...] = ("base", "other")) -> int:
    records = [ArmRecord(arm, arm == "base", {"a": [1, None]}, {"lr": 0.1}) for arm in arms]
    return store.begin_study(name, "gpu", name, {"é": ["ü", "\udc80", 0.1]}, records, {"git": None})


def trial(key: str, value: float = 0.1, **given: Any) -> TrialRecord:
    metrics = [("train", "loss", step, value / (step + 3)) for step in range(30)]
    runs = [
        RunRecord(BIG, metrics=metrics, artifacts=[ArtifactRecord("checkpoint", "a.pt", "f00", BIG)]),
        RunRecord(1, "diverged", 7, [("test", "accuracy", 10, 1e-300), ("test", 'a "b" {\\,} NULL\n', 10, -0.0)]),
    ]
    rule = RuleRecord("comba", "abc", "class Comba: 'é'")
    record = {"state": "done", "seconds": 1 / 3, "rule": rule, "runs": runs, "parameters": BIG, **given}
    return TrialRecord(key, "mqar", 1, "confirm", {"x": 1e-5}, started_at=1.25, finished_at=2.000001, **record)


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A ledger with something in every table, and with gaps among the ids."""
    file = tmp_path / "full.db"
    with Store.open(file) as store:
        first, second = study(store, "first"), study(store, "second")
        store.record_trial(first, "base", trial("gone", state="failed", error="a\x00b"), 0, {})
        for number in range(3):
            store.record_trial(first, "other", trial(f"k{number}", number / 7), number, {"lr": 0.1 + 0.2})
        store.attach(second, "base", "k1", 4, {})
        store.forget_trial("gone")
        store.record_trial(second, "base", trial("failed", state="failed", error="é", runs=[]), 5, {})
        store.finish_study(first, "done")
        keep_shares(store, first, "accuracy@mqar", "hash", [{"path": "train.lr", "share": 1 / 3}])
        proposals.answer(store, proposals.propose(store, "loop", "comba", "é"), {"combined_score": 0.1 + 0.2})
        saved_views.save(store, "the base", "curves", {"arms": ["base", "ö"]}, second)
        run = tmp_path / "run"
        run.mkdir()
        about = {"id": "r1", "rule": "comba", "started": 1e9, "recipe": {"batch": {"sequences": 2, "length": 8}}}
        (run / "run.json").write_text(json.dumps(about))
        (run / "metrics.jsonl").write_text('{"split": "train", "name": "loss", "step": 1, "value": 0.1}\n')
        one = {"step": 1, "task": "arc", "metric": "acc", "reference": "ö/x", "reference_step": None, "is_log": True}
        numbers = {"difference": 0.1, "low": -0.1, "high": 0.3, "p": 0.2, "items": 7, "family": 3}
        content = {"evaluations": [{**one, "value": 0.5}], "comparisons": [{**one, **numbers}]}
        (run / "evaluations.json").write_text(json.dumps(content))
        trainings.record(store, run)
    return file


def rows(where: str | Path) -> dict[str, list[Any]]:
    """Every row of the tables that are copied, as Python values."""
    with Store.open(where, create=False) as store, store._engine.connect() as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key.columns))]
            for table in Base.metadata.sorted_tables
            if table.name not in whole_ledger.TRANSIENT
        }


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "empty.db" if request.param == "sqlite" else request.getfixturevalue("postgres")())


def test_a_ledger_comes_back_as_it_was(full: Path, empty: str, tmp_path: Path) -> None:
    whole = rows(full)
    assert all(whole.values())
    with Store.open(empty) as store, Store.open(full) as source:
        added = whole_ledger.import_ledger(store, source, quiet)
        assert added == {table: len(whole[table]) for table in added}
    assert rows(empty) == whole
    with Store.open(empty) as store:
        whole_ledger.export_ledger(store, tmp_path / "back.db", quiet)
        assert store.trials(store.study("first").id)[0].values == {"lr": 0.1 + 0.2}
        assert study(store, "third") == 3  # PostgreSQL's counters have followed the ids
    assert rows(tmp_path / "back.db") == whole
    assert not list(tmp_path.glob(".back.db*"))
    assert not list(tmp_path.glob("back.db-*"))


def test_a_second_import_changes_nothing(full: Path, empty: str) -> None:
    with Store.open(empty) as store, Store.open(full) as source:
        whole_ledger.import_ledger(store, source, quiet)
        before = rows(empty)
        assert not any(whole_ledger.import_ledger(store, source, quiet).values())
    assert rows(empty) == before


def test_a_ledger_joins_another_by_keys(full: Path, empty: str) -> None:
    with Store.open(empty) as store:
        own = study(store, "own")
        store.record_trial(own, "base", trial("k1", 0.9), 0, {"of": "own"})
        shared = study(store, "first")
        with Store.open(full) as source:
            whole_ledger.import_ledger(store, source, quiet)
        assert sorted(found.name for found in store.studies()) == ["first", "own", "second"]
        assert {row.key: row.number for row in store.trials(shared)} == {"k0": 0, "k1": 1, "k2": 2}
        assert [(row.key, row.number) for row in store.trials(store.study("second").id)] == [("k1", 4), ("failed", 5)]
        [loss] = [final for final in store.final_metrics(own) if final.metric == "loss"]
        assert loss.value == 0.9 / 32  # the trial that was here first
        assert [len(store.artifacts(each, arm)) for each, arm in ((own, "base"), (shared, "other"))] == [1, 3]
        assert len(store.rule_versions(own)) == 1
        with store._engine.connect() as connection:
            assert connection.execute(text("SELECT count(*) FROM rule_version")).scalar() == 1
            assert connection.execute(text("SELECT count(*) FROM trial")).scalar() == 4


@pytest.mark.parametrize("own", [False, True])
def test_a_file_that_sqlite_copies_is_the_file_that_python_copies(
    own: bool, full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_ledger, "PARENTS_AT_ONCE", 2)
    found = []
    for attached in (True, False):
        if not attached:
            monkeypatch.setattr(database, "may_attach", lambda url: False)
        file = tmp_path / f"{attached}.db"
        with Store.open(file) as store, Store.open(full) as source:
            if own:
                store.record_trial(study(store, "own"), "base", trial("k1", 0.9), 0, {"of": "own"})
            added = whole_ledger.import_ledger(store, source, quiet)
        kept = rows(file)
        if own:  # a study of its own has its own time
            kept["study"] = [row[:6] for row in kept["study"]]
        found.append((added, kept))
    assert found[0] == found[1]
    assert found[0][0]["metric"] > 60


def without_checks(table: str, column: str) -> str:
    """Lets a column of a ledger lack values, as a file of another author may."""
    return (
        f"CREATE TABLE loose AS SELECT * FROM {table}; DROP TABLE {table}; ALTER TABLE loose RENAME TO {table}; "
        f"UPDATE {table} SET {column} = NULL WHERE rowid % 2"
    )


DAMAGED = {
    "a metric without a value": without_checks("metric", "value"),
    "a seed that is none": without_checks("run", "seed"),
    "a metric's name that is no UTF-8": "UPDATE metric SET name = CAST(x'73ff' AS TEXT) WHERE step = 29",
    "a setting that is no JSON": "UPDATE trial SET config = '{' WHERE key = 'k1'",
    "a time that is none": "UPDATE trial SET started_at = 'long ago' WHERE key = 'k1'",
}


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_source_is_named_and_not_the_ledger_that_it_fills(
    what: str, attached: bool, full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(sqlite3.connect(full)) as connection:
        connection.executescript(DAMAGED[what])
    monkeypatch.setattr(database, "may_attach", lambda url: attached)
    empty = tmp_path / "empty.db"
    with Store.open(empty) as store, Store.open(full) as source:
        with pytest.raises(InputError, match=r"full\.db: (is damaged|Could not decode)"):
            whole_ledger.import_ledger(store, source, quiet)
        assert study(store, "own") == 1  # the connection that failed holds no lock
    assert not rows(empty)["metric"]


def test_an_import_keeps_nobody_from_writing_the_source(full: Path, tmp_path: Path) -> None:
    def write(_: str) -> None:
        with Store.open(full) as other:
            said.append(study(other, f"later {len(said)}"))

    said: list[int] = []
    with Store.open(tmp_path / "empty.db") as store, Store.open(full) as source:
        with whole_ledger._copying(store, source, quiet) as (copy, _):
            copy.table(Base.metadata.tables["study"])
            write("")
            assert copy.table(Base.metadata.tables["arm"]) == 4  # those of the snapshot
        assert said == [3]


def test_a_ledger_that_imports_itself_stays_as_it_is(full: Path) -> None:
    before = rows(full)
    with Store.open(full) as store, Store.open(full) as source:
        assert not any(whole_ledger.import_ledger(store, source, quiet).values())
    assert rows(full) == before


def test_an_import_that_fails_leaves_nothing(full: Path, empty: str) -> None:
    with closing(sqlite3.connect(full)) as connection:
        connection.execute("UPDATE metric SET run_id = run_id + 990 WHERE step = 29")
        connection.commit()
    with Store.open(empty) as store:
        study(store, "own")
    before = rows(empty)
    with Store.open(empty) as store, Store.open(full) as source:
        with pytest.raises(InputError, match=r"full\.db: is damaged: a row of table metric refers to run 99\d"):
            whole_ledger.import_ledger(store, source, quiet)
        assert rows(empty) == before
        with pytest.raises(InputError, match="is damaged"):
            whole_ledger.export_ledger(source, full.parent / "out.db", quiet)
    assert [path.name for path in full.parent.glob("*out.db*")] == []


def test_a_number_that_postgresql_cannot_hold_is_one_line(full: Path, postgres: Callable[[], str]) -> None:
    with closing(sqlite3.connect(full)) as connection:
        connection.execute("UPDATE metric SET step = 9999999999 WHERE step = 29")
        connection.commit()
    url = postgres()
    with Store.open(url) as store, Store.open(full) as source:
        with pytest.raises(InputError, match=r"table metric: .*out of range") as caught:
            whole_ledger.import_ledger(store, source, quiet)
        assert "\n" not in str(caught.value)
    assert not any(rows(url).values())


def test_export_overwrites_nothing_and_writes_files_only(full: Path) -> None:
    before = full.read_bytes()
    with Store.open(full) as store:
        with pytest.raises(InputError, match=r"full\.db: exists; give the path of a new file"):
            whole_ledger.export_ledger(store, full, quiet)
        with pytest.raises(InputError, match="export writes a file"):
            whole_ledger.export_ledger(store, "postgresql://h/db", quiet)
    assert full.read_bytes() == before


def test_vacuum_deletes_what_nothing_refers_to(full: Path, empty: str) -> None:
    with Store.open(empty) as store, Store.open(full) as source:
        whole_ledger.import_ledger(store, source, quiet)
        before = rows(empty)
        lone = study(store, "lone")
        store.record_trial(lone, "base", trial("lone", rule=RuleRecord("old", "1", "x" * 10**6)), 0, {})
        with store._engine.begin() as connection:
            connection.execute(text(f"DELETE FROM study WHERE id = {lone}"))
        size = whole_ledger.size(store)
        assert whole_ledger.vacuum(store) == {"study": 0, "trial": 1, "rule_version": 1}
        assert whole_ledger.vacuum(store) == {"study": 0, "trial": 0, "rule_version": 0}
        assert rows(empty) == before
        assert store._engine.name != "sqlite" or whole_ledger.size(store) < size - 900_000


def platform(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["platform", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_commands(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other, shipped = tmp_path / "other.db", tmp_path / "shipped.db"
    assert platform(monkeypatch, "db", "export", shipped, "--db", full) == 0
    assert "shipped.db: written: 1 of proposal, 1 of rule_version, 2 of study" in capsys.readouterr().out
    assert platform(monkeypatch, "db", "import", shipped, tmp_path / "run", "--db", other) == 0
    said = capsys.readouterr().out
    assert "shipped.db: new: 1 of proposal, 1 of rule_version, 2 of study" in said
    assert "run: recorded" in said
    assert platform(monkeypatch, "db", "import", shipped, "--db", other) == 0
    assert "shipped.db: new: no rows" in capsys.readouterr().out
    assert platform(monkeypatch, "db", "vacuum", "--db", other) == 0
    assert capsys.readouterr().out.startswith("deleted 0 rows of study, 0 rows of trial, 0 rows of rule_version; ")
    (tmp_path / "no_run").mkdir()
    for wrong in ("none.db", "no_run"):
        assert platform(monkeypatch, "db", "import", shipped, tmp_path / wrong, "--db", tmp_path / "new.db") == 2
        assert not (tmp_path / "new.db").exists(), "a wrong path makes no ledger"
    assert platform(monkeypatch, "db", "export", shipped, "--db", full) == 2
    assert rows(other) == rows(full)
    shutil.copy(shipped, tmp_path / "used.db")
    with Store.open(tmp_path / "used.db", create=False) as store:  # an exported file is a ledger
        assert len(store.studies()) == 2
