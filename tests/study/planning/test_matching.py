"""An arm that matches the base has its state, parameters or flops within 2%, or the study is refused in one line."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.support.folders import PLANTED

from deltalab import registry
from deltalab.errors import InputError
from deltalab.models.costs import CostCounter, ModelCosts
from deltalab.registry import add_plugin
from deltalab.study.forecast.estimate import estimate
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.matching import _amounts_near
from deltalab.study.planning.plan import Plan, PlannedArm
from deltalab.study.running.run import arm_records
from deltalab.study.specs.json_schema import schema
from deltalab.study.specs.sections.budget import Match
from deltalab.study.specs.study_file import load_study

STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"mqar": {"length": 32, "pairs": 4, "vocab_size": 64}},
    "base": {
        "rule": "comba",
        "model": {"d_model": 32, "layers": 1, "heads": 2},
        "train": {"steps": 6, "batch_size": 4, "lr": 0.01, "evaluations": 1},
    },
    "seeds": 2,
}
MAMBA = {"model": {"block": "mamba", "expand_v": 2}}


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    file = tmp_path / "s.yaml"

    def planned(**given: Any) -> Plan:
        file.write_text(yaml.safe_dump({**STUDY, **given}, sort_keys=False))
        return make_plan(load_study(file), study_file="s.yaml")

    return planned


def sizes(plan: Plan, arm: PlannedArm) -> ModelCosts:
    model, _ = plan.job(arm, "confirm", 0, {}).specs
    return CostCounter().costs(model, plan.tasks[arm.task].length)


@pytest.mark.parametrize(
    ("arm", "match", "changed"),
    [
        (MAMBA, {"state": True}, {"model.key_dim": [None, 8]}),
        ({"rule": "rdn"}, {"state": True, "scale": "model.expand_v"}, {"model.expand_v": [1.0, 0.5]}),
        ({"model": {"layers": 4}}, {"state": True}, {"model.key_dim": [None, 8]}),
        ({"rule": "attention"}, {"state": True, "scale": "rule.window"}, {"rule.window": [None, 9]}),
        ({"rule": "kalman"}, {"cache": True}, {"model.key_dim": [None, 12]}),
        ({"rule": "delta_product"}, {"cache": "model.expand_v"}, {"model.expand_v": [1.0, 0.75]}),
        ({"rule": "attention"}, {"cache": True, "scale": "rule.window"}, {"rule.window": [None, 9]}),
        (
            {"model": {"key_dim": 1, "layers": 4}},
            {"cache": True, "scale": "model.expand_v"},
            {"model.expand_v": [1.0, 23]},
        ),
        (
            {"rule": "rdn"},
            {"state": "model.expand_v", "parameters": True},
            {"model.expand_v": [1.0, 0.5], "model.mlp_width": [None, 104]},
        ),
        (
            {"rule": "rdn"},
            {"state": "model.expand_v", "parameters": "model.d_model"},
            {"model.expand_v": [1.0, 0.5], "model.d_model": [32, 34]},
        ),
        # Here each dimension changes both quantities.
        (
            {"rule": "rdn"},
            {"state": "model.expand_v", "parameters": "model.key_dim"},
            {"model.expand_v": [1.0, 0.12], "model.key_dim": [None, 32]},
        ),
        (
            {"model": {"layers": 4}},
            ["state", "parameters"],
            {"model.key_dim": [None, 8], "model.mlp_width": [None, 6]},
        ),
        (
            {"model": {"output_gate": False}},
            {"parameters": True, "scale": "model.key_dim"},
            {"model.key_dim": [None, 20]},
        ),
        ({"model": {"layers": 2}}, {"parameters": True}, {"model.d_model": [32, 21], "model.key_dim": [None, 16]}),
        ({"model": {"mlp": False}}, {"flops": True, "scale": "model.key_dim"}, {"model.key_dim": [None, 32]}),
        ({"rule": "gated_deltanet"}, {"flops": True, "scale": "model.expand_v"}, {}),
        (
            {"model": {"gate_rank": 4}},
            {"parameters": True, "scale": "model.gate_rank"},
            {"model.gate_rank": [None, 16]},
        ),
    ],
    ids=str,
)
def test_a_matched_arm_has_the_quantity_of_the_base(
    plan: Callable[..., Plan], arm: dict[str, Any], match: dict[str, Any] | list[str], changed: dict[str, Any]
) -> None:
    found = plan(arms={"x": {**arm, "match": match}})
    base, matched = found.arms
    for what in {*match} - {"scale"}:
        wanted, got = (sizes(found, each).by_quantity()[what] for each in (base, matched))
        assert abs(got - wanted) <= 0.02 * wanted
    assert matched.change == {**matched.change, **changed}


@given(target=st.integers(1, 3000), start=st.integers(1, 60), data=st.data())
def test_the_nearest_of_all_values_is_among_those_tried(target: int, start: int, data: st.DataObject) -> None:
    """Where some values make no model, and where the size stops to grow, as with a window longer than the task."""
    power, most = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.integers(1, 80))
    none = data.draw(st.sets(st.integers(1, 200))) - {start}

    def size(value: int) -> float:
        if value in none:
            raise InputError("makes no model")
        return float(min(value, most) ** power)

    tried = _amounts_near(target, start, 10**6, size)
    within_reach = [abs(size(value) - target) for value in range(1, max(tried) + 1) if value not in none]
    assert min(abs(found - target) for found in tried.values()) == min(within_reach)


def test_an_arm_matches_the_base_on_each_task(plan: Callable[..., Plan]) -> None:
    mqar = STUDY["task"]["mqar"]
    found = plan(
        task={"narrow": {"task": "mqar", **mqar}, "wide": {"task": "mqar", **mqar}},
        for_task={"wide": {"model": {"d_model": 128}}},
        arms={"mamba": {**MAMBA, "match": {"state": True}}},
    )
    assert {arm.task: arm.config["model"]["key_dim"] for arm in found.arms if not arm.is_base} == {
        "narrow": 8,
        "wide": 32,
    }
    _, recorded = arm_records(found)
    changes = {key: after for key, (_, after) in recorded.change.items() if "key_dim" in key}
    assert changes == {"model.key_dim@narrow": 8, "model.key_dim@wide": 32}
    assert recorded.change["model.block"][1] == "mamba", "what is the same on all tasks stands once"


def test_a_dimension_stays_where_no_value_comes_nearer(plan: Callable[..., Plan]) -> None:
    """A window of 0, which sees all tokens, holds as much as one of 32 on 32 tokens."""
    _, arm = plan(
        base={**STUDY["base"], "rule": "attention"},
        arms={"x": {"model": {"mlp": False}, "match": {"state": True, "scale": "rule.window"}}},
    ).arms
    assert arm.change == {"model.mlp": [True, False]}


def test_layers_with_heads_of_their_own_keep_their_keys_width(plan: Callable[..., Plan]) -> None:
    listed = ["rule", {"name": "attention", "layer": {"heads": 4}}]
    found = plan(arms={"x": {"model": {"layers": listed, "mlp": False}, "match": {"parameters": True}}})
    base, arm = found.arms
    model, _ = found.job(arm, "confirm", 0, {}).specs
    assert [model.at(layer).head_dims[0] for layer in (0, 1)] == [16, 8]
    assert model.d_model != 32
    assert sizes(found, arm).parameters == pytest.approx(sizes(found, base).parameters, rel=0.02)


def test_a_plan_shows_the_value_that_was_found(plan: Callable[..., Plan]) -> None:
    base, arm = estimate(plan(arms={"mamba": {**MAMBA, "match": {"state": True}}})).arms
    assert "model.key_dim=8" in arm.change
    assert arm.state_size == base.state_size == 512


def test_a_plan_tells_the_state_from_caches_and_counts_what_does_nothing(plan: Callable[..., Plan]) -> None:
    found = estimate(plan(arms={"local": {"rule": "attention", "model": {"conv": 0}}, "hgrn2": {"rule": "hgrn2"}}))
    base, local, hgrn2 = found.arms
    assert (base.state_size, base.kv_cache, base.conv_cache) == (512, 0, 3 * 96)
    assert (local.state_size, local.kv_cache, local.conv_cache) == (2048, 2048, 0)
    # The forget gate of HGRN2 stands in for the key, which is projected and convolved all the same.
    assert (base.dead_parameters, local.dead_parameters, hgrn2.dead_parameters) == (0, 0, 32 * 32 + 4 * 32)
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(found.to_rich())
    text = console.export_text()
    assert "KV cache" in text
    assert f"hgrn2 carries 1,152 of {hgrn2.parameters:,} parameters that do nothing." in text


def test_the_identity_of_a_search_is_that_of_the_release_that_called_the_cache_state() -> None:
    first = {"state": True, "parameters": False, "flops": False, "scale": "model.expand_v"}
    assert Match(cache=True, scale="model.expand_v").keyed == first
    assert Match(flops=True).keyed == {"state": False, "parameters": False, "flops": True, "scale": None}
    assert Match(state=True, scale="model.expand_v").keyed == {"state": "model.expand_v"}


LAYERS = {"model": {"layers": 4}, "match": {"cache": True}}
INTEGERS = {"integers": [4, 8]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"arms": {"x": LAYERS}},
        "s.yaml: arms.x.match on task 'mqar': no model.key_dim gives the base's cache of 800 within 2%: "
        "the nearest is 720 at key_dim 6; scale another: model.expand_v, model.d_model",
    ),
    (
        {"arms": {"x": {"model": {"output_gate": False}, "match": {"parameters": True}}}},
        "no model.d_model gives the base's parameters of 16,248 within 2%: the nearest is 15,687 at d_model 33",
    ),
    (
        {"arms": {"x": {"rule": "gla", "match": {"parameters": True, "scale": "rule.g.gla_decay.rnk"}}}},
        "arms.x.match on task 'mqar': scale: unknown dimension 'rule.g.gla_decay.rnk'; "
        "did you mean 'rule.g.gla_decay.rank'? allowed: model.key_dim, model.expand_v, model.d_model, model.mlp_width, "
        "rule.g.gla_decay.rank",
    ),
    ({"arms": {"x": {**MAMBA, "match": {"state": True, "scale": "key_dim"}}}}, "did you mean 'model.key_dim'?"),
    ({"arms": {"x": {**MAMBA, "match": {"state": True, "scale": "train.lr"}}}}, "unknown dimension 'train.lr'"),
    (
        {"arms": {"x": {**MAMBA, "match": {"state": True, "scale": "model.d_model"}}}},
        "the arm's state does not grow with model.d_model; scale another: model.key_dim, model.expand_v",
    ),
    (
        {"arms": {"x": {"rule": "gka", "match": {"parameters": True, "scale": "rule.iterations"}}}},
        "the arm's parameters do not grow with rule.iterations",
    ),
    ({"arms": {"x": {"rule": "rdn", "match": {"state": True, "scale": "rule.clip"}}}}, "unknown dimension 'rule.clip'"),
    ({"arms": {"x": {**MAMBA, "match": {}}}}, "arms.x.match: takes at least one of state: true, cache: true"),
    ({"arms": {"x": {**MAMBA, "match": []}}}, "arms.x.match: takes at least one of state: true, cache: true"),
    ({"arms": {"x": {**MAMBA, "match": {"state": False}}}}, "takes at least one of state: true"),
    ({"arms": {"x": {**MAMBA, "match": {"state": 1}}}}, "match.state: takes true or the path of a dimension, not 1"),
    ({"arms": {"x": {**MAMBA, "match": ["state", "flopz"]}}}, "unknown quantity 'flopz'; did you mean 'flops'?"),
    ({"arms": {"x": {**MAMBA, "match": ["state", "state"]}}}, "arms.x.match: 'state' is given twice"),
    (
        {"arms": {"x": {**MAMBA, "match": ["state", "cache"]}}},
        "s.yaml: arms.x.match: state and cache exclude each other: model.key_dim scales both; give each a dimension",
    ),
    (
        {"arms": {"x": {**MAMBA, "match": {"state": True, "flops": True, "scale": "model.key_dim"}}}},
        "arms.x.match: scale goes with one quantity that is true: write state: model.key_dim",
    ),
    (
        {"arms": {"x": {"rule": "rdn", "match": ["state", "parameters"]}}},
        "no model.key_dim and model.mlp_width give the base's state of 512 and parameters of 16,248 within 2%: "
        "the nearest is 484 and 16,215 at key_dim 11 and mlp_width 105; scale another: model.expand_v, model.d_model",
    ),
    (
        {"arms": {"x": {"rule": "rdn", "match": {"state": True, "cache": "model.d_model"}}}},
        "the arm's cache does not grow with model.d_model",
    ),
    (
        {"arms": {"x": {**MAMBA, "match": ["state", "parameters"]}}},
        "parameters: unknown dimension 'model.mlp_width'; allowed: model.key_dim, model.expand_v, model.d_model",
    ),
    ({"arms": {"x": {**MAMBA, "match": "state"}}}, "arms.x.match must be a mapping, not 'state'"),
    ({"arms": {"x": {**MAMBA, "match": {"sate": True}}}}, "arms.x.match: unknown key 'sate'; did you mean 'state'?"),
    ({"arms": {"x": {"mach": {"state": True}}}}, "arms.x: unknown key 'mach'; did you mean 'match'?"),
    ({"arms": {"x": {"match": {"state": True}}}}, "arm 'x' is the same as base on task 'mqar'"),
    ({"for_task": {"mqar": {"match": {"state": True}}}}, "for_task: mqar.match stands in an arm: the base has nothing"),
    (
        {"arms": {"x": {**MAMBA, "match": {"state": True}}}, "tune": {"trials": 2, "model.key_dim": INTEGERS}},
        "arms.x.match on task 'mqar': tune.model.key_dim changes the state: match or tune, not both",
    ),
    (
        {"arms": {"x": {**MAMBA, "match": {"cache": True}}}, "tune": {"trials": 2, "model.conv": INTEGERS}},
        "tune.model.conv changes the cache",
    ),
    (
        {"arms": {"x": {**MAMBA, "match": {"state": True}}}, "tune": {"trials": 2, "model.con": INTEGERS}},
        "unknown setting 'model.con'; did you mean 'model.conv'?",
    ),
]


@pytest.mark.parametrize(("given", "says"), REFUSED, ids=lambda x: str(x)[-70:])
def test_it_is_refused_in_one_line(plan: Callable[..., Plan], given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as raised:
        plan(**given)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_setting_that_leaves_the_quantity_alone_may_be_tuned(plan: Callable[..., Plan]) -> None:
    tune = {"trials": 2, "train.lr": {"log_uniform": [1e-3, 1e-1]}, "model.output_norm": {"choice": [True, False]}}
    _, arm = plan(arms={"x": {**MAMBA, "match": {"state": True}}}, tune=tune).arms
    assert arm.config["model"]["key_dim"] == 8


def test_a_rule_that_does_not_run_is_named(plan: Callable[..., Plan]) -> None:
    with registry.isolated():
        add_plugin(PLANTED / "raises.py")
        with pytest.raises(
            InputError, match=r"arms\.x\.match on task 'mqar': a model of rule 'planted_raises' does not run: Z"
        ):
            plan(arms={"x": {"rule": {"name": "planted_raises", "form": "mean"}, "match": {"state": True}}})


def test_the_schema_describes_a_match() -> None:
    assert [*schema()["$defs"]["Match"]["properties"]] == ["state", "cache", "parameters", "flops", "scale"]


def test_no_value_over_the_limit_of_a_dimension_is_tried() -> None:
    tried = list[int]()

    def size(value: int) -> float:
        tried.append(value)
        if value > 64:
            raise InputError("makes no model")
        return float(value)

    assert _amounts_near(100, 64, 64, size) == {64: 64.0, 32: 32.0}
    assert max(tried) == 64
