"""The ledger: nothing half-written, nothing twice, and no database harmed that is not ours."""

import math
import multiprocessing
import pickle
import shutil
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, select, text
from sqlalchemy.exc import IntegrityError, OperationalError
from tests.support.records import ARMS, begin, run, trial

from deltalab.errors import InputError
from deltalab.store import ArtifactRecord, Store, database
from deltalab.store.models import Base, Metric, Run, Trial
from deltalab.study.reports.report import report


@pytest.fixture
def store(any_store: Store) -> Store:
    """An empty ledger of either kind."""
    return any_store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lab.db"
    Store.open(path).close()
    return path


def count(store: Store, table: type[Base]) -> int:
    with store._reading() as session:
        return len(session.execute(select(table)).all())


def test_what_is_recorded_is_read_back(store: Store) -> None:
    study = begin(store, profile="gpu")
    big = 2**40
    files = [ArtifactRecord("checkpoint", "a.pt", "f00", big)]
    store.record_trial(
        study,
        "no_d",
        trial(
            parameters=big, state_size=64, tokens_per_second=1e6, hardware={"gpu": "H100"},
            runs=[run(big, artifacts=files), run(1, state="diverged", diverged_at=7, metrics=[])],
        ),
        number=3,
        values={"train.lr": 0.01},
    )  # fmt: skip

    assert [(arm.name, arm.is_base, arm.change) for arm in store.arms(study)] == [
        ("base", True, {}),
        ("no_d", False, {"rule.d": [0.02, 0]}),
    ]
    [row] = store.trials(study)
    assert (row.arm, row.number, row.values) == ("no_d", 3, {"train.lr": 0.01})
    assert (row.parameters, row.state_size, row.tokens_per_second) == (big, 64, 1e6)
    assert (row.hardware, row.config) == ({"gpu": "H100"}, {"train": {"lr": 0.01}})
    assert (row.rule, row.rule_hash, row.runs) == ("comba", "abc", {1: "diverged", big: "done"})
    assert row.started_at.timestamp() == 1000
    assert row.finished_at.timestamp() == 1060.5
    assert store.final_metrics(study) == [("no_d", "mqar", "confirm", "k", big, "done", "test", "accuracy", 10, 0.5)]
    assert [version.source for version in store.rule_versions(study)] == ["class Comba: ..."]
    [(of_trial, of_run, artifact)] = store.artifacts(study, "no_d")
    assert (of_trial.key, of_run.seed, artifact.path, artifact.bytes) == ("k", big, "a.pt", big)
    assert store.artifacts(study, "base") == []


def test_a_record_that_fails_midway_leaves_nothing(store: Store) -> None:
    study = begin(store)
    twice = [("test", "accuracy", 10, 0.5)] * 2
    with pytest.raises(IntegrityError):
        store.record_trial(study, "base", trial(runs=[run(0), run(1, metrics=twice)]), 0, {})
    assert [count(store, table) for table in (Trial, Run, Metric)] == [0, 0, 0]
    assert store.rule_versions(study) == []
    assert store.known_trials(["k"]) == {}
    store.record_trial(study, "base", trial(), 0, {})
    assert list(store.known_trials(["k"])) == ["k"]


def test_a_trial_is_recorded_once_across_arms_and_studies(store: Store) -> None:
    first, second = begin(store, "first"), begin(store, "second")
    store.record_trial(first, "base", trial(), 0, {"lr": 1})
    store.record_trial(first, "base", trial(), 0, {"lr": 1})
    other = trial(runs=[run(metrics=[("test", "accuracy", 10, 0.9)])])
    store.record_trial(second, "no_d", other, 5, {"lr": 2})
    store.attach(second, "base", "k", 1, {"lr": 3})
    store.attach(second, "base", "k", 1, {"lr": 3})
    assert count(store, Trial) == 1
    assert count(store, Run) == 1
    assert [(row.arm, row.number, row.values) for row in store.trials(second)] == [
        ("base", 1, {"lr": 3}),
        ("no_d", 5, {"lr": 2}),
    ]
    assert [final.value for final in store.final_metrics(second)] == [0.5, 0.5]


def test_an_arm_may_suggest_a_trial_twice_and_counts_its_metrics_once(store: Store) -> None:
    study = begin(store)
    store.record_trial(study, "base", trial(stage="tune"), 0, {})
    store.attach(study, "base", "k", 4, {})
    assert [row.number for row in store.trials(study)] == [0, 4]
    assert len(store.final_metrics(study)) == 1
    assert len(store.curves(study, "mqar", "accuracy", "test", stage="tune")) == 1


