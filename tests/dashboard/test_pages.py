"""What the pages say of ledgers whose every figure is known."""

import csv
import hashlib
import io
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from streamlit.testing.v1.element_tree import Element
from tests.support.ledgers import ARMS, BASE, SPEC, TASKS, TRACEBACK, begin, cells, charts, open_page, record, texts
from vl_convert import vegalite_to_svg

from deltalab import registry
from deltalab.authoring.files.scaffold import new_rule
from deltalab.cli.app import main
from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, TrialRecord
from deltalab.store.models import StudyState
from deltalab.study.reports.report import report
from deltalab.study.running.run import run_study_file
from deltalab_dashboard.app import VIEWS
from deltalab_dashboard.charts.arms_by_tasks import pivot
from deltalab_dashboard.downloads import to_csv, to_latex
from deltalab_dashboard.text import STATE_COLORS

WITHOUT_STUDIES = ("studies.py", "trainings.py")
WITHOUT_BADGE = ("studies.py", "compare.py", "trainings.py", "trial.py")
PAGES = [f"{view.name}.py" for views in VIEWS.values() for view in views]


def test_a_study_shows_each_arm_of_each_task(ablation: int) -> None:
    app = open_page(tables="true")
    mqar, text = (table.value for table in app.dataframe)
    assert list(mqar["arm"]) == list(text["arm"]) == list(ARMS)
    assert list(mqar["verdict"]) == ["base", "▼ worse", "○ undecided: needs 123 seeds"]
    assert list(text["verdict"]) == ["base", "▲ better", "not run"]
    assert list(mqar["best"]) == ["★ best", "", ""]
    assert list(text["best"]) == ["", "★ best", ""]
    assert "accuracy ↑" in mqar
    assert "bits_per_byte ↓" in text
    assert mqar["difference"][1] == pytest.approx(-0.4)
    assert mqar["interval"][1] == "[-0.431, -0.369]"
    assert mqar["seeds"][2] == "7 of 8, 1 runs diverged"
    assert len(app.table) == 0, "the forest stands in the place of the table over tasks"
    assert [chart["layer"][1]["encoding"]["x"]["title"] for chart in charts(app)] == [
        "accuracy, arm minus base (higher is better →)",
        "bits_per_byte, arm minus base (← lower is better)",
    ]


def test_what_failed_is_said_first(ablation: int) -> None:
    assert "failed: late, tune 0 on mqar: RuntimeError: out of memory" in open_page().error[0].value.replace("\\", "")


def test_the_notes_of_the_report_stand_on_the_page(store: Store, ablation: int) -> None:
    said, found = texts(open_page(tables="true")), report(store, ablation)
    for note in (*found.notes, *(said for table in found.tables for said in (*table.warnings, *table.notes))):
        assert note in said


def test_warnings_of_the_report_stand_on_the_page(store: Store) -> None:
    study = begin(store, "few")
    record(store, study, "base", "mqar", BASE, state_size=10)
    record(store, study, "no_*d*", "mqar", BASE, state_size=20)
    assert "no_*d* has 2.00 times the state of the base." in texts(open_page())


def test_tuning_shows_no_differences(ablation: int) -> None:
    app = open_page(stage="tune", tables="true")
    assert "optimistic, and no answer" in texts(app)
    assert "difference" not in app.dataframe[0].value
    assert charts(app) == []


