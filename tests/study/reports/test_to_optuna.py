"""A search as a study of Optuna: Optuna loads the file, and its trials are the ledger's candidates."""

import json
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from tests.support.ledgers import begin
from tests.support.search_ledger import Lab, record_search
from typer.testing import CliRunner

from deltalab.cli.app import app
from deltalab.errors import InputError
from deltalab.store import Store
from deltalab.study.reports.to_optuna import distribution, export_optuna
from deltalab.study.searching.results import candidate_results
from deltalab.study.specs.sections.search_space import Search

LOW, LAST = "s, train.steps 20", "s, train.steps 60"


def loaded(file: Path, name: str) -> optuna.Study:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{file}")


def test_values_and_params_are_those_of_the_ledger(store: Store, tmp_path: Path) -> None:
    study_id = record_search(store)
    written = export_optuna(store, study_id, tmp_path / "o.db")
    assert [(each.name, each.trials, each.complete) for each in written] == [(LOW, 43, 41), (LAST, 2, 2)]
    study = loaded(tmp_path / "o.db", LOW)
    assert study.metric_names == ["accuracy@mqar", "flops_per_token", "state_size"]
    assert [direction.name for direction in study.directions] == ["MAXIMIZE", "MINIMIZE", "MINIMIZE"]
    assert study.user_attrs["base"]["accuracy@mqar"] == 0.7
    trials = {trial.user_attrs["candidate"]: trial for trial in study.trials}
    for each in candidate_results(store.study(study_id).spec, store, study_id):
        if each.rung == 0:
            trial = trials[each.number]
            assert trial.params == each.values, "a knob that does not exist for a candidate is absent"
            if each.infeasible is None:
                assert trial.values == [*each.scores.values()]
            assert trial.user_attrs["drawn by"] == each.drawn_by
            assert trial.duration is not None
            assert trial.duration.total_seconds() == 10
    assert {trial.user_attrs.get("arm") for trial in loaded(tmp_path / "o.db", LAST).trials} == {"found_1", "found_2"}
    assert [trial.user_attrs["what it is"] for trial in loaded(tmp_path / "o.db", LAST).trials] == [
        "fast start",
        "no decay",
    ]


def test_a_candidate_without_a_model_is_a_failed_trial_that_says_why(store: Store, tmp_path: Path) -> None:
    export_optuna(store, record_search(store), tmp_path / "o.db")
    failed = loaded(tmp_path / "o.db", LOW).get_trials(states=[TrialState.FAIL])
    assert [trial.user_attrs["failed"].partition(";")[0] for trial in failed] == [
        "width 17 is no multiple of 4 heads",
        "width 19 is no multiple of 4 heads",
    ]


def test_optuna_finds_the_front_and_draws_on(store: Store, tmp_path: Path) -> None:
    export_optuna(store, record_search(store), tmp_path / "o.db")
    study = loaded(tmp_path / "o.db", LAST)
    assert sorted(trial.user_attrs["arm"] for trial in study.best_trials) == ["found_1", "found_2"]
    space = loaded(tmp_path / "o.db", LOW).trials[0].distributions
    assert space["train.lr"] == FloatDistribution(0.01, 0.1, log=True)
    assert space["rule.decay"] == CategoricalDistribution(["none", "scalar"])


def test_every_form_of_a_setting_has_a_distribution() -> None:
    rules = Search(choice=("gla", {"name": "comba", "transition": "iplr"}))
    assert distribution(rules) == CategoricalDistribution(["gla", json.dumps({"name": "comba", "transition": "iplr"})])
    assert distribution(Search(choice=(1, 2))) == CategoricalDistribution([1, 2])
    assert distribution(Search(integers=(2, 4))) == IntDistribution(2, 4)
    assert distribution(Search(uniform=(0.5, 1))) == FloatDistribution(0.5, 1)


def test_what_cannot_be_written_is_one_line_and_no_file(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "o.db"
    with pytest.raises(InputError, match="has no search, and Optuna shows searches alone"):
        export_optuna(store, begin(store, "tuned"), file)
    empty = Lab(store).id
    with pytest.raises(InputError, match="has no candidates yet: deltalab study run s"):
        export_optuna(store, empty, file)
    study_id = record_search(store)
    with pytest.raises(InputError, match="cannot be written: unable to open database file"):
        export_optuna(store, study_id, tmp_path / "gone" / "o.db")
    assert not file.exists()
    file.write_text("mine")
    with pytest.raises(InputError, match="exists; give the path of a new file"):
        export_optuna(store, study_id, file)
    assert file.read_text() == "mine"


def test_the_command_says_how_to_open_it(store: Store, tmp_path: Path) -> None:
    record_search(store)
    file = tmp_path / "o.db"
    ran = CliRunner().invoke(app, ["study", "export-optuna", "s", str(file), "--db", str(tmp_path / "lab.db")])
    assert ran.exit_code == 0, ran.output
    assert f"{LOW}: 41 of 43 candidates have all scores" in ran.output
    assert f"optuna-dashboard sqlite:///{file}" in ran.output
    assert len(optuna.get_all_study_names(f"sqlite:///{file}")) == 2
    words = ["study", "export-optuna", "s", str(tmp_path / "json.db"), "--db", str(tmp_path / "lab.db"), "--json"]
    result = json.loads(CliRunner().invoke(app, words).output)
    assert {"name": LOW, "complete": 41, "trials": 43} in result["searches"]