def test_a_rerun_continues_the_study(store: Store) -> None:
    study = begin(store)
    store.finish_study(study, "failed")
    finished = store.study(study)
    assert finished.state == "failed"
    assert finished.finished_at is not None
    assert finished.created_at <= finished.finished_at

    of_a_later_release = [replace(arm, config={**arm.config, "new": 1}) for arm in ARMS]
    assert begin(store, arms=of_a_later_release) == study
    again = store.study(study)
    assert again.state == "running"
    assert again.finished_at is None
    assert again.provenance == {"git": "1"}
    for commit in ("2", "3"):
        begin(store, provenance={"git": commit})
    assert store.study(study).provenance == {"git": "3", "earlier": [{"git": "1"}, {"git": "2"}]}

    with pytest.raises(InputError, match="recorded with the arms base, no_d; give this one, with base,"):
        begin(store, arms=ARMS[:1])
    assert [arm.name for arm in store.arms(study)] == ["base", "no_d"]


def test_known_trials_give_the_last_value_of_the_seeds_that_finished(store: Store) -> None:
    study = begin(store)
    metrics = [("test", "accuracy", 10, 0.1), ("test", "accuracy", 20, 0.2), ("validation", "loss", 20, 3.0)]
    bad = [("test", "accuracy", 10, 0.3), ("test", "accuracy", 20, math.nan), ("test", "loss", 20, math.inf)]
    store.record_trial(
        study, "base", trial(runs=[run(5, metrics=metrics), run(6, state="diverged", metrics=bad)]), 0, {}
    )
    store.record_trial(study, "base", trial("failed", state="failed", error="boom", runs=[]), 1, {})
    many = [f"absent {i}" for i in range(1200)]  # more than one statement takes
    known = store.known_trials(["k", *many, "failed"])
    assert known.keys() == {"k", "failed"}
    assert known["k"].finals == {("test", "accuracy"): {5: 0.2}, ("validation", "loss"): {5: 3.0}}
    assert known["k"].diverged == [6]
    assert known["failed"].error == "boom"
    assert {(f.seed, f.run_state, f.step) for f in store.final_metrics(study) if f.split == "test"} == {
        (5, "done", 20),
        (6, "diverged", 10),
    }


def test_a_recorded_trial_is_what_is_known_of_it(store: Store) -> None:
    study = begin(store)
    late_first = [("test", "loss", 20, 1 / 3), ("test", "loss", 10, 0.3), ("test", "accuracy", 20, math.nan)]
    ended = trial("ended", runs=[run(7, metrics=late_first), run(2, metrics=late_first), run(3, state="diverged")])
    failed = trial("failed", state="failed", error="a\x00b\udcffc", runs=[run(1, state="diverged")], parameters=12)
    for number, record in enumerate([ended, failed]):
        said = store.record_trial(study, "base", record, number, {})
        assert said == store.known_trials([record.key])[record.key]
        assert store.record_trial(study, "no_d", replace(record, runs=[], error="another"), number, {}) == said
    assert store.known_trials(["ended"])["ended"].finals == {("test", "loss"): {2: 1 / 3, 7: 1 / 3}}


def test_only_a_failed_trial_is_forgotten_and_who_held_it_is_unfinished(store: Store) -> None:
    study, other = begin(store), begin(store, "other")
    store.record_trial(study, "base", trial("good"), 0, {})
    for owner in (study, other):
        store.record_trial(owner, "base", trial("bad", state="failed", error="boom", runs=[run()]), 1, {})
    store.finish_study(other, "failed")
    with pytest.raises(ValueError, match="only a failed one"):
        store.forget_trial("good")
    store.forget_trial("bad")
    assert [row.key for row in store.trials(study)] == ["good"]
    assert store.trials(other) == []
    assert (store.study(study).state, store.study(other).state) == ("running", "interrupted")
    assert count(store, Run) == count(store, Metric) == 1
    store.record_trial(study, "base", trial("bad"), 1, {})
    assert store.known_trials(["bad"])["bad"].state == "done"


