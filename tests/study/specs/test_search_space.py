"""The space of a search: conditions, patterns of layers, what bounds candidates, what it weighs, where it begins."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltalab import InputError
from deltalab.store import RunRecord, Store
from deltalab.study.answers.recorded_scores import RecordedScores
from deltalab.study.forecast.estimate import estimate
from deltalab.study.planning import matching
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Infeasible, Plan
from deltalab.study.planning.warm_starts import named_candidates, recorded_candidates
from deltalab.study.running.run import arm_records
from deltalab.study.specs.json_schema import schema
from deltalab.study.specs.sections.budget import Bound, Match, Objective, Searching
from deltalab.study.specs.sections.search_space import Search, combinations, count_combinations
from deltalab.study.specs.study_file import load_study
from deltalab.study.workers.train_stack import execute, failed

LR = {"log_uniform": [1e-3, 1e-1]}
MQAR = {"length": 16, "pairs": 2, "vocab_size": 32}
STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"mqar": MQAR},
    "base": {
        "rule": "comba",
        "model": {"d_model": 8, "layers": 1, "heads": 1, "mlp": False},
        "train": {"steps": 4, "batch_size": 4, "lr": 1e-2, "evaluations": 1, "eval_batches": 1},
    },
    "seeds": 2,
}
CONDITIONS: dict[str, Any] = {
    "rule": {"choice": ["comba", {"name": "gla"}, "deltanet"]},
    "rule.d": {"choice": [0, "head"], "when": {"rule": "comba"}},
    "rule.b": {"choice": ["head_sigmoid", 1], "when": {"rule.d": "head", "rule": ["comba"]}},
    "model.mlp": {"choice": [True, False]},
    "model.mlp_width": {"integers": [8, 16], "when": {"model.mlp": True}},
    "trials": 8,
}
EITHER: dict[str, Any] = {
    "rule": {"choice": ["comba", "gla", "deltanet"]},
    "model.mlp": {"choice": [True, False]},
    "model.mlp_width": {"choice": [8, 16], "when": [{"rule": "gla", "model.mlp": True}, {"rule": ["comba"]}]},
    "trials": 8,
}
LAYERS: dict[str, Any] = {
    "model.layers": {"pattern": ["rule", "attention", {"name": "attention", "window": 4}], "lengths": [2, 4]},
    "trials": 8,
}


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    def planned(search: dict[str, Any], **given: Any) -> Plan:
        file = tmp_path / "s.yaml"
        file.write_text(yaml.safe_dump({**STUDY, **given, "search": {"trials": 4, "finalists": 1, **search}}))
        return make_plan(load_study(file), study_file="s.yaml")

    return planned


def searching(**given: Any) -> Searching:
    return Searching.model_validate({"trials": 4, "finalists": 1, **given})


def draws(space: Searching, number: int = 200) -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [space.draw(lambda _, knob: draw.choice(knob.points(4))) for _ in range(number)]


# Conditions.


def test_a_setting_is_drawn_where_its_condition_holds_and_nowhere_else() -> None:
    space = searching(**CONDITIONS)
    for candidate in draws(space):
        comba = candidate["rule"] == "comba"
        assert ("rule.d" in candidate) == comba
        assert ("rule.b" in candidate) == (comba and candidate["rule.d"] == "head")
        assert ("model.mlp_width" in candidate) == candidate["model.mlp"]


def test_of_a_list_of_conditions_one_must_hold() -> None:
    space = searching(**EITHER)
    for candidate in space.combinations():
        either = candidate["rule"] == "comba" or (candidate["rule"] == "gla" and candidate["model.mlp"])
        assert ("model.mlp_width" in candidate) == either
    assert space.whole == 9
    backwards = [*searching(**dict(reversed(EITHER.items()))).knobs]
    assert backwards[-1] == "model.mlp_width", "it comes after the settings of all its conditions"


def test_a_list_of_one_condition_is_that_condition() -> None:
    one, listed = (
        {"model.mlp": {"choice": [True, False], "when": when}} for when in ({"rule": "gla"}, [{"rule": "gla"}])
    )
    rule = {"rule": EITHER["rule"]}
    assert searching(**rule, **one).model_dump() == searching(**rule, **listed).model_dump()


def test_the_base_tunes_what_one_of_its_conditions_allows(plan: Callable[..., Plan]) -> None:
    rule = {"rule": {"choice": ["comba", "gla", "deltanet"]}, "train.clip": {"choice": [0, 1]}}

    def tuned(when: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = plan({**rule, "train.lr": {"choice": [1e-3, 1e-1], "when": when}, "trials": 8})
        return sorted(found.candidates(found.arms[0]), key=str)

    none = [{"train.clip": 0}, {"train.clip": 1}]
    rates = [{"train.clip": clip, "train.lr": lr} for clip in (0, 1) for lr in (1e-1, 1e-3)]
    assert tuned([{"rule": "gla"}, {"rule": "deltanet", "train.clip": 0}]) == none
    assert tuned([{"rule": "gla"}, {"rule": "comba"}]) == sorted(rates, key=str)
    assert tuned([{"rule": "gla"}, {"rule": "comba", "train.clip": 0}]) == sorted([none[1], *rates[:2]], key=str)


def test_knobs_come_after_those_in_their_conditions_whatever_the_order_of_the_file() -> None:
    backwards = dict(reversed(CONDITIONS.items()))
    knobs = [*searching(**backwards).knobs]
    assert knobs.index("rule") < knobs.index("rule.d") < knobs.index("rule.b")
    assert knobs.index("model.mlp") < knobs.index("model.mlp_width")


@pytest.mark.parametrize(
    "given", [CONDITIONS, EITHER, LAYERS, {**LAYERS, **CONDITIONS}], ids=["when", "or", "pattern", "both"]
)
def test_a_candidate_tells_its_knobs(given: dict[str, Any]) -> None:
    space = searching(**given)
    for candidate in draws(space):
        knobs = space.drawn(candidate)
        assert knobs is not None
        assert space.draw(lambda name, _, knobs=knobs: knobs[name]) == candidate


@pytest.mark.parametrize(
    "changed",
    [
        {"rule": "mamba2"},
        {"rule": "deltanet"},
        {"rule.d": 1},
        {"model.mlp_width": 8.5},
        {"model.mlp_width": 17},
        {"model.mlp": 1},
        {"train.lr": 0.1},
    ],
)
def test_what_no_candidate_has_is_outside_of_the_space(changed: dict[str, Any]) -> None:
    space = searching(**CONDITIONS)
    inside = {"rule": "comba", "rule.d": 0, "model.mlp": True, "model.mlp_width": 8}
    assert space.drawn(inside) is not None
    assert space.drawn({**inside, **changed}) is None
    assert space.drawn({"rule": "comba", "model.mlp": False}) is None, "it lacks rule.d"


def test_all_combinations_are_counted_and_listed_without_what_does_not_exist() -> None:
    space = searching(**{key: value for key, value in CONDITIONS.items() if not key.startswith("model")}, finalists=1)
    assert space.whole == 5
    assert [*space.combinations()] == [
        {"rule": "comba", "rule.d": 0},
        {"rule": "comba", "rule.d": "head", "rule.b": "head_sigmoid"},
        {"rule": "comba", "rule.d": "head", "rule.b": 1},
        {"rule": {"name": "gla"}},
        {"rule": "deltanet"},
    ]
    assert searching(**CONDITIONS).whole is None, "integers are a range"


@pytest.mark.parametrize("seed", range(40))
def test_the_count_of_combinations_is_that_of_their_list(seed: int) -> None:
    r, knobs = random.Random(seed), dict[str, Search]()
    for name in "abcdefg"[: r.randint(1, 7)]:
        above = [{other: r.sample([1, 2, 3], r.randint(1, 2))} for other in r.sample([*knobs], min(len(knobs), 2))]
        when = r.choice([None, above or None, {key: value for way in above for key, value in way.items()} or None])
        knobs[name] = Search(choice=(1, 2, 3)[: r.randint(2, 3)], when=when)
    assert count_combinations(knobs) == len([*combinations(knobs)])


def test_a_long_pattern_is_counted_without_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 places of two layers have over 10,000 combinations, and each of those listed asks 100 knobs."""
    asked = [0]
    exists = Search.exists

    def counted(knob: Search, drawn: dict[str, Any]) -> bool:
        asked[0] += 1
        return exists(knob, drawn)

    monkeypatch.setattr(Search, "exists", counted)
    long = {"trials": 8, "model.layers": {"pattern": ["rule", "gla"], "lengths": [50, 100]}}
    assert Searching.model_validate(long).whole is None
    assert asked[0] < 1000


