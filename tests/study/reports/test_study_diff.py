"""Studies as a reader keeps them: tags, notes, hidden and deleted ones, and what differs between two."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.ledgers import BASE, SPEC, TASKS, begin, record

from deltalab.cli.app import main
from deltalab.errors import InputError
from deltalab.store import ArmRecord, Store
from deltalab.store.copies import whole_ledger
from deltalab.store.studies import shelf
from deltalab.study.reports import best_arm
from deltalab.study.reports.report import report
from deltalab.study.reports.study_diff import SettingDiff, arm_diff, side_of_file, side_of_study, study_diff
from deltalab.study.running.run import run_study_file


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


Platform = Callable[..., Said]


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Platform:
    def run(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["platform", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Said(int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_tags_and_notes_are_read_back(store: Store, ablation: int) -> None:
    shelf.tag(store, ablation, [" paper ", "gate", "paper"])
    shelf.note(store, ablation, "Look at seed 3.\n")
    [row] = shelf.listed(store)
    assert (row.tags, row.notes, row.hidden, row.description) == (
        ("paper", "gate"),
        "Look at seed 3.",
        False,
        "Two tasks",
    )


@pytest.mark.parametrize("wrong", ["", "a,b", "a\nb", "x" * 51])
def test_a_tag_that_a_list_could_not_show_is_refused(store: Store, ablation: int, wrong: str) -> None:
    with pytest.raises(InputError, match="a tag has 1 to 50 letters"):
        shelf.tag(store, ablation, ["fine", wrong])
    assert shelf.listed(store)[0].tags == ()


def test_every_word_of_a_search_is_found_somewhere_in_a_study(store: Store, ablation: int) -> None:
    shelf.tag(store, ablation, ["paper"])
    shelf.note(store, ablation, "Look at seed 3.")
    [row] = shelf.listed(store)
    for text in ("", "ABLA", "paper seed", "two tasks", "late ablation"):
        assert row.says(text, ["base", "late"]), text
    assert not row.says("paper gate", ["base", "late"])


def test_a_deleted_study_is_nowhere_until_it_is_restored(store: Store, ablation: int) -> None:
    shelf.delete(store, ablation)
    assert store.studies() == shelf.listed(store) == []
    with pytest.raises(InputError, match=f"'ablation' is deleted; `deltalab study restore {ablation}` brings it back"):
        store.study("ablation")
    assert [row.id for row in shelf.listed(store, deleted=True)] == [ablation]
    with pytest.raises(InputError, match=r"unknown deleted study 'ablatoin';.*did you mean 'ablation'"):
        shelf.restore(store, "ablatoin")
    shelf.restore(store, "ablation")
    assert store.study("ablation").id == ablation


def test_a_study_that_runs_is_not_deleted(store: Store) -> None:
    study = begin(store, "new")
    with pytest.raises(InputError, match="study 'new' is running: stop it, then delete it"):
        shelf.delete(store, study)
    assert store.study(study).state == "running"


def test_a_deleted_study_that_runs_again_is_back(store: Store, ablation: int) -> None:
    shelf.delete(store, ablation)
    assert begin(store, "ablation") == ablation
    assert store.study(ablation).state == "running"


def test_what_a_deletion_takes_leaves_trials_that_other_studies_have(store: Store, ablation: int) -> None:
    other = begin(store, "other")
    store.attach(other, "base", f"{ablation} base mqar confirm 0 0", 0, {})
    found = shelf.contents(store, ablation)
    assert (found.arms, found.trials, found.shared, found.runs) == (3, 8, 1, 42)
    assert str(found) == "3 arms, 8 trials (1 of them stay, since other studies have them, too) and 42 runs"


def test_vacuum_removes_deleted_studies_for_good_and_leaves_the_others(store: Store, ablation: int) -> None:
    other = begin(store, "other")
    store.attach(other, "base", f"{ablation} base mqar confirm 0 0", 0, {})
    shelf.delete(store, ablation)
    assert whole_ledger.vacuum(store) == {"study": 1, "trial": 7, "rule_version": 0}
    assert shelf.listed(store, deleted=True) == []
    assert [trial.arm for trial in store.trials(other)] == ["base"]


def test_the_best_arm_is_that_of_the_report(store: Store) -> None:
    study = begin(store, "good")
    for arm, more in (("base", 0.0), ("no_*d*", 0.02), ("late", -0.1)):
        record(store, study, arm, "mqar", [value + more for value in BASE])
    store.finish_study(study, "done")
    assert best_arm.without_best_arm(shelf.listed(store)) == shelf.listed(store)
    best_arm.keep_best_arm(store, study)
    [row] = shelf.listed(store)
    assert best_arm.best_arm_text(row.best) == "no_*d* 0.941 on mqar, better"
    top = report(store, study).tables[0].rows[1]
    assert row.best == best_arm.find_best_arm(report(store, study))
    assert (top.arm, top.verdict, top.score.mean) == (row.best["arm"], row.best["verdict"], row.best["mean"])
    assert best_arm.without_best_arm([row]) == []


def test_the_best_arm_is_that_of_a_task_that_has_a_better_one(store: Store) -> None:
    study = begin(store, "two")
    for task, more in (("mqar", 0.0), ("text", -0.02)):
        record(store, study, "base", task, BASE)
        record(store, study, "no_*d*", task, [value + more for value in BASE])
    store.finish_study(study, "done")
    best_arm.keep_best_arm(store, study)
    [row] = shelf.listed(store)
    assert best_arm.best_arm_text(row.best) == "no_*d* 0.901 on text, better"


def test_a_best_arm_is_forgotten_when_the_study_goes_on(store: Store, ablation: int) -> None:
    best_arm.keep_best_arm(store, ablation)
    assert shelf.listed(store)[0].best is not None
    store.forget_trial(f"{ablation} late mqar tune 0 0")
    assert shelf.listed(store)[0].best is None


def test_a_study_of_which_nothing_is_measured_has_no_best_arm(store: Store) -> None:
    study = begin(store, "failed")
    store.finish_study(study, "failed")
    best_arm.keep_best_arm(store, study)
    [row] = shelf.listed(store)
    assert (best_arm.best_arm_text(row.best), best_arm.without_best_arm([row])) == ("", [])


def test_the_list_shows_tags_and_leaves_out_what_is_hidden(store: Store, ablation: int, platform: Platform) -> None:
    begin(store, "other", "gpu")
    assert platform("study", "tag", "ablation", "paper", "gate").out == "ablation: paper, gate\n"
    assert platform("study", "tag", "ablation", "--remove", "gate").out == "ablation: paper\n"
    assert platform("study", "note", "ablation", "seed 3").out == "ablation: seed 3\n"
    assert "hidden" in platform("study", "hide", "other:gpu").out

    def names(*words: str) -> list[str]:
        return [row["name"] for row in json.loads(platform("study", "list", "--json", *words).out)]

    assert names() == names("--tag", "paper") == names("late paper") == ["ablation"]
    assert names("--all") == ["other", "ablation"]
    assert names("nonesuch") == []
    said = platform("study", "list")
    assert "paper" in said.out
    assert said.err == "1 hidden (1 of other): --all lists them, too\n"
    platform("study", "unhide", "other:gpu")
    assert names() == ["other", "ablation"]


def test_a_tag_that_there_is_not_names_the_nearest(store: Store, ablation: int, platform: Platform) -> None:
    platform("study", "tag", "ablation", "paper")
    for words in (("list", "--tag", "papr"), ("tag", "ablation", "--remove", "papr")):
        said = platform("study", *words)
        assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
        assert "unknown tag 'papr'; did you mean 'paper'? allowed: paper" in said.err


def test_deleting_asks_and_says_what_goes(
    store: Store, ablation: int, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = platform("study", "delete", "ablation")
    assert said.code == 2
    assert "3 arms, 8 trials and 42 runs: nobody is there to confirm; give --yes" in said.err
    assert store.study("ablation").id == ablation
    assert "deleted; `deltalab study restore 1`" in platform("study", "delete", "ablation", "--yes").out
    assert json.loads(platform("study", "list", "--json").out) == []
    assert json.loads(platform("study", "list", "--deleted", "--json").out)[0]["name"] == "ablation"
    assert platform("study", "restore", "ablation").out == "ablation (id 1): restored\n"
    begin(store, "new")
    said = platform("study", "delete", "new", "--yes")
    assert (said.code, said.err) == (2, "error: study 'new' is running: stop it, then delete it\n")


STUDY = """
name: tiny
task: {mqar: {length: 16, pairs: 2, vocab_size: 32}, other: {task: mqar, length: 16, pairs: 1, vocab_size: 32}}
base:
  rule: comba
  model: {d_model: 16, layers: 1, heads: 1, mlp: false}
  train: {steps: 4, batch_size: 4, lr: 1e-2, evaluations: 1, eval_batches: 1}
