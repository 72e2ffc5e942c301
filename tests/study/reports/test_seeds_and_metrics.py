"""The scores of single seeds, and the metrics beside the compared one, in every form of a report."""

import csv
import io
import json
import math
import re

import numpy as np
import pytest
from rich.console import Console
from tests.support.ledgers import ARMS, BASE, begin, cells, open_page, record, texts

from deltalab.store import RunRecord, Store
from deltalab.study.reports.report import Report, report

ARM = "no_*d*"
LOW = [value - 0.4 for value in BASE]
OTHER = [value - 0.6 for value in BASE]


def runs(scores: list[float], far: float = 0.0) -> list[RunRecord]:
    """Runs with four metrics beside the compared one; NaN is a run that diverged."""
    made = []
    for seed, score in enumerate(scores, start=1):
        if math.isnan(score):
            made.append(RunRecord(seed, "diverged"))
            continue
        further = {
            "loss": 1 - score,
            "accuracy@128": far + score / 3,
            "accuracy@64": far + score / 2,
            "output_rms@64": 7.0,
        }
        metrics = [("test", name, 100, value) for name, value in {"accuracy": score, **further}.items()]
        metrics += [("test", "loss", 50, 9.0), ("validation", "accuracy", 100, score), ("validation", "only", 100, 5.0)]
        made.append(RunRecord(seed, metrics=metrics))
    return made


@pytest.fixture
def found(store: Store) -> Report:
    """Two candidates of the base, one of an arm whose second seed diverged, and no trial of `late`."""
    study = begin(store, "measured")
    for number, scores in enumerate((BASE, OTHER)):
        record(store, study, "base", "mqar", [], number=number, tuned={"train.lr": number + 1.0}, runs=runs(scores))
    record(store, study, ARM, "mqar", [], runs=runs([LOW[0], math.nan, *LOW[2:]]))
    store.finish_study(study, "done")
    return report(store, study)