def test_a_candidate_leaves_inactive_knobs_at_the_rules_own_defaults(plan: Callable[..., Plan]) -> None:
    base = {**STUDY["base"], "rule": {"name": "comba", "b": 1, "transition": "iplr"}}
    search = {
        "rule.d": CONDITIONS["rule.d"] | {"when": None},
        "rule.b": {"choice": [0.5, 1], "when": {"rule.d": "head"}},
    }
    found = plan({**search, "trials": 3, "finalists": 1}, base=base)
    without = found.job(found.arms[0], "tune", 0, {"rule.d": 0}).config["rule"]
    default = make_plan(load_study(STUDY)).arms[0].config["rule"]
    assert without["b"] == default["b"] != found.arms[0].config["rule"]["b"]
    assert without["transition"] == "iplr", "what is not searched is as the base has it"


def test_a_gates_options_may_be_searched_where_the_gate_is_chosen(plan: Callable[..., Plan]) -> None:
    search = {
        "rule.g": {"choice": ["mamba2_decay", "gla_decay"]},
        "rule.g.gla_decay.rank": {"choice": [2, 4], "when": {"rule.g": "gla_decay"}},
    }
    found = plan({**search, "trials": 3}, base={**STUDY["base"], "rule": "gla"})
    job = found.job(found.arms[0], "tune", 0, {"rule.g": "gla_decay", "rule.g.gla_decay.rank": 2})
    assert job.config["rule"]["g"]["gla_decay"]["rank"] == 2


