"""What a study's report says, on a ledger whose every figure is known."""

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from deltalab.errors import InputError
from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, TrialRecord
from deltalab.store.models import Stage
from deltalab.study.answers.rows import Row
from deltalab.study.reports.columns import cells, columns
from deltalab.study.reports.report import Report, report
from deltalab.study.reports.sentence import sentence, short_verdict, verdict_counts

TASKS: dict[str, dict[str, Any]] = {
    "mqar": {"metric": "accuracy", "maximize": True, "chance": 1 / 64, "version": 1, "bounds": [0, 1]},
    "text": {"metric": "bits_per_byte", "maximize": False, "chance": 8.0, "version": 2},
}
SEEDS = range(1, 9)
COSTS = {"flops_per_token": 1000.0, "kv_cache": 0.0, "conv_cache": 0.0, "dead_parameters": 0.0}
EARLY = {"flops_per_token": 1000.0}
"""The costs that the first release recorded as metrics."""


class Lab:
    """A study being recorded."""

    def __init__(
        self, store: Store, arms: dict[str, dict[str, Any]], tasks: dict[str, Any] = TASKS, **spec: Any
    ) -> None:
        self.store = store
        records = [ArmRecord(name, not change, change, {}) for name, change in arms.items()]
        self.id = store.begin_study("comba_ablation", "cpu", "id", {"seeds": 8, **spec}, records, {"tasks": tasks})

    def record(
        self,
        arm: str,
        values: list[float],
        task: str = "mqar",
        *,
        stage: Stage = "confirm",
        number: int = 0,
        tuned: dict[str, Any] | None = None,
        seeds: Sequence[int] = SEEDS,
        costs: dict[str, float] | None = None,
        **given: Any,
    ) -> None:
        """One trial whose run i has values[i] as its final metric on both splits; NaN is a diverged run."""
        splits = ("validation", "test") if stage == "confirm" else ("validation",)
        runs = []
        for seed, value in zip(seeds, values, strict=False):
            bad = math.isnan(value)
            metrics = [
                (split, TASKS[task]["metric"], step, v) for split in splits for step, v in ((50, 0.01), (100, value))
            ]
            counted = {**COSTS, **(costs or {})} if costs is not EARLY else EARLY
            metrics += [("cost", name, 100, value) for name, value in counted.items()]
            runs.append(RunRecord(seed, "diverged" if bad else "done", 70 if bad else None, metrics))
        record: dict[str, Any] = {
            "key": f"{arm} {task} {stage} {number} {seeds[0]}",
            "task": task,
            "task_version": TASKS[task]["version"],
            "stage": stage,
            "config": {},
            "state": "done",
            "started_at": 1000.0 + number,
            "finished_at": 1010.0 + number,
            "seconds": 10.0,
            "rule": RuleRecord("comba", "h", "source"),
            "parameters": 12345,
            "state_size": 2048,
            "tokens_per_second": 50_000.0,
            "hardware": {"device": "CPU"},
            "runs": runs,
        }
        self.store.record_trial(self.id, arm, TrialRecord(**{**record, **given}), number, tuned or {})

    def fail(self, arm: str, message: str, **given: Any) -> None:
        error = f"Traceback (most recent call last):\n  File ...\n{message}\n"
        unknown: dict[str, Any] = {"parameters": None, "state_size": None, "tokens_per_second": None}
        self.record(arm, [], state="failed", error=error, **unknown, **given)


BASE = [0.90, 0.92, 0.94, 0.91, 0.93, 0.95, 0.90, 0.92]


@pytest.fixture
def whole(store: Store) -> Report:
    arms: dict[str, dict[str, Any]] = {
        "base": {},
        "no_d": {"d": [0.02, 0]},
        "odd|b": {"b": [1, 2]},
        "iplr": {"t": [0, 1]},
        "late": {"x": [0, 1]},
    }
    lab = Lab(store, arms, {"mqar": TASKS["mqar"]})
    lab.record("base", BASE, tuned={"train.lr": 0.005, "rule.d": "head"})
    lab.record("no_d", [x - 0.4 - 0.01 * i for i, x in enumerate(BASE)], state_size=4096)
    lab.record("odd|b", [x + 0.01 * (-1) ** i for i, x in enumerate(BASE)])
    lab.record("iplr", [math.nan, math.nan, *BASE[2:]])
    lab.fail("late", "RuntimeError: out of memory")
    lab.fail("late", "ValueError: bad [value]", stage="tune", number=3)
    store.finish_study(lab.id, "failed")
    return report(store, lab.id)


