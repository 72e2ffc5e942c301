"""The pages of a study's trials, of one trial, and of its arms."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.support.ledgers import BASE, TASKS, TRACEBACK, begin, cells, charts, open_page, record, texts

from deltalab.errors import InputError
from deltalab.store import RunRecord, Store
from deltalab.store.records import ArtifactRecord
from deltalab.store.studies.trials import Sort, curves_of, find_trial, listed
from deltalab.study.answers.rows import SPLIT
from deltalab_dashboard.views import trials

JUDGED = {task: about["metric"] for task, about in TASKS.items()}
LATE = "1 late mqar tune 0 0"
"""The key of the trial that failed."""


def keys(store: Store, study: int, **given: Any) -> list[str]:
    return [trial.key for trial in listed(store, study, judged=JUDGED, splits=SPLIT, **given).rows]


@pytest.fixture
def kept(store: Store, tmp_path: Path) -> Path:
    """The weights of seed 1 of `no_*d*` on mqar, a trial of the study `one` that the study `two` shares."""
    file = tmp_path / "seed_1.pt"
    file.write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    metrics = [("validation", "accuracy", step, step / 300) for step in (100, 200, 300)]
    runs = [
        RunRecord(
            1,
            metrics=[*metrics, ("test", "accuracy", 300, 0.5), ("train", "loss", 300, 1.25)],
            artifacts=[ArtifactRecord("weights", str(file), digest, 7)],
        ),
        RunRecord(2, "diverged", 150, metrics=metrics[:1]),
    ]
    for name in ("one", "two"):
        study = begin(store, name)
        record(store, study, "base", "mqar", BASE)
        if name == "one":
            about: Mapping[str, Any] = {
                "parameters": 3080,
                "state_size": 136,
                "hardware": {"device": "A100", "stack": 4},
            }
            record(store, study, "no_*d*", "mqar", [], tuned={"train.lr": 0.02}, **{**about, "runs": runs})
        else:
            store.attach(study, "late", "1 no_*d* mqar confirm 0 0", 3, {})
        store.finish_study(study, "done")
    return file


def test_a_page_of_trials_is_filtered_and_sorted_by_the_database(store: Store, ablation: int) -> None:
    found = listed(store, ablation, judged=JUDGED, splits=SPLIT, limit=3)
    assert (len(found.rows), found.matching, found.total) == (3, 8, 8)
    assert keys(store, ablation) == [trial.key for trial in store.trials(ablation)], "the order of the plan"
    assert keys(store, ablation, limit=2, offset=2) == keys(store, ablation)[2:4]
    assert keys(store, ablation, states=["failed"]) == [LATE]
    assert keys(store, ablation, states=["diverged", "failed"], tasks=["mqar"], arms=["late"]) == [
        "1 late mqar confirm 0 0", LATE
    ]  # fmt: skip
    assert set(keys(store, ablation, stages=["tune"], arms=["base"])) == {
        "1 base mqar tune 0 0",
        "1 base text tune 0 0",
    }
    assert keys(store, ablation, arms=["gone"]) == []


@pytest.mark.parametrize("sort", ["score", "seconds", "tokens_per_second", "finished_at"])
@pytest.mark.parametrize("descending", [False, True])
def test_a_trial_without_a_value_comes_last(store: Store, ablation: int, sort: Sort, descending: bool) -> None:
    rows = listed(store, ablation, judged=JUDGED, splits=SPLIT, sort=sort, descending=descending).rows
    values = [getattr(trial, sort) for trial in rows]
    there = [value for value in values if value is not None]
    assert values == sorted(there, reverse=descending) + [None] * values.count(None)
    if sort == "score":
        assert rows[-1].key == LATE


def test_a_score_is_the_mean_of_the_last_values_of_seeds_that_finished(store: Store, ablation: int) -> None:
    scores = {trial.key: trial for trial in listed(store, ablation, judged=JUDGED, splits=SPLIT).rows}
    assert scores["1 base mqar confirm 0 0"].score == pytest.approx(sum(BASE) / 8)
    late = scores["1 late mqar confirm 0 0"]
    assert (late.state, late.seeds, late.diverged) == ("diverged", 8, [1])
    assert late.score == pytest.approx(sum(BASE[1:]) / 7)
    assert scores["1 base text tune 0 0"].score == pytest.approx(0.9)


def test_the_list_goes_through_its_pages(ablation: int) -> None:
    app = open_page("trials.py", part=2, sort="score", descending="true")
    assert "Page 2 is empty: the last is page 1." in texts(app)
    app.multiselect(key="arms").select("base").run()
    assert "4 of 8 trials" in texts(app), "another filter shows the first page"
    assert app.number_input(key="part").value == 1
    assert list(app.dataframe[0].value["score"]) == sorted(app.dataframe[0].value["score"], reverse=True)


def test_a_row_opens_the_page_of_its_trial(store: Store, ablation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(trials.st, "switch_page", lambda page, query_params: opened.append((page, query_params)))
    rows = listed(store, ablation, judged=JUDGED, splits=SPLIT).rows
    trials.open_ticked(store.study(ablation), rows, [])
    assert opened == []
    trials.open_ticked(store.study(ablation), rows, [2])
    assert opened == [("views/trial.py", {"study": "1 ablation", "trial": rows[2].key})]


def test_a_trial_has_all_that_the_ledger_holds_of_it(kept: Path) -> None:
    app = open_page("trial.py", study="1 one", trial="1 no_")
    said = texts(app)
    assert "no_*d*, confirm 0 on mqar" in said
    assert ":orange-badge[diverged]" in said
    facts, hardware, seeds, changed, values, studies, weights = (cells(table.value) for table in app.table)
    told = dict(zip(facts["what"], facts["value"], strict=True))
    assert told["task"] == "mqar, version 1"
    assert (told["started"], told["seconds"]) == (f"{datetime.fromtimestamp(1e9, UTC):%Y-%m-%d %H:%M:%S} UTC", "10.0")
    assert (told["tokens/s"], told["us/token"]) == ("50,000", "20")
    assert (told["parameters"], told["state, elements"]) == ("3,080", "136")
    assert dict(zip(hardware["what"], hardware["value"], strict=True)) == {"device": "A100", "stack": "4"}
    assert seeds["seed 1"] == ["done", "0.5", "1", "1.25"]
    assert seeds["seed 2"] == ["diverged at step 150", "", "0.3333", ""]
    assert seeds["mean"] == ["", "0.5", "1", "1.25"], "of the seeds that finished"
    # The trials of these tests have no configuration, and their arms plan one.
    assert changed == {"setting": ["rule.name"], "base": ["comba"], "this trial": ["absent"], "set by": ["the arm"]}
    assert values == {"tuned or searched": ["train.lr"], "value": ["0.02"]}
    assert (studies["study"], studies["arm"]) == (["1 one", "2 two"], ["no_*d*", "late"])
    assert (weights["file"], weights["bytes"], weights["still there"]) == (["seed_1.pt"], ["7"], ["yes"])
    assert weights["SHA-256"] == [hashlib.sha256(b"weights").hexdigest()]
    assert "S = 'as it ran'" in [code.value for code in app.code]
    assert "9f" * 32 in said
    [chart] = charts(app)
    assert chart["layer"][0]["encoding"]["y"]["title"] == "accuracy, validation"


def test_a_file_that_is_gone_or_changed_says_so(kept: Path) -> None:
    kept.write_bytes(b"other weights")
    assert cells(open_page("trial.py", trial="1 no_").table[-1].value)["still there"] == ["yes, but with 13 bytes"]
    kept.unlink()
    assert cells(open_page("trial.py", trial="1 no_").table[-1].value)["still there"] == ["no"]


def test_a_trial_has_the_commands_that_export_it_and_run_its_study(kept: Path, tmp_path: Path) -> None:
    export, again = (code.value for code in open_page("trial.py", study="1 one", trial="1 no_").code[:2])
    assert export == f"deltalab export one exported --arm 'no_*d*' --task mqar --db {tmp_path}/lab.db"
    assert again == "deltalab --db 'postgresql://me:***@h/l'", "as it was typed, without the password"
    export, _ = (code.value for code in open_page("trial.py", study="2 two", trial="1 no_").code[:2])
    assert export == f"deltalab export two exported --arm late --task mqar --db {tmp_path}/lab.db"


def test_a_trial_of_another_study_says_whose_it_is(store: Store, kept: Path) -> None:
    third = begin(store, "three")
    record(store, third, "base", "mqar", BASE)
    app = open_page("trial.py", study="3 three", trial="1 no_")
    assert "three does not have this trial. It belongs to: 1 one, 2 two." in texts(app)
    app.button(key="to study 2").click().run()
    assert app.query_params["study"] == "2 two"
    assert app.query_params["trial"] == "1 no_"
    assert "does not have this trial" not in texts(app)


def test_a_trial_that_failed_shows_its_traceback(ablation: int) -> None:
    app = open_page("trial.py", trial=LATE)
    assert app.error[0].value == "RuntimeError: out of memory".replace(":", "\\:")
    assert app.code[0].value == TRACEBACK.strip()
    assert "No seed of this trial ran." in texts(app)
    assert "No weights of this trial were kept." in texts(app)


def test_a_key_that_no_trial_has_says_so(store: Store, ablation: int) -> None:
    assert "no trial's key begins with 'beef'" in texts(open_page("trial.py", trial="beef"))
    assert "several trials' keys begin with '1 base'" in texts(open_page("trial.py", trial="1 base"))
    assert "Type the beginning of a trial's key" in texts(open_page("trial.py"))
    with pytest.raises(InputError, match="no trial's key begins with '%'"):
        find_trial(store, "%")


def test_curves_are_thinned_evenly_and_keep_their_last_point(store: Store) -> None:
    study = begin(store, "long", changes={"base": {}})
    runs = [RunRecord(1, metrics=[("train", "loss", step, float(step)) for step in range(1, 101)])]
    record(store, study, "base", "mqar", [], runs=runs)
    trial = find_trial(store, f"{study} base").trial
    assert [point.step for point in curves_of(store, trial.id, max_points=10)] == [*range(10, 101, 10)]
    assert len(curves_of(store, trial.id, max_points=100)) == 100
    last = curves_of(store, trial.id, max_points=3)
    assert len(last) <= 3
    assert last[-1].step == 100


def test_an_arm_shows_all_its_settings_beside_the_base(ablation: int) -> None:
    app = open_page("arms.py", arm="late", task="text")
    assert "Every setting is that of the base." in texts(app)
    app.selectbox(key="settings").select("everything").run()
    assert cells(app.table[1].value) == {"setting": ["rule.name"], "base": ["comba"], "this arm": ["comba"]}