def test_the_base_tunes_the_training_that_exists_for_it(plan: Callable[..., Plan]) -> None:
    search = {
        "rule": {"choice": ["comba", "gla"]},
        "train.lr": {**LR, "when": {"rule": "comba"}},
        "train.clip": {"choice": [0.5, 1], "when": {"rule": "gla"}},
    }
    found = plan(search)
    assert all(set(values) == {"train.lr"} for values in found.candidates(found.arms[0]))


def test_every_seed_of_the_base_and_of_each_finalist_tries_as_many_trainings(plan: Callable[..., Plan]) -> None:
    found = plan({"rule": {"choice": ["comba", "gla"]}, "train.lr": LR, "trials": 9, "finalists": 2})
    assert [found.tried(arm) for arm in found.arms] == [5, 5, 5]
    assert (found.trials, found.runs) == (9 + 15, 9 + 15 * found.spec.looks[-1].seeds)
    tries = "search: each seed of the base and of each finalist tries 5 values of train.lr"
    assert f"{tries}, weighted by the other seeds." in estimate(found).notes
    base, first, *_ = found.arms
    winner = {"rule": "gla", "train.lr": 0.0123}
    own = list(islice(found.candidates(first, winner), 5))
    assert own[0] == winner
    assert {one["rule"] for one in own} == {"gla"}
    assert len({one["train.lr"] for one in own}) == 5
    assert len(list(islice(found.candidates(base), 5))) == 5


def test_a_search_says_how_many_trainings_each_arm_has(plan: Callable[..., Plan]) -> None:
    search = {"rule": {"choice": ["comba", "gla"]}, "train.lr": LR, "trials": 9, "finalists": 2}
    found = plan({**search, "trainings": 3})
    assert [found.tried(arm) for arm in found.arms] == [3, 3, 3]
    with pytest.raises(InputError, match=r"search\.trainings"):
        plan({**search, "trainings": 2})
    assert found.identity != plan(search).identity
    winner = {"rule": "gla", "train.lr": 0.0123}
    assert next(found.candidates(found.arms[1], winner)) == winner
    with pytest.raises(InputError, match=r"search\.trainings 3: nothing of train is searched"):
        plan({"rule": search["rule"], "trials": 2, "finalists": 1, "trainings": 3})


def test_a_finalist_tunes_the_training_that_exists_for_it(plan: Callable[..., Plan]) -> None:
    search = {
        "rule": {"choice": ["comba", "gla"]},
        "train.clip": {"choice": [0.5, 1], "when": {"rule": "gla"}},
    }
    found = plan({**search, "trials": 3})
    base, first = found.arms
    assert list(found.candidates(base)) == [{}]
    assert list(found.candidates(first, {"rule": "comba"})) == [{"rule": "comba"}]
    assert {one["train.clip"] for one in found.candidates(first, {"rule": "gla", "train.clip": 1})} == {0.5, 1}


def test_a_search_of_the_training_alone_tunes_the_base_alone(plan: Callable[..., Plan]) -> None:
    found = plan({"train.lr": LR})
    assert [found.tried(arm) for arm in found.arms] == [5, 1]
    assert (
        "search: each seed of the base tries 5 values of train.lr, weighted by the other seeds."
        in estimate(found).notes
    )
    assert list(found.candidates(found.arms[1], {"train.lr": 0.02})) == [{"train.lr": 0.02}]


def test_a_condition_may_name_any_integer(plan: Callable[..., Plan]) -> None:
    search = {
        "model.mlp_width": {"integers": [1, 1000]},
        "model.token_shift": {"choice": [True, False], "when": {"model.mlp_width": 37}},
    }
    found = plan(search, base={**STUDY["base"], "model": {"d_model": 8, "layers": 1, "heads": 1}})
    assert found.job(found.arms[0], "tune", 0, {"model.mlp_width": 37, "model.token_shift": True}).config


# Patterns of layers.


def test_each_place_of_a_pattern_is_a_choice() -> None:
    space = searching(**LAYERS)
    assert [*space.knobs] == ["model.layers.length", *(f"model.layers[{i}]" for i in range(4))]
    lengths = {len(candidate["model.layers"]) for candidate in draws(space)}
    assert lengths == {2, 4}
    assert space.whole == 3**2 + 3**4
    assert len({str(candidate) for candidate in space.combinations()}) == space.whole


def test_a_pattern_may_repeat(plan: Callable[..., Plan]) -> None:
    found = plan({"model.layers": {"pattern": ["rule", "attention"], "lengths": 2, "repeat": 2}})
    space = found.spec.search
    assert space is not None
    assert {"model.layers": ["rule", "attention"] * 2} in space.combinations()
    assert space.drawn({"model.layers": ["rule", "attention", "attention", "rule"]}) is None


