"""The command as a stranger types it: every command once, and one line for whatever is wrong."""

import csv
import gc
import io
import json
import os
import resource
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.support.command import STUDY, Platform, Said

import deltalab
from deltalab import registry
from deltalab.store import Store


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_refused(said: Said, *parts: str) -> None:
    """One line on stderr, nothing on stdout, exit 2."""
    assert said.code == 2, said
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1, said.err
    for part in parts:
        assert part in said.err


def test_the_imports_of_a_study_are_no_garbage_and_what_follows_is(platform: Platform) -> None:
    before = gc.get_freeze_count()
    platform("study", "run", "study.yaml", "steps=0")
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    gc.unfreeze()


# Every command once.


def test_the_command_has_a_name_that_the_standard_library_does_not_have(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("deltalab")), "version"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{deltalab.__version__}\n", "")


def test_help_is_help(platform: Platform) -> None:
    for words in ((), ("study",), ("rule",), ("task",), ("db",)):
        bare, asked = platform(*words), platform(*words, "--help")
        assert (bare.code, bare.out, asked.code) == (2, "", 0)
        assert "Usage: platform" in bare.err
        assert "\n  list " in asked.out or words in ((), ("db",))
        assert asked.out.split() == bare.err.split()


@pytest.mark.slow
def test_run_list_and_report(platform: Platform, here: Path) -> None:
    ran = platform("study", "run", "study.yaml", "--executor", "inline")
    assert ran.code == 0, ran
    assert ran.out.endswith("4 trials, 0 of them known before, 0 failed\n")
    assert "without_d" in ran.out
    assert ran.err.count("\n") == 3, "at the start and for each stack, off a terminal"
    again = platform("study", "run", "study.yaml", "--executor", "inline", "--json")
    assert again.err == ""
    whole = json.loads(again.out)
    assert whole["study"] == "tiny"

    longer = platform("study", "run", "study.yaml", "--executor", "inline", "--profile", "longer")
    assert longer.code == 0
    (second, first) = json.loads(platform("study", "list", "--json").out)
    assert (first["name"], first["profile"], first["state"], first["arms"]) == ("tiny", None, "done", 2)
    assert second["profile"] == "longer"
    assert "longer" in platform("study", "list").out

    for addresses, title, profile in (
        (("tiny", "study.yaml", first["id"]), f"tiny, default profile, id {first['id']} (done)", None),
        (("tiny:longer", second["id"]), f"tiny, profile longer, id {second['id']} (done)", "longer"),
    ):
        for address in addresses:
            assert title in platform("study", "report", address).out
            found = json.loads(platform("study", "report", address, "--json").out)
            assert (found["study"], found["profile"]) == ("tiny", profile)
    table = list(csv.DictReader(io.StringIO(platform("study", "report", first["id"], "--csv").out)))
    assert [(row["arm"], row["score_n"]) for row in table] == [("base", "2"), ("without_d", "2")]
    means = {row["arm"]: row["score"]["mean"] for row in whole["tables"][0]["rows"]}
    assert {row["arm"]: float(row["score_mean"]) for row in table} == pytest.approx(means)
    assert "| without_d |" in platform("study", "report", "tiny", "--profile", "longer", "--markdown").out
    other = platform("study", "report", "tiny", "--against", "without_d")
    assert (other.code, "against without_d, id" in other.out) == (0, True)
    same = [platform("study", "report", "tiny", "--json", *words).out for words in ((), ("--against", "base"))]
    assert same[0] == same[1]


def test_plan_runs_nothing(platform: Platform, here: Path) -> None:
    before = contents(here)
    said = platform("study", "plan", "study.yaml")
    assert said.code == 0
    assert "4 trials, 8 runs" in said.out
    assert "2 paired seeds can find nothing: p is at least 0.5. Give at least 6 seeds." in said.out
    found = json.loads(platform("study", "plan", "study.yaml", "--profile", "longer", "--workers", 2, "--json").out)
    assert (found["trials"], found["runs"], found["detectable"], found["smallest_p"]) == (4, 8, None, 0.5)
    assert (found["profile"], found["workers"]) == ("longer", 2)
    assert [arm["change"] for arm in found["arms"]] == ["", "rule.d=const(value=0)"]
    assert all(arm["parameters"] > 0 and arm["seconds"] > 0 for arm in found["arms"])
    assert contents(here) == before


