"""What effect a study can find, said before it runs: nothing with few seeds, and in the task's metric where it can."""

import math
import re
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from rich.console import Console
from tests.support.examples import pictures
from tests.support.folders import ROOT
from tests.support.schedules import STUDY

from deltalab import get_task
from deltalab.statistics.joint_test import compare, follow, one_look
from deltalab.statistics.looks import spread_looks
from deltalab.statistics.unbalanced import Groups, compare_groups
from deltalab.store import RunRecord, Store
from deltalab.study.forecast.designs import Design, advice
from deltalab.study.forecast.estimate import Estimate, estimate
from deltalab.study.forecast.power import (
    MOST_SEEDS,
    MeasuredSpread,
    Spread,
    detectable,
    detectable_by_groups,
    nearest_spreads,
    seed_correlation,
    seeds_to_equal,
    shipped,
    spreads,
)
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.running.run import arm_records, provenance
from deltalab.study.specs.study_file import load_study
from deltalab.study.workers.train_stack import failed
from deltalab.tasks import BUILTIN

SEVEN = {f"lr_{i}": {"train": {"lr": i / 1000}} for i in range(1, 8)}
SPLITS: tuple[Literal["validation", "test"], ...] = ("validation", "test")


def planned(study: str) -> Plan:
    return make_plan(load_study(ROOT / "studies" / f"{study}.yaml"))


def printed(found: Estimate) -> str:
    console = Console(width=200, file=StringIO(), record=True)
    console.print(found.to_rich())
    return console.export_text()


def test_few_seeds_find_nothing_and_the_plan_says_so() -> None:
    found = estimate(planned("quickstart"))
    few = replace(found, seeds=5, smallest_p=2 / 2**5, detectable=None)
    assert "5 paired seeds can find nothing: p is at least 0.0625. Give at least 6 seeds." in printed(few)


@pytest.mark.slow
def test_more_seeds_find_less_and_more_arms_need_more() -> None:
    assert detectable(one_look(5), 1) == math.inf
    assert detectable(one_look(6), 1) > detectable(one_look(9), 1) > detectable(one_look(15), 1) > 0.5
    assert detectable(one_look(9), 7) > detectable(one_look(9), 1)
    assert detectable(one_look(1000), 7) * math.sqrt(1000) == pytest.approx(
        detectable(one_look(MOST_SEEDS), 7) * math.sqrt(MOST_SEEDS)
    )
    assert detectable(spread_looks(6, 9), 7) > detectable(one_look(9), 7), "looks cost power"


def test_the_detectable_effect_is_found_in_most_studies() -> None:
    """Counted on studies of their own."""
    effect, random, told = detectable(one_look(9), 3), np.random.default_rng(7), 0
    for _ in range(60):
        scores = random.normal(size=(4, 9))
        scores[1] += effect
        told += compare(list(scores[1:] - scores[0]))[0].decided
    assert 0.65 <= told / 60 <= 0.95


def test_the_effect_beside_more_seeds_of_the_base_is_found_in_most_studies() -> None:
    """Counted on studies of their own. Seeds that correlate hardly matter here, and halve what pairs find."""
    effect, random, told = detectable_by_groups(6, 16, 7), np.random.default_rng(7), 0
    for _ in range(100):
        arms, base = random.normal(size=(7, 6)), random.normal(size=16)
        arms[0] += effect
        told += compare_groups([Groups.plain(arm, base) for arm in arms])[0].decided
    assert 0.68 <= told / 100 <= 0.92
    assert detectable_by_groups(6, 16, 7, 0.5) == pytest.approx(effect, rel=0.15)
    pairs = Design(7, 7)
    assert Design(7, 6, 16).effect(7, 0.0) == effect < pairs.effect(7, 0.0), "56 runs"
    assert pairs.effect(7, 0.5) == pytest.approx(pairs.effect(7, 0.0) / math.sqrt(2))
    assert pairs.effect(7, 0.5) < effect
    assert detectable_by_groups(6, 16, 500) == math.inf