@pytest.mark.parametrize(("points", "kept"), [(1, 1), (7, 7), (8, 7), (1000, 7)])
def test_curves_are_thinned_evenly_with_both_ends(store: Store, points: int, kept: int) -> None:
    study = begin(store)
    metrics = [("train", "loss", 3 * i, float(i)) for i in range(points)]
    other = [("test", "loss", 1, 9.0), ("train", "accuracy", 1, 9.0)]
    store.record_trial(study, "base", trial(runs=[run(seed, metrics=metrics + other) for seed in (0, 1)]), 0, {})
    curve = store.curves(study, "mqar", "loss", "train", max_points=7)
    assert [point.seed for point in curve] == [0] * kept + [1] * kept
    steps = [point.step for point in curve if point.seed == 0]
    assert (steps[0], steps[-1]) == (0, 3 * (points - 1))
    gaps = {(after - before) // 3 for before, after in pairwise(steps)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert all(point.value == point.step / 3 for point in curve)
    assert store.curves(study, "text", "loss", "train") == []
    assert store.curves(study, "mqar", "loss", "train", stage="tune") == []


def test_trials_come_in_pages(store: Store) -> None:
    study = begin(store)
    for number in (2, 0, 1):
        store.record_trial(study, "no_d", trial(f"n{number}", stage="tune"), number, {})
    store.record_trial(study, "base", trial("b"), 0, {})
    assert [row.key for row in store.trials(study)] == ["b", "n0", "n1", "n2"]
    pages = [store.trials(study, limit=2, offset=offset) for offset in (0, 2, 4)]
    assert [[row.key for row in page] for page in pages] == [["b", "n0"], ["n1", "n2"], []]


def test_a_study_is_found_by_name_profile_or_id(store: Store) -> None:
    small, large, latest = (
        begin(store, "ablation", "1"),
        begin(store, "ablation", "2", profile="gpu"),
        begin(store, "x"),
    )
    assert store.study("ablation", "gpu").id == large
    assert store.study(small).id == store.study(str(small)).id == small
    assert [study.id for study in store.studies()] == [latest, large, small]
    with pytest.raises(InputError, match="unknown study 'ablaton'; did you mean 'ablation'"):
        store.study("ablaton")


def test_a_name_alone_is_the_default_profile(store: Store) -> None:
    default, gpu = begin(store, "ablation", "1"), begin(store, "ablation", "2", profile="gpu")
    assert store.study("ablation").id == default
    assert store.study("ablation:gpu").id == store.study("ablation", "gpu").id == gpu
    assert store.study("ablation:gpu", "gpu").id == gpu
    assert (store.study(gpu).address, store.study(default).address) == ("ablation:gpu", "ablation")
    again = begin(store, "ablation", "3")
    assert store.study("ablation").id == again, "the latest run of the default profile"
    begin(store, "never_by_default", "4", profile="gpu")
    latest = begin(store, "never_by_default", "5", profile="paper")
    assert store.study("never_by_default").id == latest


def test_a_number_is_an_id_and_a_name_of_digits_is_a_name(store: Store) -> None:
    first, named = begin(store, "ablation", "1"), begin(store, "1", "2")
    assert store.study(first).id == first
    assert store.study("1").id == named


@pytest.mark.parametrize(
    ("address", "profile", "says"),
    [
        ("ablation:cpu", None, "unknown study 'ablation:cpu'; did you mean 'ablation:gpu'? allowed: ablation, abl"),
        ("ablation", "cpu", "unknown study 'ablation:cpu'; did you mean 'ablation:gpu'?"),
        ("1", "cpu", "unknown study 'ablation:cpu'"),
        ("3", None, "unknown study '3'; allowed: ablation, ablation:gpu"),
        ("ablation:gpu", "cpu", "study 'ablation:gpu' names one profile, --profile 'cpu' another"),
    ],
)
def test_an_unknown_address_lists_those_that_there_are(
    store: Store, address: str, profile: str | None, says: str
) -> None:
    begin(store, "ablation", "1")
    begin(store, "ablation", "2", profile="gpu")
    with pytest.raises(InputError) as raised:
        store.study(address, profile)
    assert says in str(raised.value)


def test_a_traceback_may_quote_anything(store: Store) -> None:
    study = begin(store)
    store.record_trial(study, "base", trial(state="failed", error="a\x00b\udcffc é", runs=[]), 0, {})
    assert store.trials(study)[0].error == "a\\x00b\\udcffc é"


def test_writers_wait_for_each_other(url: str, store: Store) -> None:
    study = begin(store)
    faults: list[BaseException] = []

    def write() -> None:
        try:
            with Store.open(url) as own:
                for i in range(10):
                    own.record_trial(study, "base", trial(f"k{i}"), i, {})
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert len(store.trials(study)) == 10 == count(store, Trial)


def test_migrations_make_the_models(store: Store) -> None:
    with store._engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_a_foreign_database_is_left_alone(url: str) -> None:
    engine = create_engine(url if "://" in url else f"sqlite:///{url}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE mine (x INTEGER)"))
    engine.dispose()
    before = Path(url).read_bytes() if Path(url).exists() else b""
    for touch in (Store.open, Store.upgrade):
        with pytest.raises(InputError, match="is not a deltalab database"):
            touch(url)
    assert not before or Path(url).read_bytes() == before


