"""What a report says of a search, on a ledger whose every figure is known."""

import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, TrialRecord
from deltalab.store.models import Stage
from deltalab.study import found, importance
from deltalab.study.budget import Objective
from deltalab.study.candidates import MOST_DRAWN, RANDOM_FROM, WARM_FROM
from deltalab.study.found import Discovery, changed
from deltalab.study.found_report import sections
from deltalab.study.report import Report, report
from deltalab.study.search import at_chance

TASKS = {"mqar": {"metric": "accuracy", "maximize": True, "chance": 0.03, "version": 1, "bounds": [0, 1]}}
BASE = {
    "rule": {"name": "algebra", "decay": "scalar", "start": "slow"},
    "model": {"heads": 2},
    "train": {"lr": 0.02, "steps": 60},
}
SEARCH = {
    "rule.decay": {"choice": ["none", "scalar"]},
    "rule.start": {"choice": ["slow", "fast"], "when": {"rule.decay": ["scalar"]}},
    "train.lr": {"log_uniform": [0.01, 0.1]},
    "trials": 40,
    "finalists": 2,
    "fidelity": {"train.steps": [20, 60], "keep": 0.25},
}
SPEC = {
    "name": "s",
    "task": {"mqar": {}},
    "base": {"rule": "algebra"},
    "search": SEARCH,
    "seeds": 2,
}


class Lab:
    """A search being recorded."""

    def __init__(self, store: Store, *objectives: str) -> None:
        self.store = store
        spec = {**SPEC, "search": {**SEARCH, "objectives": objectives}} if objectives else SPEC
        arms = [ArmRecord(name, name == "base", {}, {"mqar": BASE}) for name in ("base", "found_1", "found_2")]
        self.id = store.begin_study("s", None, "id", spec, arms, {"tasks": TASKS})

    def record(
        self,
        number: int,
        values: Mapping[str, Any],
        score: float,
        *,
        flops: float = 1000.0,
        decode: float | None = None,
        steps: int = 20,
        arm: str = "base",
        error: str | None = None,
        finished: float = 1010.0,
    ) -> None:
        stage: Stage = "tune" if number else "confirm"
        train = {**BASE["train"], "steps": steps}
        knobs = {path.removeprefix("rule."): value for path, value in values.items() if path.startswith("rule.")}
        rule = {**BASE["rule"], **knobs}
        splits = ("validation",) if stage == "tune" else ("validation", "test")
        metrics = [(split, "accuracy", steps, score) for split in splits]
        metrics += [("cost", "flops_per_token", steps, flops), ("cost", "state_size", steps, 64.0)]
        metrics += [("cost", "decode_us", steps, decode)] if decode else []
        runs = [RunRecord(seed, metrics=metrics) for seed in ((1, 2) if stage == "confirm" else (1_000_001,))]
        trial = TrialRecord(
            key=f"{arm} {number} {steps} {finished}",
            task="mqar",
            task_version=1,
            stage=stage,
            config={**BASE, "rule": rule, "train": train},
            state="infeasible" if error else "done",
            started_at=1000.0,
            finished_at=finished,
            seconds=10.0,
            rule=RuleRecord("algebra", "h", "source"),
            error=error,
            parameters=100,
            state_size=64,
            runs=[] if error else runs,
        )
        self.store.record_trial(self.id, arm, trial, number, dict(values))


def values(draw: random.Random) -> dict[str, Any]:
    own = {"rule.decay": draw.choice(["none", "scalar"]), "train.lr": round(10 ** draw.uniform(-2, -1), 5)}
    return own | ({"rule.start": draw.choice(["slow", "fast"])} if own["rule.decay"] == "scalar" else {})


BEST = {"rule.decay": "scalar", "rule.start": "fast", "train.lr": 0.02}
CHEAP = {"rule.decay": "none", "train.lr": 0.05}
TUNED = {"train.lr": 0.02}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(importance, "TREES", 8)
    found._importance.cache_clear()
    with Store.open(tmp_path / "lab.db") as opened:
        yield opened