@pytest.mark.parametrize(
    ("seeds", "correlation", "says"),
    [
        (7, 0.05, "seeds: {arms: 6, base: 14} would find"),
        (7, 0.6, None),
        ({"arms": 6, "base": 16}, 0.6, "seeds: 7 would find"),
        ({"arms": 6, "base": 16}, 0.05, None),
        (6, 0.05, None),
        ({"at_least": 6, "at_most": 12}, 0.05, None),
    ],
    ids=str,
)
def test_a_plan_names_the_design_that_finds_more(seeds: Any, correlation: float, says: str | None) -> None:
    plan = make_plan(load_study({**STUDY, "seeds": seeds, "arms": SEVEN}))
    (task,) = plan.tasks
    lines = advice(plan, [Spread(task, "accuracy", 0.1, "given", correlation)], 7)
    why = [line for line in lines if "are not paired" in line]
    assert bool(why) == (isinstance(seeds, dict) and "base" in seeds)
    assert [line.partition(" find")[0] + " find" for line in lines if line not in why] == ([says] if says else [])
    assert advice(plan, [Spread(task, "accuracy", 0.1, "given by --sd")], 7) == why, "no correlation is known"


def test_a_spread_of_pairs_lacks_what_seeds_share() -> None:
    assert Spread("t", "accuracy", 0.1, "given", 0.75).sd_of_groups == pytest.approx(0.2)
    assert [Spread("t", "accuracy", 0.1, "given", r).sd_of_groups for r in (None, 0.0, -0.2)] == [0.1, 0.1, 0.1]


def test_an_effect_is_told_in_the_tasks_own_metric() -> None:
    plan = planned("quickstart")
    (task,) = plan.tasks.values()
    spread = Spread(next(iter(plan.tasks)), task.metric, 0.03, "given by --sd")
    found = estimate(plan, spreads=[spread])
    bare = estimate(plan)
    assert bare.effects == []
    if found.detectable is None:
        assert found.effects == []
        return
    assert found.effects[0].effect == pytest.approx(0.03 * found.detectable)
    tested = len(plan.names) - 1
    assert found.effects[0].equal_seeds == seeds_to_equal(0.03, 0.01, tested)
    assert f"equal within 0.01 takes about {found.effects[0].equal_seeds:,} seeds" in printed(found)
    assert "(standard deviation 0.03, given by --sd)" in printed(found)
    assert "is not known: --sd gives one" in printed(bare)


def test_of_many_tasks_without_a_known_spread_three_are_named() -> None:
    found = estimate(planned("quickstart"))
    arms = [replace(arm, task=f"text.d_model={width}") for width in range(9) for arm in found.arms]
    said = printed(replace(found, arms=arms, effects=[], detectable=1.0))
    assert "on text.d_model=0, text.d_model=1, text.d_model=2, 6 more is not known" in said


@pytest.mark.parametrize(("arms", "margin"), [(1, 1.0), (7, 0.8)])
def test_so_many_seeds_find_equal_arms_equal(arms: int, margin: float) -> None:
    """The formula is a guide: it knows neither the base that the arms share, nor that few seeds are tested by flips."""
    seeds, random = seeds_to_equal(1.0, margin, arms), np.random.default_rng(0)
    equal = 0
    for _ in range(40):
        scores = random.normal(size=(1 + arms, seeds))
        found = follow(list(scores[1:] - scores[0]), one_look(seeds), margins=[margin] * arms, intervals=False)
        equal += found[0].difference.is_equal
    assert 0.6 <= equal / 40 <= 1


