"""A report that compares the arms of a study with another arm than its base."""

import io
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.support.ledgers import BASE
from tests.support.search_ledger import record_search

import deltalab
from deltalab.errors import InputError
from deltalab.statistics.joint_test import one_look
from deltalab.statistics.looks import spread_looks
from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, TrialRecord
from deltalab.study.answers.rows import Row
from deltalab.study.reports.report import Report, report
from deltalab.study.reports.sentence import sentence

MQAR = {"metric": "accuracy", "maximize": True, "chance": 1 / 64, "version": 1, "bounds": [0, 1]}
SPLITS = ("validation", "test")
Scores = Mapping[str, Sequence[Sequence[float]]]
"""Arm -> the scores of each candidate, by seed."""


def study(
    store: Store,
    scores: Scores,
    base: str,
    *,
    looks: Any = 8,
    seeds: Mapping[str, int] = {},
    changes: Mapping[str, dict[str, Any]] = {},
    margin: float = 0.0,
) -> int:
    """Records a study whose base is the arm of this name, and returns its id.

    Args:
        store: The ledger.
        scores: Arm -> the scores of each candidate, by seed.
        base: The name of the base.
        looks: The study's seeds.
        seeds: Arm -> how many of the seeds it has trained; all, for an arm that is absent.
        changes: Arm -> what it changes; a change of its own, for an arm that is absent.
        margin: The least difference that matters.
    """
    arms = [ArmRecord(arm, arm == base, changes.get(arm, {} if arm == base else {"x": [0, arm]}), {}) for arm in scores]
    made = store.begin_study(
        f"of {base}", None, f"id {base}", {"seeds": looks}, arms, {"tasks": {"mqar": {**MQAR, "margin": margin}}}
    )
    ends = [0, *(look.seeds for look in (spread_looks(**looks) if isinstance(looks, dict) else one_look(looks)))]
    for arm, candidates in scores.items():
        for number, values in enumerate(candidates):
            for look, (first, end) in enumerate(pairwise(ends)):
                if first >= seeds.get(arm, end):
                    continue
                runs = [
                    RunRecord(seed, metrics=[(split, "accuracy", 9, values[seed - 1]) for split in SPLITS])
                    for seed in range(first + 1, min(end, seeds.get(arm, end)) + 1)
                ]
                trial = TrialRecord(
                    key=f"{base} {arm} {number} {look}", task="mqar", task_version=1, stage="confirm", config={},
                    state="done", started_at=1.0, finished_at=2.0, seconds=1.0,
                    rule=RuleRecord("comba", "h", "source"), runs=runs, tokens_per_second=5e4,
                )  # fmt: skip
                store.record_trial(made, arm, trial, number, {"train.lr": 0.01 * (number + 1)})
    store.finish_study(made, "done")
    return made


def by_arm(found: Report) -> dict[str, Row]:
    return {row.arm: row for row in found.tables[0].rows}


def drawn(arms: Mapping[str, float], candidates: int, seeds: int = 8) -> dict[str, list[list[float]]]:
    random = np.random.default_rng(3)
    shared = 0.05 * random.normal(size=seeds)
    return {
        arm: (0.6 + mean + shared + 0.03 * random.normal(size=(candidates, seeds))).tolist()
        for arm, mean in arms.items()
    }


MEANS = {"base": 0.0, "a": 0.2, "b": 0.22, "c": -0.1}


@pytest.mark.parametrize("candidates", [1, 3])
def test_any_arm_stands_where_the_base_does(store: Store, candidates: int) -> None:
    """The figures are those of a study of the same runs that was planned against that arm."""
    scores = drawn(MEANS, candidates)
    planned = by_arm(report(store, study(store, scores, "a")))
    found = by_arm(report(store, study(store, scores, "base"), against="a"))
    for arm, row in found.items():
        own = planned[arm]
        assert (row.score, row.difference, row.by_seed, row.scores) == (
            own.score,
            own.difference,
            own.by_seed,
            own.scores,
        )
        assert row.verdict == {"base": "reference"}.get(own.verdict, own.verdict)
    assert {arm: row.verdict for arm, row in found.items() if arm != "b"} == {
        "base": "worse",
        "a": "reference",
        "c": "worse",
    }
    assert [row.arm for row in found.values() if row.is_reference] == ["a"]
    assert [row.arm for row in found.values() if row.is_base] == ["base"]


