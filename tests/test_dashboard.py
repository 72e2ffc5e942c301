"""What the pages say, on a ledger whose every figure is known."""

import csv
import io
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import Element

import deltalab_dashboard
from deltalab import cli
from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, TrialRecord
from deltalab.study.report import report
from deltalab_dashboard.pivot import pivot, to_csv, to_latex

APP = Path(deltalab_dashboard.__file__).parent / "app.py"
PAGES = ["study.py", "curves.py", "trials.py", "arms.py", "rule.py"]
TASKS = {
    "mqar": {"metric": "accuracy", "maximize": True, "chance": 1 / 64, "version": 1},
    "text": {"metric": "bits_per_byte", "maximize": False, "chance": 8.0, "version": 1},
}
ARMS = {"base": {}, "no_*d*": {"rule.d": [{"head": {"init": 0.02}}, {"const": {"value": 0.0}}]}, "late": {"x": [1, 2]}}
SPEC = {"description": "Two tasks", "tune": {"trials": 1, "train.lr": {"log_uniform": [1e-3, 1e-1]}}}
TRACEBACK = "Traceback (most recent call last):\n  File 'x.py'\nRuntimeError: out of memory\n"
BASE = [0.90, 0.92, 0.94, 0.91, 0.93, 0.95, 0.90, 0.92]


def begin(store: Store, name: str, profile: str | None = None) -> int:
    arms = [
        ArmRecord(arm, not change, change, {task: {"rule": {"name": "comba"}} for task in TASKS})
        for arm, change in ARMS.items()
    ]
    provenance = {
        "tasks": TASKS,
        "git": {"commit": "abc"},
        "command": ["platform", "--db", "postgresql://me:SECRET@h/l"],
    }
    return store.begin_study(name, profile, f"{name} {profile}", SPEC, arms, provenance)


def record(
    store: Store, study: int, arm: str, task: str, values: list[float], stage: str = "confirm", **given: Any
) -> None:
    """One trial whose run i ends at values[i]; NaN is a diverged run."""
    metric, last = TASKS[task]["metric"], "test" if stage == "confirm" else "validation"
    runs = [
        RunRecord(
            seed,
            "diverged" if math.isnan(value) else "done",
            metrics=[("validation", metric, 50, 0.01), ("validation", metric, 100, value), (last, metric, 100, value)][
                : 3 if stage == "confirm" else 2
            ],
        )
        for seed, value in enumerate(values, 100)
    ]
    about: dict[str, Any] = {
        "state": "done",
        "rule": RuleRecord("comba", "9f" * 32, "S = 'as it ran'"),
        "runs": runs,
        "tokens_per_second": 5e4,
    }
    about |= given
    trial = TrialRecord(
        f"{study} {arm} {task} {stage}", task, 1, stage, {}, started_at=1e9, finished_at=1e9, seconds=10.0, **about
    )  # type: ignore[arg-type]
    store.record_trial(study, arm, trial, 0, {"train.lr": 0.01})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("DELTALAB_DB", str(tmp_path / "lab.db"))
    with Store.open(tmp_path / "lab.db") as opened:
        yield opened


@pytest.fixture
def ablation(store: Store) -> int:
    study = begin(store, "ablation")
    for task in TASKS:
        record(store, study, "base", task, BASE)
        record(store, study, "base", task, BASE[:1], "tune")
        record(store, study, "no_*d*", task, [value - 0.4 for value in BASE])
    record(store, study, "late", "mqar", [math.nan, *BASE[1:]])
    record(store, study, "late", "mqar", [], "tune", state="failed", error=TRACEBACK)
    store.finish_study(study, "failed")
    return study


def shown(page: str = "study.py", **query: Any) -> AppTest:
    """A page as a URL with this query opens it."""
    app = AppTest.from_file(APP, default_timeout=60)
    app.query_params.update(query)
    app.switch_page(page).run()
    assert not app.exception
    return app


def texts(app: AppTest) -> str:
    """What the page says in words, without the backslashes that keep Markdown from reading it."""
    kinds = (app.title, app.subheader, app.markdown, app.caption, app.info, app.warning, app.error)
    return "\n".join(str(element.value) for kind in kinds for element in kind).replace("\\", "")


def charts(app: AppTest) -> list[Any]:
    return [json.loads(chart.proto.spec) for chart in app.get("vega_lite_chart")]


def test_a_study_shows_each_arm_of_each_task(ablation: int) -> None:
    app = shown()
    mqar, text, by_task = (table.value.map(lambda cell: str(cell).replace("\\", "")) for table in app.table)
    assert list(mqar["arm"]) == list(text["arm"]) == list(by_task["arm"]) == list(ARMS)
    assert list(mqar["verdict"]) == ["base", ":red[worse]", "no difference found at this budget"]
    assert list(text["verdict"]) == ["base", ":green[better]", "not run"]
    assert "accuracy ↑" in mqar
    assert "bits\\_per\\_byte ↓" in text
    assert mqar["difference"][1] == "-0.400\u00a0[-0.400,\u00a0-0.400]"
    assert mqar["seeds"][2] == "7 of 8, 1 diverged"
    assert list(by_task["text\\: bits\\_per\\_byte ↓"]) == ["0.921", "0.521 (-0.400*)", "not run"]
    assert [chart["layer"][1]["encoding"]["x"]["title"] for chart in charts(app)] == [
        "accuracy, arm minus base (higher is better →)",
        "bits_per_byte, arm minus base (← lower is better)",
    ]


