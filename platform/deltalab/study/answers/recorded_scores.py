"""Reads a study's scores from the ledger: those of every run of its trials, at the last step."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from deltalab.statistics.seed_choice import Run, Scores
from deltalab.store import Arm, FinalMetric, Store, Study, TrialRow
from deltalab.store.models import Stage
from deltalab.study.specs.recorded_study import RecordedSpec, RecordedTask, recorded_measures, recorded_tasks
from deltalab.training.time_budget import STEPS

BACKWARD = 3
"""The operations of a training step, divided by the operations of its forward pass."""
RECORDED_COSTS = ("flops_per_token", "kv_cache", "conv_cache", "dead_parameters")
"""Costs that are metrics in the ledger. Early releases recorded the first alone."""
OF_EVERY_TASK = ("output_rms",)
"""Metrics that training measures beside those of the task, without the label of a length."""


def scores_by_task(store: Store, study: Study) -> dict[str, Scores]:
    """The scores of every arm of a study on each task, by seed."""
    arms, ledger = store.arms(study.id), RecordedScores(store, study, store.trials(study.id))
    return {name: ledger.scores(task, arms) for name, task in ledger.compared.items()}


class RecordedScores:
    """A study's trials and their metrics at the last step.

    Attributes:
        trials: The trials that count. Infeasible trials and trials that a later trial superseded are left out.
        spec: The study's file.
        state: The state of the study.
        tasks: The study's tasks by name.
        compared: These tasks, and the further metrics that the study compares, each in the place of a task.
        looks: The numbers of seeds at which the study tests its arms.
        finals: trial key -> (split, metric) -> seed -> value. Runs that did not finish are absent.
    """

    def __init__(self, store: Store, study: Study, trials: Sequence[TrialRow]) -> None:
        self.trials = current([trial for trial in trials if trial.state != "infeasible"])
        self.spec, self.state = RecordedSpec(study.spec), study.state
        self.tasks = recorded_tasks(study)
        self.compared = self.tasks | recorded_measures(study)
        self.looks = self.spec.looks
        self._store, self._study_id = store, study.id
        metrics = {task.metric for task in self.compared.values()}
        if self.spec.is_ladder:
            metrics.add("loss")  # ladders fit the loss
        wanted = {*product(("validation", "test"), metrics), *(("cost", cost) for cost in (*RECORDED_COSTS, STEPS))}
        self.finals = _by_trial(store.final_metrics(study.id, metrics=wanted))
        self._read = wanted

    @cached_property
    def _others(self) -> dict[str, dict[tuple[str, str], dict[int, float]]]:
        """The metrics on test that `finals` lacks, in the same form. Only a report needs them."""
        measured = self._store.measured(self._study_id)
        on_test = {(split, name) for stage, _, split, name in measured if (stage, split) == ("confirm", "test")}
        return _by_trial(self._store.final_metrics(self._study_id, stage="confirm", metrics=on_test - self._read))

    def other_metrics(self, arm: str, task: RecordedTask) -> dict[str, dict[int, dict[int, float]]]:
        """Returns an arm's metrics on test besides the compared ones: metric -> candidate number -> seed -> value."""
        found: dict[str, dict[int, dict[int, float]]] = {}
        if task.chosen_by is not None:
            return found  # the table of the task itself has them
        compared = {other.metric for other in self.compared.values() if other.trained == task.name}
        for trial in self.of(arm, task.name):
            for (split, name), values in {**self.finals.get(trial.key, {}), **self._others.get(trial.key, {})}.items():
                if split == "test" and name not in compared and name.partition("@")[0] not in OF_EVERY_TASK:
                    found.setdefault(name, {}).setdefault(trial.number, {}).update(values)
        return found

    def of(self, arm: str, task: str, stage: Stage = "confirm") -> list[TrialRow]:
        """Returns an arm's trials on a task. If a candidate was confirmed twice, the second trial follows the first.

        For a candidate of a search, this is the trial at the last rung of successive halving that it reached.
        """
        task = self.compared[task].trained if task in self.compared else task
        trials = self._by_place.get((arm, task, stage), [])
        fidelity = self.spec.fidelity
        return _at_last_rungs(trials, fidelity) if fidelity and stage == "tune" else [*trials]

    @cached_property
    def _by_place(self) -> dict[tuple[str, str, Stage], list[TrialRow]]:
        """The trials of each arm on each task in each stage."""
        by_place: dict[tuple[str, str, Stage], list[TrialRow]] = {}
        for trial in self.trials:
            by_place.setdefault((trial.arm, trial.task, trial.stage), []).append(trial)
        return by_place

    def best_on_validation(self, trials: Sequence[TrialRow], task: RecordedTask) -> TrialRow | None:
        """Returns the trial with the best mean validation score; None if no trial finished all its runs.

        The first of equals is returned. A trial with diverged seeds is left out: the mean over its other seeds would
        mislead.
        """
        means: dict[str, float] = {}
        for trial in trials:
            values = self.finals.get(trial.key, {}).get(("validation", task.metric), {})
            if values and len(values) == len(trial.runs):
                means[trial.key] = task.sign * math.fsum(values.values()) / len(values)
        return max((trial for trial in trials if trial.key in means), key=lambda trial: means[trial.key], default=None)

    def _leave_out_unmeasured(
        self, metric: str, trials: Sequence[TrialRow], seeds: list[int], runs: dict[int, dict[int, Run]]
    ) -> None:
        """Takes out the seeds whose runs finished without a value of a further metric, which says nothing of the arm.

        A task need not measure every metric: a slice of text may be empty. A run that did not finish stays, and counts
        as the worst.
        """
        for trial in trials:
            measured = self.finals.get(trial.key, {}).get(("test", metric), {})
            for seed, state in trial.runs.items():
                if state == "done" and seed not in measured and seed in seeds:
                    seeds.remove(seed)
                    for by_seed in runs.values():
                        by_seed.pop(seed, None)

    def runs(
        self, trials: Sequence[TrialRow], metric: str, chosen_by: str | None = None, sign: int = 1
    ) -> dict[int, dict[int, Run]]:
        """Returns the runs of trials: candidate number -> seed -> run.

        Args:
            trials: The trials.
            metric: The metric on test.
            chosen_by: The metric on validation; None for the same.
            sign: -1 if less of `chosen_by` is better and more of `metric`, or the other way round.
        """
        runs: dict[int, dict[int, Run]] = {}
        for trial in trials:
            metrics = self.finals.get(trial.key, {})
            validation, test = metrics.get(("validation", chosen_by or metric), {}), metrics.get(("test", metric), {})
            for seed in trial.runs:
                run = Run(sign * validation.get(seed, math.nan), test.get(seed, math.nan))
                runs.setdefault(trial.number, {})[seed] = run
        return runs

    def step_compute(self, trial: TrialRow, task: RecordedTask) -> float:
        """Returns the operations of matrix products in a training step; NaN if the ledger lacks a figure for them."""
        flops = self.finals.get(trial.key, {}).get(("cost", "flops_per_token"), {})
        batch = trial.config.get("train", {}).get("batch_size")
        if not flops or batch is None or task.length is None:
            return math.nan
        return BACKWARD * float(next(iter(flops.values()))) * float(batch * task.length)

    def scores(self, task: RecordedTask, arms: Sequence[Arm], against: str | None = None) -> Scores:
        """The runs of all arms on a task, with the seeds that each arm was to train.

        Args:
            task: The task at one size.
            arms: The arms of the study, in order.
            against: The arm that the others are compared with in place of the base; None for the base.
        """
        base = against or next(arm.name for arm in arms if arm.is_base)
        runs, seeds, failed = {}, {}, {}
        chosen = task.chosen_by or task
        for arm in arms:
            trials = self.of(arm.name, task.name)
            runs[arm.name] = self.runs(trials, task.metric, chosen.metric, chosen.sign * task.sign)
            failed[arm.name] = {trial.number for trial in trials if trial.state == "failed"}
            trained = sorted({seed for trial in trials for seed in trial.runs})
            parts = self.spec.trained_in_parts(is_base=arm.is_base)
            reached = max(Counter(trial.number for trial in trials).values(), default=0)
            first = self.spec.first_seed
            planned = range(first, first + parts[min(reached, len(parts)) - 1]) if trained else range(0)
            if self.spec.has_engine:  # seeds end in any order
                planned = range(0)
            seeds[arm.name] = [*planned, *(seed for seed in trained if seed not in planned)]
            if task.chosen_by is not None:
                self._leave_out_unmeasured(task.metric, trials, seeds[arm.name], runs[arm.name])
        block = self.looks[0].seeds if self.spec.seeds_of_base is not None else None
        return Scores(base, task.maximize, task.chance, runs, seeds, failed, task.margin, block)