def test_a_candidates_layers_are_those_of_its_pattern(plan: Callable[..., Plan]) -> None:
    found = plan(LAYERS)
    windowed = {"name": "attention", "window": 4}
    model, _ = found.job(found.arms[0], "tune", 0, {"model.layers": ["rule", windowed]}).specs
    assert [model.at(i).make_rule().name for i in range(model.depth)] == ["comba", "attention"]
    with pytest.raises(Infeasible, match="stands in no layer"):
        found.job(found.arms[0], "tune", 0, {"model.layers": ["attention", windowed]})
    assert set(found.rules) == {"comba", "attention"}


# What bounds candidates.


HEADS = {"model.heads": {"choice": [1, 2, 4, 8]}, "model.expand_v": {"choice": [1, 2]}, "trials": 4}


def test_a_candidate_that_breaks_a_constraint_is_infeasible_with_its_size(plan: Callable[..., Plan]) -> None:
    found = plan({**HEADS, "constrain": {"state": {"at_most": 120, "at_least": 20}}})
    fits = {"model.heads": 2, "model.expand_v": 1}
    assert found.job(found.arms[0], "tune", 0, fits).values == fits
    with pytest.raises(Infeasible) as raised:
        found.job(found.arms[0], "tune", 0, {"model.heads": 1, "model.expand_v": 2})
    assert "constrain.state: " in str(raised.value)
    assert "is not at most 120 and at least 20" in str(raised.value)
    assert found.job(found.arms[0], "tune", 0, {}).key, "the base is no candidate"


def test_a_share_of_the_bases_size_bounds_both_ways(plan: Callable[..., Plan]) -> None:
    found = plan({**HEADS, "constrain": {"parameters": {"within": 0.05, "of": "base"}}})
    (bounded,) = found.bounded(found.arms[0], found.arms[0].config).values()
    assert (bounded.least, bounded.most) == (0.95 * bounded.amount, 1.05 * bounded.amount)
    with pytest.raises(Infeasible, match="within 5% of the base's"):
        found.job(found.arms[0], "tune", 0, {"model.heads": 1, "model.expand_v": 2})


def test_a_candidate_is_matched_to_the_base(plan: Callable[..., Plan]) -> None:
    found = plan({**HEADS, "match": {"state": True}, "constrain": {"state": {"within": 0.02}}},
                 base={**STUDY["base"], "model": {"d_model": 64, "layers": 1, "heads": 1, "mlp": False}})  # fmt: skip
    (base,) = found.bounded(found.arms[0], found.arms[0].config).values()
    job = found.job(found.arms[0], "tune", 0, {"model.heads": 1, "model.expand_v": 2})
    assert job.config["model"]["key_dim"] < 64
    (matched,) = found.bounded(found.arms[0], job.config).values()
    assert abs(matched.amount / base.amount - 1) <= 0.02
    confirmed = found.job(found.arms[1], "confirm", 0, {"model.heads": 1, "model.expand_v": 2})
    assert confirmed.config == job.config, "it is confirmed as it was tried"


