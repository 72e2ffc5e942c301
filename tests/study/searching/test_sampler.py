"""What samplers draw follows from candidates and results alone, and they know the space's conditions."""

import math
from typing import Any

import pytest

from deltalab.study.searching import mixed_draws, sampler
from deltalab.study.searching.mixed_draws import AT_RANDOM, STALLED, MixedDraws
from deltalab.study.searching.phase import begin_draws
from deltalab.study.searching.sampler import OptunaStudy
from deltalab.study.specs.sections.budget import Searching

SPACE: dict[str, Any] = {
    "rule": {"choice": ["gla", {"name": "comba", "transition": "iplr"}, "mamba2"]},
    "model.layers": {"choice": [4, 1, 2]},
    "train.lr": {"log_uniform": [1e-3, 1e-1]},
    "rule.decay": {"choice": ["none", "scalar"], "when": {"rule": ["comba"]}},
    "rule.start": {"uniform": [0.1, 0.9], "when": {"rule.decay": ["scalar"]}},
}


def searching(sampler: str, trials: int = 64) -> Searching:
    space = {path: knob for path, knob in SPACE.items() if sampler != "gp" or "when" not in knob}
    return Searching.model_validate({**space, "sampler": sampler, "trials": trials})


def result(candidate: dict[str, Any]) -> list[float]:
    score = math.log(candidate["train.lr"]) ** 2 + 5 * candidate.get("rule.start", 1)
    return [score, float(candidate["model.layers"])]


def go_on(live: OptunaStudy | MixedDraws, sampler: Any, first: int, last: int) -> list[dict[str, Any]]:
    """Candidates `first` to `last`, three at a time; every seventh makes no model, and every fifth has no result."""
    drawn = []
    for number in range(first, last):
        drawn.append(live.draw(number, sampler))
        show(live, number, drawn[-1])
    return drawn


def show(live: OptunaStudy | MixedDraws, number: int, candidate: dict[str, Any]) -> None:
    live.add(candidate, feasible=number % 7 != 3)
    if number % 7 != 3:
        live.tell(None if number % 5 == 4 else result(candidate))


SAMPLERS = [
    ("mixed", 30),
    ("tpe", 30),
    ("nsga2", 30),
    ("nsga3", 30),
    ("random", 12),
    pytest.param("gp", 13, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("sampler", "drawn"), SAMPLERS)
def test_a_search_begun_again_goes_on_with_the_same_candidates(sampler: Any, drawn: int) -> None:
    one, other = (begin_draws("twice", searching(sampler), [False, False]) for _ in range(2))
    before = go_on(one, sampler, 0, drawn)
    for number, candidate in enumerate(before):
        show(other, number, candidate)
    assert go_on(one, sampler, drawn, drawn + 2) == go_on(other, sampler, drawn, drawn + 2)


@pytest.mark.parametrize("sampler", ["mixed", "tpe", "nsga2", "nsga3", "random"])
def test_a_candidate_has_the_settings_whose_conditions_hold(sampler: Any) -> None:
    drawn = go_on(begin_draws("conditions", searching(sampler), [False, False]), sampler, 0, 24)
    assert {"rule.start" in candidate for candidate in drawn} == {True, False}
    for candidate in drawn:
        comba = candidate["rule"] == {"name": "comba", "transition": "iplr"}
        assert ("rule.decay" in candidate) == comba
        assert ("rule.start" in candidate) == (candidate.get("rule.decay") == "scalar")
        assert candidate["model.layers"] in (1, 2, 4)


def test_an_old_study_gives_way_to_one_with_the_best_and_the_latest_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "SHOWN", 8)
    one, other = (OptunaStudy("long", searching("tpe"), [False, False]) for _ in range(2))
    before, most = [], 0
    for number in range(70):
        before += go_on(one, "tpe", number, number + 1)
        most = max(most, len(one._study.get_trials(deepcopy=False)))
    assert most <= 4 * 8
    for number, candidate in enumerate(before):
        show(other, number, candidate)
    assert go_on(one, "tpe", 70, 72) == go_on(other, "tpe", 70, 72)
    values = [trial.values for trial in one._study.get_trials(deepcopy=False) if trial.values]
    best = min(result(c) for n, c in enumerate(before) if n % 7 != 3 and n % 5 != 4)
    assert best in values, "the best result of all is still shown"