def current(trials: Sequence[TrialRow]) -> list[TrialRow]:
    """Returns the trials, without those that a later trial of the same number has superseded.

    Trials with the same number belong to one candidate: they share its values and have other seeds at each look. But
    when failed trials run again, a search may choose another finalist, or an extended range another value. Then two
    candidates have one number in the ledger, and only the trials of the later candidate count.
    """
    latest: dict[tuple[str, str, Stage, int], TrialRow] = {}
    for trial in trials:
        at = trial.arm, trial.task, trial.stage, trial.number
        if at not in latest or trial.finished_at > latest[at].finished_at:
            latest[at] = trial
    return [t for t in trials if t.values == latest[t.arm, t.task, t.stage, t.number].values]


def _by_trial(finals: Sequence[FinalMetric]) -> dict[str, dict[tuple[str, str], dict[int, float]]]:
    """The values of runs that finished: trial key -> (split, metric) -> seed -> value."""
    by_trial: dict[str, dict[tuple[str, str], dict[int, float]]] = {}
    for final in finals:
        if final.run_state == "done":
            values = by_trial.setdefault(final.trial, {})
            values.setdefault((final.split, final.metric), {})[final.seed] = final.value
    return by_trial


def _at_last_rungs(trials: Sequence[TrialRow], fidelity: Mapping[str, Any]) -> list[TrialRow]:
    """For each candidate number, the trial at the highest rung: the one with the largest fidelity settings."""
    paths = [path.split(".") for path in fidelity if path != "keep"]

    def cost(trial: TrialRow) -> list[int]:
        return [len(trial.runs) if key == "seeds" else trial.config[section][key] for section, key in paths]

    last: dict[int, TrialRow] = {}
    for trial in trials:
        if trial.number not in last or cost(trial) > cost(last[trial.number]):
            last[trial.number] = trial
    return [*last.values()]