def test_a_candidate_is_matched_once_for_all_rungs(plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan({**HEADS, "match": {"state": True}, "fidelity": {"train.steps": [1, 2, 4]}},
                 base={**STUDY["base"], "model": {"d_model": 64, "layers": 1, "heads": 1, "mlp": False}})  # fmt: skip
    asked: list[Any] = []
    nearest = matching._nearest
    monkeypatch.setattr(matching, "_nearest", lambda *given: asked.append(given) or nearest(*given))
    values = {"model.heads": 1, "model.expand_v": 2}
    jobs = [found.job(found.arms[0], "tune", 0, values, rung=rung) for rung in (0, 1, 2, None)]
    assert len(asked) == 1
    assert all(job.config["model"] == jobs[-1].config["model"] for job in jobs)
    assert [job.config["train"]["steps"] for job in jobs] == [1, 2, 4, 4]
    found.job(found.arms[0], "tune", 1, {"model.heads": 1, "model.expand_v": 1})
    assert len(asked) == 2, "another model"


def test_a_plan_says_which_candidates_do_not_fit(plan: Callable[..., Plan]) -> None:
    (note,) = plan({"model.heads": {"choice": [1, 2, 4, 8]}, "constrain": {"state": {"at_least": 20}}}).notes
    assert "candidates drawn do not fit, such as model.heads=" in note
    assert "is not at least 20" in note


# What is weighed, by whom, at what price.


TASKS = {"mqar": ("accuracy", True), "text": ("loss", False)}


def test_objectives_are_the_metrics_of_all_tasks_and_two_costs_by_default() -> None:
    assert [*map(str, searching(**HEADS).weighed(TASKS))] == [
        "accuracy@mqar",
        "loss@text",
        "flops_per_token",
        "state_size",
    ]
    accuracy, cost = searching(**HEADS, objectives=["accuracy", "decode_us"]).weighed(TASKS)
    assert accuracy == Objective("accuracy", "mqar", True)
    assert cost == Objective("decode_us", None, False)
    (loss,) = searching(**HEADS, objectives=["loss@text"]).weighed(TASKS)
    assert loss == Objective("loss", "text", False)


def test_decoding_is_timed_where_it_is_weighed(plan: Callable[..., Plan], tmp_path: Path) -> None:
    base = {**STUDY["base"], "rule": "linear_attention"}
    plain, timed = plan(HEADS, base=base), plan({**HEADS, "objectives": ["accuracy", "decode_us"]}, base=base)
    values = {"model.heads": 2, "model.expand_v": 1}
    job = timed.job(timed.arms[0], "tune", 0, values)
    assert job.key != plain.job(plain.arms[0], "tune", 0, values).key, "a trial without the time is another one"
    (record,) = execute([job], tmp_path)
    ((_, _, step, seconds),) = [metric for metric in record.runs[0].metrics if metric[1] == "decode_us"]
    assert step == 4
    assert 0 < seconds < 1e7


def test_random_search_takes_its_share_of_the_trials() -> None:
    assert searching(**{**HEADS, "train.lr": LR, "trials": 64}).controls == 13
    assert searching(**{**HEADS, "train.lr": LR, "trials": 4}).controls == 1
    assert searching(**{**HEADS, "train.lr": LR, "trials": 64, "sampler": "random", "random": 0}).controls == 0
    assert searching(**{**HEADS, "trials": 8, "random": 0}).controls == 0, "all candidates are tried"


def test_rungs_change_what_a_trial_costs_and_leave_its_values(plan: Callable[..., Plan]) -> None:
    fidelity = {"train.steps": [1, 2, 4], "train.seeds": [1, 1, 2]}
    with pytest.raises(InputError, match=r"train\.seeds: takes at least two values that increase"):
        plan({**HEADS, "train.lr": LR, "trials": 9, "fidelity": fidelity})
    fidelity["train.seeds"] = [1, 2, 3]
    found = plan({**HEADS, "train.lr": LR, "trials": 9, "fidelity": fidelity})
    values = {"model.heads": 2, "model.expand_v": 1, "train.lr": 0.01}
    jobs = [found.job(found.arms[0], "tune", 0, values, rung=rung) for rung in range(3)]
    assert [(job.config["train"]["steps"], len(job.seeds)) for job in jobs] == [(1, 1), (2, 2), (4, 3)]
    assert all(job.values == values for job in jobs)
    assert found.job(found.arms[0], "tune", 0, values) == jobs[-1], "the last rung is the whole training"
    assert found.spec.search is not None
    assert found.spec.search.halved == [9, 3, 1]
    assert found.trials == 9 + 3 + 1 + 2 * 5
    assert found.runs == 9 * 1 + 3 * 2 + 1 * 3 + 2 * 5 * 2
    assert found.whole_runs == 9 * 1 / 4 + 3 * 2 / 2 + 1 * 3 + 2 * 5 * 2


def test_a_rung_must_be_a_training(plan: Callable[..., Plan]) -> None:
    base = {**STUDY["base"], "train": {**STUDY["base"]["train"], "evaluations": 3}}
    with pytest.raises(InputError, match=r"search\.fidelity: train\.evaluations 3 exceed steps 2"):
        plan({**HEADS, "finalists": 1, "fidelity": {"train.steps": [2, 4]}}, base=base)
    (note,) = plan({**HEADS, "fidelity": {"train.steps": [2, 8]}}).notes
    assert note.startswith("search.fidelity.train.steps ends at 8: ")
    assert "confirmed at the base's 4 on task 'mqar'" in note


def test_a_plan_says_what_a_search_draws_bounds_and_weighs(plan: Callable[..., Plan]) -> None:
    given = {
        **CONDITIONS,
        "constrain": {"state": {"at_most": 10**6}},
        "objectives": ["accuracy", "decode_us"],
        "fidelity": {"train.steps": [2, 4]},
        "warm": ["gla"],
    }
    assert estimate(plan(given)).notes[:5] == (
        "search: 5 settings, of which 3 exist only beside others; state at most 1,000,000.",
        "search: weighs accuracy@mqar (more), decode_us (less).",
        "search: mixed draws 6 of 8 candidates, random search 2 as a control.",
        "search: successive halving trains 8 at train.steps 2, 3 at train.steps 4.",
        "search: begins with gla.",
    )


# Where a search begins.


def test_a_named_rule_is_the_candidate_that_makes_it(plan: Callable[..., Plan]) -> None:
    search = {**CONDITIONS, "train.lr": LR, "warm": ["gla", {"name": "comba", "d": 0}, {"name": "comba", "b": 1}]}
    assert named_candidates(plan(search)) == [
        {"rule": {"name": "gla"}, "model.mlp": False, "train.lr": 0.01},
        {"rule": "comba", "rule.d": 0, "model.mlp": False, "train.lr": 0.01},
        {"rule": "comba", "rule.d": "head", "rule.b": 1, "model.mlp": False, "train.lr": 0.01},
    ]


def recorded_study(store: Store, plan: Plan, trials: list[tuple[dict[str, Any], int | None, float]]) -> int:
    """A study with a trial for each of the values, rungs and scores; values that come again keep their number."""
    (task,) = plan.tasks
    about = {task: {"metric": "accuracy", "maximize": True, "chance": 0.0}}
    assert plan.spec.search is not None
    spec = {"seeds": 2, "search": plan.spec.search.model_dump(mode="json")}
    study = store.begin_study(plan.spec.name, None, "id", spec, arm_records(plan), {"tasks": about})
    numbers = [values for i, (values, *_) in enumerate(trials) if values not in [one[0] for one in trials[:i]]]
    for values, rung, score in trials:
        job = plan.job(plan.arms[0], "tune", numbers.index(values), values, rung=rung)
        run = RunRecord(job.seeds[0], "done", None, [("validation", "accuracy", 4, score)])
        record = replace(failed(job, ""), state="done", error=None, runs=[run])
        store.record_trial(study, "base", record, job.number, values)
    return study


def test_an_earlier_studys_candidates_are_taken_where_they_fit(plan: Callable[..., Plan], tmp_path: Path) -> None:
    earlier = plan(
        {**HEADS, "model.heads": {"choice": [1, 2, 4, 16]}},
        name="earlier",
        task={"recall": {**MQAR, "task": "mqar"}},
        base={**STUDY["base"], "model": {"d_model": 8, "layers": 1, "key_dim": 4}},
    )
    scores = {1: 0.2, 2: 0.9, 4: 0.5, 16: 1.0}
    trials = [({"model.heads": heads, "model.expand_v": 1}, None, score) for heads, score in scores.items()]
    with Store.open(tmp_path / "lab.db") as store:
        recorded_study(store, earlier, trials)
        fits = recorded_candidates(plan({**HEADS, "trials": 8, "warm": [{"study": "earlier"}]}), store)
        assert [values["model.heads"] for values in fits] == [2, 4], (
            "the best first, as many as a quarter of the trials"
        )
        store.begin_study("plain", None, "plain", {"search": None}, arm_records(earlier)[:1], {"tasks": {}})
        with pytest.raises(InputError, match=r"search\.warm: study 'plain' has no candidates"):
            recorded_candidates(plan({**HEADS, "warm": [{"study": "plain"}]}), store)
        with pytest.raises(InputError, match=r"search\.warm: no candidate of study 'earlier' is in the space"):
            recorded_candidates(
                plan({**HEADS, "model.expand_v": {"choice": [2, 3]}, "warm": [{"study": "earlier"}]}), store
            )
        wider = recorded_candidates(plan({"train.lr": LR, **HEADS, "trials": 4, "warm": [{"study": "earlier"}]}), store)
        assert wider == [{"train.lr": 0.01, "model.heads": 2, "model.expand_v": 1}], "with the rate that it had"
        with pytest.raises(InputError, match="did you mean 'earlier'"):
            recorded_candidates(plan({**HEADS, "warm": [{"study": "earlyer"}]}), store)


def test_a_candidate_counts_at_the_last_rung_that_it_reached(plan: Callable[..., Plan], tmp_path: Path) -> None:
    found = plan({**HEADS, "trials": 8, "fidelity": {"train.steps": [1, 4]}})
    one, other = ({"model.heads": heads, "model.expand_v": 1} for heads in (1, 2))
    with Store.open(tmp_path / "lab.db") as store:
        study = recorded_study(store, found, [(one, 1, 0.9), (one, 0, 0.3), (other, 0, 0.4)])
        ledger = RecordedScores(store, store.study("s"), store.trials(study))
        trials = ledger.of("base", "mqar", "tune")
        assert [(trial.number, trial.config["train"]["steps"]) for trial in trials] == [(0, 4), (1, 1)]
        runs = ledger.runs(trials, "accuracy")
        assert [run.validation for number in runs for run in runs[number].values()] == [0.9, 0.4]


# Bad input.


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rule.d": {"choice": [0, 1], "when": {"rule": "comba"}}, **HEADS},
     "search.rule.d.when: unknown searched setting 'rule'"),
    ({"model.mlp_width": {"choice": [8, 9], "when": {"model.head": 1}}, **HEADS},
     "search.model.mlp_width.when: unknown searched setting 'model.head'; did you mean 'model.heads'?"),
    ({"model.mlp": {"choice": [True, False], "when": {"model.heads": [1, 3]}}, **HEADS},
     "search.model.mlp.when.model.heads: unknown value '3'; allowed: 1, 2, 4, 8"),
    ({**CONDITIONS, "rule.d": {"choice": [0, "head"], "when": {"rule": "combo"}}},
     "search.rule.d.when.rule: unknown value 'combo'; did you mean 'comba'?"),
    ({"model.conv": {"integers": [0, 4]}, "model.mlp": {"choice": [True, False], "when": {"model.conv": 5}}},
     "unknown value '5'; allowed: 0 to 4"),
    ({"train.lr": LR, "model.mlp": {"choice": [True, False], "when": {"train.lr": 0.1}}},
     "search.model.mlp.when: train.lr is no choice: a condition needs one, or integers"),
    ({"model.heads": {"choice": [1, 2], "when": {"model.conv": 4}}, "model.conv": {"choice": [0, 4], "when":
      {"model.heads": 1}}}, "the conditions go in a circle: "),
    ({"model.heads": {"choice": [1, 2], "when": {"model.heads": 1}}}, "in a circle: model.heads needs model.heads"),
    ({**CONDITIONS, "rule.b": {"choice": [0, 1], "when": {"rule.d": 0, "rule": "gla"}}},
     "search.rule.b.when: never holds"),
    ({"model.heads": {"choice": [1, 2], "when": []}},
     "search.model.heads.when: takes {SETTING: [value, ...]}, or a list of such mappings, not []"),
    ({**EITHER, "model.mlp_width": {"choice": [8, 16], "when": [{"rule": "gla"}, {"model.conv": 4}]}},
     "search.model.mlp_width.when[1]: unknown searched setting 'model.conv'; "),
    ({**EITHER, "model.mlp_width": {"choice": [8, 16], "when": [{"rule": "gla"}, {"rule": "combo"}]}},
     "search.model.mlp_width.when[1].rule: unknown value 'combo'; did you mean 'comba'?"),
    ({**CONDITIONS, "rule.b": {"choice": [0, 1], "when": [{"rule": "comba"}, {"rule.d": 0, "rule": "gla"}]}},
     "search.rule.b.when[1]: never holds"),
    ({**EITHER, "model.mlp_width": {"choice": [8, 16], "when": [{"rule": "gla"}, "comba"]}},
     "search.model.mlp_width.when: takes {SETTING: [value, ...]}, or a list of such mappings, not ["),
    ({"model.layers": {"pattern": ["rule", "attenton"], "lengths": [2]}}, "did you mean 'attention'?"),
    ({"model.layers": {"pattern": ["rule", {"name": "attention", "windw": 3}], "lengths": [2]}},
     "did you mean 'window'?"),
    ({"model.layers": {"pattern": ["rule", "attention"]}}, "search.model.layers: pattern needs lengths"),
    ({"model.layers": {"pattern": ["rule", "rule"], "lengths": 2}}, "pattern needs at least two values, all different"),
    ({"model.layers": {"choice": [1, 2], "lengths": 2}}, "search.model.layers: lengths goes with a pattern"),
    ({"model.heads": {"pattern": ["rule", "attention"], "lengths": 2}}, "only model.layers takes a pattern"),
    ({**HEADS, "train.lr": LR, "random": 0}, "search.random: must be above 0 and below 1"),
    ({**HEADS, "random": 1}, "search.random must be less than 1"),
    ({**HEADS, "sampler": "tpa"}, "search.sampler: unknown sampler 'tpa'; did you mean 'tpe'?"),
    ({**HEADS, "objectives": ["accurcy"]}, "search.objectives: unknown objective 'accurcy'; did you mean 'accuracy'?"),
    ({**HEADS, "objectives": ["accuracy", "accuracy@mqar"]}, "search.objectives: 'accuracy@mqar' is given twice"),
    ({**HEADS, "objectives": ["state_size"]}, "search.objectives: weighs costs alone: add accuracy@mqar"),
    ({**HEADS, "constrain": {"stat": {"at_most": 3}}}, "search.constrain: unknown key 'stat'; did you mean 'state'?"),
    ({**HEADS, "constrain": {"decode_us": {"at_most": 50}}},
     "search.constrain: decode_us cannot be bounded: candidates are refused before they train, and it is timed after"),
    ({**HEADS, "constrain": {"state": {"atmost": 3}}},
     "search.constrain.state: unknown key 'atmost'; did you mean 'at_most'?"),
    ({**HEADS, "constrain": {"state": {}}}, "search.constrain.state: takes at_most: NUMBER"),
    ({**HEADS, "constrain": {"state": {"within": 0.1, "of": "bas"}}}, "search.constrain.state.of must be 'base'"),
    ({**HEADS, "constrain": {"state": {"at_most": 3, "at_least": 4}}}, "at_least 4 is more than at_most 3"),
    ({**HEADS, "constrain": {"state": {"at_most": 3}}},
     "constrain.state: none of 8 candidates drawn has at most 3: the nearest has 8, with model.expand_v=1, "),
    ({**HEADS, "constrain": {"state": {"at_most": 100}, "parameters": {"at_least": 10**6}}},
     "search.constrain.parameters: none of 8 candidates drawn has at least 1,000,000: the nearest has "),
    ({"model.heads": {"choice": [1, 2, 4, 8]}, "match": {"state": True, "scale": "model.d_model"}},
     "search: none of 4 candidates drawn is feasible, such as model.heads="),
    ({**HEADS, "match": {"stat": True}}, "search.match: unknown key 'stat'; did you mean 'state'?"),
    ({**HEADS, "match": {"state": True, "scale": "model.heads"}}, "search.match scales model.heads, which is searched"),
    ({**HEADS, "train.lr": LR, "fidelity": {"train.steps": [1, 4], "keep": 1}}, "search.fidelity.keep must be less"),
    ({**HEADS, "train.lr": LR, "fidelity": {"train.steps": [1, 4], "keep": 0}}, "search.fidelity.keep must be greater"),
    ({**HEADS, "fidelity": {"train.steps": [4, 1]}}, "search.fidelity.train.steps: takes at least two"),
    ({**HEADS, "fidelity": {"train.step": [1, 4]}}, "search.fidelity: unknown key 'train.step'; did you mean"),
    ({**HEADS, "fidelity": {"train.steps": [1, 2], "model.d_model": [4, 8, 16]}}, "all keys need as many values"),
    ({**HEADS, "model.heads": {"choice": [2, 4]}, "fidelity": {"model.d_model": [7, 8]}},
     "search: none of 4 candidates drawn is feasible, such as model.expand_v="),
    ({**HEADS, "fidelity": {"keep": 0.5}}, "search.fidelity: needs a key such as"),
    ({**HEADS, "finalists": 3, "fidelity": {"train.steps": [1, 4]}}, "fewer than finalists 3"),
    ({"train.steps": {"choice": [2, 4]}, "fidelity": {"train.steps": [1, 4]}}, "fidelity.train.steps: is searched"),
    ({**HEADS, "warm": ["gla"]}, "search.warm: unknown rule 'gla'; allowed: comba"),
    ({**HEADS, "warm": ["combo"]}, "unknown rule 'combo'; did you mean 'comba'?"),
    ({**HEADS, "warm": [{"name": "comba", "d": 0}]},
     "search.warm: rule 'comba' is outside of the space: it has d "),
    ({**HEADS, "warm": [3]}, "search.warm: takes rules (NAME, or {name: NAME, knob: ...}) and {study: NAME}, not 3"),
]  # fmt: skip


