"""Measures which measure of a run tells arms apart best: how far arms differ, against how far seeds do.

    python benchmarks/measures.py                          trains what is missing
    python benchmarks/measures.py --only mqar text         some of the groups alone
    python benchmarks/measures.py --limit 0 --table        trains nothing, and prints the figures

Each group is a task with the arms of a shipped study, and some more. All seeds of an arm train every candidate of the
study, with `EVALUATIONS` evaluations, and some seeds train `LONGER` times as long at the best of the candidates. The
JSON file is written after every arm, and a call goes on from there. `--limit` seconds after its start, a call begins no
further arm. docs/decisions/010 has the result.

A measure of a run is `metric`, the task's metric, `loss` in nats for each scored token, or `log_loss`, its logarithm,
all on the test split after the last step; `curve_` and one of these, its mean over the evaluations of the validation
split; or `log_steps`, minus the logarithm of the steps to the first evaluation at which the metric is half way, where a
run that never gets there takes all steps. Each seed chooses its candidate by the same measure on validation.
"""

import argparse
import json
import lzma
import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import kendalltau

import deltalab
from deltalab.statistics.joint_test import compare
from deltalab.store import Store
from deltalab.study.answers.recorded_scores import RecordedScores, scores_by_task
from deltalab.study.forecast.power import SHIPPED, paired_sd, seed_correlation, spread_of
from deltalab.study.planning.make import plan_study
from deltalab.study.planning.plan import Plan, PlannedArm
from deltalab.study.specs.recorded_study import RecordedTask
from deltalab.training.device import hardware, keep_freed_memory
from deltalab.training.train import RunResult, train_together

OUT = Path(__file__).with_name("measures_cpu.json")
LEDGERS = (
    (OUT.with_name("ledgers") / "found_rules_h100.db.xz", "found_rules:gpu", True),
    (OUT.with_name("ledgers") / "found_rules_h100.db.xz", "found_parts:gpu", True),
    (OUT.with_name("ledgers") / "found_rules_h100.db.xz", "pre_state_sgla:gpu", True),
    (OUT.with_name("ledgers") / "discover_h100.db.xz", "discover:gpu", True),
    (OUT.with_name("ledgers") / "proxies.db.xz", "proxies", False),
    (OUT.with_name("ledgers") / "comba_ablation_h200.db.xz", "comba_ablation:gpu", True),
    (OUT.with_name("ledgers") / "images_h200.db.xz", "images:gpu", True),
    (OUT.with_name("ledgers") / "state_tracking_h200.db.xz", "state_tracking:gpu", True),
    (OUT.with_name("ledgers") / "niah_h200.db.xz", "niah:gpu", True),
    (OUT.with_name("ledgers") / "spreads_h200.db.xz", "spreads", True),
)
"""Studies whose runs are there, and whether they tuned."""
EVALUATIONS = 10
STUDY_SEEDS = 6
STUDIES = 20
DRAWS = 200
HALF_WAY, HALF_WAY_BITS = 0.5, 3.5
"""What the metric reaches when `log_steps` stops counting: an accuracy, or bits per byte."""
LONGER = 3
"""How many times as long the runs are whose order of arms counts as the true one."""

MORE = {f"arms.{rule}": {"rule": rule} for rule in ("linear_attention", "rwkv7")}


@dataclass(frozen=True)
class Group:
    """A task with arms.

    Attributes:
        study: The study whose arms, training and candidates these are.
        task: The task's name in the study.
        changes: Overrides of the study's file.
        seeds: The seeds of the study's steps.
        longer: The seeds of `LONGER` times as many steps.
    """

    study: str
    task: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 6
    longer: int = 3


GROUPS = {
    "mqar": Group("comba_ablation", "mqar", seeds=12, longer=12),
    "text": Group("comba_ablation", "text", seeds=12, longer=6),
    "mad_selective_copy": Group("mad", "mad_selective_copy", MORE),
    "mad_in_context_recall": Group("mad", "mad_in_context_recall", MORE),
    "mqar_2_pairs": Group("comba_ablation", "mqar", {"tune": None, "task.mqar.pairs": 2}, seeds=12, longer=0),
    "mqar_length_16": Group("comba_ablation", "mqar", {"tune": None, "task.mqar.length": 16}, seeds=6, longer=12),
    "digit_patches": Group("images", "digit_patches", longer=0),
    "parity": Group("state_tracking", "parity", {"tune": None}, longer=0),
    "niah": Group("niah", "niah_2", {"tune": None}, longer=0),
    "mad_compression": Group("mad", "mad_compression", {**MORE, "tune": None}, longer=0),
    "mad_memorization": Group("mad", "mad_memorization", MORE, longer=0),
    "mad_noisy_recall": Group("mad", "mad_noisy_recall", {**MORE, "tune": None}, longer=0),
    "mad_fuzzy_recall": Group("mad", "mad_fuzzy_recall", {**MORE, "tune": None}, longer=0),
}

