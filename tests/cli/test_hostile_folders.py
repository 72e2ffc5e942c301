"""Folders, studies and checkpoints of others: no command runs their code unless the user trusts the folder."""

import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.exports import exported
from tests.support.folders import ROOT
from tests.support.studies import STUDY, write

from deltalab import registry, trust
from deltalab.cli.app import main

PAYLOAD = "import pathlib\npathlib.Path({!r}).write_text('ran')\n"

Folder = Callable[["Lab"], list[str]]
"""Makes a hostile folder in the working folder, and returns a command that meets it."""


class Lab:
    """A working folder, with the file that hostile code writes."""

    def __init__(self, folder: Path, export: Path) -> None:
        self.folder, self.witness, self._export = folder, folder.parent / "witness", export

    @property
    def payload(self) -> str:
        return PAYLOAD.format(str(self.witness))

    @property
    def shell(self) -> str:
        return f"touch {self.witness}"

    def export(self, **config: Any) -> Path:
        """An export, with other values in its configuration."""
        target = self.folder / "exported"
        shutil.copytree(self._export, target)
        self.change(target / "config.json", **config)
        return target

    def change(self, file: Path, **values: Any) -> None:
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    def run(self, index: bytes) -> list[str]:
        """A run of training whose only checkpoint has this index."""
        export, checkpoint = self.export(), self.folder / "run" / "checkpoints" / "step-1"
        checkpoint.mkdir(parents=True)
        (checkpoint / ".metadata").write_bytes(index)
        recipe = yaml.safe_load((export / "recipe.yaml").read_text())
        about = {"id": "r1", "export": str(export), "recipe": recipe, "data": {}}
        (self.folder / "run" / "run.json").write_text(json.dumps(about))
        return ["export", "./run", "out"]

    def study(self, mixer: dict[str, Any]) -> list[str]:
        base = {key: value for key, value in STUDY["base"].items() if key != "rule"}
        base["model"] = {**base["model"], "mixer": mixer}
        file = self.folder / "s.yaml"
        file.write_text(yaml.safe_dump({**STUDY, "base": base, "ablate": []}))
        return ["study", "plan", str(file)]


