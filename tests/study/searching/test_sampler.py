"""What Optuna's samplers draw follows from candidates and results alone, and they know the space's conditions."""

import math
from typing import Any

import pytest

from deltalab.study.searching import sampler
from deltalab.study.searching.sampler import OptunaStudy
from deltalab.study.specs.budget import Searching

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


def go_on(live: OptunaStudy, sampler: Any, first: int, last: int) -> list[dict[str, Any]]:
    """Candidates `first` to `last`, three at a time; every seventh makes no model, and every fifth has no result."""
    drawn = []
    for number in range(first, last):
        drawn.append(live.draw(number, sampler))
        show(live, number, drawn[-1])
    return drawn


def show(live: OptunaStudy, number: int, candidate: dict[str, Any]) -> None:
    live.add(candidate, feasible=number % 7 != 3)
    if number % 7 != 3:
        live.tell(None if number % 5 == 4 else result(candidate))


SAMPLERS = [("tpe", 30), ("nsga2", 30), ("nsga3", 30), ("random", 12), pytest.param("gp", 13, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("sampler", "drawn"), SAMPLERS)
def test_a_search_begun_again_goes_on_with_the_same_candidates(sampler: Any, drawn: int) -> None:
    one, other = (OptunaStudy("twice", searching(sampler), [False, False]) for _ in range(2))
    before = go_on(one, sampler, 0, drawn)
    for number, candidate in enumerate(before):
        show(other, number, candidate)
    assert go_on(one, sampler, drawn, drawn + 2) == go_on(other, sampler, drawn, drawn + 2)


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "nsga3", "random"])
def test_a_candidate_has_the_settings_whose_conditions_hold(sampler: Any) -> None:
    drawn = go_on(OptunaStudy("conditions", searching(sampler), [False, False]), sampler, 0, 24)
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


def test_a_sampler_learns() -> None:
    """TPE draws better candidates than random search does, on average over its later draws."""
    live = OptunaStudy("learns", searching("tpe"), [False, False])
    drawn = go_on(live, "tpe", 0, 60)
    later = [result(candidate)[0] for candidate in drawn[30:]]
    control = [result(live.draw(number, "random"))[0] for number in range(1000, 1030)]
    assert sum(later) < 0.9 * sum(control)