@pytest.mark.slow
@pytest.mark.parametrize("sd", [(), ("--sd", "0.1")])
def test_a_plan_refuses_a_study_to_begin_with_that_is_not_there(
    platform: Platform, done: Path, sd: tuple[str, ...]
) -> None:
    space = "search:\n  train.lr: {log_uniform: [1e-3, 1e-1]}\n  trials: 4\n  finalists: 1\n  warm: [{study: tny}]\n"
    lines = [
        line for line in STUDY.replace("name: tiny", "name: found").splitlines() if line[:4] not in ("abla", "tune")
    ]
    (done / "found.yaml").write_text("\n".join(lines).replace("seeds:", f"{space}seeds:"))
    before = contents(done)
    for command in ("plan", "run"):
        more = sd if command == "plan" else ()
        said = "unknown study 'tny'; did you mean 'tiny'?"
        assert_refused(platform("study", command, "found.yaml", *more), "found.yaml: search.warm: ", said)
    said = "found.yaml: search.warm: there is no ledger with study 'tny' yet"
    assert_refused(platform("study", "plan", "found.yaml", "--db", "none.db", *sd), said)
    assert contents(done) == before
    (done / "found.yaml").write_text((done / "found.yaml").read_text().replace("tny", "tiny"))
    said = "search.warm: study 'tiny' has no candidates of a search"
    assert_refused(platform("study", "plan", "found.yaml", *sd), said)


def test_a_plan_says_the_effect_in_the_tasks_metric(platform: Platform, here: Path) -> None:
    (here / "study.yaml").write_text(STUDY.replace("seeds: 2", "seeds: 7"))
    said = platform("study", "plan", "study.yaml", "--sd", 0.02)
    assert (said.code, "standard deviation 0.02, given by --sd" in said.out) == (0, True)
    (effect,) = json.loads(platform("study", "plan", "study.yaml", "--sd", 0.02, "--json").out)["effects"]
    assert (effect["task"], effect["metric"], effect["sd"]) == ("mqar", "accuracy", 0.02)
    (effect,) = json.loads(platform("study", "plan", "study.yaml", "--json").out)["effects"]
    assert effect["source"].startswith("measured on "), "the ledger knows none: what is shipped counts"


def test_schema(platform: Platform) -> None:
    assert json.loads(platform("study", "schema").out)["required"] == ["name", "task", "base", "seeds"]


def test_rules(platform: Platform, here: Path) -> None:
    found = json.loads(platform("rule", "list", "--json").out)
    assert [row["name"] for row in found] == deltalab.list_rules()
    ours = ("algebra", "pre_state_deltanet", "pre_state_sgla")
    assert all(row["about"] and (row["paper"] or row["name"] in ours) for row in found)
    listed = platform("rule", "list").out.splitlines()
    assert len(listed) == 1 + len(found), "piped output is not wrapped"
    assert any(line.startswith("comba ") for line in listed)
    shown = platform("rule", "show", "comba")
    assert (shown.code, "arXiv:2506.02475" in shown.out) == (0, True)
    assert f"| lacks | {registry.rule_plugin('comba').kind.published['lacks']} |" in shown.out.splitlines()
    assert json.loads(platform("rule", "show", "comba", "--json").out)["name"] == "comba"


@pytest.mark.slow
def test_a_rule_from_new_to_checked(platform: Platform, here: Path) -> None:
    made = platform("rule", "new", "fresh")
    assert (made.code, made.out.split(":")[0]) == (0, "plugins/fresh.py")
    registry.refresh()
    assert "fresh" in platform("rule", "list").out
    checked = platform("rule", "check", "plugins/fresh.py", "--json")
    assert checked.code == 0
    found = json.loads(checked.out)
    assert found["rule"] == "fresh"
    assert all(check["passed"] for check in found["checks"])
    assert platform("rule", "show", "plugins/fresh.py").code == 0
    table = platform("rule", "check", "linear_attention")
    assert (table.code, "FAILED" in table.out, "ok" in table.out) == (0, False, True)


