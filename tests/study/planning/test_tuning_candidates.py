"""The candidates of tuning: the same for whoever asks, spread over their ranges, and what lies beyond them."""

from itertools import islice
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deltalab.errors import InputError
from deltalab.study.planning import tuning_candidates
from deltalab.study.planning.tuning_candidates import MOST_DRAWN, beyond, edge, spread_candidates
from deltalab.study.specs.sections.search_space import Search

LR = Search(log_uniform=(1e-3, 1e-1))
CLIP = Search(uniform=(0.5, 2))
HEADS = Search(choice=(1, 2, 4))


def first(searched: dict[str, Search], trials: int, own: dict[str, Any]) -> list[dict[str, Any]]:
    return list(islice(spread_candidates(searched, trials, own), trials))


def rates(found: list[dict[str, Any]]) -> list[float]:
    return [candidate["train.lr"] for candidate in found]


def test_a_range_is_a_grid_with_both_ends_and_the_bases_own_value() -> None:
    assert rates(first({"train.lr": LR}, 5, {"train.lr": 0.01})) == [0.001, 0.003162, 0.01, 0.03162, 0.1]
    assert rates(first({"train.lr": LR}, 5, {"train.lr": 0.02})) == [0.001, 0.004472, 0.02, 0.04472, 0.1]
    even = first({"train.lr": Search(uniform=(0, 3))}, 4, {"train.lr": 1.2})
    assert rates(even) == [0, 1.2, 2.1, 3]
    whole = first({"model.conv": Search(integers=(2, 8))}, 3, {"model.conv": 4})
    assert whole == [{"model.conv": 2}, {"model.conv": 4}, {"model.conv": 8}]


def test_two_candidates_are_the_bases_own_value_and_the_farther_end() -> None:
    assert rates(first({"train.lr": LR}, 2, {"train.lr": 0.02})) == [0.02, 0.001]
    assert rates(first({"train.lr": LR}, 2, {"train.lr": 0.005})) == [0.005, 0.1]
    assert rates(first({"train.lr": LR}, 2, {"train.lr": 0.1})) == [0.001, 0.1]


def test_a_base_outside_of_the_range_comes_beside_the_grid() -> None:
    assert rates(first({"train.lr": LR}, 3, {"train.lr": 0.5})) == [0.5, 0.001, 0.1]
    assert rates(first({"train.lr": LR}, 4, {"train.lr": 0.0})) == [0.0, 0.001, 0.01, 0.1]


def test_a_base_without_a_value_gives_none() -> None:
    found = first({"model.key_dim": Search(integers=(8, 64))}, 2, {"model.key_dim": None})
    assert found == [{"model.key_dim": 8}, {"model.key_dim": 64}]


def digits(x: float) -> float:
    return float(f"{x:.4g}")