Array = NDArray[np.float64]
Curves = dict[str, list[float]]
"""The metric and the loss of a run: on validation at each evaluation, then on the test split."""


def planned(group: str) -> tuple[Plan, list[PlannedArm]]:
    """Returns the plan of a group, and its arms."""
    plan = plan_study(GROUPS[group].study, overrides=GROUPS[group].changes)
    return plan, [arm for arm in plan.arms if arm.task == GROUPS[group].task]


def trained(
    plan: Plan, arm: PlannedArm, candidates: Sequence[Mapping[str, Any]], seeds: int, times: int
) -> list[list[Curves | None]]:
    """Trains candidates of an arm, `times` as long as the study does.

    Returns:
        The curves of each seed of each candidate; None for a run that diverged.
    """
    members = []
    for number, values in enumerate(candidates):
        model, train = plan.job(arm, "confirm", number, values).specs
        members.append((model, replace(train, steps=times * train.steps, evaluations=EVALUATIONS)))
    task = plan.tasks[arm.task]
    trials = train_together(task, members, range(1, seeds + 1), test=True)
    return [[_curves(run, task.metric) for run in trial.runs] for trial in trials]


def _curves(run: RunResult, metric: str) -> Curves | None:
    if run.diverged_at is not None:
        return None
    return {
        part: [
            float(f"{value:.4g}")
            for split in ("validation", "test")
            for at, named, _, value in run.metrics
            if (at, named) == (split, name)
        ]
        for part, name in (("metric", metric), ("loss", "loss"))
    }


def best_candidate(runs: list[list[Curves | None]]) -> int:
    """Returns the candidate with the least mean logarithm of the last validation loss."""

    def mean(number: int) -> float:
        losses = [math.inf if run is None else math.log(run["loss"][-2]) for run in runs[number]]
        return math.fsum(losses) / len(losses)

    return min(range(len(runs)), key=mean)


def train_missing(out: dict[str, Any], groups: Sequence[str], limit: float) -> Iterator[str]:
    """Trains the arms that `out` lacks, and yields a line after each."""
    began = time.monotonic()
    for group in groups:
        plan, arms = planned(group)
        task = plan.tasks[arms[0].task]
        train = plan.job(arms[0], "confirm", 0, {}).config["train"]
        here = out["groups"].setdefault(
            group,
            {
                "study": GROUPS[group].study,
                "task": task.name,
                "metric": task.metric,
                "maximize": task.maximize,
                "parameters": plan.job(arms[0], "confirm", 0, {}).task_params,
                "steps": train["steps"],
                "candidates": list(islice(plan.candidates(arms[0]), plan.tried(arms[0]))),
                "arms": {},
            },
        )
        for times, seeds in ((1, GROUPS[group].seeds), (LONGER, GROUPS[group].longer)):
            for arm in arms if seeds else ():
                runs = here["arms"].setdefault(arm.name, {})
                if str(times) in runs or time.monotonic() - began > limit:
                    continue
                start = time.monotonic()
                candidates = list(islice(plan.candidates(arm), plan.tried(arm)))
                if times > 1:
                    candidates = [candidates[best_candidate(runs["1"])]]
                runs[str(times)] = trained(plan, arm, candidates, seeds, times)
                out["seconds"] += time.monotonic() - start
                yield f"{group}, {arm.name}, {times} times as long: {time.monotonic() - start:.0f} s"


MEASURES = ("metric", "loss", "log_loss", "curve_metric", "curve_loss", "curve_log_loss", "log_steps")