@pytest.mark.slow
def test_a_rule_that_fails_a_check_is_exit_1(platform: Platform, here: Path) -> None:
    source = Path(registry.rule_plugin("linear_attention").file).read_text()
    wrong = source.replace('"linear_attention"', '"leaky"').replace("u=v)", "u=v.roll(-1, dims=1))")
    (here / "leaky.py").write_text(wrong)
    said = platform("rule", "check", "leaky.py")
    assert " checks failed: " in " ".join(said.out.splitlines()[-2:])
    assert said.code == 1
    assert "FAILED" in said.out
    assert said.err == ""


def test_tasks(platform: Platform, here: Path) -> None:
    assert [row["name"] for row in json.loads(platform("task", "list", "--json").out)] == registry.list_tasks()
    shown = platform("task", "show", "mqar", "length=8", "pairs=2", "vocab_size=16", "power=1e-2", "--json")
    found = json.loads(shown.out)
    assert found["parameters"]["power"] == 0.01
    assert len(found["inputs"]) == len(found["targets"]) == 8
    assert "chance: 8.0" in platform("task", "show", "text", "length=8").out
    depo = json.loads(platform("task", "show", "depo", "--json").out)
    assert depo["parameters"] == asdict(registry.get_task("depo")), "a study's defaults, not those of the example"


def test_export(platform: Platform, done: Path) -> None:
    said = platform("export", "tiny", "out", "--arm", "without_d")
    assert said.code == 0, said
    assert {"config.json", "model.safetensors"} <= {path.name for path in (done / "out").iterdir()}
    assert "arm without_d: seed " in said.out
    resized = platform("export", "out", "wide", "--set", "model.d_model=64", "--set", "recipe.steps=7")
    assert resized.code == 0, resized
    assert "parameters, untrained" in resized.out
    assert "steps: 7\n" in (done / "wide/recipe.yaml").read_text()
    by_paper = platform("export", "out", "paper", "--recipe", "gka")
    assert "- scale 2.7B: Gated KalmaNet" in by_paper.out
    listed = platform("export", "--recipes").out.splitlines()
    row = next(line.split() for line in listed if line.startswith("gka"))
    assert row == ["gka", "2.7B", "100B", "2M", "4096", "0.001", "0*", "2384", "0.1*", "-", "50257"]
    assert_refused(platform("export", "out", "again", "--arm", "base"), "--arm is for a study; out is a folder")
    (done / "data").mkdir()
    assert_refused(platform("export", "./data", "again", "--best"), "data: neither an exported folder, a run of")


