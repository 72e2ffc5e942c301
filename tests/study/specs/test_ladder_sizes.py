"""What `scales` makes of a study: a task for each size, and which ladders are refused."""

from collections.abc import Callable
from typing import Any

import pytest

from deltalab.errors import InputError
from deltalab.study.forecast.estimate import estimate
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.specs.recorded_study import RecordedSpec
from deltalab.study.specs.sections.ladder_sizes import task_of
from deltalab.study.specs.study_file import load_study

LADDER: dict[str, Any] = {
    "name": "rungs",
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}, "text": {"length": 16}},
    "base": {
        "rule": "deltanet",
        "model": {"d_model": 16, "layers": 1, "heads": 1},
        "train": {"steps": 6, "batch_size": 4, "lr": 0.01, "evaluations": 2},
    },
    "arms": {"gated": {"rule": "gated_deltanet"}},
    "scales": {"model.d_model": [8, 16, 32], "train.steps": [4, 6, 8]},
    "seeds": 2,
}


@pytest.fixture
def plan() -> Callable[..., Plan]:
    return lambda **given: make_plan(load_study({**LADDER, **given}))


def test_every_arm_runs_at_every_size(plan: Callable[..., Plan]) -> None:
    made = plan()
    labels = [f"{task}.d_model={width}" for task in ("mqar", "text") for width in (8, 16, 32)]
    assert [*made.tasks] == labels
    assert [(arm.task, arm.name) for arm in made.arms] == [(t, a) for t in labels for a in ("base", "gated")]
    for arm in made.arms:
        width = int(arm.task.rpartition("=")[2])
        steps = {8: 4, 16: 6, 32: 8}[width]
        assert (arm.config["model"]["d_model"], arm.config["train"]["steps"]) == (width, steps)
        assert arm.config["model"]["base_width"] is None


def test_a_size_may_set_a_parameter_of_the_task(plan: Callable[..., Plan]) -> None:
    made = plan(task={"text": {"length": 8}}, scales={"task.length": [8, 24]})
    assert {label: task.length for label, task in made.tasks.items()} == {"text.length=8": 8, "text.length=24": 24}


@pytest.mark.slow(keep="given2-False")
@pytest.mark.parametrize(
    ("given", "warns"),
    [
        ({}, True),
        ({"scales": {"model.d_model": [8, 32], "transfer": "mup"}}, False),
        ({"scales": {"train.steps": [4, 8]}}, False),
        ({"tune": {"train.lr": {"choice": [0.01, 0.02]}, "trials": 2}}, False),
        ({"tune": {"train.weight_decay": {"choice": [0.0, 0.1]}, "trials": 2}}, True),
    ],
)
def test_one_learning_rate_for_all_widths_is_warned_of(
    plan: Callable[..., Plan], given: dict[str, Any], warns: bool
) -> None:
    said = [note for note in estimate(plan(**given)).notes if note.startswith("scales:")]
    assert (
        said
        == [
            "scales: widths 8 to 32 train at one learning rate, and the best one falls with the width. "
            "Give transfer: mup, or tune train.lr."
        ]
        * warns
    )


def test_mup_takes_the_width_that_the_base_states(plan: Callable[..., Plan]) -> None:
    made = plan(scales={"model.d_model": [8, 32], "transfer": "mup"})
    assert {arm.config["model"]["base_width"] for arm in made.arms} == {16}


def test_a_size_is_the_study_that_states_it(plan: Callable[..., Plan]) -> None:
    """A rung computes what a plain study of its sizes computes; only the name of its task differs."""
    rung = next(arm for arm in plan().arms if (arm.task, arm.name) == ("text.d_model=32", "gated"))
    model, train = {**LADDER["base"]["model"], "d_model": 32}, {**LADDER["base"]["train"], "steps": 8}
    plain = make_plan(
        load_study(
            {
                **{key: value for key, value in LADDER.items() if key != "scales"},
                "task": {"text": {"length": 16}},
                "base": {**LADDER["base"], "model": model, "train": train},
            }
        )
    )
    assert rung.config == next(arm for arm in plain.arms if arm.name == "gated").config


