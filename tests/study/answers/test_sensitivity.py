"""What a study knows of the values that its arms tuned, on ledgers whose every figure is known."""

import math

import pytest
from tests.support.ledgers import begin, record
from tests.support.search_ledger import Lab

from deltalab.store import Store
from deltalab.store.models import StudyState
from deltalab.study.answers.sensitivity import range_end_notes, sensitivity
from deltalab.study.reports.report import report
from deltalab.study.specs.recorded_study import RecordedSpec

RATES = (0.001, 0.01, 0.1)
LR = {"log_uniform": [1e-3, 1e-1]}


def test_each_arm_has_its_best_value_and_says_where_it_lies(store: Store) -> None:
    study = begin(store, "tuned", changes={"base": {}, "late": {"x": [1, 2]}})
    for number, lr in enumerate(RATES):
        record(
            store,
            study,
            "base",
            "mqar",
            [0.5, 0.7, 0.6][number : number + 1] * 8,
            number=number,
            tuned={"train.lr": lr},
        )
        record(store, study, "late", "mqar", [0.2 * (number + 1)] * 8, number=number, tuned={"train.lr": lr})
    base, late = sensitivity(store, store.study(study))["mqar"]
    assert (base.arm, base.best, base.ends) == ("base", 1, {})
    assert (late.arm, late.best, late.ends) == ("late", 2, {"train.lr": "highest"})
    assert base.values == {number: {"train.lr": lr} for number, lr in enumerate(RATES)}
    assert base.scores(1, "validation") == [0.7] * 8
    (warning,) = range_end_notes([base, late], RecordedSpec(store.study(study).spec), "mqar", "done")
    assert warning.startswith("The best train.lr of late is the highest that was tried, 0.1: ")
    assert warning in report(store, study).tables[0].warnings, "the report and the page say the same"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("done", "tune.extend moved it as far as it does"),
        ("interrupted", "values that tune.extend adds beyond it may not be trained yet"),
    ],
)
def test_an_extended_range_is_moved_as_far_as_it_goes_once_the_study_ends(
    store: Store, state: StudyState, said: str
) -> None:
    study = begin(store, "tuned", changes={"base": {}}, tune={"trials": 3, "train.lr": LR, "extend": True})
    for number, lr in enumerate(RATES):
        record(store, study, "base", "mqar", [0.2 * (number + 1)] * 8, number=number, tuned={"train.lr": lr})
    store.finish_study(study, state)
    (warning,) = [text for text in report(store, study).tables[0].warnings if "that was tried" in text]
    assert warning.endswith(f"{said}).")


def test_a_candidate_with_a_diverged_seed_is_not_the_best(store: Store) -> None:
    study = begin(store, "tuned", changes={"base": {}})
    for number, values in enumerate(([0.5] * 8, [0.6] * 8, [*[0.9] * 7, math.nan])):
        record(store, study, "base", "mqar", values, number=number, tuned={"train.lr": RATES[number]})
    (base,) = sensitivity(store, store.study(study))["mqar"]
    assert base.best == 1
    assert base.scores(2, "validation") == [0.9] * 7, "its other seed still shows"


def test_the_base_of_a_search_is_tuned_and_warned_of(store: Store) -> None:
    lab = Lab(store)
    lab.record(1, {"rule.decay": "none", "train.lr": 0.05}, 0.99)
    for number, lr in enumerate(RATES):
        lab.record(800 + number, {"train.lr": lr}, 0.5 - 0.1 * number, steps=60)
    lab.record(0, {"train.lr": 0.001}, 0.5, steps=60)
    (base,) = sensitivity(store, store.study(lab.id))["mqar"]
    assert sorted(base.values) == [800, 801, 802], "candidates of the search are none of its own"
    assert (base.best, base.ends) == (800, {"train.lr": "lowest"})
    said = "\n".join(report(store, lab.id).tables[0].warnings)
    assert "The best train.lr of base is the lowest that was tried, 0.001: " in said
    assert "widen its range under search" in said


def test_a_ledger_of_a_release_that_tuned_before_it_confirmed(store: Store) -> None:
    study = begin(store, "old", changes={"base": {}})
    for number, lr in enumerate(RATES):
        record(store, study, "base", "mqar", [0.1 * (number + 1)], "tune", number=number, tuned={"train.lr": lr})
    record(store, study, "base", "mqar", [0.3], tuned={"train.lr": 0.1})
    (base,) = sensitivity(store, store.study(study))["mqar"]
    assert (base.best, base.ends, len(base.values)) == (2, {"train.lr": "highest"}, 3)