ablate: [d, beta]
seeds: 2
profiles:
  longer: {base: {train: {steps: 6}}, arms: {slow: {train: {lr: 1e-3}}}, seeds: 3, task: {mqar: {pairs: 3}}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(STUDY)
    return path


def test_a_study_differs_from_its_profile_in_what_the_profile_says(file: Path) -> None:
    found = study_diff(side_of_file(file), side_of_file(file, "longer"))
    assert not found.same
    assert found.identity == [SettingDiff("task.mqar.pairs", 2, 3), SettingDiff("profile", None, "longer")]
    assert found.settings == [SettingDiff("seeds", 2, 3)]
    assert found.arms == [SettingDiff("train.steps", 4, 6)], "once, not for each arm and task"
    assert (found.only_left, found.only_right) == ([], ["slow"])
    assert found.ran is None


def test_a_file_and_its_run_compute_the_same(file: Path, store: Store) -> None:
    text = (
        file.read_text()
        .replace(", other: {task: mqar, length: 16, pairs: 1, vocab_size: 32}", "")
        .replace("ablate: [d, beta]", "ablate: [d]")
    )
    file.write_text(text)
    run_study_file(file, db=store.folder / "lab.db", executor="inline")
    study = store.study("tiny")
    assert best_arm.best_arm_text(study.best) != "", "what a driver keeps when the study ends"
    ran = side_of_study(study, store.arms(study.id))
    found = study_diff(ran, side_of_file(file))
    assert found.same
    assert [*found.identity, *found.settings, *found.arms, *found.only_left, *found.only_right] == []
    assert study_diff(ran, ran).ran == []


def test_a_difference_of_some_arms_names_them(file: Path) -> None:
    left = side_of_file(file)
    file.write_text(
        STUDY.replace("seeds: 2", "arms: {slow: {train: {lr: 1e-3}}}\nfor_task: {other: {train: {steps: 9}}}\nseeds: 2")
    )
    found = study_diff(left, side_of_file(file))
    assert found.arms == [SettingDiff("train.steps", 4, 9, ("on other",))]
    rows = arm_diff(left.arms["base"], left.arms["without_d"])
    assert [row.key for row in rows] == ["rule.d"]


def test_a_range_of_a_task_is_a_setting_that_differs(file: Path) -> None:
    tune = "tune: {train.lr: {choice: [0.01, 0.02]}, trials: 2}"
    file.write_text(STUDY.replace("seeds: 2", f"{tune}\nseeds: 2"))
    left = side_of_file(file)
    own = "for_task: {other: {tune: {train.lr: {choice: [0.03, 0.04]}}}}"
    file.write_text(STUDY.replace("seeds: 2", f"{tune}\n{own}\nseeds: 2"))
    found = study_diff(left, side_of_file(file))
    assert [(row.key, row.right) for row in found.settings] == [("for_task.other.tune.train.lr.choice", [0.03, 0.04])]
    assert found.arms == []


def test_two_arms_of_one_study(file: Path, platform: Platform) -> None:
    said = platform("study", "diff", file, file, "--arm", "base", "--arm", "without_d", "--json")
    rows = json.loads(said.out)["arms"]
    assert [row["key"] for row in rows] == ["rule.d"]
    said = platform("study", "diff", file, file, "--arm", "bse")
    assert said.code == 2
    assert "unknown arm 'bse'; did you mean 'base'? allowed: base, without_d, without_beta" in said.err


def test_studies_of_other_tasks_rules_and_machines_say_so(store: Store, ablation: int, platform: Platform) -> None:
    tasks = {**TASKS, "mqar": {**TASKS["mqar"], "version": 2}}
    arms = [ArmRecord("base", True, {}, {"mqar": {"rule": {"name": "comba"}}})]
    about = {"tasks": tasks, "rules": {"comba": "12" * 32}, "numerics": 3, "hardware": {"device": "H100"}}
    store.begin_study("ablation", "gpu", "other", {**SPEC, "seeds": 4}, arms, about)
    said = platform("study", "diff", "ablation", "ablation:gpu").out
    for text in ("task.mqar.version  1", "absent    121212121212", "hardware.device", "H100", "numerics", "profile"):
        assert " ".join(text.split()) in " ".join(said.split()), text
    assert "Only ablation has: no_*d*, late" in said
    found = json.loads(platform("study", "diff", "ablation", "ablation:gpu", "--json").out)
    assert {"key": "seeds", "left": 8, "right": 4, "where": []} in found["settings"]
    said = platform("study", "diff", "ablation", "ablatoin")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "did you mean 'ablation'?" in said.err


def test_a_file_is_compared_where_there_is_no_ledger(
    file: Path, tmp_path: Path, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTALAB_DB", str(tmp_path / "none.db"))
    assert "train.steps" in platform("study", "diff", file, f"{file}:longer").out
    said = platform("study", "diff", file, "tiny")
    assert (said.code, "there is no database here" in said.err) == (2, True)
