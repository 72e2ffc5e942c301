"""More seeds after a test are a further look: the ledger knows the test, whatever the study is called by then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.schedules import MQAR, STUDY

from deltalab.errors import InputError
from deltalab.store import Store
from deltalab.store.models import StudyState
from deltalab.study.planning.further_looks import as_further_look
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.running.run import arm_records, provenance
from deltalab.study.specs.study_file import load_study


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    def planned(**given: Any) -> Plan:
        file = tmp_path / "s.yaml"
        file.write_text(yaml.safe_dump({**STUDY, "ablate": ["d"], "seeds": 6, **given}, sort_keys=False))
        return make_plan(load_study(file), study_file="s.yaml")

    return planned


def looked_at(store: Store, plan: Plan, state: StudyState = "done") -> Plan:
    spec = plan.spec.model_dump(mode="json")
    study = store.begin_study(
        plan.spec.name, plan.profile, plan.identity, spec, arm_records(plan), provenance(plan, {})
    )
    store.finish_study(study, state)
    return plan


def looks(plan: Plan, store: Store) -> list[tuple[int, float]]:
    return [(look.seeds, look.spent) for look in as_further_look(plan, store).spec.looks]


AFTER_6 = [(6, 0.05), (12, pytest.approx(0.0470833, abs=1e-6))]


@pytest.mark.parametrize("given", [{}, {"name": "again"}, {"family": "task"}, {"margin": {"accuracy": 0.1}}], ids=str)
def test_more_seeds_of_the_same_arms_are_a_further_look(
    plan: Callable[..., Plan], store: Store, given: dict[str, Any]
) -> None:
    first = looked_at(store, plan())
    more = as_further_look(plan(seeds=12, **given), store)
    assert looks(more, store) == AFTER_6
    assert "the ledger has tested these arms with 6 seeds" in more.notes[-1]
    assert "may err in 0.016 of studies" in more.notes[-1]
    assert more.job(more.arms[1], "confirm", 0, {}).key == first.job(first.arms[1], "confirm", 0, {}).key, "not again"
    assert more.job(more.arms[1], "confirm", 0, {}, part=1).seeds == tuple(range(7, 13))
    assert {key: getattr(more.spec, key) for key in given if key != "margin"} == {
        key: value for key, value in given.items() if key != "margin"
    }
    again = as_further_look(plan(seeds=12, **given), store)
    assert again.identity == more.identity != plan(seeds=12, **given).identity


def test_looks_follow_one_another(plan: Callable[..., Plan], store: Store) -> None:
    looked_at(store, plan())
    looked_at(store, as_further_look(plan(seeds=12), store))
    assert looks(plan(seeds=20, name="again"), store) == [*AFTER_6, (20, pytest.approx(0.0483333, abs=1e-6))]
    looked_at(store, plan(seeds={"at_least": 6, "at_most": 15}, ablate=["b"]))
    *planned, last = looks(plan(seeds=30, ablate=["b"]), store)
    assert planned == looks(plan(seeds={"at_least": 6, "at_most": 15}, ablate=["b"]), store)
    assert last == (30, pytest.approx(0.0525))


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (6, {"arms": 6, "base": 16}),
        ({"arms": 6, "base": 16}, 8),
        ({"arms": 6, "base": 16}, {"arms": 6, "base": 20}),
        ({"at_least": 4, "at_most": 6}, {"arms": 6, "base": 16}),
    ],
    ids=str,
)
def test_more_seeds_of_the_base_are_no_further_look(
    plan: Callable[..., Plan], store: Store, earlier: Any, later: Any
) -> None:
    looked_at(store, plan(seeds=earlier))
    with pytest.raises(
        InputError, match=r"'s' has tested these arms with .*; only tests with as many seeds of the base"
    ):
        as_further_look(plan(seeds=later, name="again"), store)
    other = plan(seeds=later, ablate=["b"])
    assert as_further_look(other, store) == other, "its arms were not tested"


def test_fewer_seeds_than_those_of_a_test_are_none(plan: Callable[..., Plan], store: Store) -> None:
    looked_at(store, plan(seeds={"arms": 6, "base": 16}))
    for seeds in ({"arms": 6, "base": 16}, {"arms": 6, "base": 12}, 6):
        assert looks(plan(seeds=seeds, name="again"), store) == [(6, 0.05)]


def test_what_was_not_tested_is_no_look(plan: Callable[..., Plan], store: Store) -> None:
    looked_at(store, plan(), state="interrupted")
    looked_at(store, plan(ablate=["b"]))
    looked_at(store, plan(base={**STUDY["base"], "model": {"d_model": 16}}))
    assert looks(plan(seeds=12), store) == [(12, 0.05)]


def test_fewer_seeds_and_a_study_that_ran_with_more_at_once_stay_as_they_are(
    plan: Callable[..., Plan], store: Store
) -> None:
    looked_at(store, plan(seeds=12))
    assert looks(plan(), store) == [(6, 0.05)]
    looked_at(store, plan())
    assert looks(plan(seeds=12), store) == [(12, 0.05)], "it was tested with 12 first"


def test_a_ladder_keeps_its_seeds(plan: Callable[..., Plan], store: Store) -> None:
    base = {**STUDY["base"], "model": {"heads": 1}}
    ladder = {"base": base, "scales": {"model.d_model": [8, 16], "transfer": "none"}, "task": {"mqar": MQAR}}
    looked_at(store, plan(**ladder))
    assert looks(plan(seeds=12, **ladder), store) == [(12, 0.05)]
