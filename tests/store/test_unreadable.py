"""Ledgers that cannot be written, or were damaged: read as far as they can be, or refused in one line."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.ledgers import begin

from deltalab.cli.app import main
from deltalab.errors import InputError
from deltalab.store import Store


@pytest.fixture
def db(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "lab.db") as store:
        begin(store, "s")
    return tmp_path / "lab.db"


def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no file and no folder be written, as on a medium that is mounted read-only."""
    monkeypatch.setattr(os, "access", lambda file, mode: not mode & os.W_OK)


def test_a_ledger_on_a_read_only_medium_is_read_without_a_file_beside_it(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only(monkeypatch)
    with Store.open(db, create=False) as store:
        assert [study.name for study in store.studies()] == ["s"]
        assert [file.name for file in db.parent.iterdir()] == ["lab.db"]
        with pytest.raises(InputError, match="readonly"):
            begin(store, "another")


def test_a_log_beside_a_read_only_ledger_is_not_passed_over(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(db) as writer:
        begin(writer, "in the log")
        read_only(monkeypatch)
        with Store.open(db, create=False) as store:
            assert {study.name for study in store.studies()} == {"s", "in the log"}


DAMAGE: dict[str, Callable[[bytes], bytes] | str] = {
    "no UTF-8": "UPDATE study SET name = CAST(x'73ff' AS TEXT)",
    "no JSON": "UPDATE study SET spec = '{'",
    "no time": "UPDATE study SET created_at = 'long ago'",
    "a revision that is no text": "UPDATE alembic_version SET version_num = CAST(x'ff' AS TEXT)",
    "cut off": lambda data: data[: len(data) // 2],
    "zeros": lambda data: data[:4096] + bytes(len(data) - 4096),
    "a broken schema": lambda data: data.replace(b"CREATE TABLE study", b"CREATE TABLE stu(y"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_ledger_is_refused_in_one_line(
    what: str, db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage = DAMAGE[what]
    if isinstance(damage, str):
        with closing(sqlite3.connect(db)) as connection:
            connection.execute(damage)
            connection.commit()
    else:
        db.write_bytes(damage(db.read_bytes()))
    monkeypatch.setattr("sys.argv", ["platform", "study", "list", "--db", str(db)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: sqlite:///")
