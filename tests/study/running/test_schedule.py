"""In which order a study runs, what it remembers, when it stops: all candidates on all seeds, seeds in looks."""

import json
import math
import random
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.schedules import ARMS, LOOKS, LR, MQAR, SEARCH, STUDY, Score, figures, record

from deltalab.errors import InputError
from deltalab.store import Store, TrialRecord
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.reports.report import Report, report
from deltalab.study.running.confirmation import MOST_MOVES
from deltalab.study.running.run import arm_records, provenance
from deltalab.study.running.schedule import Schedule, stack_label
from deltalab.study.searching import phase
from deltalab.study.specs.study_file import load_study
from deltalab.study.workers.jobs import Job

TUNE = {"trials": 3, "train.lr": LR}


def planned(folder: Path, **given: Any) -> Plan:
    file = folder / "s.yaml"
    file.write_text(yaml.safe_dump({**STUDY, **given}, sort_keys=False))
    return make_plan(load_study(file), study_file="s.yaml")


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    return partial(planned, tmp_path)


def schedule(found: Plan, store: Store) -> Schedule:
    spec = found.spec.model_dump(mode="json")
    study_id = store.begin_study(
        found.spec.name, found.profile, found.identity, spec, arm_records(found), provenance(found, {})
    )
    return Schedule(found, store, study_id)


def alone(one: Schedule) -> Job | None:
    """The next trial, of a study whose stacks are of one."""
    stack = one.next(places=1)
    assert len(stack) <= 1
    return stack[0] if stack else None


def finish(one: Schedule, score: Score, limit: int = 1000) -> list[Job]:
    """Runs trials one after another and returns them in order."""
    jobs: list[Job] = []
    while len(jobs) < limit and (job := alone(one)) is not None:
        jobs.append(job)
        one.finished(record(job, score))
    return jobs


def by_lr(job: Job, seed: int = 0) -> float:
    """Best at 0.02."""
    return 1 / (1 + abs(job.config["train"]["lr"] - 0.02))


def shown(store: Store, one: Schedule) -> Report:
    if one.done:
        store.finish_study(one.study_id, "done")
    return report(store, one.study_id)


# Candidates on all seeds.


def test_every_arm_trains_every_candidate_with_every_seed(plan: Callable[..., Plan], store: Store) -> None:
    tasks = {"mqar": MQAR, "short": {**MQAR, "task": "mqar", "length": 8}}
    found = plan(ablate=["d", "b"], tune={"trials": 4, "train.lr": LR}, task=tasks)
    one = schedule(found, store)
    jobs = finish(one, by_lr)
    assert one.done
    assert alone(one) is None
    assert len(jobs) == one.total == one.completed == found.trials == 2 * 3 * 4
    for arm in found.arms:
        own = [job for job in jobs if (job.arm, job.task) == (arm.name, arm.task)]
        assert sorted((job.stage, job.number) for job in own) == [("confirm", n) for n in range(4)]
        assert {job.seeds for job in own} == {(1, 2)}
        assert all(job.config["train"]["lr"] == job.values["train.lr"] for job in own)
    assert len({job.key for job in jobs}) == len(jobs)
    assert found.runs == sum(len(job.seeds) for job in jobs)


def test_without_tuning_each_arm_is_one_trial_with_its_own_values(plan: Callable[..., Plan], store: Store) -> None:
    jobs = finish(schedule(plan(ablate=["d"]), store), by_lr)
    assert [(job.arm, job.number, job.values) for job in jobs] == [("base", 0, {}), ("without_d", 0, {})]


SPACE = {"train.lr": LR, "rule.beta.sigmoid.max": {"uniform": [0.5, 2]}, "model.heads": {"choice": [1, 2, 4]}}


def test_all_arms_try_the_same_candidates_whatever_comes_of_them(plan: Callable[..., Plan], store: Store) -> None:
    found = plan(ablate=["d"], arms={"iplr": {"rule": {"transition": "iplr"}}}, tune={"trials": 10, **SPACE})
    scores = iter(range(1000))
    jobs = finish(schedule(found, store), lambda job, seed: next(scores) / 1000)
    of = {arm: {job.number: job.values for job in jobs if job.arm == arm} for arm in found.names}
    assert of["base"] == of["without_d"] == of["iplr"]
    assert len({json.dumps(values) for values in of["base"].values()}) == 10
    assert {"train.lr": 0.01, "rule.beta.sigmoid.max": 1, "model.heads": 1} in of["base"].values(), "the base's own"