GOLDEN = """\
## comba_ablation, profile cpu, id 1 (failed)

Some trials failed; of the others: no_d is worse than the base on mqar by 0.435 accuracy (p 0.008, 8 seeds); no arm \
beats it.

### mqar (version 1): accuracy on test, higher is better, chance 0.0156

- **no_d has 2.00 times the state of the base.**

| arm | seeds | accuracy | difference | p | verdict | us/token | flops/token | state | parameters | tuned |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| base | 8 | 0.921 [0.906, 0.936] |  |  | base | 20 | 1,000 | 2,048 | 12,345 | train.lr=0.005, rule.d=head |
| no_d | 8 | 0.486 [0.463, 0.510] | -0.435 [-0.460, -0.410] | 0.008 | worse | 20 | 1,000 | 4,096 | 12,345 |  |
| odd\\|b | 8 | 0.921 [0.905, 0.937] | +0.000 [-0.015, +0.015] | 1.000 | undecided \
| 20 | 1,000 | 2,048 | 12,345 |  |
| iplr | 6 of 8, 2 runs diverged | 0.698 [0.345, 1.000] | -0.224 [-0.596, +0.000] | 0.508 \
| undecided | 20 | 1,000 | 2,048 | 12,345 |  |
| late | 0 |  |  |  | failed |  |  |  |  |  |

- Pareto front of mean, flops per token and state: base, odd|b.
- iplr: 2 of 8 seeds did not finish; each counts as the worst outcome of its seed.
- Seeds that learned, past half way from chance to the best possible: base 8 of 8 [0.63, 1.00], \
no_d 2 of 8 [0.03, 0.65], odd|b 8 of 8 [0.63, 1.00], iplr 6 of 8 [0.35, 0.97].
- The median interval reaches 0.025 to either side: a smaller difference can hardly be decided here.

- failed: late, confirm 0 on mqar: RuntimeError: out of memory
- failed: late, tune 3 on mqar: ValueError: bad [value]
- A seed's score is that on the test split at the last step. Means are over seeds, with a 95% t interval.
- Differences are arm minus base, paired by seed. Intervals and p are of one exact sign-flip test over a task's arms \
and hold jointly.
- Equal means that two one-sided tests at 0.05 find the difference smaller than the margin; better and worse, that the \
interval leaves out 0, and by over the margin, the margin too; equal or better, that the arm is not worse by the margin.
- Costs are those of the tuned candidate: time per trained token, elements of state, parameters.
- Whole study: if no arm differed from the base, at most 5% of such studies would find a difference.
- More seeds are a further look at the same arms, which may err in 0.0054 of studies: the numbers of seeds that arms \
need count with that.
- A proxy task of this size does not rank every method as training at scale does.
"""


def rows(found: Report, table: int = 0) -> dict[str, Row]:
    return {row.arm: row for row in found.tables[table].rows}