def test_for_task_match_and_tune_go_with_a_ladder(plan: Callable[..., Plan]) -> None:
    made = plan(
        for_task={"text": {"train": {"batch_size": 2}}},
        arms={"local": {"rule": "attention", "match": {"cache": True, "scale": "rule.window"}}},
        tune={"train.lr": {"log_uniform": [1e-3, 1e-1]}, "trials": 2},
        scales={"model.d_model": [12, 16]},
    )
    assert {arm.task: arm.config["train"]["batch_size"] for arm in made.arms} == {
        "mqar.d_model=12": 4, "mqar.d_model=16": 4, "text.d_model=12": 2, "text.d_model=16": 2,
    }  # fmt: skip
    # Each size is matched to the base of its own size: d_model^2 elements, and 2 d_model for each token but the last.
    windows = {arm.task: arm.config["rule"]["window"] for arm in made.arms if arm.name == "local"}
    assert (windows["mqar.d_model=12"], windows["mqar.d_model=16"]) == (7, 9)
    assert made.trials == 2 * 2 * 2 * 2


def test_arms_of_all_sizes_of_a_task_are_one_family() -> None:
    labels = ["a.d_model=8", "a.d_model=16", "b.d_model=8", "b.d_model=16"]
    spec = {"family": "task", "task": {"a": {}, "b": {}}, "scales": {"model.d_model": [8, 16]}}
    assert RecordedSpec(spec).families(labels) == [labels[:2], labels[2:]]
    assert RecordedSpec({**spec, "family": "study"}).families(labels) == [labels]
    assert [task_of(label, spec["scales"], ["a", "b"]) for label in labels] == ["a", "a", "b", "b"]  # type: ignore[arg-type]


REFUSED = [
    ({}, "scales: lists no sizes: add a key such as 'model.d_model: [32, 64, 128, 256]'"),
    ({"model.d_model": [8]}, "scales: model.d_model lists one size: a ladder needs at least 2"),
    ({"model.d_model": []}, "at least 2"),
    ({"model.d_model": [8, 16], "train.steps": [4]}, "model.d_model lists 2 sizes and train.steps 1: the lists go"),
    ({"model.d_model": [16, 8]}, "scales: model.d_model must rise from size to size, and 8 follows 16"),
    ({"model.d_model": [8, 8]}, "model.d_model must rise from size to size, and 8 follows 8"),
    ({"model.d_model": [8, 16], "train.steps": [4, 2]}, "train.steps must not fall, and 2 follows 4"),
    ({"model.d_modl": [8, 16]}, "scales: unknown size 'model.d_modl'; did you mean 'model.d_model'?"),
    ({"train.lr": [1, 2]}, "scales: unknown size 'train.lr'"),
    ({"task.lenth": [8, 16]}, "scales.task.lenth: task 'mqar': unknown parameter 'lenth'; did you mean 'length'?"),
    (
        {"task.length": [2, 16]},
        "scales.task.length: task 'mqar': parameter 'length' must be at least 4 x pairs = 8, not 2",
    ),
    ({"task.length": [16, 10**9]}, "scales.task.length: task 'mqar': parameter 'length' must be at most 1,048,576"),
    (
        {"train.steps": [4, 8], "task.pairs": [2, 9]},
        "scales.task.pairs: task 'mqar': parameter 'length' must be at least",
    ),
    ({"task.task": [1, 2]}, "scales: unknown size 'task.task'"),
    ({"model.layers": [1, 2000]}, "scales.model.layers: base at mqar.layers=2000: model.layers must be at most 1,000"),
    (
        {"model.heads": [1, 3]},
        "scales.model.heads: base at mqar.heads=3: model.d_model 16 must be a multiple of heads 3",
    ),
    ({"model.d_model": 8}, "scales.model.d_model must be a list, not 8"),
    ({"model.d_model": [8, 16.5]}, "scales.model.d_model.1 must be a whole number"),
    ({"model.d_model": [0, 8]}, "scales.model.d_model.0 must be greater than or equal to 1"),
    ({"model.d_model": [8, 16, 32], "keep_out": 1}, "give at least 4 sizes"),
    ({"model.d_model": [8, 16], "keep_out": 0}, "leaves 2 of 2 sizes to fit the 3 parameters of a + b C^-c"),
    ({"model.d_model": [8, 16], "keep_out": -1}, "scales.keep_out must be greater than or equal to 0"),
    ({"model.d_model": [8, 18], "model.heads": [1, 4]}, "scales.model.d_model: base at mqar.d_model=18: model.d"),
    ({"model.d_model": [8, 16], "transfer": "sp"}, "scales.transfer must be 'none' or 'mup'"),
    ({"train.steps": [8, 16], "transfer": "mup"}, "transfer: mup carries learning rates across widths: list model.d_m"),
]


