"""What a report says of a search, on a ledger whose every figure is known."""

import json
import math
import random
from typing import Any

import pytest
from rich.console import Console
from tests.support.search_ledger import BASE, BEST, CHEAP, SEARCH, TASKS, TUNED, Lab, record_search, values

from deltalab.store import Store
from deltalab.study.answers import importance, search_results
from deltalab.study.answers.search_points import differences_from_base
from deltalab.study.answers.search_results import Discovery
from deltalab.study.planning.tuning_candidates import MOST_DRAWN, RANDOM_FROM
from deltalab.study.reports.report import Report, report
from deltalab.study.reports.search_sections import sections
from deltalab.study.searching.results import at_chance
from deltalab.study.specs.sections.budget import Objective


@pytest.fixture(autouse=True)
def small_forests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "TREES", 8)


@pytest.fixture
def searched(store: Store) -> Report:
    return report(store, record_search(store))


def search_of(shown: Report) -> Discovery:
    assert shown.search is not None
    return shown.search


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
    search = search_results.discovery(store, store.study(lab.id), store.arms(lab.id), store.trials(lab.id))
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
    assert differences_from_base(BASE, BASE, [own, own], own) == {}
    assert differences_from_base(BASE, BASE, [own, {"train.lr": 0.05}], own) == own


def test_a_knob_that_the_base_does_not_have_differs() -> None:
    other = {**BASE, "rule": {"name": "other", "xi": 1}}
    assert differences_from_base(BASE, other, [], {"rule.xi": 1, "rule": "other"}) == {"rule.xi": 1, "rule": "other"}


def test_the_rules_that_were_tried_say_what_they_were_never_tried_with(store: Store) -> None:
    space = {
        "rule": {"choice": ["gla", {"name": "comba", "transition": "iplr"}, "rdn"]},
        "model.conv": {"choice": [0, 4]},
        "rule.d": {"choice": ["none", "head"], "when": {"rule": ["comba"]}},
        "train.lr": {"log_uniform": [0.01, 0.1]},
        "trials": 40,
    }
    lab = Lab(store, space=space)
    comba = {"name": "comba", "transition": "iplr"}
    lab.record(1, {"rule": "gla", "model.conv": 4, "train.lr": 0.02}, 0.9)
    lab.record(2, {"rule": "gla", "model.conv": 0, "train.lr": 0.03}, 0.6)
    lab.record(3, {"rule": comba, "rule.d": "head", "model.conv": 0, "train.lr": 0.02}, 0.4)
    lab.record(RANDOM_FROM, {"rule": comba, "rule.d": "head", "model.conv": 0, "train.lr": 0.05}, 0.5)
    search = search_of(report(store, lab.id))
    assert [(each.rule, each.candidates, each.random, each.never) for each in search.rules] == [
        ("gla", 2, 0, {}),
        (comba, 2, 1, {"model.conv": [4], "rule.d": ["none"]}),
        ("rdn", 0, 0, {"model.conv": [0, 4]}),
    ]
    assert [each.best["accuracy@mqar"] for each in search.rules[:2]] == [0.9, 0.5]
    [section] = [each for each in sections(search) if each.title == "The rules tried"]
    assert section.rows[1] == ["comba (iplr transition)", "2", "1", "0.500", "model.conv 4; rule.d none"]
    assert section.rows[2] == ["rdn", "0", "0", "", "model.conv 0, 4"]
    assert "single draw of its training" in section.notes[0]


def test_a_search_of_an_earlier_release_that_names_no_sampler_was_drawn_by_tpe(searched: Report) -> None:
    assert "sampler" not in SEARCH
    assert search_of(searched).drawn["tpe"] == 31


def test_importance_is_computed_once_and_anew_when_results_were_added(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(candidates: Any, *args: Any) -> Any:
        calls.append(len(candidates))
        return importance.importance(candidates, *args)

    monkeypatch.setattr(search_results, "importance", counted)
    study = record_search(store)
    first = search_of(report(store, study))
    again = search_of(report(store, study))
    assert calls == [41], "the ledger keeps what the first report computed"
    assert again.importances == first.importances
    Lab.of(store, study).record(32, {**CHEAP, "train.lr": 0.03}, 0.1)
    assert search_of(report(store, study)).importances != first.importances
    assert calls == [41, 42]