def test_p_is_that_of_a_plain_loop_over_all_flips(store: Store) -> None:
    scores = drawn({"base": 0.0, "a": 0.2, "b": 0.21}, 1)
    found = by_arm(report(store, study(store, scores, "base"), against="a"))
    d = np.array([np.subtract(scores[arm][0], scores["a"][0]) for arm in ("base", "b")])
    c = np.median(np.sqrt((d**2).mean(1))) / np.sqrt(2)

    def largest(signs: Sequence[float]) -> float:
        flipped = d * np.asarray(signs)
        return float(np.max(np.sqrt(8) * np.abs(flipped.mean(1)) / (flipped.std(1, ddof=1) + c)))

    every = [largest(1 - 2 * ((flip >> np.arange(8)) & 1)) for flip in range(256)]
    observed = largest(np.ones(8))
    difference = found["base"].difference
    assert difference is not None
    assert difference.mean == pytest.approx(d[0].mean())
    assert difference.p == np.mean([t >= observed * (1 - 1e-9) for t in every])


def text(found: Report) -> str:
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(found)
    return " ".join(console.export_text().split())


def test_every_form_says_what_the_arms_are_compared_with(store: Store) -> None:
    found = report(store, study(store, drawn(MEANS, 1), "base"), against="a")
    said = "Compared with a, while the study was planned against base: p-values and intervals hold for one such choice"
    for form in (text(found), found.to_markdown(), found._repr_html_(), found.to_json()):
        assert said in form
        assert "the base" not in form.replace("was planned against base", "")
    assert "of base, default profile, against a, id 1 (done)" in text(found)
    assert "Differences are arm minus a, paired by seed." in found.to_markdown()
    assert json.loads(found.to_json())["against"] == "a"
    assert list(found.to_frame().is_reference) == [False, True, False, False]
    assert (
        sentence(found)
        == "c is worse than a on mqar by 0.318 accuracy (p 0.008, 8 seeds); base is worse too; no arm beats it."
    )


def test_sentences_name_the_reference_where_nothing_is_decided(store: Store) -> None:
    made = study(store, drawn({"base": 0.0, "a": 0.0, "b": 0.0}, 1), "base")
    assert "8 seeds tell no arm from a;" in sentence(report(store, made, against="a"))
    few = study(store, drawn({"first": 0.0, "a": 0.5}, 1, seeds=5), "first", looks=5)
    found = report(store, few, against="a")
    assert "No arm can be told from a with 5 seeds: p is at least 0.0625." in found.tables[0].warnings


def test_arms_that_equal_the_reference_equal_it_by_name(store: Store) -> None:
    made = study(store, drawn({"base": 0.0, "a": 0.3, "b": 0.3}, 1), "base", margin=0.1)
    found = report(store, made, against="a")
    assert {arm: row.verdict for arm, row in by_arm(found).items()} == {"base": "worse", "a": "reference", "b": "equal"}
    assert "the base" not in sentence(found)
    alone = report(store, study(store, drawn({"first": 0.3, "a": 0.3}, 1), "first", margin=0.1), against="a")
    assert " equals a within 0.1 accuracy on mqar" in sentence(alone)


def test_sizes_times_and_the_scale_are_those_of_the_reference(store: Store) -> None:
    scores = {"base": [BASE], "a": [[1.0] * 8], "b": [[0.5] * 8]}
    found = report(store, study(store, scores, "base"), against="a")
    assert "a is at the end of the scale: an arm can be worse, and hardly better." in found.tables[0].warnings


def test_the_base_is_the_plain_report(store: Store) -> None:
    made = study(store, drawn(MEANS, 2), "base")
    assert report(store, made, against="base") == report(store, made)


def test_an_arm_that_is_not_there_is_one_line(store: Store, tmp_path: Path) -> None:
    made = study(store, drawn(MEANS, 1), "base")
    with pytest.raises(InputError, match=r"^of base: unknown arm 'bse'; did you mean 'base'\? allowed: base, a, b, c$"):
        report(store, made, against="bse")
    with pytest.raises(InputError, match="of base: the stage tune compares no arms, so none with 'a'"):
        report(store, made, which="tune", against="a")
    assert deltalab.report("of base", db=tmp_path / "lab.db", against="a").against == "a"