def test_what_failed_is_said_first(ablation: int) -> None:
    assert "failed: late, tune 0 on mqar: RuntimeError: out of memory" in shown().error[0].value.replace("\\", "")


def test_the_notes_of_the_report_stand_on_the_page(store: Store, ablation: int) -> None:
    said, found = texts(shown()), report(store, ablation)
    for note in (*found.notes, *(note for table in found.tables for note in table.notes)):
        assert note in said


def test_tuning_shows_no_differences(ablation: int) -> None:
    app = shown(stage="tune")
    assert "optimistic, and no answer" in texts(app)
    assert "difference" not in app.table[0].value
    assert charts(app) == []


def test_the_pivot_as_files(store: Store, ablation: int) -> None:
    rows = pivot(report(store, ablation))
    assert list(csv.DictReader(io.StringIO(to_csv(rows)))) == rows
    assert to_latex(rows).splitlines()[1:] == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"arm & mqar: accuracy $\uparrow$ & text: bits\_per\_byte $\downarrow$ \\",
        r"\midrule",
        r"base & 0.921 & 0.921 \\",
        r"no\_$^*$d$^*$ & 0.521 ($-$0.400$^*$) & 0.521 ($-$0.400$^*$) \\",
        r"late & 0.924 (+0.000)$^\dagger$ & not run \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_curves_tell_seeds_that_diverged_and_arms_without_a_line(ablation: int) -> None:
    app = shown("curves.py", study="1 ablation", task="text")
    assert "No curve yet: late." in texts(app)
    assert len(charts(app)) == 1
    app.selectbox(key="task").select("mqar").run()
    assert "Diverged, dashed up to where they did: late (seed 100)." in texts(app)
    app.multiselect(key="arms").select("base").run()
    assert "Diverged" not in texts(app)
    app.selectbox(key="stage").select("tune").run()
    assert len(charts(app)) == 1


def test_trials_are_filtered_by_the_url_and_counted(ablation: int) -> None:
    [table] = shown("trials.py").dataframe
    assert list(table.value["state"]).count("diverged") == 1
    assert len(table.value) == 8
    app = shown("trials.py", states="failed")
    [table] = app.dataframe
    assert (list(table.value["arm"]), list(table.value["stage"])) == (["late"], ["tune"])
    assert "1 of 8 trials" in texts(app)
    assert [code.value for code in app.code] == [TRACEBACK.strip()]
    assert "1 of 2 trials have a score" in texts(app)


def test_arms_show_only_what_differs(ablation: int) -> None:
    table = shown("arms.py").table[0].value
    assert list(table.columns) == ["arm", "rule\\.d", "x"]
    plain = [[cell.replace("\\", "") for cell in row] for row in table.itertuples(index=False)]
    assert plain == [["**base**", "head(init=0.02)", "1"], ["no_*d*", "const(value=0.0)", ""], ["late", "", "2"]]


def test_the_rule_has_its_source_and_its_card(store: Store, ablation: int) -> None:
    app = shown("rule.py")
    assert app.code[0].value == "S = 'as it ran'"
    assert "9f" * 32 in texts(app)
    assert "multiply-adds per head and token" in texts(app)
    record(store, ablation, "late", "text", BASE, rule=RuleRecord("gone", "77" * 32, "S = 'lost'"))
    app.run().selectbox(key="rule").select("gone 777777777777").run()
    assert app.code[0].value == "S = 'lost'"
    assert "No card: unknown rule 'gone'" in texts(app)


def test_the_url_names_the_study(store: Store, ablation: int) -> None:
    begin(store, "later", "gpu")
    app = shown()
    assert app.title[0].value == "later"
    assert app.query_params["study"] == "2 later gpu"
    assert shown(study="1 ablation").title[0].value == "ablation"
    app = shown(study="7 gone")
    assert "There is no study '7 gone' here" in texts(app)
    assert app.title[0].value == "later"
    assert app.selectbox(key="study").select(1).run().title[0].value == "ablation"


@pytest.mark.parametrize("page", PAGES)
def test_a_study_that_has_just_begun(store: Store, page: str) -> None:
    begin(store, "new")
    app = shown(page)
    assert ":blue-badge[running]" in texts(app)
    if page in ("curves.py", "trials.py", "rule.py"):
        assert app.info


def test_a_running_study_grows_and_ends(store: Store) -> None:
    study = begin(store, "new")
    app = shown("trials.py")
    record(store, study, "base", "mqar", BASE)
    assert len(app.run().dataframe[0].value) == 1
    store.finish_study(study, "done")
    assert ":green-badge[done]" in texts(app.run())


def test_a_ledger_without_studies_says_how_to_fill_it(store: Store) -> None:
    app = shown()
    assert app.title[0].value == "No studies yet"
    assert "platform study run" in texts(app)


def test_a_ledger_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DELTALAB_DB", str(tmp_path / "gone.db"))
    assert "no such database" in shown().error[0].value


def test_no_page_shows_a_password(ablation: int) -> None:
    said = "".join(str(element.proto) for element in shown() if isinstance(element, Element))
    assert "abc" in said  # the commit, from beside the command
    assert "SECRET" not in said


def test_the_database_reaches_the_server_outside_its_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/lab.db"
    Store.open(url).close()
    replaced: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: replaced.extend(given))
    monkeypatch.setattr(sys, "argv", ["platform", "dashboard", "--db", url, "--no-browser"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    _, command, environment = replaced
    assert environment["DELTALAB_DB"] == url
    assert url not in " ".join(command)
    assert {"--server.address=127.0.0.1", "--browser.gatherUsageStats=false"} <= set(command)
