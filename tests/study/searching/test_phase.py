"""A search: candidates by choice of whole rules, a front of what is worth its cost, finalists on fresh seeds."""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.studies import LEAST

from deltalab import InputError
from deltalab.statistics.pareto import front
from deltalab.store import RunRecord, Store, TrialRecord
from deltalab.store.studies import shelf
from deltalab.study.planning.make import make_plan
from deltalab.study.reports.lines import failure_lines
from deltalab.study.running.run import arm_records, run_study_file
from deltalab.study.running.schedule import Schedule
from deltalab.study.searching.halving import Halving, going_on
from deltalab.study.searching.phase import finalists
from deltalab.study.searching.results import CandidateResult, candidate_results, halvings
from deltalab.study.specs.study_file import load_study
from deltalab.study.workers.jobs import Job
from deltalab.study.workers.train_stack import Start, _record, failed
from deltalab.study.workers.worker import Worker

STUDY: dict[str, Any] = {
    "name": "tiny_search",
    **LEAST,
    "search": {
        "rule": {"choice": ["linear_attention", "mamba2", {"name": "comba", "transition": "iplr"}]},
        "model.layers": {"choice": [1, 2]},
        "train.lr": {"log_uniform": [1e-3, 1e-2]},
        "trials": 6,
        "finalists": 2,
    },
    "seeds": 2,
}


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(**search: Any) -> Path:
        file = tmp_path / "study.yaml"
        file.write_text(yaml.safe_dump({**STUDY, "search": {**STUDY["search"], **search}}))
        return file

    return write


def test_no_point_of_the_front_is_dominated() -> None:
    points = [(1.0, 5.0, 2.0), (1.0, 5.0, 3.0), (2.0, 1.0, 9.0), (0.5, 6.0, 2.0)]
    assert front(points) == [0, 2, 3]