def test_the_pivot_as_files(store: Store, ablation: int) -> None:
    rows = pivot(report(store, ablation))
    assert list(csv.DictReader(io.StringIO(to_csv(rows)))) == rows
    assert to_latex(rows).splitlines() == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"arm & mqar: accuracy $\uparrow$ & text: bits\_per\_byte $\downarrow$ \\",
        r"\midrule",
        r"base & 0.921 $\star$ & 0.921 \\",
        r"no\_$^*$d$^*$ & 0.521 ($-$0.400 $\blacktriangledown$) & 0.521 ($-$0.400 $\blacktriangle$) $\star$ \\",
        r"late & 0.811 ($-$0.111)$^\dagger$ & not run \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_curves_tell_seeds_that_diverged_and_arms_without_a_line(ablation: int) -> None:
    app = open_page("curves.py", study="1 ablation", task="text")
    assert "No curve yet: late." in texts(app)
    assert len(charts(app)) == 1
    app.selectbox(key="task").select("mqar").run()
    assert "Diverged, dashed up to where they did: late (seed 1)." in texts(app)
    app.multiselect(key="arms").select("base").run()
    assert "Diverged" not in texts(app)
    app.selectbox(key="stage").select("tune").run()
    assert len(charts(app)) == 1


def test_trials_are_filtered_by_the_url_and_counted(ablation: int) -> None:
    [table] = open_page("trials.py").dataframe
    assert list(table.value["state"]).count("diverged") == 1
    assert len(table.value) == 8
    app = open_page("trials.py", states="failed")
    [table] = app.dataframe
    assert (list(table.value["arm"]), list(table.value["stage"])) == (["late"], ["tune"])
    assert "1 of 8 trials" in texts(app)
    assert list(table.value["why not done"]) == ["RuntimeError: out of memory"]


def test_arms_show_only_what_differs(ablation: int) -> None:
    table = open_page("arms.py").table[0].value
    assert list(table.columns) == ["arm", "rule\\.d", "x"]
    plain = [[cell.replace("\\", "") for cell in row] for row in table.itertuples(index=False)]
    assert plain == [["base", "head(init=0.02)", "1"], ["no_*d*", "const(value=0)", ""], ["late", "", "2"]]


def test_a_rule_that_is_installed_has_its_card_and_the_source_that_ran(ablation: int) -> None:
    app = open_page("rule.py")
    assert app.code[0].value == "S = 'as it ran'"
    assert "9f" * 32 in texts(app)
    app.selectbox(key="show").select("card").run()
    assert "multiply-adds per head and token" in texts(app)
    assert "which differs from the source that ran" in app.warning[0].value


@pytest.fixture
def plugin(store: Store, ablation: int, tmp_path: Path) -> Iterator[Path]:
    """The file of a rule that one arm of the study ran."""
    file = new_rule("invented", tmp_path)
    record(store, ablation, "late", "text", BASE, rule=RuleRecord("invented", digest(file), file.read_text()))
    yield file
    registry._named_files.clear()
    registry._all.cache_clear()


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_rule_whose_file_is_not_given_shows_the_source_that_the_ledger_recorded(plugin: Path) -> None:
    app = open_page("rule.py", show="card", rule=f"invented {digest(plugin)[:12]}")
    assert [code.value for code in app.code] == [plugin.read_text().strip()]
    assert digest(plugin) in texts(app)
    assert "No card: unknown rule 'invented'" in texts(app)
    assert "deltalab --plugin FILE dashboard" in texts(app)