def dump(url: str) -> list[Any]:
    """Every table with its columns and rows."""
    engine = create_engine(url if "://" in url else f"sqlite:///{url}")
    with engine.connect() as connection:
        tables = sorted(inspect(connection).get_table_names())
        columns = [[column["name"] for column in inspect(connection).get_columns(table)] for table in tables]
        rows = [sorted(map(repr, connection.execute(text(f"SELECT * FROM {table}")))) for table in tables]
    engine.dispose()
    return [tables, columns, rows]


@pytest.mark.parametrize("name", ["0001", "0002"])
@pytest.mark.parametrize(
    "tables",
    [
        ["study (id INTEGER, student TEXT)"],
        [f"{table} (id INTEGER, name TEXT)" for table in ("study", "arm", "trial", "run", "metric", "driver")],
    ],
)
def test_a_foreign_database_with_the_name_of_our_revision_is_left_alone(url: str, name: str, tables: list[str]) -> None:
    engine = create_engine(url if "://" in url else f"sqlite:///{url}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
        connection.execute(text(f"INSERT INTO alembic_version VALUES ('{name}')"))
        for table in tables:
            connection.execute(text(f"CREATE TABLE {table}"))
    engine.dispose()
    before = dump(url)
    for touch in (Store.open, Store.upgrade):
        with pytest.raises(InputError, match="is not a deltalab database"):
            touch(url)
    assert dump(url) == before


def test_a_table_of_versions_that_is_not_ours_is_left_alone(url: str) -> None:
    engine = create_engine(url if "://" in url else f"sqlite:///{url}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version INTEGER)"))
    engine.dispose()
    with pytest.raises(InputError, match="is not a deltalab database"):
        Store.open(url)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("DROP TABLE training_metric", "table training_metric has no "),
        ("ALTER TABLE run DROP COLUMN state", "table run has no state"),
        ("UPDATE alembic_version SET version_num = '0001'", "table (driver|study|training) has "),
        ("DELETE FROM alembic_version", "is not a deltalab database"),
    ],
)
def test_a_migration_cut_short_by_hand_is_one_line(url: str, store: Store, change: str, says: str) -> None:
    with store._engine.begin() as connection:
        connection.execute(text(change))
    store.close()
    before = dump(url)
    for touch in (Store.open, Store.upgrade):
        with pytest.raises(InputError, match=says) as caught:
            touch(url)
        assert "\n" not in str(caught.value)
    assert dump(url) == before


REVISIONS = database.revisions()


@pytest.mark.slow
@pytest.mark.parametrize("old", REVISIONS[:-1])
def test_every_released_schema_is_migrated_with_its_rows(url: str, old: str) -> None:
    """The released ledger in the tables of an earlier revision comes out with the same rows, and with our tables."""
    engine = database.connect(database.address(url), migrating=True)
    with engine.execution_options(writes=True).begin() as connection:
        database._upgrade(connection, old)
    made = dump(url)
    with closing(sqlite3.connect(":memory:")) as released:
        released.executescript((Path(__file__).parent / "released" / "ledger.sql").read_text())
        released.row_factory = sqlite3.Row
        order = [table for table in Base.metadata.sorted_tables if table.name in made[0]]
        with engine.begin() as connection:
            for table in order:
                if released.execute(f"SELECT 1 FROM sqlite_master WHERE name = '{table.name}'").fetchone():
                    for row in released.execute(f"SELECT * FROM {table.name}"):
                        given = {key: bool(row[key]) if key == "is_base" else row[key] for key in row.keys()}  # noqa: SIM118
                        marks = ", ".join(f":{key}" for key in given)
                        names = ", ".join(f'"{key}"' for key in given)
                        connection.execute(text(f"INSERT INTO {table.name} ({names}) VALUES ({marks})"), given)
    engine.dispose()
    before = dump(url)
    assert sum(map(len, before[2])) > 100
    with pytest.raises(InputError, match=f"revision '{old}' is old; run `deltalab db upgrade` first"):
        Store.open(url)
    Store.upgrade(url)
    after = dump(url)
    for table, columns, rows in zip(*before, strict=True):
        at = after[0].index(table)
        if table != "alembic_version" and columns == after[1][at]:
            assert after[2][at] == rows
        assert len(after[2][at]) == len(rows)
    with Store.open(url) as store:
        test_migrations_make_the_models(store)
        assert report(store, store.study("released").id).tables


