"""A ledger whose file is deleted, moved or replaced while a study runs: the driver keeps it, says so, and fails."""

import re
import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.studies import assert_ledger_is_of, ledger, planned, write

from deltalab.cli.app import main
from deltalab.store import LedgerGone, Store, TrialRecord
from deltalab.study.running.run import run_study_file
from deltalab.study.running.schedule import Schedule

Deed = Callable[[Path], None]


def delete(db: Path) -> None:
    for file in db.parent.glob(f"{db.name}*"):
        file.unlink()


def delete_alone(db: Path) -> None:
    db.unlink()


def delete_log(db: Path) -> None:
    db.with_name(f"{db.name}-wal").unlink()


def move(db: Path) -> None:
    (db.parent / "away").mkdir()
    for file in db.parent.glob(f"{db.name}*"):
        file.rename(db.parent / "away" / file.name)


def replace(db: Path) -> None:
    other = db.with_name("other.db")
    Store.open(other).close()
    delete(db)
    other.rename(db)


def replace_by_copy(db: Path) -> None:
    copy = db.with_name("copy.db")
    shutil.copy(db, copy)
    copy.replace(db)


def empty(db: Path) -> None:
    db.write_bytes(b"")


def overwrite(db: Path) -> None:
    other = db.with_name("other.db")
    Store.open(other).close()
    db.write_bytes(other.read_bytes())
    db.with_name(f"{db.name}-wal").write_bytes(b"")


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Deed, int], None]:
    """Does a deed to the ledger after a number of trials."""

    def after(deed: Deed, number: int) -> None:
        finished, ended = Schedule.finished, []

        def then(self: Schedule, record: TrialRecord) -> None:
            finished(self, record)
            ended.append(record)
            if len(ended) == number:
                deed(tmp_path / "lab.db")

        monkeypatch.setattr(Schedule, "finished", then)

    return after


def test_a_ledger_whose_folder_is_removed_comes_back_by_the_command_that_is_told(
    lose: Callable[[Deed, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it held lies in the temporary folder then, and the command makes the folder again."""
    folder, elsewhere = tmp_path / "a lab", tmp_path / "temporary"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    lose(lambda _: shutil.rmtree(folder), 2)
    given = {"db": folder / "lab.db", "executor": "inline", "unchecked": True, "storage": str(tmp_path / "runs")}
    with pytest.raises(LedgerGone) as told:
        run_study_file(write(tmp_path / "s.yaml", resources={"stack": 1}), **given)
    assert told.value.exit_code == 1
    assert "\n" not in str(told.value)
    kept = elsewhere / "lab.db.kept"
    said = re.search("`(.*)`", str(told.value))
    assert said is not None
    words = shlex.split(said[1])
    assert words == ["mkdir", "-p", str(folder), "&&", "deltalab", "db", "import", str(kept), "--db", str(given["db"])]
    folder.mkdir()
    monkeypatch.setattr("sys.argv", words[words.index("deltalab") :])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert ledger(folder / "lab.db") == ledger(kept)


@pytest.mark.parametrize(
    ("deed", "number"),
    [(delete, 4), *((deed, 1) for deed in (delete, delete_alone, delete_log, move, replace, replace_by_copy))],
)
def test_what_a_lost_ledger_held_is_kept_and_the_same_study_goes_on(
    deed: Deed, number: int, lose: Callable[[Deed, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_file, db = write(tmp_path / "s.yaml", resources={"stack": 1}), tmp_path / "lab.db"
    lose(deed, number)
    with pytest.raises(LedgerGone) as told:
        run_study_file(study_file, db=db, executor="inline", unchecked=True)
    assert "\n" not in str(told.value)
    monkeypatch.undo()

    kept = tmp_path / "lab.db.kept"
    assert str(kept) in str(told.value)
    held = [key for (key,) in ledger(kept)["trials"]]
    assert number <= len(held) <= number + 1
    for file in tmp_path.glob("lab.db*"):
        if file != kept:
            file.unlink()
    monkeypatch.setattr("sys.argv", ["platform", "db", "import", str(kept), "--db", str(db)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    result = run_study_file(study_file, db=db, executor="inline", unchecked=True)
    assert (result.state, result.known) == ("done", len(held))
    assert_ledger_is_of(db, planned(study_file))


@pytest.mark.parametrize("deed", [empty, overwrite])
def test_a_ledger_overwritten_in_place_is_noticed_within_one_trial(
    deed: Deed,
    lose: Callable[[Deed, int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study_file, db = write(tmp_path / "s.yaml", resources={"stack": 1}), tmp_path / "lab.db"
    lose(deed, 2)
    words = ["study", "run", str(study_file), "--db", str(db), "--executor", "inline", "--unchecked"]
    monkeypatch.setattr("sys.argv", ["platform", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert "lab.db: was deleted, moved or replaced" in capsys.readouterr().err.splitlines()[-1]


def test_a_reader_of_a_deleted_ledger_is_told(tmp_path: Path) -> None:
    with Store.open(tmp_path / "lab.db") as store:
        delete(tmp_path / "lab.db")
        with pytest.raises(LedgerGone, match="while it was open"):
            store.studies()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def move_amid(monkeypatch: pytest.MonkeyPatch) -> Callable[[Store, Path], None]:
    """Moves the file of a ledger after the next transaction has looked for it, and before it opens it."""

    def prepare(store: Store, db: Path) -> None:
        follow = Store._follow_file

        def then(self: Store) -> None:
            follow(self)
            monkeypatch.undo()
            move(db)

        monkeypatch.setattr(Store, "_follow_file", then)
        store._engine.dispose()

    return prepare


def test_a_reader_is_told_of_a_ledger_that_is_moved_amid_a_transaction(
    move_amid: Callable[[Store, Path], None], tmp_path: Path
) -> None:
    with Store.open(tmp_path / "lab.db") as store:
        move_amid(store, tmp_path / "lab.db")
        with pytest.raises(LedgerGone, match="while it was open"):
            store.studies()


def test_a_driver_goes_on_in_the_new_file_amid_a_transaction(
    move_amid: Callable[[Store, Path], None], tmp_path: Path
) -> None:
    with Store.open(tmp_path / "lab.db") as store:
        store.begin_study("s", None, "identity", {}, [], {})
        move_amid(store, tmp_path / "lab.db")
        assert [study.name for study in store.studies()] == ["s"]
        with pytest.raises(LedgerGone, match=r"lab\.db\.kept"):
            store.require_in_place()
