"""A search: candidates by choice of whole rules, a front of what is worth its cost, finalists on fresh seeds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltalab import InputError
from deltalab.store import Store, TrialRecord
from deltalab.study import run as running
from deltalab.study.pareto import front
from deltalab.study.plan import make_plan
from deltalab.study.run import run_study
from deltalab.study.spec import load_study

STUDY: dict[str, Any] = {
    "name": "tiny_search",
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}},
    "base": {
        "rule": "linear_attention",
        "model": {"d_model": 8, "layers": 1, "heads": 1, "mlp": False},
        "train": {"steps": 4, "batch_size": 4, "lr": 1e-2, "evaluations": 1, "eval_batches": 1},
    },
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
    result = run_study(file, db=db, executor="inline")
    assert (result.trials, result.failed) == (6 + 6 + 3, 0)
    (table,) = result.report.tables
    assert [row.arm for row in table.rows] == ["base", "found_1", "found_2"]
    assert set(table.rows[0].tuned) == {"train.lr"}, "the base tunes its training, with as many candidates"
    assert all(set(row.tuned) == {"rule", "model.layers", "train.lr"} for row in table.rows[1:])
    assert set(table.front) <= {"base", "found_1", "found_2"}
    with Store.open(db) as store:
        tuning = [row.values for row in store.trials(result.study_id) if row.stage == "tune"]
        drawn = [values for values in tuning if "rule" in values]
        own = [values for values in tuning if "rule" not in values]
        assert len(drawn) == len(own) == 6
        assert {"train.lr": 1e-2} in own, "its own value among them"
        assert all(row.tuned in drawn for row in table.rows[1:])
        assert table.rows[0].tuned in own
        seeds = {seed for row in store.trials(result.study_id) if row.stage == "tune" for seed in row.runs}
        assert seeds.isdisjoint({1, 2})
    again = run_study(file, db=db, executor="inline")
    assert again.known == again.trials == 15


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"rule": {"choice": ["linear_attention", "comb"]}}, "did you mean 'comba'"),
        ({"rule": {"choice": ["mamba2", {"name": "comba", "transition": "dpl"}]}}, "did you mean 'dplr'"),
        ({"rule": {"choice": ["mamba2", {"name": "comba", "transition": "dpl"}]}}, r"search\.rule: "),
        ({"model.layer": {"choice": [1, 2]}}, "model.layer"),
        ({"finalists": 7}, "finalists 7 exceed trials 6"),
    ],
)
def test_what_cannot_be_searched_is_refused_at_planning(written: Any, search: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_plan(load_study(written(**search)))


def drawn(db: Path) -> list[tuple[int, str, dict[str, Any], str | None]]:
    """What became of the candidates that a ledger holds."""
    with Store.open(db, create=False) as store:
        rows = store.trials(store.study("tiny_search").id)
    drawn = [row for row in rows if row.stage == "tune" and "model.heads" in row.values]
    return [(row.number, row.state, row.values, row.error) for row in drawn]


class Killed(Exception):
    """Stands for kill -9."""


def dies_after(stacks: int) -> Callable[..., list[TrialRecord]]:
    """Runs so many stacks, then dies."""
    left, execute = iter(range(stacks)), running.execute

    def run(*args: Any, **given: Any) -> list[TrialRecord]:
        if next(left, None) is None:
            raise Killed
        return execute(*args, **given)

    return run


NARROW = {"model.d_model": {"integers": [16, 64]}, "model.heads": {"choice": [1, 2]}, "trials": 8}


def test_a_candidate_that_makes_no_model_is_recorded_and_another_is_drawn(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(**NARROW)
    whole = run_study(file, db=tmp_path / "whole.db", executor="inline")
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
    assert (whole.trials, whole.failed, whole.infeasible) == (8 + 8 + 3, 0, len(infeasible))

    for stacks in (0, 1):  # the driver dies before anything has trained, and after the first stack
        with monkeypatch.context() as patch:
            patch.setattr(running, "execute", dies_after(stacks))
            with pytest.raises(Killed):
                run_study(file, db=tmp_path / "cut.db", executor="inline")
    resumed = run_study(file, db=tmp_path / "cut.db", executor="inline")
    assert drawn(tmp_path / "cut.db") == found
    assert resumed.report.tables[0].notes == whole.report.tables[0].notes
    assert (resumed.infeasible, resumed.failed) == (len(infeasible), 0)


def test_a_search_makes_its_own_arms(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({**STUDY, "ablate": ["conv"]}))
    with pytest.raises(InputError, match="leave out ablate"):
        load_study(file)