@dataclass(frozen=True)
class Table:
    """The runs of a group at one length of training.

    Attributes:
        maximize: Whether more of the metric is better.
        runs: Arm -> candidate -> seed -> curves; None for a run that diverged. The base comes first.
    """

    maximize: bool
    runs: Mapping[str, Sequence[Sequence[Curves | None]]]

    def scores(self, measure: str, *, own: bool = True) -> Array:
        """Returns the score of each seed of each arm, [A, S]. More is better, whatever the measure.

        Args:
            measure: The measure.
            own: Whether each seed chooses its candidate by its own validation, as in a study. If not, all seeds of an
                arm take the candidate of the best mean.
        """
        diverged = (math.nan, math.nan)
        by_arm = [
            np.array([[self._values(measure, run) if run else diverged for run in seeds] for seeds in candidates])
            for candidates in self.runs.values()
        ]
        worst = np.nanmin(np.concatenate([values.reshape(-1, 2) for values in by_arm]), axis=0)
        scores = []
        for values in by_arm:
            validation, score = np.moveaxis(np.where(np.isnan(values), worst, values), -1, 0)  # [C, S] each
            chosen = validation if own else np.repeat(validation.mean(1, keepdims=True), validation.shape[1], axis=1)
            scores.append(np.take_along_axis(score, chosen.argmax(0)[None], axis=0)[0])
        return np.array(scores)

    def _values(self, measure: str, run: Curves) -> tuple[float, float]:
        """Returns the number by which a run is chosen, and its score."""
        metric = np.array(run["metric"]) * (1 if self.maximize else -1)
        loss = -np.array(run["loss"])
        if measure == "log_steps":
            there = np.flatnonzero(metric[:-1] >= (HALF_WAY if self.maximize else -HALF_WAY_BITS))
            evaluations = len(metric) - 1
            score = -math.log((there[0] + 1 if len(there) else evaluations) / evaluations)
            return score + 1e-6 * float(loss[-2]), score  # Runs that tie are chosen by their loss.
        curve = {"metric": metric, "loss": loss, "log_loss": -np.log(-loss)}[measure.removeprefix("curve_")]
        if measure.startswith("curve_"):
            return float(curve[:-1].mean()), float(curve[:-1].mean())
        return float(curve[-2]), float(curve[-1])


def figures(scores: Array) -> dict[str, float]:
    """Returns how well a measure tells arms apart.

    Args:
        scores: The score of each seed of each arm, [A, S], the base first.

    Returns:
        `signal` is the standard deviation of the arms' true means, and `noise` that of a seed's score, from paired
        differences to the base. `sd` is the noise as a plan counts it, the median over arms.
        `correlation` is that of seeds, the mean over pairs of arms.
    """
    differences = scores[1:] - scores[0]
    variance = float((differences.var(1, ddof=1) / 2).mean())
    correlation = seed_correlation(scores.tolist())
    signal = math.sqrt(max(0.0, float(scores.mean(1).var(ddof=1)) - variance / scores.shape[1]))
    return {
        "signal": signal,
        "noise": math.sqrt(variance),
        "sd": paired_sd(differences.tolist()),
        "correlation": math.nan if correlation is None else correlation,
    }


def ratio(scores: Array) -> float:
    """Returns the standard deviation of the arms' true means over that of a seed's score; NaN if no seed differs."""
    found = figures(scores)
    return found["signal"] / found["noise"] if found["noise"] else math.nan


def gain(scores: Array, by_metric: Array) -> dict[str, float]:
    """Returns the ratio of a measure over that of the metric, with a 90% interval from seeds drawn with replacement."""
    random, seeds = np.random.default_rng(0), scores.shape[1]
    drawn = [random.integers(seeds, size=seeds) for _ in range(DRAWS)]
    with np.errstate(divide="ignore", invalid="ignore"):
        gains = np.array([np.divide(ratio(scores[:, of]), ratio(by_metric[:, of])) for of in drawn])
        whole = float(np.divide(ratio(scores), ratio(by_metric)))
    low, high = np.nanquantile(gains, [0.05, 0.95])
    return {"gain": whole, "gain_low": float(low), "gain_high": float(high)}


def studies(scores: Array, seeds: int = STUDY_SEEDS) -> dict[str, float]:
    """Returns what studies find whose seeds are drawn from those that there are, with replacement if these are fewer.

    Args:
        scores: As in `figures`.
        seeds: The seeds of a study.

    Returns:
        `decided` is the share of arms that are told from the base, and `half_width` the mean half-width of the joint
        intervals, as a share of the largest difference to the base.
    """
    differences, random = scores[1:] - scores[0], np.random.default_rng(0)
    decided, widths = [], []
    for _ in range(STUDIES):
        of = random.choice(scores.shape[1], seeds, replace=seeds > scores.shape[1])
        drawn = compare(list(differences[:, of]))
        decided.append(float(np.mean([difference.decided for difference in drawn])))
        widths.append(float(np.mean([difference.high - difference.low for difference in drawn])) / 2)
    largest = float(np.abs(differences.mean(1)).max())
    return {
        "decided": float(np.mean(decided)),
        "half_width": float(np.median(widths)) / largest if largest else math.nan,
    }