def text(found: Report, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(found)
    return console.export_text()


def test_a_frame_has_a_line_per_task_arm_and_seed(found: Report) -> None:
    seeds = found.to_frame("seeds")
    assert list(zip(seeds.task, seeds.arm, seeds.seed, strict=True)) == [
        ("mqar", arm, seed) for arm in ("base", ARM) for seed in range(1, 9)
    ]
    types = {
        name: str(kind) for name, kind in seeds.dtypes.items() if name in ("seed", "score", "candidate", "maximize")
    }
    assert types == {"seed": "Int64", "score": "float64", "candidate": "Int64", "maximize": "bool"}
    base, arm = seeds[seeds.arm == "base"], seeds[seeds.arm == ARM]
    row = {row.arm: row for row in found.tables[0].rows}
    # Both candidates differ by 0.6 with every seed: the better one has all the weight.
    assert list(base.score) == pytest.approx(BASE)
    assert (list(base.candidate), list(base["values"])) == ([0] * 8, [{"train.lr": 1.0}] * 8)
    assert list(base.one_setting) == pytest.approx(BASE)
    assert base.difference.isna().all()
    assert base.score.mean() == pytest.approx(row["base"].score.mean)
    assert arm.difference.mean() == pytest.approx(row[ARM].difference.mean)  # type: ignore[union-attr]
    assert list(arm.score - base.score.to_numpy()) == pytest.approx(list(arm.difference))
    assert list(arm.candidate.isna()) == [False, True, *[False] * 6], "its only run diverged"
    assert arm.score.iloc[1] == 1 / 64
    assert arm.one_setting.isna().all(), "no candidate finished all seeds"


def test_csv_and_json_have_every_seed(found: Report) -> None:
    of_json = json.loads(found.to_json(), parse_constant=pytest.fail)["tables"][0]["rows"]
    of_csv = [line for line in csv.DictReader(io.StringIO(found.to_csv())) if line["task"] == "mqar"]
    seeds = found.to_frame("seeds")
    for row, line in zip(of_json, of_csv, strict=True):
        own = seeds[seeds.arm == row["arm"]]
        assert row["scores"] == json.loads(line["scores"])
        assert {int(seed): scored["score"] for seed, scored in row["scores"].items()} == dict(
            zip(own.seed, own.score, strict=True)
        )
    assert of_json[1]["scores"]["2"]["candidate"] is None
    assert of_json[2]["scores"] == {}


def test_further_metrics_are_weighed_as_the_scores_are(store: Store, found: Report) -> None:
    base, arm, late = found.tables[0].rows
    assert list(base.metrics) == ["accuracy@64", "accuracy@128", "loss"], "not what training measures for any task"
    assert base.metrics["loss"].mean == pytest.approx(1 - float(np.mean(BASE)))
    assert (arm.metrics["loss"].n, arm.metrics["loss"].mean) == (
        7,
        pytest.approx(1 - float(np.mean(np.delete(LOW, 1)))),
    )
    assert late.metrics == {}
    near = begin(store, "near")
    near_runs = ([0.5, 0.8] * 4, 0.0), ([0.7, 0.6] * 4, 10.0)
    for number, (scores, far) in enumerate(near_runs):
        record(store, near, "base", "mqar", [], number=number, tuned={"train.lr": number + 1.0}, runs=runs(scores, far))
    row = report(store, near).tables[0].rows[0]
    # A plain sum of the weights of the second candidate, over seeds: w2 = (score - s1) / (s2 - s1).
    second = [
        (row.scores[seed].score - s1) / (s2 - s1)
        for seed, (s1, s2) in enumerate(zip(near_runs[0][0], near_runs[1][0], strict=True), start=1)
    ]
    assert all(0.2 < weight < 0.8 for weight in second)
    expected = np.mean([10 * weight for weight in second]) + row.score.mean / 2
    assert row.metrics["accuracy@64"].mean == pytest.approx(float(expected))


@pytest.mark.parametrize("width", [44, 60, 80, 160])
def test_a_terminal_loses_no_metric(found: Report, width: int) -> None:
    shown = text(found, width)
    assert all(len(line) <= width for line in shown.splitlines())
    for row in found.tables[0].rows:
        for interval in row.metrics.values():
            for value in (interval.mean, interval.low, interval.high):
                assert f"{value:#.4g}" in shown
    heads = [line for line in shown.splitlines() if re.match(r"arm +.*(accuracy@|loss)", line)]
    assert len(heads) == {44: 3, 60: 2, 80: 2, 160: 1}[width]


@pytest.mark.parametrize("width", [44, 60])
def test_a_long_name_folds_and_no_figure_does(store: Store, width: int) -> None:
    long = "without_the_output_gate_of_each_head_and_all_layers"
    study = begin(store, "long", changes={"base": {}, long: {"x": [0, 1]}})
    for arm in ("base", long):
        record(store, study, arm, "mqar", [], runs=runs(BASE, 123.4))
    found = report(store, study)
    shown = text(found, width)
    assert all(len(line) <= width for line in shown.splitlines())
    for interval in found.tables[0].rows[1].metrics.values():
        assert f"{interval.mean:#.4g} [{interval.low:#.4g}, {interval.high:#.4g}]" in shown


def test_every_form_has_the_further_metrics_and_says_that_none_is_tested(found: Report) -> None:
    for form in (text(found, 160), found.to_markdown(), found._repr_html_()):
        assert "Further metrics of mqar on test, not tested" in form
        assert "accuracy@128" in form
    assert "| no_*d* | 0.2607 [" in found.to_markdown(), "half of 0.5214, the mean of the seven seeds that finished"
    assert any("no test compares them" in note for note in found.notes)
    of_json = json.loads(found.to_json())["tables"][0]["rows"]
    of_csv = [line for line in csv.DictReader(io.StringIO(found.to_csv())) if line["task"] == "mqar"]
    assert [row["metrics"] for row in of_json] == [json.loads(line["metrics"]) for line in of_csv]
    frame = found.to_frame("metrics")
    assert list(zip(frame.arm, frame.metric, strict=True)) == [
        (arm, name) for arm in ("base", ARM) for name in ("accuracy@64", "accuracy@128", "loss")
    ]
    assert of_json[0]["metrics"]["loss"]["mean"] == frame["mean"][2]
    assert str(frame.n.dtype) == "Int64"


def test_the_page_has_the_further_metrics(found: Report) -> None:
    app = open_page(tables="true")
    shown = [table.value for table in app.table if "loss" in table.value]
    assert len(shown) == 1
    assert list(shown[0]["arm"]) == ["base", r"no\_\*d\*"]
    compared = open_page("compare.py", what="arms", left_arm="base", right_arm=ARM)
    assert "loss (not tested)" in cells(compared.table[0].value)["figure"]


def test_a_task_with_one_metric_has_no_further_table(store: Store, ablation: int) -> None:
    plain = report(store, ablation)
    assert "urther metrics" not in plain.to_markdown() + plain._repr_html_() + text(plain, 80) + texts(
        open_page(tables="true")
    )
    assert plain.to_frame("metrics").empty
    assert set(ARMS) == set(plain.to_frame("seeds").arm)