def test_candidates_do_not_depend_on_the_study(plan: Callable[..., Plan]) -> None:
    studies = [plan(tune=TUNE), plan(tune=TUNE, name="t", ablate=["d"], seeds=9), plan(tune={**TUNE, "extend": True})]
    assert len({json.dumps(list(found.candidates(found.arms[0]))) for found in studies}) == 1
    other = plan(tune=TUNE, base={**STUDY["base"], "train": {**STUDY["base"]["train"], "lr": 0.03}})
    assert [values["train.lr"] for values in islice(other.candidates(other.arms[0]), 3)] == [0.001, 0.03, 0.1]


def test_a_seed_is_scored_by_what_the_other_prefers(plan: Callable[..., Plan], store: Store) -> None:
    """Seed 1 finds the lowest rate best, seed 2 the highest; each is trained at the other's."""
    one = schedule(plan(ablate=["d"], tune=TUNE), store)
    finish(one, lambda job, seed: 0.5 + job.values["train.lr"] * (2 if seed == 2 else -1))
    (row, _) = shown(store, one).tables[0].rows
    assert row.score.mean == pytest.approx((0.4 + 0.502) / 2)
    assert (row.tuned, row.chose) == ({"train.lr": 0.1}, 1)


def test_a_trial_that_fails_costs_its_seeds_that_candidate_alone(plan: Callable[..., Plan], store: Store) -> None:
    one = schedule(plan(tune=TUNE), store)
    finish(one, lambda job, seed: None if job.number == 2 else by_lr(job))
    (row,) = shown(store, one).tables[0].rows
    assert one.done
    assert (one.failures, one.completed) == (1, 3)
    assert (row.tuned, row.chose, row.score.n, row.score.missing) == ({"train.lr": 0.01}, 2, 2, 0)


def test_an_arm_whose_every_trial_fails_ends(plan: Callable[..., Plan], store: Store) -> None:
    found = plan(ablate=["d", "b"], tune=TUNE, seeds={"at_least": 6, "at_most": 8})
    one = schedule(found, store)
    jobs = finish(
        one, lambda job, seed: None if job.arm == "without_d" else 0.5 + seed / 100 + 0.1 * (job.arm != "base")
    )
    assert one.done
    assert sum(job.arm == "without_d" for job in jobs) == 3, "no further look"
    verdicts = {row.arm: row.verdict for row in shown(store, one).tables[0].rows}
    assert verdicts == {"base": "base", "without_d": "failed", "without_b": "better"}


# Candidates that make no model.

NARROW = {"model.d_model": {"integers": [16, 64]}, "model.heads": {"choice": [1, 2]}}


@pytest.mark.slow(keep="0")
@pytest.mark.parametrize("killed_after", [0, 1, 12, 13])
def test_every_arm_trains_its_budget_whatever_makes_no_model(
    plan: Callable[..., Plan], tmp_path: Path, killed_after: int
) -> None:
    found = plan(ablate=["d"], tune={"trials": 12, **NARROW})
    rows = {}
    for name, limits in {"whole": [999], "cut": [killed_after, 999]}.items():
        for limit in limits:
            with Store.open(tmp_path / f"{name}.db") as store:
                one = schedule(found, store)
                finish(one, lambda job, seed: job.config["model"]["d_model"] / 100, limit)
                rows[name] = store.trials(one.study_id)
    assert one.done
    assert one.completed == one.total == found.trials == 2 * 12
    places = [
        sorted((row.arm, row.stage, row.number, row.state, str(row.values)) for row in of) for of in rows.values()
    ]
    assert places[0] == places[1]
    for arm in found.names:
        states = [row.state for row in rows["whole"] if row.arm == arm]
        assert states.count("done") == 12
        assert states.count("infeasible") == len(states) - 12 > 0
    assert one.infeasible == sum(row.state == "infeasible" for row in rows["whole"])


