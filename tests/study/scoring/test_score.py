"""Scores of proposals: what is kept, what is counted, and what a kill, a second process or a bad file changes."""

import hashlib
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from tests.support.folders import ROOT
from tests.support.studies import LEAST

from deltalab import InputError, registry
from deltalab.authoring.quarantine import Quarantined
from deltalab.cli.app import main
from deltalab.store import RunRecord, Store, TrialRecord
from deltalab.store.studies import proposals
from deltalab.study.running.settings import RunSettings
from deltalab.study.scoring import design
from deltalab.study.scoring import score as scoring
from deltalab.study.workers.jobs import Job
from deltalab.study.workers.train_stack import Start, _record, failed

STUDY: dict[str, Any] = {
    "name": "loop",
    **LEAST,
    "arms": {"other": {"rule": "mamba2"}},
    "seeds": 7,
}
SD = 0.02
RULE = (ROOT / "plugins/deltalab_rules/deltanet.py").read_text()


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that were asked for. A score follows from the rule's file and the seed: noise, and a gain it states."""
    jobs: list[Job] = []

    def execute(worker: object, stack: Sequence[Job], *_: object) -> list[TrialRecord]:
        records = []
        for job in stack:
            jobs.append(job)
            if "fails = True" in job.rule_source:
                records.append(failed(job, "RuntimeError: the rule raised"))
                continue
            gain = float((re.findall(r"gain = ([\d.]+)", job.rule_source) or ["0"])[0])
            runs = []
            for seed in job.seeds:
                digest = hashlib.sha256(f"{job.rule_source} {seed}".encode()).hexdigest()
                kind: Any = registry.task_plugin(job.task_kind).kind
                better = SD * (gain + random.Random(digest).gauss(0, 1))
                value = 0.5 + better if kind.maximize else 2 - better
                metrics = [(split, kind.metric, 4, value) for split in ("validation", "test")]
                runs.append(RunRecord(seed, "done", None, metrics, []))
            records.append(_record(job, Start.now(), 1, runs=runs))
        return records

    monkeypatch.setattr("deltalab.study.workers.worker.Worker.execute", execute)
    return jobs


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are checked in an instant: by their names."""

    def quarantined(file: Path) -> Quarantined:
        name = re.findall(r'name: ClassVar\[str\] = "(\w+)"', file.read_text())
        return Quarantined(name[0], None) if name else Quarantined(None, "defines no rule: a proposal is one rule")

    monkeypatch.setattr(scoring, "quarantined", quarantined)


@pytest.fixture
def here(lab: Path, trained: list[Job], checked: None) -> Path:
    (lab / "loop.yaml").write_text(yaml.safe_dump(STUDY))
    return lab


def proposal(folder: Path, name: str, said: str = "") -> Path:
    file = folder / f"{name}.py"
    file.write_text(RULE.replace('"deltanet"', f'"{name}"') + (f"\n# {said}\n" if said else ""))
    return file


def scored(folder: Path, file: Path, **study: Any) -> scoring.Score:
    settings = RunSettings(db=folder / "lab.db", executor="inline")
    return scoring.score(file, {**STUDY, **study}, settings)


def test_a_planted_gain_is_kept_on_seeds_that_nothing_trained_with(here: Path, trained: list[Job]) -> None:
    answer = scored(here, proposal(here, "better", "gain = 4"))
    assert answer.verdict == "keep"
    assert answer.combined_score == pytest.approx(4 * SD, abs=SD)
    assert answer.artifacts["low"] < 4 * SD < answer.artifacts["high"]
    assert answer.artifacts["p"] <= answer.artifacts["alpha"] == design.alpha_of(1)
    screened, confirmed = {1, 2, 3, 4, 5, 6, 7}, {*range(2001, 2001 + design.seeds_of(1))}
    assert {job.seeds for job in trained} == {tuple(sorted(screened)), tuple(sorted(confirmed))}
    assert {job.config["rule"]["name"] for job in trained} == {"linear_attention", "better"}, "no arm of the file"


def test_a_wrong_executor_is_refused_before_a_proposal_counts_and_beside_a_known_answer(here: Path) -> None:
    known = proposal(here, "known")
    scored(here, known)
    for file in (known, proposal(here, "other")):
        with pytest.raises(InputError, match="--executor: unknown executor 'inlin'; did you mean 'inline'"):
            scoring.score(file, STUDY, RunSettings(db=here / "lab.db", executor="inlin"))  # type: ignore[arg-type]
    assert scored(here, proposal(here, "next")).artifacts["proposal"] == 2


def test_less_of_a_loss_is_a_gain(here: Path) -> None:
    answer = scored(here, proposal(here, "better", "gain = 4"), task={"text": {"length": 16}})
    assert answer.verdict == "keep"
    assert answer.combined_score == pytest.approx(4 * SD, abs=SD)
    assert answer.artifacts["low"] < answer.combined_score < answer.artifacts["high"]


def test_several_tasks_are_scored_by_their_mean_from_chance_to_perfect(here: Path) -> None:
    tasks = {name: {"task": "mqar", **STUDY["task"]["mqar"]} for name in ("one", "two")}
    answer = scored(here, proposal(here, "better", "gain = 4"), task=tasks)
    assert answer.verdict == "keep"
    chance = 1 / 16
    assert answer.combined_score == pytest.approx(4 * SD / (1 - chance), abs=SD)
    with pytest.raises(InputError, match=r"task\.text: its metric has no bounds"):
        scored(here, proposal(here, "other"), task={**tasks, "text": {"length": 16}})


def test_noise_is_discarded_after_screening_and_spends_nothing(here: Path, trained: list[Job]) -> None:
    answers = [scored(here, proposal(here, f"noise_{i}")) for i in range(4)]
    assert [answer.verdict for answer in answers] == ["discard"] * 4
    assert [answer.artifacts["proposal"] for answer in answers] == [1, 2, 3, 4]
    last = answers[-1].artifacts
    assert last["spent"] == pytest.approx(sum(design.alpha_of(n + 1) for n in range(last["confirmations"])))
    assert sum(job.config["rule"]["name"] == "linear_attention" for job in trained) == 1 + last["confirmations"]


def test_what_was_answered_is_answered_again_without_a_trial(here: Path, trained: list[Job]) -> None:
    file = proposal(here, "noise")
    first, count = scored(here, file), len(trained)
    assert scored(here, file) == first
    assert len(trained) == count
    other = scored(here, file, arms={"another": {"rule": "gla"}})
    assert other == first, "arms of the file are not part of the loop"
    assert scored(here, file, name="next").artifacts["proposal"] == 1, "another study is another loop"


def test_after_a_kill_the_confirmation_is_the_one_that_was_given(
    here: Path, trained: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = proposal(here, "better", "gain = 4")
    with monkeypatch.context() as patch:
        patch.setattr(design, "p_of", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            scored(here, file)
    other = scored(here, proposal(here, "other", "gain = 5"))
    count = len(trained)
    answer = scored(here, file)
    assert len(trained) == count, "every trial was in the ledger"
    assert answer.verdict == other.verdict == "keep"
    assert (answer.artifacts["alpha"], answer.artifacts["proposal"]) == (design.alpha_of(1), 1)
    assert other.artifacts["confirmations"] == 2


def test_two_processes_never_have_one_number_or_one_confirmation(tmp_path: Path) -> None:
    with Store.open(tmp_path / "lab.db"):
        pass
    given: list[tuple[int, int]] = []

    def ask(first: int) -> None:
        with Store.open(tmp_path / "lab.db") as store:
            for i in range(first, first + 10):
                asked = proposals.propose(store, "loop", f"rule {i}", f"source {i}")
                given.append((asked.number, proposals.confirm(store, asked)))
                assert proposals.confirm(store, asked) == given[-1][1] or len(given) > 1

    threads = [threading.Thread(target=ask, args=(10 * n,)) for n in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    numbers, confirmations = zip(*given, strict=True)
    assert sorted(numbers) == sorted(confirmations) == [*range(1, 41)]


@pytest.mark.parametrize(
    ("text", "said"),
    [("x = 1\n", "defines no rule"), (RULE.replace('"deltanet"', '"broken"') + "\n# fails = True\n", "does not train")],
)
def test_a_rule_that_cannot_be_scored_is_an_answer(here: Path, text: str, said: str) -> None:
    file = here / "broken.py"
    file.write_text(text)
    answer = scored(here, file)
    assert (answer.combined_score, answer.verdict) == (None, "invalid")
    assert said in answer.artifacts["reason"]
    assert "\n" not in answer.artifacts["reason"]
    assert scored(here, file) == answer


@pytest.mark.parametrize(
    ("study", "said"),
    [
        ({"seeds": 1}, "seeds: screening needs at least 2 seeds"),
        ({"scales": {"model.d_model": [8, 16]}, "arms": {}}, "scales: a rule is scored at one size"),
        (
            {"arms": {}, "search": {"train.lr": {"log_uniform": [1e-3, 1e-2]}, "trials": 4}},
            "search: a rule is scored against a base",
        ),
        ({"base": {**STUDY["base"], "rule": "linear_atention"}}, "did you mean 'linear_attention'"),
    ],
)
def test_a_study_that_no_rule_can_be_scored_against_is_refused(here: Path, study: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as refused:
        scored(here, proposal(here, "rule"), **study)
    assert "\n" not in str(refused.value)
    assert not (here / "lab.db").exists()


def blocks(title: str) -> str:
    page = (ROOT / "docs/how-to/score.md").read_text()
    return re.findall(rf'```python title="{title}"\n(.*?)```', page, re.S)[0]  # type: ignore[no-any-return]


@pytest.fixture
def command(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """The exit codes of `deltalab` where `subprocess.run` calls it: it runs here, with the training replaced."""
    codes: list[int] = []
    others = subprocess.run

    def run(words: list[str], **options: Any) -> Any:
        if words[0] != "deltalab":
            return others(words, **options)
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        codes.append(int(ended.value.code or 0))
        return SimpleNamespace(stdout=capsys.readouterr().out, returncode=codes[-1])

    monkeypatch.setattr(subprocess, "run", run)
    return codes


def openevolve(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, Any]]:
    result = ModuleType("openevolve.evaluation_result")
    result.EvaluationResult = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openevolve", ModuleType("openevolve"))
    monkeypatch.setitem(sys.modules, "openevolve.evaluation_result", result)
    evaluator: dict[str, Any] = {}
    exec(blocks("openevolve_evaluator.py"), evaluator)

    def evaluate(file: Path) -> dict[str, Any]:
        told = evaluator["evaluate"](str(file))
        return {**told.metrics, "keep": bool(told.metrics["keep"])}

    return evaluate


def shinka(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, Any]]:
    def evaluate(file: Path) -> dict[str, Any]:
        results = here / "results" / file.stem
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "--program_path", str(file), "--results_dir", str(results)])
        exec(blocks("shinka_evaluate.py"), {"__name__": "__main__"})
        metrics, correct = (json.loads((results / f"{n}.json").read_text()) for n in ("metrics", "correct"))
        assert correct["correct"] == (metrics["public"]["verdict"] != "invalid")
        return {"combined_score": metrics["combined_score"], "keep": metrics["public"]["verdict"] == "keep"}

    return evaluate


@pytest.mark.slow
@pytest.mark.parametrize("tool", [openevolve, shinka])
def test_a_loop_of_random_and_planted_proposals_keeps_the_planted_ones(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: list[int], tool: Any
) -> None:
    """A stub that proposes 16 rules of noise and 4 with a gain of 3 sd, and one that is no rule."""
    evaluate, kept = tool(here, monkeypatch), []
    for i in range(20):
        with registry.isolated():
            told = evaluate(proposal(here, f"rule_{i}", "gain = 3" if i % 5 == 4 else ""))
        kept += [i] if told["keep"] else []
    assert kept == [4, 9, 14, 19]
    broken = here / "broken.py"
    broken.write_text("x = 1\n")
    assert evaluate(broken)["combined_score"] == -1.0
    assert command == [0] * 20 + [1]
    with Store.open(here / "deltalab.db", create=False) as store:
        assert all(study.hidden for study in store.studies()), "lists do not fill with a loop's studies"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["score", "nothing.py", "--against", "loop.yaml"], "nothing.py: no such rule file"),
        (["score", "rule.py"], "--against"),
        (["score", "rule.py", "--against", "lop.yaml"], "did you mean"),
        (["score", "rule.py", "--against", "loop.yaml", "seed=3"], "did you mean 'seeds'"),
        (
            ["score", "rule.py", "--against", "loop.yaml", "--executor", "inlin"],
            "unknown executor 'inlin'; did you mean 'inline'?",
        ),
    ],
)
def test_a_wrong_command_is_one_line_and_no_proposal(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    proposal(here, "rule")
    monkeypatch.setattr(sys, "argv", ["platform", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert said in told.err
    assert told.err.count("\n") == 1
    if (here / "deltalab.db").exists():
        with Store.open("deltalab.db") as store:
            assert store.studies() == []