@pytest.mark.slow
def test_a_plan_counts_the_most_that_looks_can_take(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    text = (ROOT / "studies" / "quickstart.yaml").read_text()
    file.write_text(re.sub(r"^seeds:.*$", "seeds: {at_least: 6, at_most: 12}", text, flags=re.M))
    plan = make_plan(load_study(file))
    found = estimate(plan)
    assert found.seeds == 12
    assert found.runs == len(plan.arms) * plan.tried(plan.arms[0]) * 12
    assert found.trials == len(plan.arms) * plan.tried(plan.arms[0]) * 4


def test_the_spread_of_a_task_is_that_of_its_latest_study(tmp_path: Path) -> None:
    """The median over the arms of the spread of their differences to the base, over sqrt(2)."""
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump({
        "name": "s", "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}}, "seeds": 6,
        "base": {"rule": "comba", "model": {"d_model": 16}, "train": {"steps": 20, "batch_size": 4, "lr": 0.01}},
        "arms": {"x": {"rule": {"d": 0}}},
    }))  # fmt: skip
    plan = make_plan(load_study(file))
    scores = {"base": [0.5] * 6, "x": [0.5, 0.6, 0.5, 0.6, 0.5, 0.6]}
    with Store.open(tmp_path / "lab.db") as store:
        assert spreads(store, plan.tasks) == []
        spec = plan.spec.model_dump(mode="json")
        study = store.begin_study("s", None, plan.identity, spec, arm_records(plan), provenance(plan, {}))
        for arm in plan.arms:
            job = plan.job(arm, "confirm", 0, {})
            runs = [
                RunRecord(seed, metrics=[(split, "accuracy", 2, scores[arm.name][seed - 1]) for split in SPLITS])
                for seed in job.seeds
            ]
            made = replace(failed(job, ""), state="done", error=None, runs=runs)
            store.record_trial(study, arm.name, made, 0, {})
        (found,) = spreads(store, plan.tasks)
        assert found.sd == pytest.approx(np.std([0, 0.1] * 3, ddof=1) / math.sqrt(2))
        assert found.correlation is None, "all seeds of the base agree"
        assert (found.task, found.metric, found.source) == ("mqar", "accuracy", "study s in the ledger")
        other = get_task("mqar", length=32, pairs=2, vocab_size=32)
        assert spreads(store, {"mqar": other}) == [], "another size of the task has another spread"


def test_the_nearest_measured_spread_counts_and_says_what_differs() -> None:
    sizes = {"small": (32, 4), "large": (256, 32), "middling": (256, 16)}
    tasks = {name: get_task("mqar", length=length, pairs=n, vocab_size=256) for name, (length, n) in sizes.items()}
    measured = [
        MeasuredSpread("mqar", metric, {**asdict(tasks[name]), "mixture": [], "tests": []}, 200, sd, 0.4, "a_study")
        for name, metric, sd in (("small", "loss", 0.3), ("small", "accuracy", 0.1), ("large", "accuracy", 0.2))
    ]
    known = nearest_spreads({**tasks, "longer": tasks["small"]}, dict.fromkeys(tasks, 200) | {"longer": 600}, measured)
    assert known == [
        Spread("small", "accuracy", 0.1, "measured on a_study", 0.4),
        Spread("large", "accuracy", 0.2, "measured on a_study", 0.4),
        Spread("middling", "accuracy", 0.2, "measured on a_study with pairs=32", 0.4),
        Spread("longer", "accuracy", 0.1, "measured on a_study with steps=200", 0.4),
    ]


def test_a_task_that_was_not_measured_has_no_shipped_spread() -> None:
    assert nearest_spreads({"mine": get_task("image_folder", folder=pictures())}, {"mine": 100}, shipped()) == []


def test_every_shipped_spread_is_of_a_task_that_a_plan_can_have() -> None:
    assert {spread.task for spread in shipped()} - set(BUILTIN) == set()


@pytest.mark.parametrize("study", sorted(file.stem for file in (ROOT / "studies").glob("*.yaml")))
def test_every_task_of_a_shipped_study_has_a_spread(study: str) -> None:
    spec = load_study(ROOT / "studies" / f"{study}.yaml")
    tasks = {}
    for name, params in spec.task.items():
        kind = params.get("task", name)
        assert isinstance(kind, str)
        tasks[name] = get_task(kind, **{key: value for key, value in params.items() if key != "task"})
    assert {spread.task for spread in nearest_spreads(tasks, dict.fromkeys(tasks, 200), shipped())} == set(tasks)


def test_arms_that_share_their_luck_correlate() -> None:
    assert seed_correlation([[0.1, 0.9, 0.4], [0.2, 1.0, 0.5]]) == 1.0
    assert seed_correlation([[0.1, 0.9, 0.4], [0.5, 0.5, 0.5]]) is None, "an arm whose seeds agree has none"
