"""The command in this process, in a folder of its own, with a study that ran or did not."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.command import STUDY, Platform, Said

import deltalab
from deltalab import progress, registry
from deltalab.cli.app import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, with a study in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(STUDY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with registry.isolated():
        yield tmp_path
    torch.set_num_threads(threads)


@pytest.fixture
def platform(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Platform]:
    """The command, in this process."""

    def run(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["platform", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Said(int(ended.value.code or 0), *capsys.readouterr())

    yield run
    progress.tell_in("text")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the study ran."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "study.yaml").write_text(STUDY)
    deltalab.run_study(folder / "study.yaml", db=folder / "deltalab.db", executor="inline")
    return folder


@pytest.fixture
def done(here: Path, finished: Path) -> Path:
    shutil.copy(finished / "deltalab.db", here)
    return here