@given(st.floats(1e-4, 1).map(digits), st.floats(1.5, 100), st.integers(2, 12), st.floats(0, 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_candidates_differ_and_hold_the_own_value_and_the_ends(
    low: float, times: float, trials: int, x: float, log: bool
) -> None:
    bounds = (low, digits(low * times))
    search = Search(log_uniform=bounds) if log else Search(uniform=bounds)
    own = digits(low + x * (bounds[1] - low))
    found = rates(first({"train.lr": search}, trials, {"train.lr": own}))
    assert len(set(found)) == trials
    assert own in found
    ends = [end in found for end in bounds]
    assert all(ends) if trials > 2 else any(ends)


SPACES: list[dict[str, Search]] = [
    {"train.lr": LR},
    {"train.lr": LR, "train.clip": CLIP},
    {"train.lr": LR, "model.heads": HEADS},
    {"model.conv": Search(integers=(2, 40)), "train.clip": CLIP},
]
OWN = {"train.lr": 0.02, "train.clip": 1.0, "model.heads": 2, "model.conv": 4}


@pytest.mark.parametrize("searched", SPACES, ids=lambda space: "+".join(space))
def test_they_are_distinct_reproducible_and_inside(searched: dict[str, Search]) -> None:
    own = {path: OWN[path] for path in searched}
    found = list(spread_candidates(searched, 8, own))
    assert found == list(spread_candidates(searched, 8, own))
    assert own in found[:8]
    assert 8 <= len(found) <= (MOST_DRAWN + 1) * 8, "more follow, for those that make no model"
    assert len({str(candidate) for candidate in found}) == len(found)
    for candidate in found:
        assert list(candidate) == list(searched)
        for path, value in candidate.items():
            ends = searched[path].extremes
            assert value in ends if searched[path].choice else ends[0] <= value <= ends[1]


def test_several_settings_are_spread_over_all_of_their_space() -> None:
    found = first({"train.lr": LR, "train.clip": CLIP}, 16, OWN)
    for low, high, of in ((1e-3, 1e-2, "train.lr"), (1e-2, 1e-1, "train.lr"), (0.5, 1.25, "train.clip")):
        assert 6 <= sum(low <= candidate[of] <= high for candidate in found) <= 10


def test_no_more_are_drawn_than_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(tuning_candidates, "_existing", lambda _, one: drawn.append(one) or one)
    first({"train.lr": LR, "model.heads": HEADS}, 1000, OWN)
    assert 1000 <= len(drawn) < 1100


def test_a_budget_for_every_combination_takes_them_in_order() -> None:
    space = {"train.lr": Search(choice=(0.1, 0.2)), "model.heads": HEADS}
    found = list(spread_candidates(space, 6, {"train.lr": 0.15, "model.heads": 1}))
    assert [tuple(candidate.values()) for candidate in found] == [
        (0.1, 1), (0.1, 2), (0.1, 4), (0.2, 1), (0.2, 2), (0.2, 4),
    ]  # fmt: skip


def test_a_smaller_budget_begins_with_the_bases_own_values() -> None:
    space = {"train.lr": Search(choice=(0.1, 0.2)), "model.heads": HEADS}
    assert first(space, 4, {"train.lr": 0.2, "model.heads": 2})[0] == {"train.lr": 0.2, "model.heads": 2}
    other = first(space, 4, {"train.lr": 0.15, "model.heads": 2})
    assert all(candidate["train.lr"] != 0.15 for candidate in other), "a choice is made among those that are listed"


@pytest.mark.parametrize(
    ("space", "trials", "there"),
    [
        ({"model.conv": Search(integers=(2, 4))}, 4, 3),
        ({"train.lr": Search(choice=(0.1, 0.2))}, 3, 2),
        ({"train.lr": Search(log_uniform=(1e-2, 1.00001e-2))}, 2, 1),
    ],
)
def test_a_range_that_holds_too_few_candidates_is_refused(space: dict[str, Search], trials: int, there: int) -> None:
    with pytest.raises(InputError, match=f"trials {trials}: there are only {there} candidates to try"):
        spread_candidates(space, trials, dict.fromkeys(space, 0.01 if "train.lr" in space else 2))


# Beyond a range.


def test_the_next_value_is_as_far_as_the_last_two_are_apart() -> None:
    tried = [{"train.lr": lr} for lr in (0.01, 0.1, 0.001)]
    assert beyond({"train.lr": LR}, tried, "train.lr", above=True) == {"train.lr": 1.0}
    assert beyond({"train.lr": LR}, tried, "train.lr", above=False) == {"train.lr": 0.0001}
    clip = [{"train.clip": clip} for clip in (0.5, 1.0, 2.0)]
    assert beyond({"train.clip": CLIP}, clip, "train.clip", above=True) == {"train.clip": 3.0}
    conv = [{"model.conv": conv} for conv in (4, 6)]
    found = beyond({"model.conv": Search(integers=(4, 6))}, conv, "model.conv", above=True)
    assert found == {"model.conv": 8}
    assert isinstance(found["model.conv"], int)


def test_other_settings_stay_what_they_are_at_the_end() -> None:
    tried = [{"train.lr": 0.01, "model.heads": 1}, {"train.lr": 0.1, "model.heads": 4}]
    found = beyond({"train.lr": LR, "model.heads": HEADS}, tried, "train.lr", above=True)
    assert found == {"train.lr": 1.0, "model.heads": 4}


@given(st.lists(st.floats(1e-3, 1e-1).map(lambda x: float(f"{x:.3g}")), min_size=2, max_size=6, unique=True))
@settings(max_examples=40, deadline=None)
def test_what_lies_beyond_is_farther_than_all(values: list[float]) -> None:
    assume(max(values) / min(values) > 1.01)
    tried = [{"train.lr": value} for value in values]
    assert beyond({"train.lr": LR}, tried, "train.lr", above=True)["train.lr"] > max(values)
    assert 0 < beyond({"train.lr": LR}, tried, "train.lr", above=False)["train.lr"] < min(values)


def test_the_edge_is_of_what_was_tried() -> None:
    space = {
        "train.lr": LR,
        "model.heads": HEADS,
        "model.mlp": Search(choice=(True, False)),
        "rule.beta": Search(choice=("one", 2)),
    }
    tried = [
        {"train.lr": lr, "model.heads": heads, "model.mlp": mlp, "rule.beta": beta}
        for lr, heads, mlp, beta in ((0.01, 1, True, "one"), (0.02, 2, False, 2), (0.05, 4, True, 2))
    ]
    assert edge(space, tried, tried[0]) == {"train.lr": "lowest", "model.heads": "lowest"}
    assert edge(space, tried, tried[1]) == {}
    assert edge(space, tried, tried[2]) == {"train.lr": "highest", "model.heads": "highest"}, "words have no order"
    same = [{"train.lr": 0.01}, {"train.lr": 0.01}]
    assert edge({"train.lr": LR}, same, same[0]) == {}
