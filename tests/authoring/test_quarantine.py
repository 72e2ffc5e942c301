"""Quarantine: whatever a rule's file does, it costs the file its own verdict and nothing else."""

import re
import time
from pathlib import Path

import pytest
from tests.support.folders import ROOT

from deltalab.authoring.quarantine import quarantined

RULE = (ROOT / "plugins/deltalab_rules/deltanet.py").read_text()
AT_IMPORT = "\n\n@dataclass"
IN_USE = "        return Operands"


def rule(folder: Path, code: str, at: str) -> Path:
    """A rule that runs code when it is imported, or when it makes its operands."""
    lines = code.format(folder=folder).splitlines()
    text = "\n".join(lines) + "\n" if at == AT_IMPORT else "".join(f"        {line}\n" for line in lines)
    file = folder / "proposed.py"
    file.write_text(RULE.replace('"deltanet"', '"proposed"').replace(at, f"\n{text}{at}".lstrip("\n"), 1))
    return file


@pytest.mark.slow(keep="import")
@pytest.mark.parametrize(
    ("code", "at", "said"),
    [
        ("open('{folder}/out', 'w')", AT_IMPORT, "writes '.*/out', outside of its folder"),
        ("import os\nos._exit(3)", AT_IMPORT, "it ends the process, with exit code 3"),
        ("open('{folder}/out', 'w')", IN_USE, "writes '.*/out', outside of its folder"),
        ("import os\nos.rename('{folder}/kept', 'mine')", IN_USE, "outside of its folder"),
        ("import shutil\nshutil.rmtree('{folder}/full')", IN_USE, "outside of its folder"),
        ("import os\nos.fork()", IN_USE, "starts a process"),
        ("import subprocess\nsubprocess.Popen(['sleep', '99'])", IN_USE, "starts a process"),
    ],
    ids=["import writes", "import ends", "writes", "moves", "removes a folder", "forks", "starts a program"],
)
def test_what_reaches_beyond_the_process_is_refused(tmp_path: Path, code: str, at: str, said: str) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("kept")
    file = rule(tmp_path, code, at)
    found = quarantined(file)
    assert found.problem is not None
    assert re.search(said, found.problem), found.problem
    assert "\n" not in found.problem
    assert {path.name for path in tmp_path.rglob("*")} == {"kept", "full", "proposed.py"}


@pytest.mark.slow
@pytest.mark.parametrize("at", [AT_IMPORT, IN_USE], ids=["import", "use"])
def test_what_hangs_ends_in_time(tmp_path: Path, at: str) -> None:
    began = time.monotonic()
    found = quarantined(rule(tmp_path, "while True: pass", at), seconds=6)
    assert found.problem == "its checks did not end within 6 s"
    assert time.monotonic() - began < 16


@pytest.mark.slow
def test_what_prints_and_writes_in_its_own_folder_passes_in_silence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = quarantined(rule(tmp_path, "print('x' * 10**5)\nopen('mine', 'w').close()", IN_USE))
    assert (found.rule, found.problem) == ("proposed", None)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [("x = 1\n", "defines no UpdateRule"), ("def f(:\n", "line 1: does not import: SyntaxError")],
)
def test_what_is_no_rule_is_said_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "proposed.py"
    file.write_text(text)
    found = quarantined(file)
    assert found.rule is None
    assert said in (found.problem or "")