def test_a_search_confirms_what_it_found_and_nothing_runs_twice(written: Any, tmp_path: Path) -> None:
    file, db = written(), tmp_path / "lab.db"
    result = run_study_file(file, db=db, executor="inline")
    assert (result.trials, result.known, result.failed) == (6 + 3 * 5, 0, 0)
    (table,) = result.report.tables
    assert [row.arm for row in table.rows] == ["base", "found_1", "found_2"]
    assert set(table.rows[0].tuned) == {"train.lr"}, "the base tunes its training"
    assert all(set(row.tuned) == {"rule", "model.layers", "train.lr"} for row in table.rows[1:])
    assert set(table.front) <= {"base", "found_1", "found_2"}
    with Store.open(db) as store:
        trials = store.trials(result.study_id)
        drawn = [row.values for row in trials if row.stage == "tune"]
        assert len(drawn) == 6
        for row in table.rows:
            own = [each.values for each in trials if (each.arm, each.stage) == (row.arm, "confirm")]
            assert len(own) == 5
            assert row.tuned in own
            assert {"train.lr": 1e-2} in own if row.is_base else own[0] in drawn, "its own value among them"
        assert {seed for row in trials if row.stage == "tune" for seed in row.runs}.isdisjoint({1, 2})
    again = run_study_file(file, db=db, executor="inline")
    assert again.known == again.trials == 21


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"rule": {"choice": ["linear_attention", "comb"]}}, "did you mean 'comba'"),
        ({"rule": {"choice": ["mamba2", {"name": "comba", "transition": "dpl"}]}}, "did you mean 'dplr'"),
        ({"rule": {"choice": ["mamba2", {"name": "comba", "transition": "dpl"}]}}, r"search\.rule: "),
        ({"model.layer": {"choice": [1, 2]}}, "model.layer"),
        ({"finalists": 7}, "finalists 7 exceed trials 6"),
        ({"objectives": []}, r"search\.objectives: takes at least one"),
        ({"trials": 8, "finalists": 7}, r"search\.finalists 7: the space has 6 models, and each is confirmed once"),
        ({"warm": [{"study": "s", "name": "comba"}]}, r"search\.warm"),
        ({"fidelity": {"train.lr": [0.01, 0.02]}}, r"search\.fidelity: unknown key 'train\.lr'"),
    ],
)
def test_what_cannot_be_searched_is_refused_at_planning(written: Any, search: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_plan(load_study(written(**search)))


def test_a_study_to_begin_with_that_is_not_there_is_refused_before_anything_is_written(
    written: Any, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"study\.yaml: search\.warm: there is no ledger with study 'nope' yet"):
        run_study_file(written(warm=[{"study": "nope"}]), db=tmp_path / "lab.db", executor="inline")
    assert not (tmp_path / "lab.db").exists()
    with Store.open(tmp_path / "lab.db"), pytest.raises(InputError, match=r"unknown study 'nope'"):
        run_study_file(written(warm=[{"study": "nope"}]), db=tmp_path / "lab.db", executor="inline")
    with Store.open(tmp_path / "lab.db") as store:
        assert store.studies() == []


def drawn(db: Path) -> list[tuple[int, str, dict[str, Any], str | None]]:
    """What became of the candidates that a ledger holds."""
    with Store.open(db, create=False) as store:
        rows = store.trials(store.study("tiny_search").id)
    drawn = [row for row in rows if row.stage == "tune" and row.arm == "base" and "model.heads" in row.values]
    return [(row.number, row.state, row.values, row.error) for row in drawn]


class Killed(Exception):
    """Stands for kill -9."""


def dies_after(stacks: int) -> Callable[..., list[TrialRecord]]:
    """Runs so many stacks, then dies."""
    left, execute = iter(range(stacks)), Worker.execute

    def run(*args: Any, **given: Any) -> list[TrialRecord]:
        if next(left, None) is None:
            raise Killed
        return execute(*args, **given)

    return run


NARROW = {"model.d_model": {"integers": [16, 64]}, "model.heads": {"choice": [1, 2]}, "trials": 8}


@pytest.mark.slow
def apart_from_times(notes: list[str]) -> list[str]:
    """Leaves out the notes that hang on the load of the machine."""
    return [note for note in notes if not note.startswith(("The machine was loaded", "us/token", "Times are"))]


def test_a_candidate_that_makes_no_model_is_recorded_and_another_is_drawn(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(**NARROW)
    whole = run_study_file(file, db=tmp_path / "whole.db", executor="inline")
    found = drawn(tmp_path / "whole.db")
    numbers = sorted(number for number, *_ in found)
    controls = [number for number in numbers if number >= 1_000_000]
    assert numbers == [*range(len(found) - len(controls)), *range(1_000_000, 1_000_000 + len(controls))]
    assert [state for _, state, _, _ in found].count("done") == 8, "the budget counts candidates that train"
    infeasible = [(values, error) for _, state, values, error in found if state == "infeasible"]
    assert infeasible
    for values, error in infeasible:
        said = f"model.d_model {values['model.d_model']} must be a multiple of heads 2, or set key_dim"
        assert (values["model.d_model"] % 2, values["model.heads"], error) == (1, 2, said)
    assert (whole.trials, whole.failed, whole.infeasible) == (8 + 3 * 5, 0, len(infeasible))
    with Store.open(tmp_path / "whole.db", create=False) as store:
        assert shelf.trial_counts(store) == {whole.study_id: whole.trials}, "the list counts as the driver does"
        kept = shelf.contents(store, whole.study_id)
        keys = {row.key for row in store.trials(whole.study_id) if row.state == "done"}
    assert kept.trials == len(keys)

    for stacks in (0, 1):  # the driver dies before anything has trained, and after the first stack
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "execute", dies_after(stacks))
            with pytest.raises(Killed):
                run_study_file(file, db=tmp_path / "cut.db", executor="inline")
    resumed = run_study_file(file, db=tmp_path / "cut.db", executor="inline")
    assert drawn(tmp_path / "cut.db") == found
    assert apart_from_times(resumed.report.tables[0].notes) == apart_from_times(whole.report.tables[0].notes)
    assert (resumed.infeasible, resumed.failed) == (len(infeasible), 0)


def test_a_search_makes_its_own_arms(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({**STUDY, "ablate": ["conv"]}))
    with pytest.raises(InputError, match="leave out ablate"):
        load_study(file)


MQAR = {"length": 16, "pairs": 2, "vocab_size": 32}


def computed(job: Job, score: float | None = None) -> TrialRecord:
    """The record of a trial whose results follow from its settings. Candidates of two layers learn late."""
    model, train = job.specs
    late = 0.5 if model.layers == 2 and train.steps < 8 else 0.0
    score = 1 - abs(math.log(train.lr / 4e-3)) / 5 - late if score is None else score
    figures = {
        ("validation", "accuracy"): score,
        ("test", "accuracy"): score,
        ("cost", "flops_per_token"): float(model.layers) + (0.5 if job.config["rule"]["name"] == "mamba2" else 0),
        ("cost", "state_size"): float(model.d_model),
    }
    metrics = [(*name, train.steps, value) for name, value in figures.items()]
    return _record(job, Start.now(), 1, runs=[RunRecord(seed, "done", None, metrics, []) for seed in job.seeds])


def executed(worker: Worker, stack: Sequence[Job], *_: Any) -> list[TrialRecord]:
    return [computed(job) for job in stack]


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials compute their results instead of training."""
    monkeypatch.setattr(Worker, "execute", executed)


def found(db: Path, name: str = "tiny_search") -> list[CandidateResult]:
    with Store.open(db, create=False) as store:
        study = store.study(name)
        return candidate_results(study.spec, store, study.id)


@pytest.mark.slow
@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("sampler", ["mixed", "tpe", "nsga2"])
def test_candidates_do_not_depend_on_when_trials_end(written: Any, tmp_path: Path, sampler: str) -> None:
    """With other numbers of trials at a time, which end in another order, a search draws the same candidates."""
    file = written(trials=24, sampler=sampler)
    run_study_file(file, db=tmp_path / "inline.db", executor="inline")
    expected = found(tmp_path / "inline.db")
    assert len(expected) == 24
    plan = make_plan(load_study(file), study_file=str(file))
    for places in (2, 5):
        draw = random.Random(places)
        db = tmp_path / f"{places}.db"
        with Store.open(db) as store:
            tasks = {"mqar": {"metric": "accuracy", "maximize": True, "chance": 1 / 16}}
            study_id = store.begin_study(
                "tiny_search",
                None,
                plan.identity,
                plan.spec.model_dump(mode="json"),
                arm_records(plan),
                {"tasks": tasks},
            )
            schedule = Schedule(plan, store, study_id)
            out: list[Job] = []
            while not schedule.done:
                while len(out) < places and (stack := schedule.next(places)):
                    out += stack
                if out:
                    schedule.finished(computed(out.pop(draw.randrange(len(out)))))
        assert found(db) == expected


@pytest.mark.usefixtures("untrained")
def test_a_fifth_of_the_candidates_is_drawn_at_random_whatever_the_results(written: Any, tmp_path: Path) -> None:
    run_study_file(written(trials=24), db=tmp_path / "lab.db", executor="inline")
    drawn = found(tmp_path / "lab.db")
    control = [each for each in drawn if each.drawn_by == "random"]
    assert [each.number for each in control] == [*range(1_000_000, 1_000_005)]
    assert [each.number for each in drawn if each.drawn_by == "mixed"] == [*range(19)]
    run_study_file(written(trials=24, sampler="nsga2"), db=tmp_path / "other.db", executor="inline")
    other = [each for each in found(tmp_path / "other.db") if each.drawn_by == "random"]
    assert [each.values for each in other] == [each.values for each in control]


@pytest.mark.slow
@pytest.mark.usefixtures("untrained")
def test_successive_halving_says_how_likely_it_dropped_a_late_learner(written: Any, tmp_path: Path) -> None:
    file = written(trials=24, finalists=3, fidelity={"train.steps": [2, 4, 8], "keep": 0.5})
    for stacks in (2, 3, 3):  # dies while candidates are drawn, and while they go on
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Worker, "execute", dies_after(stacks))
            with pytest.raises(Killed):
                run_study_file(file, db=tmp_path / "cut.db", executor="inline")
    result = run_study_file(file, db=tmp_path / "lab.db", executor="inline")
    run_study_file(file, db=tmp_path / "cut.db", executor="inline")
    drawn = found(tmp_path / "lab.db")
    assert drawn == found(tmp_path / "cut.db")
    assert [sum(each.rung == rung for each in drawn) for rung in range(3)] == [24, 12, 6]
    with Store.open(tmp_path / "lab.db") as store:
        spec = store.study("tiny_search").spec
        candidates = candidate_results(spec, store, result.study_id)
        first, second = halvings(spec, store, result.study_id, candidates)
        steps = {row.key: row.config["train"]["steps"] for row in store.trials(result.study_id) if row.stage == "tune"}
    assert set(steps.values()) == {2, 4, 8}, "the trials of lower rungs are trials of their own"
    assert (first.trained, first.by_rank, first.by_lot, first.dropped) == (24, 9, 3, 12)
    assert (second.trained, second.by_rank, second.by_lot, second.best) == (12, 4, 2, 3)
    assert second.late is not None
    assert 0 <= second.low <= second.late / 2 <= second.high <= 1
    assert "train.steps 4: dropped 6 of 12" in str(second)
    last = [{**each.values, "train.lr": 0} for each in drawn if each.rung == 2]
    tables = result.report.tables
    assert all({**row.tuned, "train.lr": 0} in last for row in tables[0].rows[1:]), "finalists come from the last rung"


def test_places_by_lot_go_to_candidates_that_did_not_earn_one() -> None:
    points = {number: (float(number),) for number in range(40)} | {40: (math.nan,)}
    by_rank, by_lot = going_on("name", points, 12)
    assert by_rank == [*range(9)]
    assert len(by_lot) == 3
    assert set(by_lot) <= set(range(9, 40))
    others = {number for lot in range(60) for number in going_on(f"{lot}", points, 12)[1]}
    assert len(others) > 25, "any of the others may be drawn"
    assert going_on("name", {1: (0.0,), 2: (1.0,)}, 4) == ([1, 2], [])


def test_a_halving_that_has_not_ended_says_so() -> None:
    halving = Halving({"train.steps": 2}, {"train.steps": 4}, 8, 3, 1, 2)
    assert str(halving) == "train.steps 2: dropped 4 of 8. train.steps 4 has not ended"


@pytest.mark.usefixtures("untrained")
def test_a_search_begins_with_named_rules_and_with_what_another_search_found(written: Any, tmp_path: Path) -> None:
    db = tmp_path / "lab.db"
    run_study_file(written(), db=db, executor="inline")
    best = {str(each.values) for each in found(db)}
    file = tmp_path / "warm.yaml"
    warm = [{"name": "comba", "transition": "iplr"}, {"study": "tiny_search"}]
    file.write_text(
        yaml.safe_dump({**STUDY, "name": "warm", "search": {**STUDY["search"], "trials": 16, "warm": warm}})
    )
    run_study_file(file, db=db, executor="inline")
    first = [each for each in found(db, "warm") if each.drawn_by == "warm"]
    assert [each.number for each in first] == [*range(2_000_000, 2_000_005)], "one named, and a quarter of the trials"
    assert first[0].values == {"rule": {"name": "comba", "transition": "iplr"}, "model.layers": 1, "train.lr": 1e-2}
    assert {str(each.values) for each in first[1:]} <= best
    narrow = {"rule.transition": {"choice": ["iplr", "splr"]}, "train.lr": {"log_uniform": [1e-3, 1e-2]}}
    narrow |= {"trials": 16, "finalists": 1, "warm": [{"study": "tiny_search"}]}
    base = {**STUDY["base"], "rule": "comba"}
    file.write_text(yaml.safe_dump({**STUDY, "name": "narrow", "base": base, "search": narrow}))
    run_study_file(file, db=db, executor="inline")
    first = [each.values for each in found(db, "narrow") if each.drawn_by == "warm"]
    earlier = [each.values for each in found(db) if each.values["rule"] == {"name": "comba", "transition": "iplr"}]
    rates = [each["train.lr"] for each in earlier if each["model.layers"] == 1]
    assert {each["rule.transition"] for each in first} == {"iplr"}, "of other rules or sizes, the space has none"
    assert sorted(each["train.lr"] for each in first) == sorted(rates)
    file.write_text(yaml.safe_dump({**STUDY, "search": {**STUDY["search"], "warm": ["gla"]}}))
    with pytest.raises(InputError, match=r"warm: unknown rule 'gla'"):
        run_study_file(file, db=tmp_path / "none.db", executor="inline")


@pytest.mark.usefixtures("untrained")
def test_a_candidate_trains_on_every_task(tmp_path: Path) -> None:
    tasks = {"mqar": MQAR, "longer": {**MQAR, "task": "mqar", "length": 24}}
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({**STUDY, "task": tasks}))
    result = run_study_file(file, db=tmp_path / "lab.db", executor="inline")
    drawn = found(tmp_path / "lab.db")
    assert len(drawn) == 6
    assert {*drawn[0].scores} == {"accuracy@mqar", "accuracy@longer", "flops_per_token", "state_size"}
    assert result.trials == 2 * (6 + 3 * 5)
    tuned = [[{**row.tuned, "train.lr": 0} for row in table.rows[1:]] for table in result.report.tables]
    assert tuned[0] == tuned[1], "a finalist is one model on all tasks"


@pytest.mark.parametrize("tasks", [{"mqar": MQAR}, {"mqar": MQAR, "longer": {**MQAR, "task": "mqar", "length": 24}}])
def test_a_candidate_has_one_name_on_the_terminal_and_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tasks: dict[str, Any]
) -> None:
    def execute(worker: Worker, stack: Sequence[Job], *_: Any) -> list[TrialRecord]:
        return [
            failed(job, "ValueError: no") if job.stage == "tune" and job.number in (3, 1_000_001) else computed(job)
            for job in stack
        ]

    monkeypatch.setattr(Worker, "execute", execute)
    space = {**STUDY["search"], "trials": 8, "warm": ["mamba2"]}
    given = {**STUDY, "task": tasks, "search": space, "resources": {"stack": 1}}
    found = run_study_file(given, db=tmp_path / "lab.db", executor="inline", quiet=False).report
    names = ["warm candidate 0", "random candidate 0", *(f"candidate {number}" for number in range(5))]
    task = "mqar / " if len(tasks) > 1 else ""
    running = {part for line in capsys.readouterr().err.splitlines() for part in line.split("  ")}
    for name in names:
        assert f"{task}{name}, 1 seed" in running
    for name in ("base, training 1", "found_1, training 0", "found_2, training 4"):
        assert f"{task}{name}, 2 seeds" in running
    assert {line.partition(": ValueError")[0] for line in failure_lines(found.failures)} == {
        f"failed: {name} on {task}" for name in ("candidate 3", "random candidate 1") for task in tasks
    }
    assert found.search is not None
    shown = {point.name for point in found.search.candidates if not point.is_arm}
    assert shown < {*names, "random candidate 1"}
    assert {"candidate 3", "random candidate 1"} < shown


def test_finalists_are_those_that_add_the_most_hypervolume() -> None:
    """Of two near points of the front and a far one, two finalists are the far one and one of the near."""
    points = [(0.0, 1.0), (0.01, 0.99), (0.9, 0.0), (1.0, 1.0), (math.nan, 0.0)]
    assert finalists(points, 2) == [2, 1]
    assert finalists(points, 5) == [2, 1, 0, 3, 4]


def test_the_best_by_each_metric_is_a_finalist() -> None:
    """The best is dear, next to the worst of all costs, so that its share of the hypervolume is small."""
    points = [(-0.395, 12_320.0), (-0.230, 11_296.0), (-0.137, 9_760.0), (-0.05, 12_576.0), (-0.395, 12_400.0)]
    assert finalists(points, 2) == [2, 1]
    assert finalists(points, 2, [0]) == [0, 2]
    assert finalists(points, 1, [0]) == [0]
    assert finalists([(*each, -each[0]) for each in points], 2, [0, 2]) == [0, 3]
    assert finalists([(math.nan, 1.0)], 1, [0]) == [0]


def test_no_finalist_is_a_cheap_candidate_that_learned_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chance is 1/16. One layer is the cheapest and on the front; it comes last, where there is no other."""

    def execute(worker: Worker, stack: Sequence[Job], *_: Any) -> list[TrialRecord]:
        layers = [job.config["model"]["layers"] for job in stack]
        scores = {1: 1 / 16, 2: 0.5, 3: 0.7, 4: 0.7}
        return [computed(job, scores[each]) for job, each in zip(stack, layers, strict=True)]

    monkeypatch.setattr(Worker, "execute", execute)
    space = {"model.layers": {"choice": [1, 2, 3]}, "trials": 3}
    base = {**STUDY["base"], "model": {**STUDY["base"]["model"], "layers": 4}}
    for most, found in ((2, [3, 2]), (3, [3, 2, 1])):
        given = {**STUDY, "base": base, "search": {**space, "finalists": most}}
        result = run_study_file(given, db=tmp_path / f"{most}.db", executor="inline").report
        (table,) = result.tables
        assert [row.tuned["model.layers"] for row in table.rows[1:]] == found
