"""What evaluations are tested on: packed text, an export, and the command."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.exports import exported

from deltalab.cli.app import main
from deltalab.data.pack import pack
from deltalab.data.sources import Reading


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    lines = [f"document {i} says {i * 7} and little else, again and again" for i in range(80)]
    (folder / "all.txt").write_text("\n".join(lines))
    shares = {"train": 0.4, "validation": 0.3, "test": 0.3}
    pack([str(folder / "all.txt")], folder / "packed", reading=Reading(separator="\n"), shares=shares)
    return folder / "packed"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("export") / "model")


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> int:
        monkeypatch.setattr("sys.argv", ["platform", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return run