def summary(table: Table, longer: Table | None) -> dict[str, dict[str, float | None]]:
    """Returns the figures of every measure; None for a figure that does not exist, as of runs that do not vary.

    `near` is the ratio without the arm that is farthest from the base. `one_rate` is the ratio if all seeds of an arm
    take one candidate; `decided_one_rate` and `half_width_one_rate` are what studies of the same time then find, which
    have as many more seeds. `longer` is the ratio of longer runs, whose seeds have one candidate, too. `tau_metric` and
    `tau_log_loss` are Kendall's tau between the order of the arms and that of longer runs by the metric and by the
    logarithm of the loss.
    """
    rows: dict[str, dict[str, float | None]] = {}
    for measure in MEASURES:
        scores = table.scores(measure)
        far = 1 + int(np.abs((scores[1:] - scores[0]).mean(1)).argmax())
        row = {
            "ratio": ratio(scores),
            **figures(scores),
            **studies(scores),
            **gain(scores, table.scores("metric")),
            "near": ratio(np.delete(scores, far, axis=0)),
            "one_rate": ratio(table.scores(measure, own=False)),
        }
        candidates = max(map(len, table.runs.values()))
        if candidates > 1 and measure in ("metric", "loss"):
            same_time = studies(table.scores(measure, own=False), candidates * STUDY_SEEDS)
            row |= {f"{name}_one_rate": value for name, value in same_time.items()}
        if longer is not None:
            row["longer"] = ratio(longer.scores(measure))
            for truth in ("metric", "log_loss"):
                order = kendalltau(scores.mean(1), longer.scores(truth).mean(1))
                row[f"tau_{truth}"] = float(order.statistic)
        rows[measure] = {name: float(f"{value:.3g}") if math.isfinite(value) else None for name, value in row.items()}
    return rows


def trained_table(group: Mapping[str, Any], times: int) -> Table | None:
    """Returns the runs of a group that trained `times` as long as the study; None if an arm is missing."""
    runs = {name: by_length.get(str(times)) for name, by_length in group["arms"].items()}
    there = {name: by_candidate for name, by_candidate in runs.items() if by_candidate}
    return Table(group["maximize"], there) if len(there) == len(runs) else None


class Recorded(NamedTuple):
    """What a ledger holds of a study's task.

    Attributes:
        task: The task.
        kind: The name under which the task is registered, by which a plan looks a spread up.
        steps: The steps of the base.
        table: The runs.
        spread: The standard deviation and the correlation of seeds' scores as a report has them; None if too few.
    """

    task: RecordedTask
    kind: str
    steps: int
    table: Table
    spread: tuple[float, float | None] | None


def recorded_tables(ledger: Path, address: str) -> dict[str, Recorded]:
    """Reads the runs of a study from a compressed ledger, by task."""
    tables = {}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "lab.db"
        file.write_bytes(lzma.decompress(ledger.read_bytes()))
        Store.upgrade(file)
        with Store.open(file, create=False) as store:
            study = store.study(address)
            recorded = RecordedScores(store, study, store.trials(study.id))
            compared = scores_by_task(store, study)
            for name, task in recorded.tasks.items():
                curves: dict[tuple[str, int], Curves] = {}
                for part, metric in (("metric", task.metric), ("loss", "loss")):
                    for split in ("validation", "test"):
                        for point in store.curves(study.id, name, metric, split):
                            curves.setdefault((point.trial, point.seed), {}).setdefault(part, []).append(point.value)
                runs: dict[str, list[list[Curves | None]]] = {}
                for arm in store.arms(study.id):
                    by_candidate: dict[int, dict[int, Curves | None]] = {}
                    trials = recorded.of(arm.name, name)
                    for trial in trials:
                        done = recorded.finals.get(trial.key, {}).get(("test", task.metric), {})
                        for seed in trial.runs:
                            run = curves[trial.key, seed] if seed in done else None
                            by_candidate.setdefault(trial.number, {})[seed] = run
                    common = set.intersection(*(set(by_seed) for by_seed in by_candidate.values()))
                    runs[arm.name] = [[by_seed[seed] for seed in sorted(common)] for by_seed in by_candidate.values()]
                    steps = trials[0].config["train"]["steps"]
                seeds = min(len(by_seed) for by_candidate in runs.values() for by_seed in by_candidate)
                runs = {arm: [by_seed[:seeds] for by_seed in by_candidate] for arm, by_candidate in runs.items()}
                kind = study.spec["task"][name].get("task", name)
                tables[name] = Recorded(task, kind, steps, Table(task.maximize, runs), spread_of(compared[name]))
    return tables