@pytest.mark.parametrize(("scales", "says"), REFUSED)
def test_a_ladder_that_is_none_is_refused_in_one_line(scales: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        make_plan(load_study({**LADDER, "scales": scales}))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


NOT_OF_THE_LADDER = [
    ({"task": {"mqar": {"lenght": 9}}, "scales": {"task.length": [8, 16]}}, "task 'mqar': unknown parameter 'lenght'"),
    ({"task": {"mqar": {"pairs": True}}, "scales": {"task.length": [8, 16]}}, "task 'mqar': parameter 'pairs' must be"),
    ({"task": {"one": {"task": "mqar", "length": 9}}}, "task.one: task 'mqar': needs pairs"),
    ({"base": {**LADDER["base"], "model": {"hedas": 1}}}, "base: unknown model key 'hedas'; did you mean 'heads'?"),
    ({"arms": {"x": {"train": {"lr": -1}}}}, "arms.x: train.lr must be a finite number"),
    (
        {"arms": {"x": {"model": {"heads": 4}}}, "scales": {"model.d_model": [8, 18]}},
        "scales.model.d_model: arms.x at mqar.d_model=18: model.d_model 18 must be a multiple of heads 4",
    ),
]


@pytest.mark.parametrize(("given", "says"), NOT_OF_THE_LADDER)
def test_an_error_names_the_ladder_only_where_it_is_at_fault(
    plan: Callable[..., Plan], given: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError) as caught:
        plan(**given)
    assert str(caught.value).startswith(f"study: {says}")


BESIDE = [
    ({"seeds": {"at_least": 6, "at_most": 9}}, "scales: all sizes of an arm share their seeds: give seeds a number"),
    ({"arms": {"wide": {"model": {"d_model": 64}}}}, "arms.wide sets model.d_model, and so does scales"),
    ({"for_task": {"text": {"train": {"steps": 9}}}}, "for_task.text sets train.steps, and so does scales"),
    ({"for_task": {"text.d_model=8": {}}}, "for_task: unknown task 'text.d_model=8'"),
    ({"tune": {"model.d_model": {"choice": [8, 16]}, "trials": 2}}, "tune sets model.d_model, and so does scales"),
    (
        {"arms": {}, "search": {"train.lr": {"log_uniform": [1e-3, 1e-1]}, "trials": 4}},
        "scales: a search runs at one size: leave out scales or search",
    ),
]


@pytest.mark.parametrize(("given", "says"), BESIDE)
def test_what_cannot_stand_beside_a_ladder_is_refused_in_one_line(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        make_plan(load_study({**LADDER, **given}))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_profile_may_change_one_list() -> None:
    study = {**LADDER, "profiles": {"gpu": {"scales": {"train.steps": [10, 20, 30]}}}}
    found = load_study(study, profile="gpu").scales
    assert found is not None
    assert found.lists == {"model.d_model": (8, 16, 32), "train.steps": (10, 20, 30)}