def test_a_rule_whose_file_is_given_has_its_card(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTALAB_PLUGINS", str(plugin))
    app = open_page("rule.py", show="card", rule=f"invented {digest(plugin)[:12]}")
    assert "A delta rule that erases with one strength and writes with another" in texts(app)
    assert "whose source is the one that ran" in texts(app)
    assert not app.info


@pytest.mark.slow
def test_the_url_names_the_study(store: Store, ablation: int) -> None:
    begin(store, "later", "gpu")
    app = open_page()
    assert app.title[0].value == "later"
    assert app.query_params["study"] == "2 later gpu"
    assert open_page(study="1 ablation").title[0].value == "ablation"
    app = open_page(study="7 gone")
    assert "There is no study '7 gone' here" in texts(app)
    assert app.title[0].value == "later"
    assert app.selectbox(key="study").select(1).run().title[0].value == "ablation"


def test_a_study_is_always_chosen(store: Store, ablation: int) -> None:
    begin(store, "later")
    picker = open_page().selectbox(key="study")
    assert picker.proto.HasField("default")  # without a default, Streamlit offers an x that clears the choice
    app = picker.set_value(None).run()
    assert not app.exception
    assert app.query_params["study"] == "2 later"


@pytest.mark.slow(keep="trial.py")
@pytest.mark.parametrize("page", PAGES)
def test_a_study_that_has_just_begun(store: Store, page: str) -> None:
    begin(store, "new")
    app = open_page(page)
    assert ":blue-badge[running]" in texts(app) or page in WITHOUT_BADGE
    if page in ("curves.py", "trials.py", "rule.py"):
        assert app.info


def test_a_running_study_grows_and_ends(store: Store) -> None:
    study = begin(store, "new")
    app = open_page("trials.py")
    record(store, study, "base", "mqar", BASE)
    assert len(app.run().dataframe[0].value) == 1
    store.finish_study(study, "done")
    assert ":green-badge[done]" in texts(app.run())


def test_a_ledger_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DELTALAB_DB", str(tmp_path / "gone.db"))
    assert "no such database" in open_page().error[0].value


SEARCH = {
    "name": "search",
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}},
    "base": {
        "rule": "linear_attention",
        "model": {"d_model": 8, "layers": 1, "heads": 1, "mlp": False},
        "train": {"steps": 2, "batch_size": 4, "lr": 1e-2, "evaluations": 1, "eval_batches": 1},
    },
    "search": {
        "rule": {"choice": ["linear_attention", {"name": "comba", "transition": "iplr"}]},
        "model.conv": {"integers": [2, 4]},
        "model.d_model": {"integers": [7, 9]},
        "model.heads": {"choice": [1, 2]},  # 2 heads make no model of width 7 or 9
        "train.lr": {"log_uniform": [1e-3, 1e-2]},
        "trials": 4,
        "finalists": 1,
    },
    "seeds": 2,
}
MANY = {"base": {}, **{f"{part}_is_{i}": {f"model.{part}": [0, i]} for i in range(20) for part in ("gate", "normal")}}
NEVER = [math.nan] * len(BASE)


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of ledgers, NAME.db, each with a study of the kind that its name says."""
    folder = tmp_path_factory.mktemp("ledgers")
    states: dict[str, StudyState] = {
        "failed": "failed",
        "diverged": "done",
        "interrupted": "interrupted",
        "many": "done",
    }
    with ExitStack() as open_stores:  # a study whose driver closed the ledger does not run
        for name in ("running", *states):
            store = open_stores.enter_context(Store.open(folder / f"{name}.db"))
            study = begin(store, name, changes=MANY if name == "many" else ARMS)
            stage = "tune" if name in ("running", "interrupted") else "confirm"
            for task in TASKS:
                for i, arm in enumerate(MANY if name == "many" else ["base", "no_*d*"]):
                    record(store, study, arm, task, [value - 0.01 * i for value in BASE], stage)
                if name == "failed":
                    record(store, study, "late", task, [], state="failed", error=TRACEBACK, tokens_per_second=None)
                if name == "diverged":
                    record(store, study, "late", task, NEVER)
            if name in states:
                store.finish_study(study, states[name])
        (folder / "search.yaml").write_text(yaml.safe_dump(SEARCH))
        run_study_file(folder / "search.yaml", db=folder / "search.db", executor="inline")
        Store.open(folder / "empty.db").close()
        yield folder


def test_every_state_of_a_study_has_a_color() -> None:
    assert set(STATE_COLORS) == set(get_args(StudyState))


# What a page says, by ledger.
SAID = {
    "search": {
        "answer.py": [":green-badge[done]", "2 seeds cannot decide anything", "Cost"],
        "curves.py": ["A thick line is an arm's mean"],
        "trials.py": ["trials. The score is the mean"],
        "arms.py": ["What the search chose for each arm"],
        "search.py": ["found_1: ", "The front of 4 candidates"],
        "rule.py": ["Arms: base, found_1."],
    },
    "failed": {
        "answer.py": [":red-badge[failed]", "failed: late, confirm 0 on text: RuntimeError: out of memory"],
        "curves.py": ["No curve yet: late."],
        "trials.py": ["6 of 6 trials"],
        "arms.py": ["Only the settings in which an arm differs"],
        "search.py": ["This study searches nothing"],
        "rule.py": ["Arms: base, no_*d*, late."],
        "sensitivity.py": ["No seed finished with train.lr 0.01: late."],
        "ladder.py": ["This study runs at one size."],
        "trial.py": ["Type the beginning of a trial's key"],
        "studies.py": ["1 of 1 studies."],
        "compare.py": ["Both are the same"],
        "trainings.py": ["A training of an exported folder appears here"],
    },
    "diverged": {
        "answer.py": [
            ":green-badge[done]",
            "late is worse",
        ],
        "curves.py": ["Diverged, dashed up to where they did: late (seed 1)", "late (seed 8)"],
        "trials.py": ["6 of 6 trials"],
        "arms.py": ["Only the settings in which an arm differs"],
        "rule.py": ["Arms: base, no_*d*, late."],
    },
    "running": {
        "answer.py": [":blue-badge[running]", "4 trials recorded"],
        "curves.py": [":blue-badge[running]", "Nothing is measured in the stage 'confirm' yet."],
        "trials.py": [":blue-badge[running]", "4 of 4 trials"],
        "arms.py": [":blue-badge[running]"],
        "rule.py": [":blue-badge[running]", "Arms: base, no_*d*."],
    },
    "interrupted": {page: [":orange-badge[interrupted]"] for page in PAGES},
    "many": {
        "answer.py": ["82 trials recorded"],
        "curves.py": ["A thick line is an arm's mean"],
        "trials.py": ["82 of 82 trials"],
        "arms.py": ["Only the settings in which an arm differs"],
        "rule.py": ["gate_is_0, normal_is_0", "gate_is_19, normal_is_19"],
    },
    "empty": {page: ["No studies yet", "deltalab study run"] for page in PAGES if page not in WITHOUT_STUDIES}
    | {"studies.py": ["0 of 0 studies"], "trainings.py": ["deltalab train"]},
}


def test_a_page_of_the_application_has_an_expectation() -> None:
    assert set(SAID["failed"]) == set(PAGES)


@pytest.mark.slow(keep="failed-")
@pytest.mark.parametrize(("ledger", "page"), [(ledger, page) for ledger in SAID for page in SAID[ledger]])
def test_every_page_of_every_kind_of_study(
    ledgers: Path, monkeypatch: pytest.MonkeyPatch, ledger: str, page: str
) -> None:
    monkeypatch.setenv("DELTALAB_DB", str(ledgers / f"{ledger}.db"))
    app = open_page(page)
    said = texts(app)
    for text in SAID[ledger][page]:
        assert text in said
    for chart in charts(app):
        assert vegalite_to_svg(chart).startswith("<svg"), "as a browser draws it, which reports errors to its console"


def test_a_search_shows_what_it_tried_and_what_it_found(ledgers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTALAB_DB", str(ledgers / "search.db"))
    rules = {"linear_attention", "comba(transition=iplr)"}
    tried = open_page("trials.py").dataframe[0].value.query("stage == 'tune'")
    assert set(tried["rule"]) <= rules
    # The first trial is the base's confirmation, which has no values: the columns stand beside the score all the same.
    assert list(tried.columns)[5:11] == ["score", "model.conv", "model.d_model", "model.heads", "rule", "train.lr"]
    assert set(tried["state"]) == {"done", "infeasible"}
    assert tried["train.lr"].between(1e-3, 1e-2).all()
    found = cells(open_page("arms.py").table[0].value)
    assert list(found) == ["arm", "model.conv", "model.d_model", "model.heads", "rule", "train.lr"]
    assert found["arm"] == ["base", "found_1"]
    assert found["rule"][0] == "", "the base tunes its training alone"
    assert found["rule"][1] in rules


def test_the_page_of_a_search_draws_the_front_and_random_search(ledgers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTALAB_DB", str(ledgers / "search.db"))
    app = open_page("search.py")
    [front] = charts(app)
    assert len(charts(open_page("search.py", view="Settings"))) == 3, "all settings side by side, one, two"
    method = open_page("search.py", view="Method")
    [growth] = charts(method)
    assert "infeasible" in texts(method)
    points = front["layer"][1]["encoding"]
    assert points["y"]["title"] == "accuracy (higher is better)"
    assert points["x"]["title"] == "flops_per_token (lower is better)"
    assert growth["encoding"]["x"]["field"] == "candidates"
    assert "base" in cells(app.table[0].value)["candidate"]
    app.selectbox(key="objective").select("state_size").run()
    assert charts(app)[0]["layer"][1]["encoding"]["y"]["title"] == "state_size (lower is better)"


def test_an_arm_that_a_search_found_has_one_row_however_many_looks_it_had(store: Store) -> None:
    spec = {"search": {"trials": 1, "finalists": 1, "train.lr": {"log_uniform": [1e-3, 1e-1]}}, "seeds": 8}
    arms = [ArmRecord(arm, arm == "base", {}, {}) for arm in ("base", "found_1")]
    study = store.begin_study("looks", None, "looks", spec, arms, {"tasks": TASKS})
    for arm in ("base", "found_1"):
        record(store, study, arm, "mqar", BASE)
        record(store, study, arm, "mqar", BASE, look=1)
    assert cells(open_page("arms.py").table[0].value)["arm"] == ["base", "found_1"]


def test_an_arm_that_failed_has_a_row_and_says_why(ledgers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTALAB_DB", str(ledgers / "failed.db"))
    assert open_page(tables="true").dataframe[1].value["verdict"][2] == "failed"
    table = open_page("trials.py", states="failed").dataframe[0].value
    assert list(table["why not done"]) == ["RuntimeError: out of memory"] * 2


def test_an_arm_that_always_diverges_counts_as_the_worst(ledgers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTALAB_DB", str(ledgers / "diverged.db"))
    late = open_page(tables="true").dataframe[0].value.iloc[2]
    assert late["verdict"] == "▼ worse"
    assert late["seeds"] == "0 of 8, 8 runs diverged"
    assert late["accuracy ↑"] == pytest.approx(1 / 64), "chance, with each seed"
    assert late["p"] == pytest.approx(1 / 128)
    table = open_page("trials.py", states="diverged").dataframe[0].value
    assert list(table["arm"]) == ["late", "late"]
    assert table["score"].isna().all()


def test_a_study_without_confirmed_trials_compares_nothing(ledgers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTALAB_DB", str(ledgers / "running.db"))
    app = open_page(tables="true")
    assert app.radio(key="stage").value == "tune"
    assert list(app.dataframe[0].value["verdict"]) == ["base", "not compared", "not run"]
    assert "on validation base leads on mqar" in texts(app)
    app.radio(key="stage").set_value("confirm").run()
    assert [list(table.value["verdict"]) for table in app.dataframe] == [["not run"] * 3] * 2
    assert charts(app) == []
    assert "confirmation has not begun" in texts(app)


def test_the_stage_follows_the_study_until_it_is_chosen(store: Store) -> None:
    study = begin(store, "new")
    record(store, study, "base", "mqar", BASE, "tune")
    app = open_page()
    assert app.radio(key="stage").value == "tune"
    record(store, study, "base", "mqar", BASE)
    assert app.run().radio(key="stage").value == "confirm"
    app.radio(key="stage").set_value("tune").run()
    record(store, study, "no_*d*", "mqar", BASE)
    assert app.run().radio(key="stage").value == "tune"


def test_each_study_opens_with_its_own_stage(store: Store, ablation: int) -> None:
    record(store, begin(store, "new"), "base", "mqar", BASE, "tune")
    app = open_page()
    assert app.radio(key="stage").value == "tune"
    app.selectbox(key="study").select(ablation).run()
    assert app.radio(key="stage").value == "confirm"
    app.selectbox(key="study").select(ablation + 1).run()
    assert app.radio(key="stage").value == "tune"
    assert not app.exception


def test_forty_arms_are_all_there(ledgers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTALAB_DB", str(ledgers / "many.db"))
    app = open_page(tables="true")
    bodies = "".join(element.proto.body for element in app.get("html"))
    rows = re.findall(r'<th scope="row"[^>]*>(.*?)</th>', bodies)
    assert {row.replace("<wbr>", "") for row in rows} == {*MANY}
    for table in app.dataframe:
        assert list(table.value["arm"]) == list(MANY)
    [chart] = charts(open_page("curves.py").toggle(key="others").set_value(True).run())
    color = chart["layer"][0]["encoding"]["color"]
    assert color["scale"]["domain"] == list(MANY)
    assert color["legend"]["symbolLimit"] == 41  # Vega-Lite would drop what comes after the 30th


def test_no_page_shows_a_password(ablation: int) -> None:
    said = "".join(str(element.proto) for element in open_page() if isinstance(element, Element))
    assert "abc" in said  # the commit, from beside the command
    assert "SECRET" not in said


def test_the_database_and_the_plugins_reach_the_server_outside_its_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/lab.db"
    Store.open(url).close()
    replaced: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: replaced.extend(given))
    file = new_rule("distant", tmp_path)
    words = ["platform", "--plugin", str(file), "dashboard", "--db", url, "--no-browser"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    registry._named_files.clear()
    registry._all.cache_clear()
    assert ended.value.code in (0, None)
    _, command, environment = replaced
    assert environment["DELTALAB_DB"] == url
    assert environment["DELTALAB_PLUGINS"] == str(file)
    assert url not in " ".join(command)
    assert {"--server.address=127.0.0.1", "--browser.gatherUsageStats=false"} <= set(command)


def test_a_ladder_shows_its_trends(store: Store) -> None:
    """Arms by sizes, and what each trend says."""
    widths = [8, 16, 32]
    spec = {**SPEC, "tune": None, "task": {"text": {}}, "scales": {"model.d_model": widths}}
    tasks = {f"text.d_model={width}": {**TASKS["text"], "length": 16} for width in widths}
    arms = [ArmRecord(name, name == "base", {} if name == "base" else {"x": [1, 2]}, {}) for name in ("base", "no_d")]
    study = store.begin_study("rungs", None, "rungs", spec, arms, {"tasks": tasks, "git": None})
    for size, task in enumerate(tasks):
        for arm, apart in (("base", 0.0), ("no_d", 0.5)):
            figures = [[(split, name, 10, 3 - size + apart + 0.01 * seed) for split in ("validation", "test")
                        for name in ("bits_per_byte", "loss")] for seed in range(8)]  # fmt: skip
            runs = [
                RunRecord(seed, metrics=[*found, ("cost", "flops_per_token", 10, 1e3 * 4.0**size)])
                for seed, found in enumerate(figures, 1)
            ]
            trial = TrialRecord(
                f"{arm} {task}", task, 1, "confirm", {"train": {"steps": 10, "batch_size": 4}}, "done", 1e9, 1e9, 1.0,
                RuleRecord("comba", "9f" * 32, "S"), runs=runs,
            )  # fmt: skip
            store.record_trial(study, arm, trial, 0, {})
    store.finish_study(study, "done")
    page = open_page(study="rungs")
    assert not page.exception
    headers = [header.value.replace("\\", "") for header in page.subheader]
    assert "Ladder of text: differences to the base in bits_per_byte, lower is better" in headers
    tables = [table.value.to_string().replace("\\", "") for table in page.table]
    assert any("no_d" in table and "holds" in table for table in tables)