def text(found: Report, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(found)
    return console.export_text()


def test_markdown(whole: Report) -> None:
    assert whole.to_markdown() == GOLDEN


def test_the_figures_are_those_of_hand(whole: Report) -> None:
    found = rows(whole)
    row = found["no_d"]
    assert row.difference is not None
    assert row.difference.mean == pytest.approx(-0.435)
    assert row.difference.p == pytest.approx(2 / 2**8), "the least that 8 seeds can give, for any number of arms"
    assert (row.difference.n, row.score.n, row.score.missing) == (8, 8, 0)
    assert row.microseconds_per_token == 20
    # Its seeds 1 and 2 diverged: each counts as chance, the worst there is.
    iplr = found["iplr"]
    assert iplr.score.mean == pytest.approx((2 / 64 + sum(BASE[2:])) / 8)
    assert (iplr.score.n, iplr.score.missing, iplr.diverged) == (8, 2, 2)
    assert iplr.difference is not None
    assert iplr.difference.mean == pytest.approx((2 / 64 - sum(BASE[:2])) / 8)
    assert iplr.difference.p == pytest.approx(0.5, abs=0.05)
    assert iplr.learned is not None
    assert (iplr.learned.learned, iplr.learned.n) == (6, 8)


WIDTHS = (60, 80, 100, 120, 160, 240)


@pytest.fixture(params=["as it comes", "large"])
def report_of_any_size(request: pytest.FixtureRequest, store: Store) -> Report:
    """A report as it comes; and one with long names, many tuned values and the figures of a large model."""
    if request.param == "as it comes":
        found: Report = request.getfixturevalue("whole")
        return found
    arms = {"base": {}, "without_the_output_gate_of_each_head": {"g": [0, 1]}, "not_yet_run": {"h": [0, 1]}}
    lab = Lab(store, arms, {"text": TASKS["text"]})
    tuned = {"rule": {"name": "comba", "transition": "iplr"}, "train.lr": 0.000123, "model.conv": 4}
    large = {"parameters": 1_234_567_890, "state_size": 16_777_216, "tokens_per_second": 12.3, "tuned": tuned}
    lab.record("base", [-10 - x for x in BASE], "text", **large)
    lab.record("without_the_output_gate_of_each_head", [100 + 50 * x for x in BASE], "text", **large)
    return report(store, lab.id)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_width_loses_anything(report_of_any_size: Report, width: int) -> None:
    shown = text(report_of_any_size, width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert "\u2026" not in shown
    for table in report_of_any_size.tables:
        for row in table.rows:
            for cell in cells(row, columns(table)):
                for number in re.findall(r"[-+]?\d[\d,.]*\d", cell.replace(row.arm, "")):
                    assert number in shown, f"{row.arm} lacks {number}"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_wide_terminal_shows_one_table_and_a_narrow_one_two(whole: Report, width: int) -> None:
    rules = [line for line in text(whole, width).splitlines() if set(line.strip()) == {"\u2500"}]
    assert len(rules) == (1 if width >= 120 else 2)


def test_json_has_every_figure_and_no_nan(whole: Report) -> None:
    found = json.loads(whole.to_json(), parse_constant=pytest.fail)
    [table] = found["tables"]
    assert (found["state"], table["metric"], table["maximize"]) == ("failed", "accuracy", True)
    iplr = table["rows"][3]
    assert set(iplr["difference"]) == {"mean", "low", "high", "p", "n", "margin", "is_equal", "of_base"}
    assert iplr["score"]["missing"] == 2
    assert table["warnings"] == ["no_d has 2.00 times the state of the base."]
    assert table["rows"][0]["tuned"] == {"train.lr": 0.005, "rule.d": "head"}
    assert [failure["message"] for failure in found["failures"]] == [
        "RuntimeError: out of memory",
        "ValueError: bad [value]",
    ]


def test_csv_has_a_line_per_arm(whole: Report) -> None:
    base, no_d, *_, late = csv.DictReader(io.StringIO(whole.to_csv()))
    assert base["difference_mean"] == base["difference_p"] == late["score_mean"] == ""
    assert float(no_d["difference_mean"]) == pytest.approx(-0.435)
    assert (no_d["verdict"], no_d["score_n"], no_d["state_size"]) == ("worse", "8", "4096")
    assert json.loads(base["tuned"])["train.lr"] == 0.005


def test_csv_has_a_line_of_an_arm_with_a_figure_that_the_base_lacks(store: Store) -> None:
    """No candidate of the base finished all seeds, so that none has a score alone."""
    lab = Lab(store, {"base": {}, "A": {"a": [0, 1]}}, {"mqar": TASKS["mqar"]}, tune={"trials": 2, "train.lr": LR})
    for number, lr in enumerate((0.01, 0.1)):
        lab.record("base", [math.nan, *BASE[1:]], number=number, tuned={"train.lr": lr})
        lab.record("A", BASE, number=number, tuned={"train.lr": lr})
    base, arm = csv.DictReader(io.StringIO(report(store, lab.id).to_csv()))
    assert (base["one_setting_mean"], base["one_setting_missing"]) == ("", "0")
    assert float(arm["one_setting_mean"]) == pytest.approx(sum(BASE) / 8)


def test_lower_is_better_where_the_task_says_so(store: Store) -> None:
    lab = Lab(store, {"base": {}, "up": {"x": [0, 1]}, "down": {"x": [0, 2]}})
    for task in TASKS:
        for arm, shift in (("base", 0.0), ("up", 0.1), ("down", -0.1)):
            lab.record(arm, [x + shift for x in BASE], task)
    found = report(store, lab.id)
    assert [{row.arm: row.verdict for row in table.rows} for table in found.tables] == [
        {"base": "base", "up": "better", "down": "worse"},
        {"base": "base", "up": "worse", "down": "better"},
    ]
    assert "bits_per_byte on test, lower is better" in found.to_markdown()


EVEN = [0.01, -0.01, 0.02, -0.02, 0.01, -0.01, 0.0, 0.0]
"""What an arm adds to the base's seeds, with mean 0."""
SHIFTS = {
    "up": (0.1, 1), "little": (0.035, 1), "some": (0.03, 4), "even": (0.0, 1), "less": (-0.03, 4), "down": (-0.1, 1),
    "wide": (0.0, 10),
}  # fmt: skip
"""The shift of an arm, and how often it adds `EVEN`."""


@pytest.mark.parametrize("maximize", [True, False])
def test_a_verdict_says_on_which_side_of_the_margins_the_interval_lies(store: Store, maximize: bool) -> None:
    task = {**TASKS["mqar"], "maximize": maximize, "margin": 0.04, "bounds": None}
    arms: dict[str, dict[str, Any]] = {"base": {}, **{name: {"x": [0, name]} for name in SHIFTS}}
    lab = Lab(store, arms, {"mqar": task})
    lab.record("base", BASE)
    for name, (shift, factor) in SHIFTS.items():
        lab.record(name, [x + factor * e + shift for x, e in zip(BASE, EVEN, strict=True)])
    store.finish_study(lab.id, "done")
    found = report(store, lab.id)
    up, down = ("better", "worse") if maximize else ("worse", "better")
    verdicts = [up, up, f"equal or {up}", "equal", f"equal or {down}", down, "undecided"]
    assert [row.verdict for row in found.tables[0].rows[1:]] == verdicts
    assert verdict_counts(found) == {"better": 1 + maximize, "worse": 2 - maximize, "equal": 1, "undecided": 3}
    end = "; even equals the base within 0.04 accuracy on mqar; 3 of 7 comparisons are undecided."
    assert sentence(found).endswith(end)
    assert "chance 0.0156, margin 0.04" in found.to_markdown()
    shown = {name: short_verdict(row) for name, row in rows(found).items()}
    assert (shown["up"], shown["little"]) == (f"{up} by over 0.04", up)
    assert shown["some" if maximize else "less"].startswith("equal or better: needs")


def test_a_ceiling_is_equal_and_not_worse(store: Store) -> None:
    """1.000 against 0.999, which six seeds agree on."""
    lab = Lab(store, {"base": {}, "near": {"x": [0, 1]}}, {"mqar": {**TASKS["mqar"], "margin": 0.01}}, seeds=6)
    lab.record("base", [1.0] * 6)
    lab.record("near", [0.999, 0.9985, 0.999, 0.9995, 0.999, 0.999])
    store.finish_study(lab.id, "done")
    found = report(store, lab.id)
    near = rows(found)["near"]
    assert near.difference is not None
    assert (near.difference.p, near.verdict, near.seeds_needed) == (2 / 64, "equal", None)
    assert sentence(found) == "No arm is better or worse: near equals the base within 0.01 accuracy on mqar."


def test_few_seeds_are_told_what_they_cannot_show(store: Store) -> None:
    lab = Lab(store, {"base": {}, "no_d": {"x": [0, 1]}}, {"mqar": TASKS["mqar"]}, seeds=5)
    lab.record("base", BASE[:5])
    lab.record("no_d", [0.1] * 5)
    found = report(store, lab.id)
    [table] = found.tables
    assert table.rows[1].verdict == "undecidable: needs 6 seeds"
    assert table.warnings == ["No arm can be told from the base with 5 seeds: p is at least 0.0625."]
    assert table.rows[1].difference is not None
    assert (table.rows[1].difference.low, table.rows[1].difference.high) == (-math.inf, math.inf), "no interval"
    said = found.to_markdown()
    assert said.index("No arm can be told") < said.index("| arm |") < said.index("Pareto front")
    shown = text(found)
    assert shown.index("! No arm can be told") < shown.index("difference")


def test_what_cannot_be_compared_says_why(store: Store) -> None:
    names = ("no trial", "all bad", "some bad", "no metric", "raised")
    lab = Lab(store, {"base": {}} | {name: {name: [0, 1]} for name in names}, {"mqar": TASKS["mqar"]}, seeds=6)
    assert {row.verdict for row in report(store, lab.id).tables[0].rows} == {"not run"}
    lab.record("base", [0.9, 0.8, math.nan, 0.7, 0.9, 0.8])
    lab.record("all bad", [math.nan] * 6)
    lab.record("some bad", [math.nan, math.nan, 0.7, 0.9, 0.9, 0.9])
    lab.record("no metric", [], runs=[RunRecord(seed) for seed in SEEDS[:6]])
    lab.fail("raised", "OSError: gone")
    found = report(store, lab.id)
    assert {row.arm: row.verdict for row in found.tables[0].rows} == {
        "base": "base",
        "no trial": "not run",
        "all bad": "undecided",
        "some bad": "undecided",
        "no metric": "undecided",
        "raised": "failed",
    }
    bad = rows(found)["all bad"]
    assert bad.score.mean == pytest.approx(1 / 64), "all at chance; so is the base where it diverged"
    assert bad.difference is not None
    assert bad.difference.p == pytest.approx(4 / 2**6)
    assert "OSError: gone" in text(found)
    json.loads(found.to_json(), parse_constant=pytest.fail)


def test_an_arm_that_always_diverges_is_worse(store: Store) -> None:
    lab = Lab(store, {"base": {}, "bad": {"x": [0, 1]}})
    for task in TASKS:
        lab.record("base", BASE, task)
        lab.record("bad", [math.nan] * 8, task)
    found = report(store, lab.id)
    for at, worst in enumerate((1 / 64, 8.0)):
        row = rows(found, at)["bad"]
        assert (row.verdict, row.score.mean, row.score.missing) == ("worse", worst, 8)
        assert cells(row, columns(found.tables[at]))[1] == "0 of 8, 8 runs diverged"
    assert "bad: 8 of 8 seeds did not finish; each counts as the worst outcome of its seed." in found.tables[0].notes


def test_a_failed_base_leaves_the_arms_uncompared(store: Store) -> None:
    lab = Lab(store, {"base": {}, "no_d": {"x": [0, 1]}}, {"mqar": TASKS["mqar"]})
    lab.fail("base", "OSError: gone")
    lab.record("no_d", BASE)
    assert [row.verdict for row in rows(report(store, lab.id)).values()] == [
        "failed",
        "not compared",
    ]


def test_each_seed_is_scored_by_its_runs_as_the_others_weigh_them(store: Store) -> None:
    """Both candidates have the mean 0.65 over all seeds, so that the weights are near 1/2."""
    lab = Lab(store, {"base": {}, "A": {"a": [0, 1]}}, {"mqar": TASKS["mqar"]}, tune={"trials": 2, "train.lr": LR})
    for arm, gain in (("base", 0.0), ("A", 0.05)):
        lab.record(arm, [0.5 + gain, 0.8 + gain] * 4, number=0, tuned={"train.lr": 0.01})
        lab.record(arm, [0.7 + gain, 0.6 + gain] * 4, number=1, tuned={"train.lr": 0.1}, state_size=999)
    found = report(store, lab.id)
    base, a = found.tables[0].rows
    assert base.score.mean == pytest.approx(0.6325, abs=1e-4)
    assert (base.tuned, base.chose) == ({"train.lr": 0.01}, 4)
    assert (base.by_budget, a.by_budget) == (
        pytest.approx({1: 0.65, 2: 0.6325}, abs=1e-4),
        pytest.approx({1: 0.7, 2: 0.6825}, abs=1e-4),
    )
    assert a.difference is not None
    assert (a.difference.mean, a.verdict) == (pytest.approx(0.05), "better")
    assert (base.state_size, base.seconds) == (2048, 20)
    assert cells(base, columns(found.tables[0], "tuned"))[0] == "train.lr=0.01 (4 of 8 seeds)"
    assert "Expected score with 1 to 2 candidates: base 0.650, 0.633; A 0.700, 0.683." in found.tables[0].notes
    assert (
        "The best train.lr of base, A is the lowest that was tried, 0.01: these arms may do better beyond it "
        "(tune: {extend: true} tries further)."
    ) in found.tables[0].warnings


def test_a_best_value_between_others_warns_of_nothing(store: Store) -> None:
    lab = Lab(store, {"base": {}}, {"mqar": TASKS["mqar"]}, tune={"trials": 3, "train.lr": LR})
    for number, (lr, score) in enumerate({0.001: 0.5, 0.01: 0.7, 0.1: 0.6}.items()):
        lab.record("base", [score] * 8, number=number, tuned={"train.lr": lr})
    [table] = report(store, lab.id).tables
    assert (table.rows[0].tuned, table.rows[0].chose, table.warnings) == ({"train.lr": 0.01}, 8, [])


def test_the_values_tried_are_those_of_the_task(store: Store) -> None:
    """Only one task's range was extended."""
    lab = Lab(store, {"base": {}}, tune={"trials": 2, "train.lr": LR})
    for number, lr in enumerate((0.01, 0.1, 1.0)):
        for task in TASKS:
            if (task, lr) != ("mqar", 1.0):
                lab.record("base", [lr / 2] * 8, task, number=number, tuned={"train.lr": lr})
    of_mqar, of_text = report(store, lab.id).tables
    assert "The best train.lr of base is the highest that was tried, 0.1: " in str(of_mqar.warnings)
    assert "The best train.lr of base is the lowest that was tried, 0.01: " in str(of_text.warnings)


def test_a_candidate_that_diverged_with_some_seeds_is_weighed_as_the_worst_there(store: Store) -> None:
    lab = Lab(store, {"base": {}}, {"mqar": TASKS["mqar"]}, tune={"trials": 2, "train.lr": LR})
    lab.record("base", [0.9, math.nan] * 4, number=0, tuned={"train.lr": 0.1})
    lab.record("base", [0.7, 0.6] * 4, number=1, tuned={"train.lr": 0.01})
    row = rows(report(store, lab.id))["base"]
    assert (row.score.mean, row.score.missing, row.diverged) == (pytest.approx(0.5803, abs=1e-4), 0, 4)
    assert (row.tuned, row.chose) == ({"train.lr": 0.01}, 8), "of the candidates that finished all seeds"


LR = {"log_uniform": [1e-3, 1e-1]}
FIRST, MORE = range(1, 9), range(9, 11)


def test_an_arm_keeps_the_seeds_at_which_it_stopped(store: Store) -> None:
    """Looks at 8, 10, 12 and 15 seeds."""
    lab = Lab(store, {"base": {}, "told": {"x": [0, 1]}, "on": {"x": [0, 2]}}, {"mqar": TASKS["mqar"]},
              seeds={"at_least": 8, "at_most": 15})  # fmt: skip
    on = [0.03, 0.05, -0.02, 0.04, 0.05, 0.03, 0.04, 0.02, 0.05, 0.04]
    for seeds in (FIRST, MORE):
        base = [0.5 + 0.001 * seed for seed in seeds]
        lab.record("base", base, seeds=seeds)
        lab.record("on", [b + on[s - 1] for b, s in zip(base, seeds, strict=True)], seeds=seeds)
        if seeds is FIRST:
            lab.record("told", [b + 0.3 + 0.001 * s**2 for b, s in zip(base, seeds, strict=True)], seeds=seeds)
    found = rows(report(store, lab.id))
    assert {arm: row.score.n for arm, row in found.items()} == {"base": 10, "told": 8, "on": 10}
    assert (found["told"].verdict, found["told"].difference and found["told"].difference.n) == ("better", 8)
    assert found["on"].difference is not None
    assert found["on"].difference.n == 10


def two_arms(store: Store, by: float, **spec: Any) -> Report:
    """A study of an arm that is better by so much, with noise, and of one that hardly differs."""
    lab = Lab(store, {"base": {}, "told": {"x": 1}, "idle": {"x": 2}}, {"mqar": TASKS["mqar"]}, **spec)
    noise = [0.02, -0.03, 0.05, 0.01, -0.02, 0.04, -0.04, -0.01]
    lab.record("base", [0.5] * 8)
    lab.record("told", [0.5 + by + x for x in noise])
    lab.record("idle", [0.5 + 2 * x for x in reversed(noise)])
    store.finish_study(lab.id, "done")
    return report(store, lab.id)


@pytest.mark.parametrize(("by", "keeps"), [(0.05, 0.8), (0.3, 1.0)])
def test_a_difference_that_was_decided_early_has_an_unbiased_one_beside_it(
    store: Store, by: float, keeps: float
) -> None:
    """Looks at 8, 10, 12 and 15 seeds. The first decides one arm, narrowly or not, and gives up the other."""
    found = two_arms(store, by, seeds={"at_least": 8, "at_most": 15})
    row = rows(found)["told"]
    assert row.difference is not None
    assert (row.verdict, row.difference.n) == ("better", 8)
    assert row.unbiased is not None
    assert row.difference.low <= row.unbiased
    assert row.unbiased / row.difference.mean == pytest.approx(keeps, abs=0.2 if keeps < 1 else 0.01)
    assert [rows(found)[arm].unbiased for arm in ("base", "idle")] == [None, None]
    clause = f"(about {row.unbiased:.3g} without the optimism of several looks, p "
    assert (clause in sentence(found)) == (keeps < 1)
    assert any(note.startswith("Unbiased: ") for note in found.tables[0].notes)
    heads = {column.head: column for column in columns(found.tables[0], "name", "answer")}
    assert heads["unbiased"].text(row) == f"{row.unbiased:+.3f}"
    assert f"| {row.unbiased:+.3f} |" in found.to_markdown()
    assert [line["unbiased"] for line in csv.DictReader(io.StringIO(found.to_csv()))] == ["", str(row.unbiased), ""]
    frame = found.to_frame()
    assert (str(frame["unbiased"].dtype), frame["unbiased"][1]) == ("float64", row.unbiased)


def test_a_study_of_one_look_shows_its_means_alone(store: Store) -> None:
    found = two_arms(store, 0.05, seeds=8)
    assert rows(found)["told"].verdict == "better"
    assert all(row.unbiased is None for row in found.tables[0].rows)
    assert "unbiased" not in [column.head for column in columns(found.tables[0])]
    assert "optimism" not in sentence(found)
    assert not any(note.startswith("Unbiased: ") for note in found.tables[0].notes)


def test_seeds_whose_trial_raised_are_none_of_the_arms(store: Store) -> None:
    """A candidate that raised at the second look: it is no fault of the arm's."""
    lab = Lab(store, {"base": {}, "A": {"x": [0, 1]}}, {"mqar": TASKS["mqar"]}, seeds={"at_least": 6, "at_most": 8})
    gains = [0.03, 0.05, -0.02, 0.04, 0.05, 0.03]
    lab.record("base", BASE[:6], seeds=FIRST[:6])
    lab.record("A", [x + gain for x, gain in zip(BASE, gains, strict=False)], seeds=FIRST[:6])
    lab.record("base", [0.9], seeds=[7])
    lab.fail("A", "OSError: gone", seeds=[7])
    row = rows(report(store, lab.id))["A"]
    assert (row.score.n, row.score.missing) == (6, 0)
    assert row.difference is not None
    assert row.difference.mean == pytest.approx(sum(gains) / 6)


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ([0.05] * 8, "The base has hardly learned the task (chance 0.0156): "),
        ([1.0] * 8, "The base is at the end of the scale: an arm can be worse, and hardly better."),
        ([0.5] * 8, None),
    ],
)
def test_a_base_at_an_end_of_the_scale_is_told_of(store: Store, values: list[float], warning: str | None) -> None:
    lab = Lab(store, {"base": {}, "A": {"x": [0, 1]}}, {"mqar": TASKS["mqar"]})
    lab.record("base", values)
    lab.record("A", values)
    [table] = report(store, lab.id).tables
    assert len(table.warnings) == (warning is not None)
    assert all(said.startswith(str(warning)) for said in table.warnings)


