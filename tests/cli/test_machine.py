"""`deltalab doctor` says what works here, and what to do about the rest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deltalab.cli.app import app
from deltalab.cli.machine_commands import examination
from deltalab.cli.machine_commands.examination import Finding


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_ray", lambda: Finding("ray starts", "works", "in 3 s"))


@pytest.mark.usefixtures("without_ray")
def test_a_machine_without_a_ledger_lacks_nothing_that_studies_need(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--db", str(tmp_path / "none.db"), "--json"])
    found = {each["part"]: each for each in json.loads(done.stdout)}
    assert done.exit_code == 0, done.stdout
    assert found["database"]["state"] == "absent"
    assert not (tmp_path / "none.db").exists()
    assert {
        "deltalab",
        "command platform",
        "torch",
        "ray",
        "gpu",
        "kernels",
        "plugins",
        "space",
        "[train]",
        "[postgres]",
    } <= found.keys()


@pytest.mark.usefixtures("without_ray")
def test_a_file_that_is_no_ledger_is_broken(tmp_path: Path) -> None:
    file = tmp_path / "notes.db"
    file.write_text("milk, bread")
    done = CliRunner().invoke(app, ["doctor", "--db", str(file)])
    assert done.exit_code == 1
    assert "BROKEN" in done.stdout
    assert file.read_text() == "milk, bread"


def test_a_command_of_another_program_is_told_from_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = "from deltalab.cli.app import main\n"
    scripts = {
        "another": "#!/bin/sh\nexec client\n",
        "ours": f"#!{sys.executable}\n{ours}",
        "elsewhere": f"#!/other/bin/python\n{ours}",
    }
    found = {}
    for name, text in scripts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "platform").write_text(text)
        (tmp_path / name / "platform").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / name))
        found[name] = examination._command("platform")
    assert (found["ours"].state, found["ours"].found) == ("works", str(tmp_path / "ours" / "platform"))
    path = tmp_path / "another" / "platform"
    mend = "type deltalab in its place"
    assert found["another"] == Finding("command platform", "absent", f"{path} is another program", mend)
    assert "another installation" in found["elsewhere"].found
    assert examination._command("deltalab").found == "not on the PATH"


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_version", lambda package: None)
    assert examination._package("optuna") == Finding("optuna", "broken", "not installed", "pip install 'optuna>=4.5'")
    extra = examination._extra("eval", ("lm-eval",))
    assert (extra.state, extra.mend) == ("absent", "pip install 'deltalab[eval]'")


def test_a_gpu_beside_a_torch_for_cpus_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(examination, "_output", lambda *_: "NVIDIA H100, 580.1")
    found = examination._gpu()
    assert found.state == "broken"
    assert examination.CUDA_WHEELS in found.mend
    monkeypatch.setattr(examination, "_output", lambda *_: None)
    assert examination._gpu().state == "absent"


def test_a_ray_that_does_not_start_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "RAY", "import sys; sys.exit('no socket')")
    assert examination._ray() == Finding(
        "ray starts", "broken", "no socket", "deltalab study run --executor inline runs studies without Ray"
    )

    def late(*command: str, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", late)
    assert "not within" in examination._ray().found


def test_a_right_kernel_differs_from_the_parallel_form_by_rounding_alone() -> None:
    assert 0 < examination.kernel_error("cpu") < examination.TOLERANCE
