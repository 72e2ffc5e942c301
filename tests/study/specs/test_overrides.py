"""Settings beside a study's file: read with the file's limits, checked as the file is, and kept in the ledger."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deltalab import registry
from deltalab.cli.app import main
from deltalab.errors import InputError
from deltalab.store import Store
from deltalab.study.planning.make import plan_study
from deltalab.study.planning.plan import Plan
from deltalab.study.running.run import run_study_file
from deltalab.study.specs.overrides import Overrides

STUDY = """
name: tiny
task: mqar
base:
  rule: gated_deltanet
  model: {d_model: 16, layers: 1, heads: 1, mlp: false}
  train: {steps: 2, batch_size: 4, lr: 1e-2, evaluations: 2, eval_batches: 1}
ablate: [g]
arms:
  linear_attention: {rule: linear_attention}
tune: {train.lr: {log_uniform: [1e-3, 1e-1]}, trials: 2}
seeds: 2
deadline: 600
profiles:
  task: {task: {mqar: {length: 16, pairs: 2, vocab_size: 32}}}
  longer: {task: {mqar: {length: 16, pairs: 2, vocab_size: 32}}, base: {train: {steps: 3}}}
"""
Platform = Callable[..., tuple[int, str, str]]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(STUDY)
    return "tiny.yaml"


@pytest.fixture
def platform(file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Platform:
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["platform", *words])
        with registry.isolated(), pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def planned(overrides: Overrides, profile: str = "task") -> Plan:
    return plan_study("tiny.yaml", profile=profile, overrides=overrides)


def base(plan: Plan) -> dict[str, dict[str, object]]:
    return plan.arms[0].config


def test_a_setting_of_the_base_reaches_every_arm(file: str) -> None:
    plan = planned(["train.steps=5", "model.d_model=32"])
    assert {arm.config["train"]["steps"] for arm in plan.arms} == {5}
    assert {arm.config["model"]["d_model"] for arm in plan.arms} == {32}
    assert plan.overrides == {"train.steps": 5, "model.d_model": 32}


def test_a_knob_goes_to_a_rule_that_is_a_bare_name(file: str) -> None:
    assert (
        base(planned(["ablate=[]", "rule.g=0"]))["rule"]["g"] == base(planned(["ablate=[]", "rule.g=0.0"]))["rule"]["g"]
    )
    assert base(planned(["ablate=", "rule=gla"]))["rule"]["name"] == "gla"


def test_overrides_come_after_the_profile(file: str) -> None:
    assert base(planned(None, "longer"))["train"]["steps"] == 3
    assert base(planned(["train.steps=4"], "longer"))["train"]["steps"] == 4


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("tune.train.lr.log_uniform.0=2e-3", lambda spec: spec.tune.searched["train.lr"].log_uniform == (2e-3, 0.1)),
        ("tune.train.clip={choice: [1, 2]}", lambda spec: spec.tune.searched["train.clip"].choice == (1, 2)),
        ("tune.train.clip.choice=[1, 2]", lambda spec: spec.tune.searched["train.clip"].choice == (1, 2)),
        ("tune.trials=3", lambda spec: spec.tune.trials == 3),
        ("tune=", lambda spec: spec.tune is None),
        ("seeds={at_least: 6, at_most: 9}", lambda spec: spec.seeds.at_most == 9),
        ("ablate.0=output_gate", lambda spec: spec.ablate == ("output_gate",)),
        ("task.mqar.pairs=1", lambda spec: spec.task["mqar"] == {"length": 16, "pairs": 1, "vocab_size": 32}),
        ("arms.linear_attention.rule=gla", lambda spec: spec.arms["linear_attention"].rule == "gla"),
        ("arms.linear_attention.rule.name=gla", lambda spec: spec.arms["linear_attention"].rule == {"name": "gla"}),
        ("arms.wide.model.d_model=32", lambda spec: spec.arms["wide"].model == {"d_model": 32}),
        ("resources.cpu=2", lambda spec: spec.resources.cpu == 2),
        ("deadline=", lambda spec: spec.deadline is None),
        ("deadline=null", lambda spec: spec.deadline is None),
        ("retries=0", lambda spec: spec.retries == 0),
        ("description=a=b", lambda spec: spec.description == "a=b"),
    ],
)
def test_a_path_leads_to_any_key(file: str, word: str, found: Callable[[object], bool]) -> None:
    assert found(planned([word]).spec)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["train.stpes=3"],
            "tiny.yaml: command line: train.stpes=3: base: unknown train key 'stpes'; did you mean 'steps'?",
        ),
        (["trian.steps=3"], "tiny.yaml: command line: trian.steps=3: unknown key 'trian'; did you mean 'train'?"),
        (
            ["resources.cpus=2"],
            "tiny.yaml: command line: resources.cpus=2: resources: unknown key 'cpus'; did you mean 'cpu'?",
        ),
        (["rule.zz=2"], "tiny.yaml: command line: rule.zz=2: base: rule 'gated_deltanet': unknown knob 'zz'"),
        (["seeds=many"], "tiny.yaml: command line: seeds must be a whole number, not 'many'"),
        (["seeds"], "tiny.yaml: command line: 'seeds': give settings as KEY=VALUE"),
        (["seeds=["], "tiny.yaml: command line: 'seeds=[', line 1: expected the node content"),
        (["seeds=7", "seeds=8"], "tiny.yaml: command line: 'seeds' is given twice"),
        (["seeds=!!python/none x"], "takes no tag"),
        (["description=" + "x" * 10_001], "has 10,001 letters in one text"),
        (["." * 40 + "=1"], "a key is up to 32 words with dots between"),
        (["ablate.1=b"], "command line: ablate.1: ablate has no entry '1': its entries are 0 to 0"),
        (["ablate.0="], "command line: ablate.0: an entry of a list cannot be taken away: give the whole list"),
        (["seeds.at_least=6"], "command line: seeds.at_least: seeds is 2, which has no key 'at_least'"),
        (["family="], "command line: family=: unknown key to take away 'family'"),
        (["tune.trials="], "command line: tune.trials is missing"),
        (["profiles.x.seeds=2"], "command line: profiles.x.seeds=2: unknown key 'profiles'"),
        (
            ["ablate=[]", "arms=", "arms.same.rule=gated_deltanet", "train.steps=3"],
            "command line: arms.same.rule=gated_deltanet: arm 'same' is the same as base",
        ),
        (["train.lr=0.5", "seeds=3", "train.steps=-1", "model.layers=1"], "command line: base: train.steps must be"),
        # Settings of an engine are paths, and its bare name stands for a section.
        (["engine=torchtitan", "engine.settings.checkpoint.evry=8"], "'checkpoint.evry'; did you mean 'checkpoint.e"),
        (["engine=torchtitan", "engine.settings.parallelism.pp=2"], "no engine takes 'parallelism.pp': GPUs share a"),
        (["engine=torchtitan", "engine.tp=2"], "command line: engine.tp=2: engine: no engine takes 'tp': GPUs share"),
    ],
)
def test_a_mistake_is_one_line_that_says_where_it_is(file: str, words: list[str], said: str) -> None:
    with pytest.raises(InputError) as error:
        planned(words)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mistake_in_python_is_not_of_the_command_line(file: str) -> None:
    with pytest.raises(InputError, match=r"tiny\.yaml: overrides: train\.stpes: base: unknown train key 'stpes'"):
        planned({"train.stpes": 3})
    with pytest.raises(InputError, match=r"overrides: train\.lr: takes texts, finite numbers"):
        planned({"train.lr": float("nan")})


def test_a_mistake_of_the_file_is_not_blamed_on_the_command_line(file: str) -> None:
    Path(file).write_text(STUDY.replace("steps: 2,", "stepz: 2,"))
    with pytest.raises(InputError, match=r"^tiny\.yaml: base: unknown train key 'stepz'"):
        planned(["seeds=3"])
    with pytest.raises(InputError, match=r"^tiny\.yaml: command line: unknown key .sedes.;"):
        planned(["sedes=3"])
    Path(file).write_text(STUDY.replace("seeds:", "sedes:"))
    with pytest.raises(InputError, match=r"^tiny\.yaml: command line: ablate\.7: ablate has no entry '7'"):
        planned(["ablate.7=b"])
    with pytest.raises(InputError, match=r"^tiny\.yaml: unknown key 'sedes'"):
        planned(["seeds=3"])


def test_an_override_that_the_study_sets_again_is_refused(file: str) -> None:
    Path(file).write_text(STUDY + "for_task: {mqar: {train: {steps: 3}}}\n")
    with pytest.raises(InputError, match=r"the study sets for_task\.mqar\.train\.steps: set this, too, or say base\."):
        planned(["train.steps=5"])
    assert base(planned(["train.steps=5", "for_task.mqar.train.steps=6"]))["train"]["steps"] == 6
    assert base(planned(["base.train.steps=5"]))["train"]["steps"] == 3
    assert base(planned(["train.lr=0.5"]))["train"]["lr"] == 0.5


def test_the_identity_follows_the_settings(file: str) -> None:
    assert planned(["seeds=3"]).identity != planned(None).identity
    assert planned(["train.steps=2"]).identity == planned(None).identity  # as the file has it
    assert planned(["seeds=3"]).identity == planned({"seeds": 3}).identity


@pytest.mark.slow
def test_a_study_with_overrides_is_another_one_of_its_name(file: str, platform: Platform) -> None:
    first = run_study_file(file, profile="task", executor="inline")
    with_words = run_study_file(file, profile="task", executor="inline", overrides=["train.steps=3", "seeds=1"])
    assert (with_words.study_id, with_words.known) == (2, 0)
    again = run_study_file(file, profile="task", executor="inline", overrides={"train.steps": 3, "seeds": 1})
    assert (again.study_id, again.known) == (2, again.trials)
    assert run_study_file(file, profile="task", executor="inline").study_id == first.study_id

    with Store.open(create=False) as store:
        study = store.study(2)
        assert (study.name, study.overridden) == ("tiny", "train.steps=3 seeds=1")
        assert (study.spec["base"]["train"]["steps"], study.spec["seeds"]) == (3, 1)
        assert store.study("tiny", "task").id == first.study_id
        assert store.study("tiny", "task", {"train.steps": 3, "seeds": 1}).id == 2
        with pytest.raises(InputError, match="with 'seeds=9'"):
            store.study("tiny", "task", {"seeds": 9})

    _, listed, _ = platform("study", "list", "--json")
    assert [row["with"] for row in json.loads(listed)] == ["train.steps=3 seeds=1", None]
    assert "tiny, profile task, with train.steps=3 seeds=1, id 2 (done)" in platform("study", "report", "2")[1]
    asked = ("train.steps=3", "seeds=1", "--profile", "task")
    assert json.loads(platform("study", "report", file, *asked, "--json")[1])["overrides"] == {
        "train.steps": 3,
        "seeds": 1,
    }
    code, _, said = platform("study", "calibrate", file, *asked)
    assert (code, "study 'tiny:task' has too few runs on task 'mqar'" in said) == (2, True)


def test_the_command_line_plans_and_runs_with_overrides(platform: Platform) -> None:
    code, out, _ = platform("study", "plan", "tiny.yaml", "tune=", "seeds=1", "--profile", "task")
    assert (code, "tiny (task) with tune= seeds=1: 3 trials, 3 runs" in out) == (0, True)
    code, out, _ = platform(
        "study", "run", "tiny.yaml", "tune=", "seeds=1", "--profile", "task", "--executor", "inline", "--json"
    )
    assert (code, json.loads(out)["overrides"]) == (0, {"tune": None, "seeds": 1})
    code, _, said = platform("study", "run", "tiny.yaml", "train.stpes=1", "--profile", "task")
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(
        "error: tiny.yaml: command line: train.stpes=1: base: unknown train key 'stpes'; did you mean 'steps'?"
    )
