"""What a seed's result is: its choice by other seeds, what divergence costs it, what fewer candidates give."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltalab.statistics import cross_fitting
from deltalab.statistics.joint_test import compare, one_look
from deltalab.statistics.seed_choice import Run, Scores, outcomes
from deltalab.statistics.unbalanced import Groups, compare_groups

GONE = Run(math.nan, math.nan)
Table = dict[str, dict[int, dict[int, Run]]]


def scores(runs: Table, *, maximize: bool = True, chance: float = 0.0, seeds: tuple[int, ...] = (1, 2)) -> Scores:
    return Scores("base", maximize, chance, runs, dict.fromkeys(runs, seeds))


def test_of_two_seeds_each_takes_what_is_best_with_the_other_and_reports_its_test_score() -> None:
    table: Table = {
        "base": {0: {1: Run(0.5, 0.9), 2: Run(0.7, 0.1)}, 1: {1: Run(0.6, 0.2), 2: Run(0.6, 0.8)}},
        "arm": {0: {1: Run(0.1, 0.3), 2: Run(0.1, 0.4)}, 1: {1: Run(0.0, 0.9), 2: Run(0.0, 0.9)}},
    }
    most = scores(table)
    assert {seed: most.choice("base", seed) for seed in (1, 2)} == {1: 0, 2: 1}, "each as the other prefers"
    assert most.results == {"base": {1: 0.9, 2: 0.8}, "arm": {1: 0.3, 2: 0.4}}
    least = scores(table, maximize=False)
    assert least.results == {"base": {1: 0.2, 2: 0.1}, "arm": {1: 0.9, 2: 0.9}}
    assert most.others == ["arm"]
    assert most.differences("arm") == pytest.approx([-0.6, -0.4])


@pytest.mark.parametrize("bug", ["own", "all"])
def test_a_choice_that_looks_at_the_seed_itself_is_caught(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """A planted bug: it reports the luckiest of the candidates."""

    def looks_at_its_own(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return scores if bug == "own" else np.broadcast_to(scores.sum(-2, keepdims=True), scores.shape)

    monkeypatch.setattr(cross_fitting, "_others", looks_at_its_own)
    with pytest.raises(AssertionError):
        test_of_two_seeds_each_takes_what_is_best_with_the_other_and_reports_its_test_score()


def test_of_equals_the_first_is_shown_and_all_are_averaged() -> None:
    table: Table = {"base": {n: {s: Run(0.5, n / 10) for s in (1, 2)} for n in (3, 1, 2)}}
    for maximize in (True, False):
        found = scores(table, maximize=maximize)
        assert found.choice("base", 1) == 3
        assert found.results["base"] == {1: pytest.approx(0.2), 2: pytest.approx(0.2)}


def test_a_candidate_that_failed_in_one_arm_counts_in_none() -> None:
    """If an arm alone loses its best candidate, it is worse for no reason of its own."""
    whole = {n: {s: Run(n / 10, n / 10 + s / 100) for s in (1, 2)} for n in (0, 1, 2)}
    table: Table = {"base": {n: whole[n] for n in (0, 1)}, "arm": whole, "gone": {}}
    failed = {"base": {2}, "gone": {0, 1, 2}}
    found = Scores("base", True, 0.0, table, {"base": (1, 2), "arm": (1, 2), "gone": ()}, failed)
    assert found.lost == {2: ["base"]}
    assert found.numbers("arm") == [0, 1]
    assert found.differences("arm") == [0.0, 0.0]
    assert found.others == ["arm"]


def test_another_figure_is_weighed_as_the_result_is() -> None:
    random = np.random.default_rng(1)
    drawn = random.normal(size=(3, 6, 2))
    table: Table = {"base": {c: {s + 1: Run(*drawn[c, s]) for s in range(6)} for c in range(3)}}
    found = scores(table, seeds=tuple(range(1, 7)))
    tests = {c: {s + 1: float(drawn[c, s, 1]) for s in range(6)} for c in range(3)}
    assert found.weighed("base", tests) == pytest.approx(list(found.results["base"].values()))
    # A plain loop, in which candidate 1 lacks the figure with seed 3, and seed 5 has none at all.
    del tests[1][3]
    for c in range(3):
        del tests[c][5]
    weights = found.sample("base", range(1, 7)).weights()
    for seed, value in enumerate(found.weighed("base", tests), start=1):
        own = [c for c in range(3) if seed in tests[c]]
        total = sum(weights[seed - 1, c] for c in own)
        if seed == 5:
            assert math.isnan(value)
        else:
            assert value == pytest.approx(sum(weights[seed - 1, c] * tests[c][seed] for c in own) / total)
    assert scores({"base": {}}).weighed("base", tests) == []


def test_a_seed_without_a_finished_run_counts_as_the_worst_of_all_arms() -> None:
    table: Table = {
        "base": {0: {1: Run(0.9, 0.9), 2: Run(0.9, 0.8)}},
        "arm": {0: {1: GONE, 2: Run(0.9, 0.9)}, 1: {2: Run(0.7, 0.7)}},  # candidate 1 failed with seed 1
        "low": {0: {1: Run(0.2, 0.2), 2: Run(0.3, 0.3)}},
    }
    found = scores(table, chance=0.1)
    assert found.results["arm"] == {1: 0.1, 2: pytest.approx(0.8)}, "chance is worse than the worst arm"
    assert found.choice("arm", 1) is None
    above = scores(table, chance=0.5)
    assert above.results["arm"] == {1: 0.2, 2: pytest.approx(0.8)}, "the worst arm is worse than chance"
    lower = scores(table, maximize=False, chance=8.0)
    assert lower.results["arm"] == {1: 8.0, 2: pytest.approx(0.8)}, "both are the worst with seed 1"


def test_a_collapsed_arm_is_not_better() -> None:
    """It was, when seeds that diverged were left out: here those that finished are all better than the base."""
    seeds = tuple(range(1, 16))
    base = {0: {seed: Run(0.5, 0.5 + 0.001 * seed) for seed in seeds}}
    arm = {0: {seed: GONE if seed % 3 == 0 else Run(0.5, 0.6 + 0.001 * seed) for seed in seeds}}
    found = scores({"base": base, "arm": arm}, seeds=seeds)
    (outcome,) = outcomes([found], one_look(15))[0].values()
    assert outcome.difference.n == 15
    assert outcome.difference.mean < 0
    assert not outcome.difference.low > 0


def test_a_seed_of_the_base_alone_is_as_bad_as_the_worst_of_any_seed() -> None:
    """Else a base that diverges there would do better than an arm that diverges beside it."""
    table: Table = {
        "base": {0: {seed: Run(0.5, 0.5) for seed in range(1, 9)} | {8: GONE}},
        "arm": {0: {seed: Run(0.5, -0.1 * seed) for seed in range(1, 7)}},
    }
    seeds = {"base": range(1, 9), "arm": range(1, 7)}
    assert Scores("base", True, 0.0, table, seeds, block=6).results["base"][8] == pytest.approx(-0.6)
    assert Scores("base", True, 0.0, table, seeds).results["base"][8] == 0.0


def test_a_base_with_more_seeds_is_compared_as_a_group_and_any_other_reference_in_pairs() -> None:
    random = np.random.default_rng(1)
    table = {
        arm: {0: {seed: Run(0.5, score) for seed, score in enumerate(random.normal(size=n).tolist(), 1)}}
        for arm, n in {"base": 12, "a": 6, "b": 6}.items()
    }
    seeds = {arm: [*of_arm[0]] for arm, of_arm in table.items()}
    found = Scores("base", True, 0.0, table, seeds, block=6)
    groups = [Groups.plain([*found.results[arm].values()], [*found.results["base"].values()]) for arm in "ab"]
    (by_arm,) = outcomes([found], one_look(6))
    assert [by_arm[arm].difference for arm in "ab"] == compare_groups(groups)
    (other,) = outcomes([replace(found, base="a")], one_look(6), afterwards=True)
    in_pairs = replace(found, base="a")
    expected = compare([in_pairs.differences(arm) for arm in ("base", "b")])
    assert [other[arm].difference for arm in ("base", "b")] == expected
    assert [d.of_base for d in expected] == [None, None]


def test_a_difference_of_rounding_is_none() -> None:
    table: Table = {"base": {0: {1: Run(1, 0.3), 2: Run(1, 0.1)}}, "arm": {0: {1: Run(1, 0.1 + 0.2), 2: Run(1, 0.2)}}}
    assert scores(table).differences("arm") == [0.0, 0.1]


def test_seeds_that_only_one_side_has_are_not_compared() -> None:
    table: Table = {"base": {0: {1: Run(1, 0.3)}}, "arm": {0: {1: Run(1, 0.4), 2: Run(1, 0.9)}}}
    found = Scores("base", True, 0.0, table, {"base": [1], "arm": [1, 2]})
    assert found.differences("arm") == pytest.approx([0.1])


def test_the_best_candidate_is_of_those_that_finished_all_seeds() -> None:
    table: Table = {
        "base": {0: {1: Run(0.9, 0.1), 2: GONE}, 1: {1: Run(0.4, 0.1), 2: Run(0.6, 0.1)}, 2: {1: Run(0.5, 0.1)}},
        "arm": {0: {1: GONE, 2: Run(0.9, 0.9)}},
    }
    assert scores(table).best("base") == 1
    assert scores(table).best("arm") is None


# Divergence can only hurt, where a run that finishes is no worse than chance.

scored = st.floats(0.25, 1).map(lambda x: round(x, 2))


@st.composite
def tables(draw: st.DrawFn, *, same: bool) -> Table:
    """same: validation and test scores are equal, so that no run profits from the noise of the choice."""
    table: Table = {}
    for arm in ("base", "arm", "other"):
        table[arm] = {}
        for number in range(draw(st.integers(1, 4))):
            table[arm][number] = {}
            for seed in (1, 2):
                validation = draw(scored)
                run = Run(validation, validation if same else draw(scored))
                table[arm][number][seed] = draw(st.sampled_from([run, run, run, GONE, Run(run.validation, math.nan)]))
    return table


@given(tables(same=True), st.data(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_run_that_diverges_never_improves_its_arm(table: Table, data: st.DataObject, maximize: bool) -> None:
    chance = 0.25 if maximize else 1.0
    before = scores(table, maximize=maximize, chance=chance).results["arm"]
    number = data.draw(st.sampled_from([*table["arm"]]))
    table["arm"][number][1] = GONE
    after = scores(table, maximize=maximize, chance=chance).results["arm"]
    assert after[1] <= before[1] if maximize else after[1] >= before[1], "other seeds may choose another candidate"


@given(tables(same=False), st.data())
@settings(max_examples=100, deadline=None)
def test_a_seed_all_of_whose_runs_diverge_is_no_better_than_any_of_that_seed(table: Table, data: st.DataObject) -> None:
    table["arm"] = {number: {**of, 1: GONE} for number, of in table["arm"].items()}
    found = scores(table, chance=0.25)
    assert found.results["arm"][1] <= min(results[1] for results in found.results.values())


# What fewer candidates would have given.


def subsets(found: Scores, arm: str, budget: int) -> Iterator[float]:
    for some in combinations(found.runs[arm], budget):
        runs = {**found.runs, arm: {number: found.runs[arm][number] for number in some}}
        fewer = replace(found, runs=runs)
        fewer._worst.update(found._worst)  # the worst of all runs, not of the subset's
        yield from fewer.sample(arm, found.seeds[arm]).results().tolist()


@pytest.mark.slow
@given(tables(same=False), st.booleans())
@settings(max_examples=100, deadline=None)
def test_by_budget_is_the_mean_over_all_subsets_of_candidates(table: Table, maximize: bool) -> None:
    found = scores(table, maximize=maximize, chance=0.25 if maximize else 1.0)
    for seed in (1, 2):
        found.worst(seed), found.worst(seed, "validation")
    for arm in table:
        curve = found.by_budget(arm)
        assert list(curve) == [*range(1, len(table[arm]) + 1)]
        for budget, value in curve.items():
            brute = list(subsets(found, arm, budget))
            assert value == pytest.approx(sum(brute) / len(brute))
        assert curve[len(curve)] == pytest.approx(sum(found.results[arm].values()) / 2), (
            "all of them: the arm's own score"
        )


def test_many_candidates_are_looked_at_in_doubles() -> None:
    draw = np.random.default_rng(0)
    runs = {
        number: {seed: Run(*(number / 20 + draw.normal(0, 0.01, 2)).tolist()) for seed in (1, 2, 3)}
        for number in range(20)
    }
    found = scores({"base": runs, "arm": runs}, seeds=(1, 2, 3))
    curve = found.by_budget("arm")
    assert list(curve) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]
    assert curve[1] < curve[4] < curve[16] < curve[20] == pytest.approx(sum(found.results["arm"].values()) / 3)


@pytest.mark.parametrize("candidates", [3, 5, 9])
def test_weights_are_those_of_the_definition(candidates: int) -> None:
    """As many candidates as seeds or fewer, and more: the sums are formed in another way then."""
    n = 5
    validation = np.random.default_rng(candidates).normal(size=(n, candidates))
    weights = cross_fitting.Sample(validation, validation).weights()
    for seed in range(n):
        others = np.delete(validation, seed, axis=0)
        means = others.mean(0)
        best = means.argmax()
        errors = (others[:, [best]] - others).std(0, ddof=1) / math.sqrt(n - 1)
        error = sorted(np.delete(errors, best))[(candidates - 2) // 2]
        expected = np.exp(-(means[best] - means) / error)
        assert weights[seed] == pytest.approx(expected / expected.sum())


def test_subsets_weigh_at_once_as_one_by_one() -> None:
    scores = np.random.default_rng(0).normal(size=(2, 4, 9))
    sample = cross_fitting.Sample(*scores)
    subsets = np.array([[0, 3, 8, 1, 5], [7, 2, 4, 6, 0], [8, 7, 6, 5, 4]])
    at_once = sample.among(subsets).results()
    assert at_once == pytest.approx(np.array([sample.among(each).results() for each in subsets]))


# One family over several tasks.


@pytest.fixture
def two_tasks() -> list[Scores]:
    def table(shifts: dict[str, float], scale: float) -> Scores:
        noise: Callable[[int, str], float] = lambda seed, arm: 0.1 * ((seed * len(arm) * 7) % 5)  # noqa: E731
        seeds = tuple(range(1, 8))
        runs: Table = {
            arm: {0: {s: Run(0, scale * (shift + noise(s, arm))) for s in seeds}} for arm, shift in shifts.items()
        }
        return scores(runs, seeds=seeds)

    return [table({"base": 0, "a": 1, "bbb": 0.1}, 1.0), table({"base": 0, "a": 0.1, "cc": 2}, 50.0)]


def test_a_family_of_two_tasks_is_one_test_in_two_units(two_tasks: list[Scores]) -> None:
    found = outcomes(two_tasks, one_look(7))
    assert [list(of) for of in found] == [["a", "bbb"], ["a", "cc"]]
    arms = [(unit, arm) for unit, table in enumerate(two_tasks) for arm in table.others]
    at_once = compare([two_tasks[unit].differences(arm) for unit, arm in arms], [unit for unit, _ in arms])
    assert [found[unit][arm].difference for unit, arm in arms] == at_once
    apart: list[Any] = [outcomes([table], one_look(7))[0] for table in two_tasks]
    for unit, arm in arms:
        assert found[unit][arm].difference.p >= apart[unit][arm].difference.p - 0.02, "more arms to rival it"
