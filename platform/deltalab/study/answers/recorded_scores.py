"""What the ledger has of a study: its trials, and the score of every run at its last step."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from deltalab.store import Arm, Store, TrialRow
from deltalab.store.models import Stage
from deltalab.study.statistics.joint_test import Look, one_look, spread_looks
from deltalab.study.statistics.seed_choice import Run, Scores


def results(store: Store, study_id: int) -> dict[str, Scores]:
    """The scores of every arm on each task of a study, by seed."""
    study, arms = store.study(study_id), store.arms(study_id)
    ledger = Measured(store, study_id, store.trials(study_id), study.spec)
    return {task: ledger.scores(task, about, arms) for task, about in study.provenance["tasks"].items()}


class Measured:
    """A study's trials and their metrics at the last step."""

    def __init__(self, store: Store, study_id: int, trials: list[TrialRow], spec: Mapping[str, Any]) -> None:
        self.trials = current([trial for trial in trials if trial.state != "infeasible"])
        self.spec = spec
        self.looks = looks_of(spec)
        self.finals: dict[str, dict[tuple[str, str], dict[int, float]]] = {}
        names = {about["metric"] for about in store.study(study_id).provenance["tasks"].values()}
        if spec.get("scales"):
            names.add("loss")  # ladders fit it
        read = {*product(("validation", "test"), names), ("cost", "flops_per_token")}
        for final in store.final_metrics(study_id, metrics=read):
            if final.run_state == "done":
                metrics = self.finals.setdefault(final.trial, {})
                metrics.setdefault((final.split, final.metric), {})[final.seed] = final.value

    def of(self, arm: str, task: str, stage: Stage = "confirm") -> list[TrialRow]:
        """An arm's trials; a second confirmation of one candidate follows the first.

        Those of a search are at the last rung of successive halving that each candidate reached.
        """
        found = [trial for trial in self.trials if (trial.arm, trial.task, trial.stage) == (arm, task, stage)]
        fidelity = (self.spec.get("search") or {}).get("fidelity")
        return _at_last_rungs(found, fidelity) if fidelity and stage == "tune" else found

    def runs(self, trials: Sequence[TrialRow], metric: str) -> dict[int, dict[int, Run]]:
        """Candidate number -> seed -> run."""
        found: dict[int, dict[int, Run]] = {}
        for trial in trials:
            metrics = self.finals.get(trial.key, {})
            validation, test = (metrics.get((split, metric), {}) for split in ("validation", "test"))
            for seed in trial.runs:
                run = Run(validation.get(seed, math.nan), test.get(seed, math.nan))
                found.setdefault(trial.number, {})[seed] = run
        return found

    def scores(self, task: str, about: Mapping[str, Any], arms: Sequence[Arm]) -> Scores:
        base = next(arm.name for arm in arms if arm.is_base)
        runs, seeds = {}, {}
        for arm in arms:
            trials = self.of(arm.name, task)
            runs[arm.name] = self.runs(trials, about["metric"])
            own = sorted({seed for trial in trials for seed in trial.runs})
            parts = max((sum(t.number == trial.number for t in trials) for trial in trials), default=0)
            planned = range(1, self.looks[min(parts, len(self.looks)) - 1].seeds + 1) if own else []
            seeds[arm.name] = [*planned, *(seed for seed in own if seed not in planned)]
        return Scores(base, about["maximize"], about["chance"], runs, seeds)


def current(trials: Sequence[TrialRow]) -> list[TrialRow]:
    """The trials without those that a later one of the same number has superseded.

    The trials of a number are one candidate, whose values they share, with other seeds at each look. Where failed
    trials ran again, a search may have come to another finalist, or an extended range to another value: the trials of
    both candidates then have one number in the ledger, and the later ones count.
    """
    latest: dict[tuple[str, str, Stage, int], TrialRow] = {}
    for trial in trials:
        at = trial.arm, trial.task, trial.stage, trial.number
        if at not in latest or trial.finished_at > latest[at].finished_at:
            latest[at] = trial
    return [t for t in trials if t.values == latest[t.arm, t.task, t.stage, t.number].values]


def _at_last_rungs(trials: Sequence[TrialRow], fidelity: Mapping[str, Any]) -> list[TrialRow]:
    """The trial of each number that took most. fidelity: the settings that increase with the rung, and `keep`."""
    paths = [path.split(".") for path in fidelity if path != "keep"]

    def taken(trial: TrialRow) -> list[int]:
        return [len(trial.runs) if key == "seeds" else trial.config[section][key] for section, key in paths]

    last: dict[int, TrialRow] = {}
    for trial in trials:
        if trial.number not in last or taken(trial) > taken(last[trial.number]):
            last[trial.number] = trial
    return [*last.values()]


def looks_of(spec: Mapping[str, Any]) -> tuple[Look, ...]:
    """The looks of a study as the ledger has it."""
    seeds = spec["seeds"]
    return spread_looks(**seeds) if isinstance(seeds, Mapping) else one_look(seeds)