@pytest.mark.parametrize(("search", "says"), REFUSED, ids=lambda x: str(x)[:70])
def test_it_is_refused_in_one_line(plan: Callable[..., Plan], search: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as raised:
        plan(search)
    message = str(raised.value)
    assert says in message
    assert message.startswith("s.yaml: ") or "s.yaml: " in message
    assert "\n" not in message


def test_several_tasks_with_one_metric_ask_whose() -> None:
    tasks = {"mqar": ("accuracy", True), "mad": ("accuracy", True)}
    with pytest.raises(
        InputError, match="'accuracy' is the metric of several tasks: say accuracy@mqar or accuracy@mad"
    ):
        searching(**HEADS, objectives=["accuracy"]).weighed(tasks)


def test_tuning_takes_neither_conditions_nor_patterns(tmp_path: Path) -> None:
    tune = {"trials": 2, "train.lr": LR, "model.mlp": {"choice": [True, False], "when": {"model.conv": 4}}}
    with pytest.raises(InputError, match=r"tune\.model\.mlp: when goes with search"):
        load_study({**STUDY, "tune": tune})


# Studies of before.


def test_a_search_without_the_new_keys_keeps_its_dump() -> None:
    found = searching(**HEADS, sampler="tpe").model_dump(mode="json")
    assert searching(**HEADS).model_dump(mode="json") == {**found, "sampler": "mixed"}, "no key meant tpe"
    assert [*found] == ["trials", "seeds", "finalists", "model.heads", "model.expand_v"]
    assert [*found["model.heads"]] == ["log_uniform", "uniform", "integers", "choice"]


@pytest.mark.parametrize("given", [CONDITIONS, EITHER, LAYERS], ids=["when", "or", "pattern"])
def test_a_search_is_read_back_from_the_ledger(given: dict[str, Any]) -> None:
    new = {"match": {"state": True}, "constrain": {"state": {"at_most": 9}}, "warm": [{"study": "x"}]}
    space = searching(
        **given, **new, sampler="nsga2", random=0.3, objectives=["accuracy"], fidelity={"train.steps": [1, 2]}
    )
    assert Searching.model_validate(space.model_dump(mode="json")) == space


def test_the_schema_has_the_keys_of_a_search() -> None:
    found = schema()["$defs"]
    assert {"sampler", "random", "objectives", "constrain", "match", "warm", "fidelity"} <= set(
        found["Searching"]["properties"]
    )
    assert {"when", "pattern", "lengths", "repeat"} <= set(found["Search"]["properties"])
    assert set(found["Bound"]["properties"]) == {"at_most", "at_least", "within", "of"}


def test_limits_of_a_bound() -> None:
    assert Bound(at_least=5).limits(0) == (5, float("inf"))
    assert Bound(within=0.1).limits(100) == (90, pytest.approx(110))
    assert Match(state=True).dimensions == {"state": "model.key_dim"}
    assert Search(choice=(1, 2)).exists({})