def test_a_grid_with_candidates_that_make_no_model_ends_with_its_last(plan: Callable[..., Plan], store: Store) -> None:
    grid = {"model.d_model": {"choice": [15, 16]}, "model.heads": {"choice": [1, 2]}}
    one = schedule(plan(tune={"trials": 4, **grid}), store)
    jobs = finish(one, lambda job, seed: job.config["model"]["d_model"] / 100)
    assert [tuple(job.values.values()) for job in jobs] == [(15, 1), (16, 1), (16, 2)]
    assert (one.done, one.infeasible, one.completed, one.total) == (True, 1, 3, 3)


# Where the best value is at an end: extend.


def rising(job: Job, seed: int) -> float:
    """The higher the better, up to 5."""
    return min(job.values["train.lr"], 10 / (1 + job.values["train.lr"])) / 10


def rates(jobs: list[Job], arm: str) -> list[float]:
    return sorted(job.values["train.lr"] for job in jobs if job.arm == arm)


def test_extend_moves_all_arms_alike_until_the_best_is_inside(plan: Callable[..., Plan], store: Store) -> None:
    """Only one arm wants more; each is given the same."""
    one = schedule(plan(ablate=["d"], tune={**TUNE, "extend": True}), store)
    jobs = finish(one, lambda job, seed: rising(job, seed) if job.arm == "without_d" else by_lr(job))
    assert rates(jobs, "base") == rates(jobs, "without_d") == [0.001, 0.01, 0.1, 1.0, 10.0]
    assert one.done
    assert one.completed == one.total == 10
    rows = {row.arm: row for row in shown(store, one).tables[0].rows}
    assert (rows["without_d"].tuned, len(rows["base"].by_budget)) == ({"train.lr": 1.0}, 5)
    assert not [warning for warning in shown(store, one).tables[0].warnings if "that was tried" in warning]


def test_a_task_tries_and_extends_a_range_of_its_own(plan: Callable[..., Plan], store: Store) -> None:
    tasks = {"mqar": MQAR, "slow": {**MQAR, "task": "mqar"}}
    of_task = {"slow": {"tune": {"train.lr": {"log_uniform": [1e-5, 1e-3]}}, "train": {"lr": 1e-4}}}
    one = schedule(plan(ablate=["d"], task=tasks, for_task=of_task, tune={**TUNE, "extend": True}), store)
    jobs = finish(one, lambda job, seed: by_lr(job) if job.task == "mqar" else job.values["train.lr"] / 1e6)
    moved = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1]
    for arm in ("base", "without_d"):
        assert rates([job for job in jobs if job.task == "mqar"], arm) == [0.001, 0.01, 0.1]
        assert rates([job for job in jobs if job.task == "slow"], arm) == pytest.approx(moved)
    tables = {table.task: table for table in shown(store, one).tables}
    assert {row.tuned["train.lr"] for row in tables["mqar"].rows} == {0.01}
    assert {row.tuned["train.lr"] for row in tables["slow"].rows} == {1.0}
    (warning,) = [warning for warning in tables["slow"].warnings if "that was tried" in warning]
    assert warning.startswith("The best train.lr of base, without_d is the highest that was tried, 1: ")


def test_extend_ends_after_a_few_moves(plan: Callable[..., Plan], store: Store) -> None:
    one = schedule(plan(tune={**TUNE, "extend": True}), store)
    jobs = finish(one, lambda job, seed: job.values["train.lr"] / 1e6)
    assert one.done
    assert len(jobs) == 3 + MOST_MOVES
    assert rates(jobs, "base")[-1] == 100
    assert "The best train.lr of base is the highest that was tried, 100" in shown(store, one).to_markdown()


def test_extend_moves_both_ends_at_once(plan: Callable[..., Plan], store: Store) -> None:
    def apart(job: Job, seed: int) -> float:
        distance = abs(math.log10(job.values["train.lr"]) - (0 if job.arm == "base" else -4))
        return 1 / (1 + distance)

    one = schedule(plan(ablate=["d"], tune={**TUNE, "extend": True}), store)
    jobs = finish(one, apart)
    wanted = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0]
    assert rates(jobs, "base") == rates(jobs, "without_d") == pytest.approx(wanted)


def test_without_extend_the_report_says_where_the_best_is(plan: Callable[..., Plan], store: Store) -> None:
    one = schedule(plan(ablate=["d"], tune=TUNE), store)
    assert len(finish(one, lambda job, seed: job.values["train.lr"])) == 6
    (warning,) = [warning for warning in shown(store, one).tables[0].warnings if "that was tried" in warning]
    assert warning.startswith("The best train.lr of base, without_d is the highest that was tried, 0.1: ")