@pytest.mark.parametrize(("score", "verdict"), [(0.05, "undecided"), (0.5, "equal")])
def test_no_arm_equals_a_base_that_has_hardly_learned(store: Store, score: float, verdict: str) -> None:
    lab = Lab(store, {"base": {}, "A": {"x": [0, 1]}}, {"mqar": {**TASKS["mqar"], "margin": 0.02}})
    lab.record("base", [score] * 8)
    lab.record("A", [score] * 8)
    found = report(store, lab.id)
    assert rows(found)["A"].verdict == verdict
    assert verdict_counts(found)[verdict] == 1


@pytest.mark.parametrize(("score", "said"), [(0.4, "base 0 of 8 [0.00, 0.37], A 0 of 8 [0.00, 0.37]."), (0.6, None)])
def test_seeds_that_learned_are_told_unless_all_did(store: Store, score: float, said: str | None) -> None:
    lab = Lab(store, {"base": {}, "A": {"x": [0, 1]}}, {"mqar": TASKS["mqar"]})
    lab.record("base", [score] * 8)
    lab.record("A", [score] * 8)
    [table] = report(store, lab.id).tables
    told = [note.partition(": ")[2] for note in table.notes if note.startswith("Seeds that learned")]
    assert told == ([said] if said else [])


def test_an_arm_of_another_size_is_marked(store: Store) -> None:
    arms = {"base": {}, "even": {"x": [0, 1]}, "large": {"x": [0, 2]}}
    lab = Lab(store, arms, {"mqar": TASKS["mqar"]})
    lab.record("base", BASE)
    lab.record("even", BASE, parameters=12345 + 600, state_size=2048 - 100)
    lab.record("large", BASE, parameters=2 * 12345, state_size=1024)
    assert report(store, lab.id).tables[0].warnings == [
        "large has 0.50 times the state, 2.00 times the parameters of the base."
    ]