def summarize(out: dict[str, Any], names: Sequence[str]) -> None:
    """Puts the figures of groups into `out`, and writes the spreads of all groups for plans."""
    for name in names:
        group = out["groups"].get(name)
        if group and (table := trained_table(group, 1)):
            group["figures"] = summary(table, trained_table(group, LONGER))
            group["tuned"] = len(group["candidates"]) > 1
    for ledger, address, tuned in LEDGERS:
        for name, (task, kind, steps, table, spread) in recorded_tables(ledger, address).items():
            out.setdefault("recorded", {})[f"{address} {name}"] = {
                "study": address,
                "task": kind,
                "metric": task.metric,
                "parameters": dict(task.parameters),
                "steps": steps,
                "tuned": tuned,
                "figures": summary(table, None),
                "spread": spread and [value and float(f"{value:.3g}") for value in spread],
            }
    spreads = [
        {
            "task": group["task"],
            "metric": metric,
            "parameters": group["parameters"],
            "steps": group["steps"],
            "sd": sd,
            "correlation": correlation,
            "source": group["study"] + ("" if group["tuned"] else " without tuning"),
        }
        for group in [*out["groups"].values(), *out.get("recorded", {}).values()]
        if "figures" in group
        for metric, measure in ((group["metric"], "metric"), ("loss", "loss"))
        for sd, correlation in [spread_for_plans(group, measure)]
        if sd  # Seeds that all are at the ceiling say nothing of others.
    ]
    SHIPPED.write_text(json.dumps(spreads, indent=1) + "\n")


def spread_for_plans(group: Mapping[str, Any], measure: str) -> tuple[float | None, float | None]:
    """Returns the standard deviation and the correlation of seeds' scores by a measure that a plan counts with.

    Of a recorded study's metric they are those of the report, where the arm's other seeds weigh a seed's candidates: a
    candidate at which one seed fails costs that seed its score there, and not where it chooses for itself.
    """
    if measure == "metric" and group.get("spread"):
        sd, correlation = group["spread"]
        return sd, correlation
    return group["figures"][measure]["sd"], group["figures"][measure]["correlation"]


def rows(out: Mapping[str, Any]) -> Iterator[str]:
    """Yields a Markdown table for each figure: a row for each group, a column for each measure."""
    named = {**out["groups"], **out.get("recorded", {})}
    for column in (
        "ratio",
        "gain",
        "gain_low",
        "gain_high",
        "near",
        "decided",
        "half_width",
        "one_rate",
        "decided_one_rate",
        "half_width_one_rate",
        "longer",
        "tau_metric",
        "tau_log_loss",
    ):
        yield f"\n{column}\n\n| group | {' | '.join(MEASURES)} |\n| --- |{' --- |' * len(MEASURES)}"
        for name, group in named.items():
            if "figures" in group and column in group["figures"]["metric"]:
                values = [group["figures"][measure].get(column) for measure in MEASURES]
                yield f"| {name} | {' | '.join('' if value is None else f'{value:.2f}' for value in values)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further arm begins")
    parser.add_argument("--table", action="store_true", help="print the figures, and write the spreads for plans")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    out: dict[str, Any] = {"groups": {}, "seconds": 0.0}
    if options.out.exists():
        out = json.loads(options.out.read_text())
    for line in train_missing(out, options.only, options.limit):
        print(line, flush=True)
        out |= {
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": hardware(torch.device("cpu")),
            "versions": {
                "deltalab": deltalab.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        options.out.write_text(json.dumps(out) + "\n")
    if options.table:
        summarize(out, options.only)
        options.out.write_text(json.dumps(out) + "\n")
        print("\n".join(rows(out)))


if __name__ == "__main__":
    main()