def test_a_value_beyond_that_makes_no_training_ends_the_moves(plan: Callable[..., Plan], store: Store) -> None:
    tune = {"trials": 3, "train.clip": {"uniform": [0.5, 1.5]}, "extend": True}
    one = schedule(plan(tune=tune), store)
    jobs = finish(one, lambda job, seed: 1 - job.values["train.clip"] / 100)
    assert one.done
    assert [job.values["train.clip"] for job in jobs][:3] == [0.5, 1.0, 1.5]
    assert min(job.values["train.clip"] for job in jobs) == 0.0
    assert one.infeasible == 1, "-0.5 is no bound for a gradient"


# Looks.


def seeds_of(jobs: list[Job]) -> dict[str, int]:
    return {
        arm: max(max(job.seeds) for job in jobs if job.arm == arm) for arm in dict.fromkeys(job.arm for job in jobs)
    }


def test_an_arm_stops_when_it_is_decided_and_the_base_goes_on_while_any_arm_does(
    plan: Callable[..., Plan], store: Store
) -> None:
    one = schedule(plan(arms=ARMS, tune=TUNE, seeds=LOOKS, margin={"accuracy": 0}), store)
    jobs = finish(one, figures)
    found = seeds_of(jobs)
    assert found["better"] == 8
    assert found["same"] < found["close"] == found["base"]
    assert one.done
    assert one.completed == one.total == len(jobs) < one.plan.trials
    for arm, seeds in found.items():
        for number in range(3):
            used = [seed for job in jobs if (job.arm, job.number) == (arm, number) for seed in job.seeds]
            assert sorted(used) == list(range(1, seeds + 1)), "each seed once"
    table = shown(store, one).tables[0]
    rows = {row.arm: row for row in table.rows}
    assert {arm: row.score.n for arm, row in rows.items()} == found
    assert rows["better"].verdict == "better"
    assert rows["same"].verdict == "undecided"
    assert "Stopped early, with little prospect of a verdict: same." in table.notes


def test_an_arm_without_a_rival_left_ends_the_study_early(plan: Callable[..., Plan], store: Store) -> None:
    one = schedule(plan(arms={"better": ARMS["better"]}, seeds=LOOKS), store)
    assert seeds_of(finish(one, figures)) == {"base": 8, "better": 8}
    assert one.done
    assert one.total == one.completed == 2