def test_caches_are_shown_beside_the_state_where_there_are_any(store: Store) -> None:
    lab = Lab(store, {"base": {}, "local": {"x": [0, 1]}}, {"mqar": TASKS["mqar"]})
    lab.record("base", BASE, costs={"conv_cache": 288.0})
    lab.record("local", BASE, costs={"kv_cache": 2000.0, "dead_parameters": 96.0})
    found = report(store, lab.id)
    assert found.tables[0].warnings == ["local carries 96 of 12,345 parameters that do nothing."]
    assert "| state | KV cache | conv cache | parameters |" in found.to_markdown()
    assert "| 48 | 2,000 | 0 | 12,345 |" in found.to_markdown()
    assert [
        (row["state_size"], row["recurrent_state"], row["kv_cache"], row["conv_cache"], row["dead_parameters"])
        for row in csv.DictReader(io.StringIO(found.to_csv()))
    ] == [("2048", "2048", "0", "288", "0"), ("2048", "48", "2000", "0", "96")]


def test_a_table_with_a_trial_of_an_early_release_counts_all_that_is_held(store: Store) -> None:
    """Early releases recorded the sum alone, as `state_size`."""
    lab = Lab(store, {"base": {}, "new": {"x": [0, 1]}}, {"mqar": TASKS["mqar"]})
    lab.record("base", BASE, state_size=2048 + 288, costs=EARLY)
    lab.record("new", BASE, costs={"conv_cache": 288.0, "kv_cache": 48.0})
    found = report(store, lab.id)
    assert [(row.state_size, row.recurrent_state, row.conv_cache) for row in found.tables[0].rows] == [
        (2336, 2336, None)
    ] * 2
    assert found.tables[0].warnings == []
    assert "conv cache |" not in found.to_markdown()
    assert any(note.startswith("State counts the convolution's cache") for note in found.tables[0].notes)


