"""The table over tasks: its figures, its place in every form of a report, and the sentence that it leads."""

import csv
import io
import json
import math
from typing import Any

import pytest
from rich.console import Console
from tests.support.ledgers import BASE, BOUNDED, TASKS, begin, record

from deltalab.store import Store
from deltalab.study.reports.report import Report, report
from deltalab.study.reports.sentence import sentence, short_verdict

CHANGES: dict[str, Any] = {"base": {}, "up": {"x": [1, 2]}, "noise": {"x": [1, 3]}}
SIZES = {f"mqar.d_model={size}": BOUNDED["mqar"] for size in (8, 16)}
GAINS = [0.020, 0.025, 0.015, 0.022, 0.018, 0.021, 0.024, 0.016]
LOSSES = [4.0, 4.1, 3.9, 4.2, 4.0, 3.8, 4.1, 4.0]


def recorded(store: Store, *, gain: float = 1.0, loss: float = 1.0, **spec: Any) -> Report:
    """A study in which `up` gains on both tasks, by these multiples of `GAINS`, and `noise` gains nothing."""
    study = begin(store, "both", changes=CHANGES, tasks=BOUNDED, **spec)
    ups_and_downs = [0.01 * (-1) ** i for i in range(8)]
    record(store, study, "base", "mqar", BASE)
    record(store, study, "up", "mqar", [x + gain * d for x, d in zip(BASE, GAINS, strict=True)])
    record(store, study, "noise", "mqar", [x + d for x, d in zip(BASE, ups_and_downs, strict=True)])
    record(store, study, "base", "text", LOSSES)
    record(store, study, "up", "text", [x - loss * 8 * d for x, d in zip(LOSSES, GAINS, strict=True)])
    record(store, study, "noise", "text", [x + d for x, d in zip(LOSSES, ups_and_downs, strict=True)])
    store.finish_study(study, "done")
    return report(store, study)


GOLDEN = """\
### Over 2 tasks: mean normalized score on test, higher is better

| arm | seeds | normalized score | difference | p | verdict | IQM | IQM difference |
| --- | --- | --- | --- | --- | --- | --- | --- |
| base | 8 | 0.709 [0.696, 0.723] |  |  | base | 0.708 |  |
| up | 8 | 0.730 [0.717, 0.742] | +0.020 [+0.017, +0.024] | 0.008 | better | 0.727 | +0.020 [+0.013, +0.027] |
| noise | 8 | 0.709 [0.696, 0.723] | +0.000 [-0.004, +0.004] | 1.000 | undecided | 0.708 \
| +0.000 [-0.007, +0.007] |

- A normalized score is (score - chance) / (best - chance), where best is the best possible value of the task's \
metric, which is 0 for a loss without bounds.
- Difference, p and verdict are of the mean, tested by exchanging all runs of a seed on all tasks at once. The IQM is \
the mean without the least and the greatest quarter of an arm's scores over tasks and seeds; the intervals of its \
differences hold jointly over the arms, apart from those of the mean.
"""


def test_markdown_has_it_first(store: Store) -> None:
    found = recorded(store).to_markdown()
    start = found.index("### ")
    assert found[start : found.index("\n### mqar")] == GOLDEN


def test_the_figures_are_those_of_hand(store: Store) -> None:
    found = recorded(store)
    assert found.headline is not None
    assert found.headline.over == ["mqar", "text"]
    base, up, _ = found.headline.rows
    chance = TASKS["mqar"]["chance"]
    by_seed = [((x - chance) / (1 - chance) + (8 - y) / 8) / 2 for x, y in zip(BASE, LOSSES, strict=True)]
    assert base.score.mean == pytest.approx(math.fsum(by_seed) / 8)
    assert up.by_seed == pytest.approx({i: (d / (1 - chance) + d) / 2 for i, d in enumerate(GAINS, 1)})
    assert up.difference is not None
    assert up.difference.mean == pytest.approx(math.fsum(up.by_seed.values()) / 8)
    assert base.difference is None
    assert base.iqm_difference is None


def test_every_form_has_it_first(store: Store) -> None:
    found = recorded(store)
    tasks = ["over tasks"] * 3 + ["mqar"] * 3 + ["text"] * 3
    assert [row["task"] for row in csv.DictReader(io.StringIO(found.to_csv()))] == tasks
    frame = found.to_frame()
    assert list(frame.task) == tasks
    assert (str(frame.iqm.dtype), str(frame.iqm_difference_n.dtype)) == ("float64", "Int64")
    assert list(frame.iqm.isna()) == [False] * 3 + [True] * 6
    parts = json.loads(found.to_json())
    assert [row["iqm"] for row in parts["headline"]["rows"]] == pytest.approx(list(frame.iqm[:3]))
    assert [table["task"] for table in parts["tables"]] == ["mqar", "text"]
    html = found._repr_html_()
    assert html.index("Over 2 tasks") < html.index("mqar (version 1)")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_terminal_shows_it_first_and_without_costs(store: Store, width: int) -> None:
    out = Console(width=width, file=io.StringIO())
    out.print(recorded(store))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    headline, _, tasks = text.partition("mqar (version 1)")
    assert "Over 2 tasks" in headline
    assert "IQM" in headline
    assert "flops" not in headline
    assert "flops" in tasks
    assert max(map(len, text.splitlines())) <= width