def test_what_is_no_database_is_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("not a database, but long enough to be looked at\n" * 40)
    for touch in (Store.open, Store.upgrade):
        with pytest.raises(InputError, match=r"notes.txt: file is not a database$"):
            touch(notes)
    assert notes.read_text().startswith("not a database")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_newer_database_is_refused(url: str, store: Store) -> None:
    with store._engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for touch in (Store.open, Store.upgrade):
        with pytest.raises(InputError, match="revision '9999' is newer than this deltalab knows"):
            touch(url)


def test_an_older_database_asks_for_upgrade_and_keeps_its_rows(
    url: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = begin(store)
    store.record_trial(study, "base", trial(), 0, {})
    store.close()
    scripts = tmp_path / "scripts"
    shutil.copytree(Path(database.__file__).parent / "migrations", scripts)
    (scripts / "versions" / "9000_next.py").write_text(
        f"import sqlalchemy as sa\nfrom alembic import op\nrevision, down_revision = '9000', '{REVISIONS[-1]}'\n"
        "def upgrade():\n"
        "    with op.batch_alter_table('trial', recreate='auto') as batch:\n"
        "        batch.alter_column('task', type_=sa.Text())\n"
        "        batch.add_column(sa.Column('note', sa.String()))\n"
    )
    monkeypatch.setattr(database, "MIGRATIONS", scripts)
    with pytest.raises(InputError, match=f"revision '{REVISIONS[-1]}' is old; run `deltalab db upgrade` first"):
        Store.open(url)
    Store.upgrade(url)
    Store.upgrade(url)
    with Store.open(url) as upgraded:
        with upgraded._engine.connect() as connection:
            assert connection.execute(text("SELECT note FROM trial")).all() == [(None,)]
        # SQLite's batch replaced the table that runs refer to: they must have stayed.
        assert [final.value for final in upgraded.final_metrics(study)] == [0.5]


def test_a_ledger_of_each_earlier_revision_is_brought_up_with_its_studies(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that a killed driver left as "running" does not run."""
    scripts = tmp_path / "scripts"
    shutil.copytree(Path(database.__file__).parent / "migrations", scripts)
    for file in (scripts / "versions").glob("0*.py"):
        if file.name > "0003":
            file.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(database, "MIGRATIONS", scripts)
        with Store.open(url) as old, old._engine.begin() as connection:
            assert {"driver", "stack"}.isdisjoint(inspect(connection).get_table_names())
            connection.execute(
                text(
                    "INSERT INTO study (name, identity, spec, state, created_at, provenance) "
                    "VALUES ('study', 'study', '{}', 'running', '2026-01-01 00:00:00', '{}')"
                )
            )
    with pytest.raises(InputError, match="revision '0002' is old; run `deltalab db upgrade` first"):
        Store.open(url)
    Store.upgrade(url)
    with Store.open(url) as upgraded:
        (study,) = upgraded.studies()
        assert study.state == "interrupted"
        with upgraded._engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_a_failed_migration_leaves_the_database_as_it_was(
    url: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.close()
    scripts = tmp_path / "scripts"
    shutil.copytree(Path(database.__file__).parent / "migrations", scripts)
    (scripts / "versions" / "9000_next.py").write_text(
        f"from alembic import op\nrevision, down_revision = '9000', '{REVISIONS[-1]}'\n"
        "def upgrade():\n    op.drop_table('metric')\n    raise RuntimeError('halfway')\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(database, "MIGRATIONS", scripts)
        with pytest.raises(RuntimeError, match="halfway"):
            Store.upgrade(url)
    with Store.open(url) as intact:
        assert count(intact, Metric) == 0


def test_a_locked_database_is_one_line_after_waiting(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.1)
    with Store.open(file, patience=0) as store, closing(sqlite3.connect(file)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(InputError, match=r"lab.db: database is locked by another process, for 0.1 s$"):
            begin(store)
        assert store.studies() == []  # readers do not wait for a writer
        other.rollback()
        begin(store)


def test_a_read_only_database_is_read_and_not_written(file: Path) -> None:
    with Store.open(f"sqlite:///file:{file}?mode=ro&uri=true") as store:
        assert store.studies() == []
        with pytest.raises(InputError, match="attempt to write a readonly database"):
            begin(store)


def test_a_full_disk_is_one_line_and_leaves_nothing(file: Path) -> None:
    with Store.open(file, patience=0) as store:
        study = begin(store)
        with store._engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 30")
        long = [("train", "loss", step, 0.0) for step in range(20_000)]
        with pytest.raises(InputError, match=r"lab.db: database or disk is full$"):
            store.record_trial(study, "base", trial(runs=[run(metrics=long)]), 0, {})
        assert store.trials(study) == []
        assert count(store, Run) == 0


def test_a_packed_ledger_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "lab.db.xz").write_bytes(b"no database" * 100)
    with pytest.raises(InputError, match="file is not a database: unpack it first, by `xz -dc"):
        Store.open(tmp_path / "lab.db.xz", create=False)


def test_a_place_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"is there a folder {tmp_path}/absent, and may you write there"):
        Store.open(tmp_path / "absent" / "lab.db")
    with pytest.raises(InputError, match=r"unable to open database file: it is a folder$"):
        Store.open(tmp_path)
    with pytest.raises(InputError, match=r"typo.db: no such database"):
        Store.open(tmp_path / "typo.db", create=False)
    assert list(tmp_path.iterdir()) == []


def test_the_default_is_a_file_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deltalab.db").touch()  # an empty file is a new database
    with pytest.raises(InputError, match="is empty"):
        Store.open(create=False)
    with Store.open() as store:
        begin(store)
    with closing(sqlite3.connect("deltalab.db")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("SELECT name FROM study").fetchall() == [("study",)]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("postgresql://me:s3cret@h:port/db", "cannot be read"),
        ("postgresql://me:s3cret@x:y@h/db", "cannot be read"),
        (Path("postgresql://me:s3cret@h/db"), "cannot be read"),
        ("postgres://me:s3cret@h/db", "unknown database 'postgres'; did you mean 'postgresql'"),
        ("mysql://me:s3cret@h/db", "unknown database 'mysql'"),
        ("postgresql://me:s3cret@127.0.0.1:1/db", r"postgresql://me:\*\*\*@127.0.0.1:1/db: .*refused"),
        ("postgresql://127.0.0.1:1/db?password=s3cret&user=me", "refused"),
        ("sqlite://", "needs a file"),
        (":memory:", "needs a file"),
    ],
)
def test_a_wrong_url_is_one_line_without_its_password(where: str | Path, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Store.open(where)
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_store_shows_no_password_and_stays_in_its_process(store: Store) -> None:
    url = store._engine.url.set(password="s3cret") if store._engine.name == "postgresql" else store._engine.url
    assert "s3cret" not in repr(Store(create_engine(url)))
    url = database.address("postgresql://me:s3cret@h/db")
    hidden = r"^postgresql://me:\*\*\*@h/db: bad conninfo \*\*\*$"
    with pytest.raises(InputError, match=hidden), database.input_errors(url):
        raise OperationalError("", {}, Exception("bad conninfo\ns3cret"))
    with pytest.raises(TypeError, match="stays in the driver"):
        pickle.dumps(store)


def _open(path: str) -> int:
    with Store.open(path) as store:
        return len(store.studies())


def test_a_new_database_waits_for_another_process_that_makes_it(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "lab.db", isolation_level=None, check_same_thread=False)
    with closing(other):
        other.execute("BEGIN IMMEDIATE")
        ended = threading.Timer(0.3, other.execute, ["ROLLBACK"])
        ended.start()
        assert _open(str(tmp_path / "lab.db")) == 0
        ended.join()


def test_many_processes_may_make_the_same_database(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(_open, [str(tmp_path / "lab.db")] * 8) == [0] * 8