def test_gp_refuses_conditions() -> None:
    with pytest.raises(ValueError, match="gp draws what every candidate has, and rule"):
        Searching.model_validate({**SPACE, "sampler": "gp", "trials": 64})


def test_choices_of_numbers_are_drawn_by_their_order() -> None:
    live = OptunaStudy("order", searching("tpe"), [False, False])
    go_on(live, "tpe", 0, 12)
    shown = live._study.get_trials(deepcopy=False)[-1]
    assert shown.distributions["model.layers"].high == 2, "the places of 1, 2 and 4"
    assert isinstance(shown.params["rule"], str)


def test_integers_of_a_wide_range_reach_both_ends() -> None:
    space = {"model.heads": {"integers": [1, 17]}, "model.layers": {"integers": [1, 3]}}
    live = OptunaStudy("wide", Searching.model_validate({**space, "sampler": "random", "trials": 64}), [False, False])
    drawn = [live.draw(number, "random") for number in range(200)]
    assert {candidate["model.heads"] for candidate in drawn} == {*range(1, 18)}
    assert {candidate["model.layers"] for candidate in drawn} == {1, 2, 3}
    live.add(drawn[0])


@pytest.mark.parametrize("sampler", ["mixed", "tpe"])
def test_a_sampler_learns(sampler: Any) -> None:
    """It draws better candidates than random search does, on average over its later draws."""
    live = begin_draws("learns", searching(sampler), [False, False])
    drawn = go_on(live, sampler, 0, 60)
    later = [result(candidate)[0] for candidate in drawn[30:]]
    control = [result(live.draw(number, "random"))[0] for number in range(1000, 1030)]
    assert sum(later) < 0.9 * sum(control)


def test_the_control_is_the_same_whatever_draws_the_others() -> None:
    mixed, optuna = (begin_draws("control", searching(each), [False, False]) for each in ("mixed", "tpe"))
    go_on(mixed, "mixed", 0, 40)
    assert [mixed.draw(n, "random") for n in range(9, 20)] == [optuna.draw(n, "random") for n in range(9, 20)]


def test_mixed_draws_half_at_random_while_nothing_is_gained_and_stops_once_something_is() -> None:
    live, control = (begin_draws("stalls", searching("mixed"), [False, False]) for _ in range(2))

    def at_random(first: int) -> int:
        """How many of 60 draws are those of random search with the same numbers."""
        return sum(live.draw(n, "mixed") == control.draw(n, "random") for n in range(first, first + 60))

    def told(result: list[float]) -> None:
        live.add(live.draw(0, "random"))
        live.tell(result)

    for score in range(12, 0, -1):
        told([float(score), 1.0])
    assert at_random(100) == 0, "each result so far was a gain"
    for _ in range(STALLED):
        told([5.0, 2.0])
    assert 0.5 * AT_RANDOM < at_random(200) / 60 < 1.5 * AT_RANDOM
    told([1.0, 0.5])
    assert at_random(300) == 0


def test_what_is_drawn_near_the_front_differs_in_one_or_two_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_draws, "BY_TPE", 0.0)
    live = begin_draws("near", searching("mixed"), [False, False])
    best = {"rule": "gla", "model.layers": 1, "train.lr": 0.01}
    for number in range(12):
        live.add(best if number == 5 else live.draw(number, "random"))
        live.tell([float(number != 5), 1.0 + (number != 5)])
    for number in range(12, 40):
        candidate = live.draw(number, "mixed")
        changed = [path for path in best if candidate[path] != best[path]]
        assert 1 <= len(changed) <= 2, "the best candidate alone is on the front"
        assert "rule.decay" not in candidate or "rule" in changed