def test_its_margin_is_the_mean_of_those_of_the_tasks(store: Store) -> None:
    tasks = {"mqar": {**BOUNDED["mqar"], "margin": 0.01}, "text": {**BOUNDED["text"], "margin": 0.08}}
    study = begin(store, "margins", changes={"base": {}, "same": {"x": [1, 2]}}, tasks=tasks)
    for arm in ("base", "same"):
        record(store, study, arm, "mqar", BASE)
        record(store, study, arm, "text", LOSSES)
    found = report(store, study).headline
    assert found is not None
    assert found.margin == pytest.approx((0.01 / (1 - TASKS["mqar"]["chance"]) + 0.01) / 2)
    assert [row.verdict for row in found.rows] == ["base", "equal"]


def test_it_counts_the_seeds_of_the_first_look(store: Store) -> None:
    """Which arms have more seeds depends on their results, so that a test of all seeds would not be exact."""
    found = recorded(store, seeds={"at_least": 6, "at_most": 8})
    assert found.headline is not None
    _, up, _ = found.headline.rows
    assert up.difference is not None
    assert (up.score.n, up.difference.n, list(up.by_seed)) == (6, 6, [1, 2, 3, 4, 5, 6])
    assert up.verdict == "better"
    assert any(note.startswith("Only the first 6 seeds count here: ") for note in found.headline.notes)


def test_it_promises_no_verdict_for_further_seeds(store: Store) -> None:
    """A further look at the same arms does not count here."""
    found = recorded(store, gain=1, loss=-1)
    assert found.headline is not None
    assert {row.seeds_needed for row in found.headline.rows} == {None}
    assert short_verdict(found.headline.rows[1]) == "undecided"


def test_an_arm_that_lacks_a_task_is_not_compared(store: Store) -> None:
    study = begin(store, "half", changes=CHANGES, tasks=BOUNDED)
    for arm in CHANGES:
        record(store, study, arm, "mqar", BASE)
        if arm == "noise":
            record(store, study, arm, "text", [], state="failed", error="ValueError: x")
        else:
            record(store, study, arm, "text", LOSSES)
    found = report(store, study).headline
    assert found is not None
    assert [row.verdict for row in found.rows] == ["base", "undecided", "failed"]
    assert math.isnan(found.rows[2].score.mean)
    assert found.notes[-1] == "Not on every task yet, or failed: noise."


def test_a_seed_that_diverged_on_a_task_is_missing(store: Store) -> None:
    study = begin(store, "diverged", changes=CHANGES, tasks=BOUNDED)
    for arm in CHANGES:
        record(store, study, arm, "mqar", BASE if arm != "up" else [math.nan, *BASE[1:]])
        record(store, study, arm, "text", LOSSES if arm != "up" else [*LOSSES[:-1], math.nan])
    found = report(store, study).headline
    assert found is not None
    assert [(row.score.missing, row.diverged) for row in found.rows] == [(0, 0), (2, 2), (0, 0)]


@pytest.mark.parametrize(
    ("tasks", "spec", "said"),
    [
        ({"mqar": BOUNDED["mqar"]}, {}, False),
        (SIZES, {"scales": {"model.d_model": [8, 16]}, "task": {"mqar": {}}}, False),
        (TASKS, {}, True),
    ],
)
def test_some_studies_have_none(store: Store, tasks: Any, spec: Any, said: bool) -> None:
    """One task, a ladder, and a task whose best possible value is not known, of which the notes tell."""
    study = begin(store, "none", changes=CHANGES, tasks=tasks, **spec)
    if not spec:
        for arm in CHANGES:
            for task in tasks:
                record(store, study, arm, task, BASE)
    found = report(store, study)
    assert found.headline is None
    assert ("No mean over tasks: the best possible value is not known of mqar." in found.notes) == said


def test_the_stage_of_tuning_has_none(store: Store) -> None:
    study = begin(store, "tuning", changes=CHANGES, tasks=BOUNDED)
    record(store, study, "base", "mqar", BASE, "tune")
    assert report(store, study, which="tune").headline is None


def test_the_notes_count_its_errors_apart(store: Store) -> None:
    (whole,) = [note for note in recorded(store, family="study").notes if note.startswith("Whole study")]
    assert whole.endswith("at most 5% of such studies would find a difference on a task.")
    assert "The table over tasks is a family of its own, and adds at most 5% to this." in recorded(store).notes


@pytest.mark.parametrize(
    ("gain", "loss", "said"),
    [
        (1, 1, r"Over 2 tasks up beats the base by 0.0203 normalized score (p 0.008); up beats the base on "),
        (-1, -1, r"Over 2 tasks up is worse than the base by 0.0203 normalized score (p 0.008); up is worse than "),
        (1, -1, r"Over 2 tasks no arm is told from the base; up beats the base on mqar by "),
        (0, 0, "Nothing is decided: 8 seeds tell no arm from the base"),
    ],
)
def test_the_sentence_leads_with_it(store: Store, gain: float, loss: float, said: str) -> None:
    assert sentence(recorded(store, gain=gain, loss=loss)).startswith(said)