@pytest.mark.parametrize(
    ("of_base", "of_arm", "said"),
    [
        ("1.00", "0.85", None),
        ("0.98", "0.64", "The machine was loaded: trainings had their core for 64% to 98% of the time. "),
        (None, "1.00", "Times are not comparable: some trials were timed by the clock on the wall"),
        (None, None, "us/token differs at equal flops (slow 1.55 times the base's): the rules may take different"),
    ],
)
def test_times_of_a_loaded_machine_are_marked(
    store: Store, of_base: str | None, of_arm: str | None, said: str | None
) -> None:
    lab = Lab(store, {"base": {}, "slow": {"x": [0, 1]}, "more": {"x": [0, 2]}}, {"mqar": TASKS["mqar"]})
    for arm, share, speed in (("base", of_base, 62_000.0), ("slow", of_arm, 40_000.0), ("more", of_base, 10_000.0)):
        hardware = {"device": "CPU", **({"core_share": share} if share else {})}
        flops = {"flops_per_token": 6000.0 if arm == "more" else 1000.0}
        lab.record(arm, BASE, hardware=hardware, tokens_per_second=speed, costs=flops)
    notes = [note for note in report(store, lab.id).tables[0].notes if "us/token" in note or "Times" in note]
    assert len(notes) == (said is not None)
    assert said is None or notes[0].startswith(said)