@pytest.fixture(scope="module", params=["task", "study"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, list[str], Any]:
    """A plan with a family of tests, the keys of its trials in a schedule that nothing ends, and their tables."""
    lab = tmp_path_factory.mktemp("whole")
    tasks = {"mqar": MQAR, "short": {**MQAR, "task": "mqar", "length": 8}}
    tune = {"trials": 2, "train.lr": LR, "extend": True}
    found = planned(lab, arms=ARMS, tune=tune, seeds=LOOKS, family=request.param, task=tasks)
    with Store.open(lab / "whole.db") as store:
        one = schedule(found, store)
        keys = sorted(job.key for job in finish(one, figures))
        return found, keys, shown(store, one).to_json()


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", [1, 11, 12, 17])
def test_a_schedule_made_anew_goes_on_and_repeats_nothing(
    whole: tuple[Plan, list[str], Any], tmp_path: Path, killed_after: int
) -> None:
    found, keys, tables = whole
    with Store.open(tmp_path / "cut.db") as store:
        first = schedule(found, store)
        before = finish(first, figures, limit=killed_after)
        alone(first)  # in flight when the driver dies
    with Store.open(tmp_path / "cut.db") as store:
        second = schedule(found, store)
        after = finish(second, figures)
        assert second.done
        assert second.known == killed_after
        assert second.completed == second.total == len(keys)
        third = schedule(found, store)
        assert alone(third) is None
        assert (third.done, third.known) == (True, len(keys))
        assert len(store.trials(third.study_id)) == len(keys)
        assert shown(store, third).to_json() == tables
    assert sorted(job.key for job in before + after) == keys


@pytest.mark.slow
def test_the_number_of_places_and_who_is_first_change_nothing(plan: Callable[..., Plan], tmp_path: Path) -> None:
    found = plan(arms=ARMS, tune={**TUNE, "extend": True}, seeds=LOOKS)
    ran = []
    for seed, places in enumerate([1, 3, 7]):
        with Store.open(tmp_path / f"{seed}.db") as store:
            one, order, flying = schedule(found, store), random.Random(seed), list[Job]()
            while True:
                while len(flying) < places and (job := alone(one)) is not None:
                    flying.append(job)
                if not flying:
                    break
                one.finished(record(flying.pop(order.randrange(len(flying))), figures))
            assert one.done
            rows = [(row.arm, row.number, row.key, str(row.values)) for row in store.trials(one.study_id)]
            ran.append((sorted(rows), shown(store, one).to_json()))
    assert ran[0] == ran[1] == ran[2]


def test_a_family_of_the_whole_study_is_tested_together(plan: Callable[..., Plan], store: Store) -> None:
    """An effect that one task's arms alone let through is lost among the arms of two."""
    tasks = {"mqar": MQAR, "short": {**MQAR, "task": "mqar", "length": 8}}

    def score(job: Job, seed: int) -> float:
        noise = random.Random(f"{job.task} {job.arm} {seed}").gauss(0, 0.02)
        return 0.5 + noise + (0.05 if (job.task, job.arm) == ("mqar", "better") else 0)

    found = {}
    for family in ("task", "study"):
        one = schedule(plan(arms=ARMS, seeds=7, family=family, task=tasks), store)
        finish(one, score)
        found[family] = shown(store, one)
    p = {
        family: [row.difference.p for t in of.tables for row in t.rows if row.difference]
        for family, of in found.items()
    }
    assert len(p["task"]) == len(p["study"]) == 6
    assert sum(p["study"]) > sum(p["task"])
    assert "one exact sign-flip test over the study's arms" in found["study"].to_markdown()
    assert "one exact sign-flip test over a task's arms" in found["task"].to_markdown()


def test_a_family_of_the_whole_study_goes_from_look_to_look_together(plan: Callable[..., Plan], store: Store) -> None:
    tasks = {"mqar": MQAR, "short": {**MQAR, "task": "mqar", "length": 8}}
    one = schedule(plan(arms={"better": ARMS["better"]}, seeds=LOOKS, family="study", task=tasks), store)
    jobs = []
    while len(jobs) < 4:
        job = alone(one)
        assert job is not None
        assert job.seeds == tuple(range(1, 9))
        jobs.append(job)
    for job in jobs[:3]:
        one.finished(record(job, figures))
        assert alone(one) is None, "a look waits for both tasks"
    one.finished(record(jobs[3], figures))
    assert alone(one) is None
    assert one.done


# What is waited for, and what runs once.


def test_nothing_waits_for_more_than_it_needs(plan: Callable[..., Plan], store: Store) -> None:
    one = schedule(plan(ablate=["d"], tune={"trials": 2, "train.lr": LR}), store)
    flying: list[Job] = []
    while (job := alone(one)) is not None:
        flying.append(job)
    places = {(job.arm, job.number) for job in flying}
    assert places == {("base", 0), ("without_d", 0), ("base", 1), ("without_d", 1)}, "all at once"
    assert not one.done
    for job in flying:
        one.finished(record(job, by_lr))
    assert alone(one) is None
    assert one.done


def test_candidates_that_coincide_run_once_for_all_who_wait(plan: Callable[..., Plan], store: Store) -> None:
    """A block of Mamba has no MLP, with or without one."""
    space = {"model.block": {"choice": ["transformer", "mamba"]}, "model.mlp": {"choice": [True, False]}}
    found = plan(tune={"trials": 4, **space})
    one = schedule(found, store)
    jobs = finish(one, lambda job, seed: 0.5)
    assert one.done
    assert [job.number for job in jobs] == [0, 1, 2]
    assert one.completed == one.total == 4
    assert sorted(row.number for row in store.trials(one.study_id)) == [0, 1, 2, 3]
    again = schedule(found, store)
    assert alone(again) is None
    assert again.done


def test_a_trial_of_another_study_is_taken_over(plan: Callable[..., Plan], store: Store) -> None:
    finish(schedule(plan(ablate=["d"]), store), by_lr)
    one = schedule(plan(name="t", ablate=["b"]), store)
    assert [job.arm for job in finish(one, by_lr)] == ["without_b"]
    assert one.known == 1
    assert {row.arm for row in store.trials(one.study_id)} == {"base", "without_b"}


def test_more_seeds_take_over_nothing_and_looks_their_first(plan: Callable[..., Plan], store: Store) -> None:
    """A study of eight seeds that goes on as one of looks keeps its eight."""
    finish(schedule(plan(arms={"same": ARMS["same"]}, seeds=8), store), figures)
    one = schedule(plan(arms={"same": ARMS["same"]}, seeds=LOOKS), store)
    finish(one, figures)
    assert one.known == 2


def test_the_same_work_under_another_task_name_is_in_its_own_study(plan: Callable[..., Plan], store: Store) -> None:
    finish(schedule(plan(), store), by_lr)
    one = schedule(plan(name="t", task={"recall": {**MQAR, "task": "mqar"}}), store)
    finish(one, by_lr)
    assert {row.task for row in store.trials(one.study_id)} == {"recall"}


def test_the_leader_has_the_best_candidate_on_validation(plan: Callable[..., Plan], store: Store) -> None:
    found = plan(task={"text": {"length": 16}}, ablate=["d"], tune=TUNE)
    one = schedule(found, store)
    bits = {("base", 0): 5.0, ("base", 1): 4.0, ("without_d", 0): 4.5, ("without_d", 1): math.nan}
    while (job := alone(one)) is not None:
        score: Score = lambda job, seed: bits.get((job.arm, job.number), 6.0)  # noqa: E731
        one.finished(record(job, score, "bits_per_byte"))
    assert one.leader("text") == ("base", 4.0)


# A search.


def searched(one: Job) -> TrialRecord:
    """More heads score more and cost more; one rule fails, another gives the same for less."""
    heads, rule = one.config["model"]["heads"], one.config["rule"]
    if rule["name"] == "comba" and rule["d"] == {"const": {"value": 0.0}}:
        return record(one, lambda job, seed: None)
    size = 1.0 + (rule["name"] == "comba")
    return record(one, lambda job, seed: heads / 10 + by_lr(job) / 100, flops=100.0 * heads, size=size)


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", [0, 8, 12, 13, 17, 28])
def test_a_search_confirms_its_front_and_goes_on_where_it_was_killed(
    plan: Callable[..., Plan], tmp_path: Path, killed_after: int
) -> None:
    found = plan(search=SEARCH)
    ran: dict[str, list[Job]] = {"whole": [], "cut": []}
    for name, limits in {"whole": [99], "cut": [killed_after, 99]}.items():
        for limit in limits:
            with Store.open(tmp_path / f"{name}.db") as store:
                one = schedule(found, store)
                while len(ran[name]) < limit and (job := alone(one)) is not None:
                    ran[name].append(job)
                    one.finished(searched(job))
                done = one.done, one.completed, one.total
        assert done == (True, found.trials, found.trials) == (True, 13 + 4 * 5, 33)
    assert sorted(job.key for job in ran["cut"]) == sorted(job.key for job in ran["whole"])
    tried = [job for job in ran["whole"] if job.stage == "tune"]
    assert len(tried) == 13
    assert {job.arm for job in tried} == {"base"}
    with Store.open(tmp_path / "whole.db") as store:  # two finalists may come to one trial, which runs once
        rows = [row for row in store.trials(store.study("s").id) if row.stage == "confirm"]
    confirmed = {arm: [row for row in rows if row.arm == arm] for arm in found.names}
    assert {arm: len(own) for arm, own in confirmed.items()} == dict.fromkeys(found.names, 5), "all alike"
    assert all("rule" not in row.values for row in confirmed["base"])
    finalists = [confirmed[f"found_{i}"][0] for i in (1, 2, 3)]
    models = [json.dumps([row.values["rule"], row.values["model.heads"]]) for row in finalists]
    assert len(set(models)) == 3, "each is another model"
    assert all(row.values in [job.values for job in tried] for row in finalists), "its own training is the first"
    assert not [row for row in finalists if row.state == "failed"]
    best = max(row.config["model"]["heads"] for row in finalists)
    assert best == max(job.config["model"]["heads"] for job in tried if searched(job).state == "done")
    seeds = {seed for row in rows for seed in row.runs}
    assert {seed for job in tried for seed in job.seeds}.isdisjoint(seeds)


def test_a_search_without_training_settings_leaves_the_base_as_it_is(plan: Callable[..., Plan], store: Store) -> None:
    found = plan(search={"model.heads": {"choice": [1, 2, 4]}, "trials": 3, "finalists": 1})
    one = schedule(found, store)
    jobs = finish(one, lambda job, seed: job.config["model"]["heads"] / 10)
    assert [job.stage for job in jobs] == ["tune"] * 3 + ["confirm"] * 2
    assert one.completed == one.total == found.trials == 5
    assert [job.values for job in jobs if job.arm == "base" and job.stage == "confirm"] == [{}]


@pytest.mark.parametrize("how", ["failed", "diverged", "one seed diverged"])
def test_a_candidate_of_a_search_without_all_its_scores_is_no_first_finalist(
    plan: Callable[..., Plan], store: Store, how: str
) -> None:
    found = plan(search={"train.lr": LR, "trials": 3, "seeds": 2, "finalists": 1})
    one = schedule(found, store)

    def score(job: Job, seed: int) -> float | None:
        if job.number == 1 and job.stage == "tune":
            bad = {"failed": None, "diverged": math.nan, "one seed diverged": math.nan if seed % 2 else 1.0}
            return bad[how]
        return 0.5

    jobs = finish(one, score)
    (bad,) = [job for job in jobs if (job.stage, job.number) == ("tune", 1)]
    assert bad.values not in [job.values for job in jobs if job.stage == "confirm"]


@pytest.mark.slow
def test_suggestions_of_a_search_are_a_function_of_the_ledger(plan: Callable[..., Plan], tmp_path: Path) -> None:
    found = plan(search={"trials": 24, "train.lr": LR})
    values = {}
    for name, score in {"a": by_lr, "again": by_lr, "other": lambda job, seed: 1 - by_lr(job)}.items():
        with Store.open(tmp_path / f"{name}.db") as store:
            jobs = finish(schedule(found, store), score)
            drawn = {job.number: job.values for job in jobs if job.stage == "tune" and job.number < 24}
            values[name] = [drawn[number] for number in range(19)]  # five more are random search's
    assert values["a"] == values["again"]
    assert values["a"][:5] == values["other"][:5]
    assert values["a"][15:] != values["other"][15:], "what comes after the start-up heeds the results"


def test_values_that_the_ledger_holds_win_over_new_suggestions(plan: Callable[..., Plan], store: Store) -> None:
    """With several trials in flight a candidate depends on what was known then; the ledger knows what it was."""
    found = plan(search={"trials": 2, "train.lr": LR, "finalists": 1})
    one = schedule(found, store)
    job = found.job(found.arms[0], "tune", 0, {"train.lr": 0.0123})
    store.record_trial(one.study_id, "base", record(job, lambda job, seed: 0.9), 0, job.values)
    two = schedule(found, store)
    rest = finish(two, lambda job, seed: 0.1)
    assert two.known == 1
    assert {job.arm: job.values for job in rest if job.stage == "confirm"}["found_1"] == {"train.lr": 0.0123}


def test_a_search_that_never_draws_a_model_ends_in_one_line(
    plan: Callable[..., Plan], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = {"model.d_model": 17, "model.heads": 2}
    monkeypatch.setattr(phase.OptunaStudy, "draw", lambda live, number, sampler: never)
    one = schedule(plan(search={"trials": 2, "finalists": 1, **NARROW}), store)
    with pytest.raises(InputError, match=r"s\.yaml: search: none of 40 candidates makes a model"):
        finish(one, by_lr)


def test_a_candidate_says_at_which_fidelity_it_trains(plan: Callable[..., Plan], store: Store) -> None:
    phase = {"model.heads": {"choice": [1, 2, 4]}, "trials": 3, "finalists": 1, "fidelity": {"train.steps": [2, 4]}}
    found = plan(search=phase)
    jobs = finish(schedule(found, store), lambda job, seed: job.config["model"]["heads"] / 10)
    said = [stack_label([job], found) for job in jobs]
    assert said[0] == "candidate 0, train.steps 2, 1 seed"
    assert "train.steps 4" in said[3]
    assert said[-1].startswith(("base, training 0, ", "found_1, training 0, "))