def test_dashboard(platform: Platform, done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        started.append((command, environment))
        sys.exit(0)

    monkeypatch.setattr(os, "execve", execve)
    assert platform("dashboard", "--port", 8600, "--no-browser").code == 0
    ((command, _),) = started
    assert "--server.address=127.0.0.1" in command
    assert "--server.port=8600" in command
    assert "--browser.gatherUsageStats=false" in command
    assert command[1:4] == ["-P", "-m", "deltalab_dashboard.serve"]
    assert Path(command[5]).is_file()


def test_the_dashboard_asks_for_a_token_where_others_reach_it(
    platform: Platform, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        started.append((command, environment))
        sys.exit(0)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(done / "config"))
    monkeypatch.setenv("DELTALAB_TOKEN_FILE", "of another dashboard")
    file = done / "config" / "deltalab" / "dashboard-token"
    for words, asks in (
        ("", False),
        ("--host localhost", False),
        ("--host 127.0.0.2", False),
        ("--host 0.0.0.0 --no-token", False),
        ("--host 0.0.0.0", True),
        ("--token", True),
    ):
        said = platform("dashboard", *words.split())
        assert said.code == 0
        _, environment = started[-1]
        assert environment.get("DELTALAB_TOKEN_FILE") == (str(file) if asks else None)
        assert (f"the dashboard asks for the token that {file} holds" in said.err) == asks
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text().strip()
    assert len(token) > 40
    said = platform("dashboard", "--host", "0.0.0.0", "--json")
    assert json.loads(said.out) == {"address": "http://0.0.0.0:8501", "token_file": str(file)}
    assert file.read_text().strip() == token, "a link and a noted token stay good"
    assert all(token not in str(one) for one in (started, said))

    assert_refused(
        platform("dashboard", "--host", "nowhere.invalid"), "--host: 'nowhere.invalid' is no address of this"
    )
    assert_refused(platform("dashboard", "--host", "192.0.2.1"), "--host: '192.0.2.1' is no address of this machine: ")
    assert_refused(platform("dashboard", "--host", " "), "is empty")
    file.chmod(0o640)
    assert_refused(
        platform("dashboard", "--token"), "dashboard-token: other users may read it: delete it for a new one"
    )
    file.chmod(0o600)
    file.write_text("short")
    assert_refused(platform("dashboard", "--token"), "dashboard-token: a token has at least 16 characters")
    file.unlink()
    file.mkdir(mode=0o700)
    assert_refused(platform("dashboard", "--token"), "dashboard-token: no token can be kept there: ")


def test_upgrade_leaves_a_current_database_alone(platform: Platform, done: Path) -> None:
    before = json.loads(platform("study", "report", "tiny", "--json").out)
    assert platform("db", "upgrade").code == 0
    assert json.loads(platform("study", "report", "tiny", "--json").out) == before


# What is wrong, in one line.

WRONG: list[tuple[str, tuple[str, ...]]] = [
    ("nonsense", ("No such command 'nonsense'",)),
    ("study rnu", ("Did you mean 'run'?",)),
    ("study run", ("Missing argument 'FILE|NAME'",)),
    ("study run study.yaml --exector inline", ("--exector", "--executor")),
    ("study run study.yaml --executor rey", ("ray, inline", "'rey'")),
    ("study run study.yaml --workers 0", ("--workers",)),
    ("study run study.yaml --workers two", ("--workers",)),
    ("study run study.yaml --backup-every 10", ("--backup-every: '10' is no time: give a number with s, m or h",)),
    ("study run study.yaml --backup-every 0s", ("--backup-every must be from 1s to 168h, not 0 s",)),
    ("db backup study.yaml", ("deltalab.db: no such database",)),
    ("study run study.yaml --profile lnger", ("did you mean 'longer'?", "study.yaml")),
    ("study run study.yaml --address ray://x:1", ("--storage",)),
    ("study run studie.yaml", ("studie.yaml: no such study", "did you mean study.yaml?")),
    ("study run .", ("cannot be read",)),
    ("study plan study.yaml --workers 0", ("--workers",)),
    ("study plan nope.yaml", ("nope.yaml: no such study",)),
    ("study list", ("deltalab.db: no such database",)),
    ("study report tiny", ("deltalab.db: no such database",)),
    ("study report tiny --markdown --csv", ("give one of them",)),
    ("study list --db mysql://me@host/lab", ("unknown database 'mysql'",)),
    ("study list --db sqlite://", ("needs a file",)),
    ("study list --db study.yaml", ("study.yaml: file is not a database",)),
    ("study list --db .", (".",)),
    ("db upgrade", ("deltalab.db: no such database",)),
    ("db upgrade --db study.yaml", ("file is not a database",)),
    ("dashboard", ("deltalab.db: no such database",)),
    ("dashboard --port 0", ("--port",)),
    ("export tiny out", ("deltalab.db: no such database",)),
    ("rule show combo", ("unknown rule 'combo'; did you mean 'comba'?",)),
    ("rule check combo", ("unknown rule 'combo'; did you mean 'comba'?",)),
    ("rule check nope.py", ("nope.py: no such plugin file",)),
    ("rule new 3x", ("'3x' cannot name a rule",)),
    ("rule new comba", ("there is a rule 'comba' already",)),
    ("rule new mine --folder study.yaml", ("study.yaml", "cannot be written")),
    ("task show mqr", ("unknown task 'mqr'; did you mean 'mqar'?",)),
    ("task show mqar lenth=3", ("unknown parameter 'lenth'; did you mean 'length'?",)),
    ("task show mqar length", ("give settings as KEY=VALUE",)),
    ("task show mqar length=[", ("'length=['",)),
    ("task show mqar length=-8", ("parameter 'length'",)),
    ("task show mqar length=true", ("must be an integer, not True",)),
    ("task show text corpus=nowhere", ("nowhere",)),
    ("task show text corpus=pyton", ("pyton'", "did you mean 'python'? a corpus is a file, a folder, 'python' for")),
    ("--plugin nope.py rule list", ("nope.py: no such plugin file",)),
    ("--plugin study.yaml rule list", ("study.yaml",)),
    ("--plugin . rule list", ("no such plugin file",)),
]


@pytest.mark.parametrize(("words", "says"), WRONG, ids=[words for words, _ in WRONG])
def test_wrong_input_is_one_line(platform: Platform, here: Path, words: str, says: tuple[str, ...]) -> None:
    before = contents(here)
    assert_refused(platform(*words.split()), *says)
    assert contents(here) == before, "nothing is written"


STUDIES = [
    ("lr: 1e-2", "lr: -1", "train.lr must be a finite number from 0 to 1e+38, not -1"),
    ("steps: 4", "steps: -4", "train.steps must be a whole number of at least 1, not -4"),
    ("seeds: 2", "seeds: true", "seeds must be a whole number"),
    ("seeds: 2", "seeds: {at_least: 9, at_most: 6}", "seeds: at_most 6 must be more than at_least 9"),
    ("seeds: 2", "seeds: {at_lest: 6, at_most: 9}", "seeds: unknown key 'at_lest'; did you mean 'at_least'?"),
    ("trials: 2", "trials: 1", "tune: trials 1 leaves one candidate and nothing to choose"),
    ("trials: 2", "trials: 2, seeds: 1", "tune: leave out seeds: every seed of the study trains every candidate"),
    ("log_uniform: [1e-3, 1e-1]", "choice: [1e-3, 1e-1]}, extend: true, train.clip: {choice: [1, 2]", "extend moves a"),
    ("log_uniform: [1e-3, 1e-1]", "log_uniform: [1e-2, 1.00001e-2]", "tune.trials 2: there are only 1 candidates"),
    ("seeds: 2", "seeds: 2\nfamily: all", "family must be 'task' or 'study', not 'all'"),
    ("seeds: 2", "sedes: 2", "unknown key 'sedes'; did you mean 'seeds'?"),
    ("rule: comba", "rule: combo", "unknown rule 'combo'; did you mean 'comba'?"),
    ("rule: comba", "rule: {name: comba, dd: 0}", "rule 'comba': unknown knob 'dd'; did you mean 'd'?"),
    ("rule: comba", "rule: {name: comba, d: haed}", "unknown gate 'haed'; did you mean 'head'?"),
    ("mqar: {", "mqra: {", "unknown task 'mqra'; did you mean 'mqar'?"),
    ("ablate: [d]", "ablate: [f]", "ablate: unknown part 'f'"),
    ("ablate: [d]", "arms: {x: {rule: comba}}", "arm 'x' is the same as base"),
    ("name: tiny", "name: tiny\nname: tiny", "line 3: key 'name' is given twice"),
]


@pytest.mark.parametrize(("right", "wrong", "says"), STUDIES, ids=[wrong for _, wrong, _ in STUDIES])
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_wrong_study_is_one_line_that_names_the_file(
    platform: Platform, here: Path, command: str, right: str, wrong: str, says: str
) -> None:
    (here / "study.yaml").write_text(STUDY.replace(right, wrong, 1))
    before = contents(here)
    assert_refused(platform("study", command, "study.yaml"), "study.yaml", says)
    assert contents(here) == before, "not even a database is made"


WRONG_IN_A_LEDGER: list[tuple[str, tuple[str, ...]]] = [
    ("study report tny", ("unknown study 'tny'; did you mean 'tiny'?",)),
    ("study report 7", ("unknown study '7'",)),
    ("study report ²", ("unknown study '²'",)),
    ("study report tiny --profile x", ("unknown study 'tiny:x'", "allowed: tiny")),
    ("study report tiny:x", ("unknown study 'tiny:x'", "allowed: tiny")),
    ("study report nope.yaml", ("nope.yaml: no such study",)),
    (
        "study report tiny --against witout_d",
        ("tiny: unknown arm 'witout_d'; did you mean 'without_d'? allowed: base",),
    ),
    ("export tiny out --arm without_b", ("unknown arm 'without_b'; did you mean 'without_d'?",)),
    ("export tiny out", ("say which arm: --arm NAME, of base, without_d; or --best",)),
    ("export tiny out --arm base --best", ("--arm base and --best: give one of them",)),
    ("export tiny out --arm base --task txt", ("unknown task 'txt'",)),
    ("export tiny out --arm base --to onnx", ("unknown format 'onnx'", "allowed: hf, torchtitan, fla")),
    (
        "export tiny out --arm base --scale 350M",
        ("unknown scale '350M'; did you mean '340M'?", "340M, 1.3B, 1.5B, 2.7B"),
    ),
    (
        "export tiny out --arm base --set model.d_modl=8",
        ("unknown setting 'model.d_modl'; did you mean 'model.d_model'?",),
    ),
    ("export tiny out --arm base --set rule.bta=x", ("rule 'comba': unknown knob 'bta'; did you mean 'beta'?",)),
    (
        "export tiny out --arm base --set recipe.stps=9",
        ("unknown setting 'recipe.stps'; did you mean 'recipe.steps'?",),
    ),
    ("export tiny out --arm base --set recipe.steps=0", ("--set recipe.steps: must be a whole number of at least 1",)),
    ("export tiny out --arm base --set steps", ("give settings as KEY=VALUE",)),
    ("export tiny out --arm base --set train.lr=1", ("unknown setting 'train.lr'", "model., rule., recipe.")),
    (
        "export tiny out --arm base --scale 340M --weights",
        ("weights do not fit a model changed by --scale; leave that out",),
    ),
    ("export tiny out --arm base --scale 340M --set model.layers=3", ("--scale 340M: the nearest model has",)),
    ("export ./nothing out --best", ("nothing: no such folder",)),
    ("export . out --best", (".: the folder holds no model, and no study is found: ", "unknown study '.'")),
    ("export tny out --best", ("did you mean 'tiny'?",)),
    ("export tiny:longer out --best", ("unknown study 'tiny:longer'", "allowed: tiny")),
    ("export tiny . --arm base", ("not an empty directory",)),
    ("export tiny study.yaml/out --arm base", ("study.yaml/out",)),
]


@pytest.mark.slow(keep="export tiny . --arm base")
@pytest.mark.parametrize(("words", "says"), WRONG_IN_A_LEDGER, ids=[words for words, _ in WRONG_IN_A_LEDGER])
def test_what_a_ledger_does_not_have_is_one_line(
    platform: Platform, done: Path, words: str, says: tuple[str, ...]
) -> None:
    before = contents(done)
    assert_refused(platform(*words.split()), *says)
    assert contents(done) == before


PLUGINS = [
    ("def (", "does not import: SyntaxError"),
    ("import nothing_like_it", "does not import: ModuleNotFoundError: No module named 'nothing_like_it'"),
    ("raise RuntimeError('one\\ntwo')", "does not import: RuntimeError: one"),
    ("import sys; sys.exit(3)", "does not import: SystemExit: 3"),
    ("x = 1", "defines no UpdateRule and no Task with a name"),
    ("\udcff", "does not import: SyntaxError"),
    (
        "from deltalab.rule import UpdateRule, knob\nclass A(UpdateRule):\n    name = 'a'\n    x: int = knob(1, 2)",
        "A needs @dataclass(frozen=True, kw_only=True)",
    ),
    (
        "from deltalab.rule import UpdateRule\nfrom deltalab.structure import SPLR\n"
        "class A(UpdateRule):\n    name = 'a'\n    transition = SPLR",
        "A.transition must be annotated",
    ),
    (
        "from deltalab.rule import UpdateRule\nclass A(UpdateRule):\n    name = 'a'\n"
        "    def operands(self, k, q, v): ...",
        "A.operands must take (self, q, k, v, ...)",
    ),
    ("from deltalab.rule import UpdateRule\nclass A(UpdateRule):\n    name = 'comba'", "'comba' is defined twice"),
    (
        "from deltalab.rule import UpdateRule\nclass A(UpdateRule):\n    name = 'a'\nclass B(A): ...",
        "broken.py, line 4: rename one",
    ),
    ("x = 1\nx = y", "broken.py, line 2: does not import: NameError: name 'y' is not defined"),
    ("x = 1\nx = (", "broken.py, line 2: does not import: SyntaxError: '(' was never closed"),
    (
        "from dataclasses import dataclass\nfrom deltalab import gates\nfrom deltalab.rule import UpdateRule, knob\n"
        "@dataclass(frozen=True, kw_only=True)\nclass A(UpdateRule):\n    name = 'a'\n"
        "    beta: gates.Gate = knob(gates.sigmoid(), 3)",
        "broken.py, line 4: A.beta: the option 3 must be a Gate, as sigmoid(max=1) is: for a number, write gates.const",
    ),
]


@pytest.mark.parametrize(("source", "says"), PLUGINS, ids=[says for _, says in PLUGINS])
@pytest.mark.parametrize("where", ["--plugin", "./plugins"])
def test_a_broken_plugin_is_named_in_one_line_and_the_others_are_listed(
    platform: Platform, here: Path, where: str, source: str, says: str
) -> None:
    file = here / "plugins" / "broken.py" if where == "./plugins" else here / "broken.py"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(source.encode("utf-8", "surrogateescape"))
    words = ("rule", "list") if where == "./plugins" else ("--plugin", "broken.py", "rule", "list")
    if where == "./plugins" and source == "x = 1":
        assert platform(*words).code == 0, "a file beside the rules may be anything"
    elif where == "./plugins":
        said = platform(*words, "--json")
        assert said.code == 0, said
        assert (
            {"comba", "deltanet"}
            >= {row["name"] for row in json.loads(said.out)} & {"comba", "deltanet"}
            >= {"deltanet"}
        )
        assert said.err.startswith("warning: left out: ")
        assert said.err.count("\n") == 1
        assert "broken.py" in said.err
        assert says in said.err
    else:
        assert_refused(platform(*words), "broken.py", says)


def test_a_plugin_that_says_nothing_of_itself_is_listed(platform: Platform, here: Path) -> None:
    source = Path(registry.rule_plugin("linear_attention").file).read_text().partition("\n")[2]
    source = source.replace('"linear_attention"', '"silent"').replace('"arXiv:2006.16236"', '"[/b]"')
    (here / "silent.py").write_text(source)
    said = platform("--plugin", "silent.py", "rule", "list", "--json")
    assert said.code == 0, said
    assert "[/b]" in platform("--plugin", "silent.py", "rule", "list").out
    assert {"name": "silent", "about": ""}.items() <= next(
        r for r in json.loads(said.out) if r["name"] == "silent"
    ).items()


RAISES = '''"""A rule that is wrong."""
from dataclasses import dataclass
from deltalab.rule import UpdateRule
from deltalab.structure import ADDITIVE, Transition

@dataclass(frozen=True, kw_only=True)
class Raises(UpdateRule):
    """S_t = 0"""
    name = "raises_always"
    transition: Transition = ADDITIVE
    def operands(self, q, k, v):
        raise RuntimeError("one\\ntwo")
'''


@pytest.mark.slow
def test_a_rule_that_does_not_run(platform: Platform, here: Path) -> None:
    (here / "raises.py").write_text(RAISES)
    (here / "study.yaml").write_text(STUDY.replace("rule: comba", "rule: raises_always").replace("ablate: [d]", ""))
    shown = platform("rule", "show", "raises.py")
    assert_refused(shown, "raises_always", "RuntimeError: one", "rule check raises.py")
    plan = platform("--plugin", "raises.py", "study", "plan", "study.yaml")
    assert_refused(plan, "arm 'base'", "RuntimeError: one", "rule check raises_always")
    checked = platform("rule", "check", "raises.py")
    assert (checked.code, checked.err) == (1, "")
    ran = platform("--plugin", "raises.py", "study", "run", "study.yaml", "--executor", "inline")
    assert ran.code == 1
    assert "Traceback" not in ran.out + ran.err
    assert "RuntimeError: one" in ran.out
    assert "2 trials, 0 of them known before, 2 failed" in ran.out


# Databases and disks.


def execute(db: Path, sql: str) -> None:
    with closing(sqlite3.connect(db)) as connection, connection:
        connection.execute(sql)


@pytest.mark.parametrize("command", ["study run study.yaml --executor inline", "study list", "db upgrade", "dashboard"])
def test_a_database_that_is_not_ours_stays_as_it_is(platform: Platform, here: Path, command: str) -> None:
    execute(here / "theirs.db", "CREATE TABLE customers (id INTEGER)")
    before = contents(here)
    assert_refused(platform(*command.split(), "--db", "theirs.db"), "theirs.db: is not a deltalab database")
    assert contents(here) == before


@pytest.mark.parametrize("command", ["study run study.yaml --executor inline", "study list", "db upgrade", "dashboard"])
def test_a_newer_database_stays_as_it_is(platform: Platform, done: Path, command: str) -> None:
    execute(done / "deltalab.db", "UPDATE alembic_version SET version_num = '9999'")
    before = (done / "deltalab.db").read_bytes()
    assert_refused(platform(*command.split()), "'9999' is newer than this deltalab knows; upgrade deltalab")
    assert (done / "deltalab.db").read_bytes() == before


def test_a_locked_database(platform: Platform, done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalab.store.database.LOCK_SECONDS", 0.2)
    monkeypatch.setitem(Store.open.__func__.__kwdefaults__, "patience", 0.0)  # type: ignore[attr-defined]
    with closing(sqlite3.connect(done / "deltalab.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        assert_refused(platform("study", "run", "study.yaml", "--executor", "inline"), "locked by another process")
        other.rollback()
    assert platform("study", "run", "study.yaml", "--executor", "inline").code == 0


@pytest.mark.parametrize("where", ["study.yaml/lab.db", "nowhere/lab.db", "/proc/lab.db"])
def test_a_database_where_none_can_be_written(platform: Platform, here: Path, where: str) -> None:
    before = contents(here)
    said = platform("study", "run", "study.yaml", "--executor", "inline", "--db", where)
    assert_refused(said, "lab.db: unable to open database file", "may you write there?")
    assert contents(here) == before


def test_weights_where_none_can_be_written(platform: Platform, here: Path) -> None:
    said = platform("study", "run", "study.yaml", "--executor", "inline", "--storage", "study.yaml/runs")
    assert_refused(said, "study.yaml/runs: no folder for weights can be made")


@pytest.mark.slow(keep="0")
@pytest.mark.parametrize("room", [0, 1 << 12, 1 << 15, 1 << 17])
def test_a_disk_without_room_for_more_of_the_ledger(platform: Platform, here: Path, room: int) -> None:
    """No file may grow past a limit: the ledger cannot be written, then or later, and goes on when it can."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        said = platform("study", "run", "study.yaml", "--executor", "inline")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said.code in (1, 2)
    assert "Traceback" not in said.err
    if said.code == 2:
        assert said.out == ""
        assert [line for line in said.err.splitlines() if line.startswith("error: ")] == [said.err.splitlines()[-1]]
    assert platform("study", "run", "study.yaml", "--executor", "inline", "--retry-failed").code == 0
    with closing(sqlite3.connect(here / "deltalab.db")) as connection:
        assert connection.execute("SELECT count(*), count(DISTINCT key) FROM trial").fetchone() == (4, 4)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT count(*) FROM trial WHERE state = 'failed'").fetchone() == (0,)


@pytest.mark.slow
def test_a_full_disk_under_the_output(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    program = str(Path(sys.executable).with_name("platform"))
    with open("/dev/full", "w") as full:
        said = subprocess.run(
            [program, "study", "schema"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (said.returncode, said.stderr) == (2, "error: output: No space left on device\n")


@pytest.mark.slow
def test_a_reader_that_had_enough(tmp_path: Path) -> None:
    program = str(Path(sys.executable).with_name("platform"))
    said = subprocess.run(
        f"{program} study schema | head -c 1", shell=True, cwd=tmp_path, capture_output=True, text=True
    )
    assert (said.stdout, said.stderr) == ("{", "")
