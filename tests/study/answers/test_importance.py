"""Which settings explain a score: those it is made of, and nothing else."""

import math
import random
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.importance import FanovaImportanceEvaluator
from optuna.trial import create_trial

from deltalab.study.answers import importance as module
from deltalab.study.answers.importance import FEWEST, NOTHING, Importance, importance


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TREES", 8)


def drawn(count: int) -> tuple[list[dict[str, Any]], list[float]]:
    """Scores made of the decay, of its start where there is a decay, and of the learning rate's logarithm."""
    draw = random.Random(0)
    candidates: list[dict[str, Any]] = []
    for _ in range(count):
        values = {
            "decay": draw.choice(["none", "scalar"]),
            "conv": draw.choice([0, 4]),
            "lr": 10 ** draw.uniform(-3, -1),
        }
        if values["decay"] == "scalar":
            values["start"] = draw.choice([["slow"], ["fast"]])
        candidates.append(values)
    scores = [
        0.6 * (each["decay"] == "scalar")
        + 0.2 * (each.get("start") == ["fast"])
        - 0.2 * abs(math.log10(each["lr"]) + 2)
        + draw.gauss(0, 0.02)
        for each in candidates
    ]
    return candidates, scores


def test_settings_are_told_apart_by_what_they_explain() -> None:
    candidates, scores = drawn(80)
    found = {each.path: each for each in importance(candidates, scores, frozenset({"lr"}))}
    assert next(iter(found)) == "decay"
    assert list(found)[-1] == NOTHING
    assert found["decay"].low > 0.5 > found["lr"].high
    assert found["lr"].share > found["conv"].share
    assert found["conv"].low <= found["conv"].share <= found["conv"].high < 0.05
    assert found[NOTHING].share < 0.05


def test_a_setting_that_only_some_candidates_have_is_judged_among_them() -> None:
    candidates, scores = drawn(80)
    [start] = [each for each in importance(candidates, scores) if each.path == "start"]
    assert start.among == sum("start" in each for each in candidates) < 80
    assert start.share > 0.5, "where there is a decay, its start explains most of the score"


@pytest.mark.parametrize("case", ["few", "flat", "one value"])
def test_nothing_is_said_where_nothing_is_known(case: str) -> None:
    candidates, scores = drawn(FEWEST - 1 if case == "few" else 2 * FEWEST)
    if case == "flat":
        scores = [0.5] * len(scores)
    if case == "one value":
        candidates = [{"conv": 4} for _ in candidates]
    assert importance(candidates, scores) == []


def test_a_long_search_is_judged_by_a_part_of_its_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2 * FEWEST)
    assert {each.among for each in importance(*drawn(100)) if each.path != "start"} == {34}


def test_the_same_candidates_give_the_same_figures() -> None:
    candidates, scores = drawn(FEWEST)
    assert importance(candidates, scores) == importance(candidates, scores)
    assert all(isinstance(each, Importance) for each in importance(candidates, scores))


def test_the_shares_are_those_of_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna's evaluator with one tree and the tree's number as its seed is the oracle."""
    monkeypatch.setattr(module, "TREES", 3)
    draw = np.random.default_rng(0)
    numbers = {"a": draw.uniform(-3, 2, 60), "b": draw.integers(0, 3, 60).astype(float), "c": draw.uniform(0, 1, 60)}
    scores = numbers["a"] ** 2 + numbers["b"] + numbers["a"] * numbers["c"]
    space = np.array([[-3.0, 2.0], [0.0, 2.0], [0.0, 1.0]])
    study = optuna.create_study()
    distributions = {
        "a": FloatDistribution(-3, 2), "b": IntDistribution(0, 2), "c": FloatDistribution(0, 1),
    }  # fmt: skip
    for row, score in enumerate(scores):
        params = {name: int(column[row]) if name == "b" else column[row] for name, column in numbers.items()}
        study.add_trial(create_trial(params=params, distributions=distributions, value=score))
    for number, shares in enumerate(module._trees(np.array([*numbers.values()]).T, scores, space)):
        of_optuna = FanovaImportanceEvaluator(n_trees=1, max_depth=module.DEPTH, seed=number).evaluate(study)
        assert shares == pytest.approx([of_optuna[name] for name in numbers], rel=1e-6)