def record_search(store: Store) -> int:
    """32 candidates of the sampler and 8 of random search, of which 3 train on; a decay is worth 0.5."""
    lab, draw = Lab(store), random.Random(0)
    for number in [*range(1, 32), *range(RANDOM_FROM, RANDOM_FROM + 8)]:
        own = values(draw)
        lab.record(number, own, 0.2 + 0.5 * (own["rule.decay"] == "scalar") + 0.01 * draw.random())
    lab.record(WARM_FROM, BEST, 0.8)
    lab.record(WARM_FROM, BEST, 0.9, steps=60)
    lab.record(WARM_FROM + 1, CHEAP, 0.25, flops=500.0)
    lab.record(WARM_FROM + 1, CHEAP, 0.3, flops=500.0, steps=60)
    lab.record(40, {**BEST, "train.lr": 0.1}, 0.5, error="width 17 is no multiple of 4 heads; take 16")
    lab.record(41, {**BEST, "train.lr": 0.09}, 0.5, error="width 19 is no multiple of 4 heads")
    lab.record(0, TUNED, 0.7, steps=60)
    lab.record(0, BEST, 0.88, steps=60, arm="found_1")
    lab.record(0, CHEAP, 0.31, steps=60, arm="found_2")
    store.finish_study(lab.id, "done")
    return lab.id


@pytest.fixture
def searched(store: Store) -> Report:
    return report(store, record_search(store))


def search_of(found: Report) -> Discovery:
    assert found.search is not None
    return found.search


def test_finalists_and_the_base_stand_first_and_say_what_they_are(searched: Report) -> None:
    first = search_of(searched).candidates[:3]
    assert [(each.name, each.drawn_by, each.rung) for each in first] == [
        ("base", "tuning", 1),
        ("found_1", "warm", 1),
        ("found_2", "warm", 1),
    ]
    assert [each.values for each in first] == [
        {},
        {"rule.start": "fast"},
        {"rule.decay": "none", "train.lr": 0.05},
    ], "only where they differ from the tuned base"
    assert [each.scores["accuracy@mqar"] for each in first] == [0.7, 0.9, 0.3], "at the last fidelity"
    assert [each.on_front for each in first] == [False, True, True], "found_1 beats the base at its costs"
    assert first[0].settings == {"rule.decay": "scalar", "rule.start": "slow", "train.lr": 0.02}, (
        "the base's own values"
    )
    assert first[2].settings == CHEAP
    assert [each.first.get("accuracy@mqar") for each in first] == [None, 0.8, 0.25], "at the lowest fidelity"


def test_candidates_are_named_by_what_they_are(searched: Report) -> None:
    front = sections(search_of(searched))[1]
    assert [row[:2] for row in front.rows] == [["base", ""], ["found_1", "fast start"], ["found_2", "no decay"]]


def test_a_short_front_has_all_finalists(searched: Report) -> None:
    front = sections(search_of(searched), 1)[1]
    assert [row[0] for row in front.rows] == ["base", "found_1", "found_2"]


def test_what_mattered_is_judged_at_the_fidelity_that_all_have(searched: Report) -> None:
    search = search_of(searched)
    assert search.fidelity == {"train.steps": 20}
    decay, *_ = search.importances["accuracy@mqar"]
    assert (decay.path, decay.among) == ("rule.decay", 41)
    assert decay.share > 0.7
    [start] = [each for each in search.importances["accuracy@mqar"] if each.path == "rule.start"]
    assert start.among < 41


@pytest.mark.parametrize(("learned", "warned"), [(5, True), (6, False)])
def test_what_mattered_warns_where_few_candidates_have_learned(store: Store, learned: int, warned: bool) -> None:
    lab = Lab(store)
    for number in range(1, 25):
        score = 0.5 if number <= learned else number / 100  # chance is 0.03
        lab.record(number, {**BEST, "train.lr": 0.01 + number / 1000}, score)
    store.finish_study(lab.id, "done")
    search = search_of(report(store, lab.id))
    assert search.learned == {"accuracy@mqar": learned}
    (mattered,) = (section for section in sections(search) if section.title == "What mattered")
    said = [note for note in mattered.notes if note.startswith(f"accuracy: {learned} of 24 candidates")]
    assert bool(said) == warned