def test_interactions_are_those_of_the_study(store: Store) -> None:
    """An interaction is (both - a) - (b - base), whatever the arms are compared with."""
    scores = drawn({"base": 0.0, "a": -0.1, "b": -0.2, "ab": -0.25}, 1)
    a, b = {"a": [0, 1]}, {"b": [0, 1]}
    made = study(store, scores, "base", changes={"a": a, "b": b, "ab": a | b})
    [plain], [other] = (report(store, made, against=arm).tables[0].interactions for arm in (None, "a"))
    assert plain == other


# Looks after 6, 8, 11 and 15 seeds. `early` stopped after the first, `a` and `b` went on.
LOOKS = {"at_least": 6, "at_most": 15}


def test_arms_that_stopped_are_compared_on_the_seeds_that_both_have(store: Store) -> None:
    scores = drawn({"base": 0.0, "a": 0.1, "b": 0.04, "early": 0.02}, 1, seeds=15)
    made = study(store, scores, "base", looks=LOOKS, seeds={"early": 6, "base": 15, "a": 15, "b": 15})
    found = report(store, made, against="a")
    rows = by_arm(found)
    seeds = {arm: row.difference.n for arm, row in rows.items() if row.difference}
    assert seeds["early"] == 6
    assert seeds["base"] > 6
    assert seeds["b"] > 6, "an arm that stopped does not keep the others from their seeds"
    early = rows["early"].difference
    assert early is not None
    assert early.mean == pytest.approx(float(np.mean(np.subtract(scores["early"][0][:6], scores["a"][0][:6]))))
    listed = ", ".join(f"{arm} {n}" for arm, n in seeds.items() if n < 15)
    assert (
        f"Tested on the seeds up to the look that decides, or to the last that both reached: {listed}."
        in found.tables[0].warnings
    )
    differences = found.to_frame("seeds").dropna(subset="difference").groupby("arm").size()
    assert differences.to_dict() == seeds, "a seed that the test did not take has none"
    # Six seeds of fifteen cannot decide, and with six of the reference nobody can be decided.
    assert "No interval for early: so few seeds cannot exclude any difference." in found.tables[0].notes
    assert {row.difference.n for row in by_arm(report(store, made, against="early")).values() if row.difference} == {6}


def test_no_arm_is_given_up_against_another_reference(store: Store) -> None:
    """It has its seeds, whatever its prospect was."""
    scores = drawn({"base": 0.0, "a": 0.0, "b": 0.0}, 1, seeds=15)
    made = study(store, scores, "base", looks=LOOKS, seeds=dict.fromkeys(scores, 15))
    assert {row.difference.n for row in by_arm(report(store, made)).values() if row.difference} != {15}
    found = report(store, made, against="a")
    assert {row.difference.n for row in by_arm(found).values() if row.difference} == {15}
    assert not any(note.startswith("Stopped early") for note in found.tables[0].notes)


def test_what_cannot_be_compared_is_said(store: Store) -> None:
    scores = drawn({"base": 0.0, "a": 0.1, "few": 0.1}, 1, seeds=15)
    made = study(store, scores, "base", looks=LOOKS, seeds={"base": 15, "a": 15, "few": 3})
    # An arm whose later trials failed: the ledger has three of its seeds.
    failed = TrialRecord(
        key="failed", task="mqar", task_version=1, stage="confirm", config={}, state="failed", started_at=1.0,
        finished_at=3.0, seconds=1.0, rule=RuleRecord("comba", "h", "source"), runs=[], error="OSError: gone",
    )  # fmt: skip
    store.record_trial(made, "few", failed, 0, {"train.lr": 0.01})
    found = report(store, made, against="few")
    assert {row.verdict for row in by_arm(found).values()} == {"not compared", "reference"}
    assert "a is not compared: it shares 3 seeds with few, and the first look takes 6." in found.tables[0].warnings
    absent = study(store, {**scores, "none": []}, "few", looks=15)
    assert (
        "No arm is compared with none, which has no score here."
        in report(store, absent, against="none").tables[0].warnings
    )


def test_finalists_of_a_search_are_compared_by_their_names(store: Store) -> None:
    made = record_search(store)
    found = report(store, made, against="found_1")
    assert {arm: row.is_reference for arm, row in by_arm(found).items()} == {
        "base": False,
        "found_1": True,
        "found_2": False,
    }
    difference = by_arm(found)["base"].difference
    assert difference is not None
    assert difference.mean == pytest.approx(0.7 - 0.88)
    assert found.search == report(store, made).search, "the search is as it was"