def test_tuning_shows_the_best_and_compares_nothing(store: Store) -> None:
    lab = Lab(store, {"base": {}, "no_d": {"x": [0, 1]}})
    for task in TASKS:
        for number, values in enumerate(([0.5, 0.7], [0.9, math.nan], [0.2, 0.3], [0.6, 0.6])):
            lab.record("base", values, task, stage="tune", number=number, tuned={"lr": number})
    lab.fail("base", "OSError: gone", stage="tune", number=9)
    lab.record("base", BASE)
    found = report(store, lab.id, which="tune")
    assert [(t.split, t.rows[0].tuned, round(t.rows[0].score.mean, 9)) for t in found.tables] == [
        ("validation", {"lr": 0}, 0.6),
        ("validation", {"lr": 2}, 0.25),
    ]
    assert [(row.verdict, row.difference) for row in found.tables[0].rows] == [
        ("base", None),
        ("not run", None),
    ]
    assert "optimistic, and no answer" in found.to_markdown()


def test_arms_that_combine_two_others_show_their_interaction(store: Store) -> None:
    a, b = {"a": [0, 1]}, {"b": [0, 1]}
    lab = Lab(store, {"base": {}, "A": a, "B": b, "AB": a | b, "A2": {"a": [0, 2]}}, {"mqar": TASKS["mqar"]})
    for arm, shift in (("base", 0.0), ("A", -0.1), ("B", -0.2), ("AB", -0.25), ("A2", -0.1)):
        lab.record(arm, [x + shift for x in BASE])
    [table] = report(store, lab.id).tables
    [found] = table.interactions
    assert (found.a, found.b, found.both) == ("A", "B", "AB")
    assert found.difference.mean == pytest.approx(0.05)
    assert (
        "A and B together (AB) make +0.050 [+0.050, +0.050] beyond their sum (p 0.008, exact, not corrected)."
        in table.notes
    )


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        ({"device": "H200", "host": "b"}, "device, host"),
        ({"stack": "16"}, "runs trained as one"),
        ({"gpu": "GPU-1"}, None),  # another one of the same host
    ],
)
def test_times_that_say_nothing_of_the_arms_are_not_compared(
    store: Store, other: dict[str, str], differ: str | None
) -> None:
    lab = Lab(store, {"base": {}, "no_d": {"x": [0, 1]}}, {"mqar": TASKS["mqar"]})
    same = {"device": "H100", "host": "a", "gpu": "GPU-0", "stack": "8"}
    lab.record("base", BASE, hardware=same)
    lab.record("no_d", BASE, hardware={**same, **other})
    notes = [note for note in report(store, lab.id).tables[0].notes if note.startswith("Times")]
    assert notes == ([f"Times are not comparable: the arms differ in {differ}."] if differ else [])