def test_a_finalist_of_an_old_ledger_is_the_candidate_that_it_was(store: Store) -> None:
    """Its training was tuned apart, and confirmed as number 0."""
    lab, own = Lab(store), MOST_DRAWN * 40
    lab.record(1, BEST, 0.8, steps=60)
    lab.record(2, {**BEST, "train.lr": 0.05}, 0.7, steps=60)
    lab.record(own, TUNED, 0.7, steps=60)
    for number, lr, score in ((own, 0.02, 0.8), (own + 1, 0.05, 0.9)):
        lab.record(number, {**BEST, "train.lr": lr}, score, steps=60, arm="found_1")
    lab.record(0, TUNED, 0.7, steps=60)
    lab.record(0, {**BEST, "train.lr": 0.05}, 0.9, steps=60, arm="found_1")
    store.finish_study(lab.id, "done")
    search = search_of(report(store, lab.id))
    assert [(point.name, point.number) for point in search.candidates] == [
        ("base", None),
        ("found_1", 1),
        ("candidate 2", 2),
    ]
    assert sections(search)[0].notes == ["found_1: rule.start=fast"]


def test_a_finalist_that_took_the_place_of_another_has_its_name(store: Store) -> None:
    """As where failed trials of a search ran again: both were confirmed as found_1, and the later one counts."""
    lab = Lab(store)
    for number, lr in ((1, 0.02), (2, 0.05)):
        lab.record(number, {**BEST, "train.lr": lr}, 0.8, steps=60)
        lab.record(0, {**BEST, "train.lr": lr}, 0.8, steps=60, arm="found_1", finished=1010.0 + number)
    lab.record(0, TUNED, 0.7, steps=60)
    store.finish_study(lab.id, "done")
    points = search_of(report(store, lab.id)).candidates
    assert [(point.name, point.number) for point in points if point.is_arm] == [("base", None), ("found_1", 2)]


CHANCES: list[tuple[dict[str, Any], set[str], int]] = [
    ({}, {"base", "candidate 1"}, 2),  # at 0.03
    ({"chance": 0.02}, {"candidate 1", "candidate 3"}, 1),
    ({"chance": None}, {"candidate 1", "candidate 2", "candidate 3"}, 0),
    ({"chance": 0.03, "maximize": False}, {"base", "candidate 2"}, 0),
    ({"chance": 0.005, "maximize": False}, {"base"}, 1),
]


@pytest.mark.parametrize(("about", "on_front", "left_off"), CHANCES)
def test_a_candidate_that_learned_nothing_is_left_off_the_front(
    store: Store, monkeypatch: pytest.MonkeyPatch, about: dict[str, Any], on_front: set[str], left_off: int
) -> None:
    monkeypatch.setitem(TASKS, "mqar", {**TASKS["mqar"], **about})
    lab = Lab(store)
    scores = {1: (0.9, 900.0), 2: (0.01, 100.0), 3: (0.025, 200.0), 4: (0.02, 300.0), 5: (math.nan, 1.0)}
    for number, (score, flops) in scores.items():
        lab.record(number, {**BEST, "train.lr": number / 100}, score, flops=flops, steps=60)
    lab.record(0, TUNED, 0.02, flops=50.0 if about.get("maximize") is False else 800.0, steps=60)
    store.finish_study(lab.id, "done")
    search = found.discovery(store, store.study(lab.id), store.arms(lab.id), store.trials(lab.id))
    assert {point.name for point in search.candidates if point.on_front} == on_front
    assert search.left_off == left_off
    [front] = [section for section in sections(search) if section.title.startswith("The front")]
    notes = " ".join(front.notes)
    assert ("better than chance on none of the tasks: left off" in notes) == bool(left_off)