class Calls:
    """A pickle that calls a function when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def pickled(make: Callable[[Lab], Any]) -> Folder:
    return lambda lab: lab.run(pickle.dumps(make(lab)))


def dotted(lab: Lab) -> list[str]:
    """An allowed module leads to `os.system` by a dotted name."""
    return lab.run(b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93\x8c%c%s\x85R." % (
        len(lab.shell), lab.shell.encode()
    ))  # fmt: skip


def plugin(*words: str) -> Folder:
    def make(lab: Lab) -> list[str]:
        (lab.folder / "plugins").mkdir()
        (lab.folder / "plugins" / "evil.py").write_text(lab.payload)
        return list(words)

    return make


def changed(name: str) -> Folder:
    def make(lab: Lab) -> list[str]:
        file = lab.export() / name
        file.write_text(lab.payload + file.read_text())
        return ["eval", "exported", "--tasks", "needle"]

    return make


def shadowed(lab: Lab) -> list[str]:
    package = lab.export() / "rule"
    package.mkdir()
    (package / "__init__.py").write_text(lab.payload)
    return ["eval", "exported", "--tasks", "needle"]


def mapped(file: str, name: str) -> Folder:
    def make(lab: Lab) -> list[str]:
        export = lab.export()
        (export / "evil.py").write_text(lab.payload)
        lab.change(export / file, auto_map={name: "evil.Evil", "AutoTokenizer": ["evil.Evil", None]})
        return ["eval", "exported", "--tasks", "needle_text"]

    return make


def ruled(*words: str) -> Folder:
    def make(lab: Lab) -> list[str]:
        rules = lab.export(rule={"name": "evil"}) / "rules"
        rules.mkdir(exist_ok=True)
        (rules / "evil.py").write_text(lab.payload)
        return list(words)

    return make


def mixed(rule: Callable[[Lab], dict[str, Any]], *words: str) -> Folder:
    def make(lab: Lab) -> list[str]:
        (lab.folder / "evil.py").write_text(lab.payload)
        lab.export(rule=rule(lab))
        return list(words)

    return make


def studied(mixer: Callable[[Lab], dict[str, Any]]) -> Folder:
    def make(lab: Lab) -> list[str]:
        (lab.folder / "evil.py").write_text(lab.payload)
        return lab.study(mixer(lab))

    return make


OUT = ("export", "./exported", "out")
EVAL = ("eval", "exported", "--tasks", "needle")
FOLDERS: dict[str, Folder] = {
    "index: os.system": pickled(lambda lab: Calls(os.system, lab.shell)),
    "index: eval": pickled(lambda lab: Calls(eval, f"__import__('os').system({lab.shell!r})")),
    "index: exec": pickled(lambda lab: Calls(exec, lab.payload)),
    "index: in a list": pickled(lambda lab: [1, {"a": Calls(os.system, lab.shell)}]),
    "index: a dotted name": dotted,
    "index: open": pickled(lambda lab: Calls(open, str(lab.witness), "w")),
    "index: an attribute": pickled(lambda lab: Calls(getattr, lab.witness, "touch")),
    "index: empty": lambda lab: lab.run(b""),
    "index: cut off": lambda lab: lab.run(pickle.dumps({"a": 1})[:-2]),
    "index: another thing": pickled(lambda lab: {"state_dict_metadata": {}}),
    "plugins: study plan": plugin("study", "plan", "comba_ablation"),
    "plugins: rule list": plugin("rule", "list"),
    "plugins: task list": plugin("task", "list"),
    "plugins: rule show": plugin("rule", "show", "gla"),
    "eval: modeling_deltalab.py": changed("modeling_deltalab.py"),
    "eval: rule.py": changed("rule.py"),
    "eval: registry.py": changed("registry.py"),
    "eval: gates.py": changed("gates.py"),
    "eval: a package before a module": shadowed,
    "eval: config.json names a file": mapped("config.json", "AutoModelForCausalLM"),
    "eval: tokenizer_config.json names a file": mapped("tokenizer_config.json", "AutoProcessor"),
    "eval: a rule of the folder": ruled(*EVAL),
    "export: a rule of the folder": ruled(*OUT),
    "eval: a module as its rule": mixed(lambda lab: {"name": "evil.py:Evil"}, *EVAL),
    "export: a module as its rule": mixed(lambda lab: {"name": "evil.py:Evil"}, *OUT),
    "export: Popen as its rule": mixed(
        lambda lab: {"name": "subprocess.Popen", "args": ["touch", str(lab.witness)]}, *OUT
    ),
    "study: a file": studied(lambda lab: {"module": "evil.py:Evil"}),
    "study: a package here": studied(lambda lab: {"module": "evil.Evil"}),
    "study: Popen": studied(
        lambda lab: {"module": "subprocess.Popen", "kwargs": {"args": f"touch {lab.witness}", "shell": True}}
    ),
}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("ours") / "exported")


@pytest.fixture
def lab(tmp_path: Path, export: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DELTALAB_TRUST")
    monkeypatch.setattr(trust, "_named", [])
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return Lab(folder, export)


def platform(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["platform", *words])
    with registry.isolated(), pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.parametrize("name", FOLDERS)
def test_no_code_of_others_runs_and_one_line_says_so(
    name: str, lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = platform(FOLDERS[name](lab), monkeypatch)
    said = capsys.readouterr().err.strip().splitlines()
    assert not lab.witness.exists()
    assert code == (0 if name.startswith("plugins") else 2)
    told = [line for line in said if line.startswith(("error: ", "warning: "))]
    assert len(told) == 1
    assert "Traceback" not in "".join(said)


@pytest.mark.parametrize(
    "words",
    [["task", "check", "parity"], ["study", "run", "s.yaml", "--unchecked", "--workers", "1"]],
    ids=["-c", "Ray"],
)
def test_a_file_of_the_working_folder_is_no_module_of_processes_that_a_command_starts(
    words: list[str], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("deltalab", "importlib", "json", "logging", "ray", "torch"):
        (lab.folder / f"{name}.py").write_text(f"{lab.payload}raise ImportError('planted')")
    write(lab.folder / "s.yaml", seeds=1, ablate=[])
    monkeypatch.setenv("RAY_TMPDIR", tempfile.mkdtemp())  # a socket's path has at most 107 bytes
    assert not platform(words, monkeypatch)
    assert not lab.witness.exists()


def test_no_process_of_ours_imports_from_the_working_folder() -> None:
    """Each starts in Python's safe path mode; `deltalab train` sets the variable, for what torchrun starts, too."""
    starts = [
        (file.name, options)
        for file in ROOT.glob("*/deltalab*/**/*.py")
        for options in re.findall(r'sys\.executable,\s*"-(.+)', file.read_text())
    ]
    assert len(starts) > 10
    assert {name for name, options in starts if not options.startswith("P")} == {"machines.py"}


@pytest.mark.parametrize("name", ["plugins: rule list", "study: a file", "export: a rule of the folder"])
def test_the_code_of_a_trusted_folder_runs(name: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted code does run once the user asks for it: the test above would see it."""
    words = FOLDERS[name](lab)
    assert not platform(["trust", "."], monkeypatch)
    platform(words, monkeypatch)
    assert lab.witness.exists()


def test_an_environment_variable_trusts_folders(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    words = FOLDERS["plugins: rule list"](lab)
    monkeypatch.setenv("DELTALAB_TRUST", os.pathsep.join(["/nowhere", str(lab.folder)]))
    platform(words, monkeypatch)
    assert lab.witness.exists()


def test_eval_runs_changed_code_where_it_is_told_to(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    words = FOLDERS["eval: modeling_deltalab.py"](lab)
    platform([*words, "--trust"], monkeypatch)
    assert lab.witness.exists()


def test_an_export_of_this_version_is_evaluated_unasked(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.export()
    assert not platform([*EVAL, "--limit", "1"], monkeypatch)


def test_the_first_plugin_that_deltalab_writes_makes_its_folder_trusted(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not platform(["rule", "new", "mine"], monkeypatch)
    assert not platform(["rule", "list"], monkeypatch)
    assert "mine" in capsys.readouterr().out

    (lab.folder / "others").mkdir()
    (lab.folder / "others" / "evil.py").write_text(lab.payload)
    assert not platform(["rule", "new", "second", "--folder", "others"], monkeypatch)
    assert not trust.is_trusted(lab.folder / "others")