def test_a_trial_that_failed_has_no_times_to_compare(store: Store) -> None:
    lab = Lab(store, {"base": {}, "no_d": {"x": [0, 1]}}, {"mqar": TASKS["mqar"]})
    lab.record("base", BASE, hardware={"device": "H100", "host": "a"})
    lab.fail("no_d", "OSError: gone", hardware={})
    assert not [note for note in report(store, lab.id).tables[0].notes if note.startswith("Times")]


def test_an_interaction_is_told_of_once_its_four_arms_have_finished(store: Store) -> None:
    a, b = {"a": [0, 1]}, {"b": [0, 1]}
    lab = Lab(store, {"base": {}, "A": a, "B": b, "AB": a | b}, {"mqar": TASKS["mqar"]})
    for arm in ("base", "A", "B"):
        lab.record(arm, BASE)
        assert not [note for note in report(store, lab.id).tables[0].notes if "together" in note]
    lab.record("AB", BASE)
    assert [note for note in report(store, lab.id).tables[0].notes if note.startswith("A and B together (AB) make")]


def test_a_candidate_that_makes_no_model_is_told_of_and_stands_for_no_arm(store: Store) -> None:
    lab = Lab(store, {"base": {}}, {"mqar": TASKS["mqar"]})
    reason = "model.d_model 17 must be a multiple of heads 2"
    values = {"model.d_model": 17, "model.heads": 2}
    nothing: dict[str, Any] = {"parameters": None, "state_size": None, "tokens_per_second": None, "hardware": {}}
    lab.record("base", [], stage="tune", number=0, state="infeasible", error=reason, runs=[], tuned=values, **nothing)
    lab.record("base", BASE, stage="tune", number=1, tuned={"model.d_model": 16, "model.heads": 2})
    for which in ("tune", "confirm"):
        found = report(store, lab.id, which=which)  # type: ignore[arg-type]
        assert (
            "1 of 2 candidates drawn for base make no model and did not run, "
            f"such as model.d_model=17, model.heads=2: {reason}." in found.tables[0].notes
        )
        assert rows(found)["base"].verdict == {"tune": "base", "confirm": "not run"}[which]
        assert found.failures == []
        assert [(one.number, one.values, one.reason) for one in found.infeasible] == [(0, values, reason)]
    assert json.loads(report(store, lab.id).to_json())["infeasible"][0]["reason"] == reason


def test_an_unknown_study_is_one_line(store: Store) -> None:
    with pytest.raises(InputError, match="unknown study '7'"):
        report(store, 7)