def test_a_candidate_that_learned_one_task_of_two_stays_on_the_front() -> None:
    weighed = [Objective(name, task, True) for name, task in (("accuracy", "a"), ("accuracy", "b"))]
    cost = Objective("state_size", None, False)
    chance = {"accuracy@a": 0.1, "accuracy@b": 0.5}
    scores = {"accuracy@a": 0.1, "accuracy@b": 0.6, "state_size": 1.0}
    assert not at_chance([*weighed, cost], scores, chance)
    assert at_chance([*weighed, cost], {**scores, "accuracy@b": 0.4}, chance)
    assert not at_chance([*weighed, cost], {**scores, "accuracy@b": 0.4}, {"accuracy@a": 0.1})
    assert not at_chance([cost], scores, chance), "costs alone have no chance level"


def test_what_makes_a_token_slow_is_told(store: Store) -> None:
    lab, draw = Lab(store, "accuracy", "decode_us"), random.Random(0)
    for number in range(1, 32):
        own = values(draw)
        slow = 2000.0 if own["rule.decay"] == "scalar" else 1000.0
        lab.record(number, own, draw.random(), decode=None if number == 7 else slow + draw.random())
    store.finish_study(lab.id, "done")
    decay, *_ = search_of(report(store, lab.id)).importances["decode_us"]
    assert (decay.path, decay.among) == ("rule.decay", 30)
    assert decay.share > 0.7


def test_random_search_is_compared_at_equal_numbers(searched: Report) -> None:
    control = search_of(searched).control
    assert control is not None
    assert (control.n, control.of) == (8, 33)


def test_infeasible_candidates_are_counted_by_reason(searched: Report) -> None:
    [reason] = search_of(searched).infeasible
    assert (reason.reason, reason.count) == ("width 17 is no multiple of 4 heads", 2)
    assert reason.example == {**BEST, "train.lr": 0.1}


def test_a_terminal_of_80_columns_shows_it_in_few_lines(searched: Report) -> None:
    console = Console(width=80, record=True)
    console.print(searched)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    said = " ".join(line.strip() for line in lines)
    assert "found_1: rule.start=fast" in said
    assert "The front of 41 candidates (8 random, 31 tpe, 2 warm)" in said
    assert "train.steps 20: dropped" in said
    assert "2 candidates are infeasible, such as: width 17 is no multiple of 4 heads" in said
    assert "Hypervolume of 8 candidates, trained with train.steps 20: search" in said
    assert "tuned" not in "".join(lines[:12]), "the values of finalists are no column"


def test_json_and_markdown_have_all_of_it(searched: Report) -> None:
    told = json.loads(searched.to_json())["search"]
    assert len(told["candidates"]) == 42
    assert told["importances"]["accuracy@mqar"][0]["path"] == "rule.decay"
    markdown = searched.to_markdown()
    for section in sections(search_of(searched)):
        assert f"### {section.title}" in markdown


def test_a_running_search_says_nothing_yet_of_what_mattered(store: Store) -> None:
    lab = Lab(store)
    lab.record(1, BEST, 0.8)
    search = search_of(report(store, lab.id))
    assert (search.importances, search.control) == ({}, None)
    assert [section.title for section in sections(search)] == ["The front of 1 candidate (1 tpe)"]


def test_a_value_that_the_base_has_on_one_task_alone_differs() -> None:
    own = {"train.lr": 0.02}
    assert changed(BASE, BASE, [own, own], own) == {}
    assert changed(BASE, BASE, [own, {"train.lr": 0.05}], own) == own


def test_a_knob_that_the_base_does_not_have_differs() -> None:
    other = {**BASE, "rule": {"name": "other", "xi": 1}}
    assert changed(BASE, other, [], {"rule.xi": 1, "rule": "other"}) == {"rule.xi": 1, "rule": "other"}
