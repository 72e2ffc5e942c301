"""How scores depend on the values that arms tuned, and whether the best value is the lowest or the highest tried."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deltalab.store import Store, Study, TrialRow
from deltalab.study.answers.recorded_scores import Measured
from deltalab.study.planning.tuning_candidates import edge
from deltalab.study.specs.budget import Searching
from deltalab.study.specs.search_space import Search
from deltalab.study.statistics.seed_choice import Runs, Scores


@dataclass(frozen=True)
class Sweep:
    """The candidates that one arm tried on one task.

    values: candidate number -> path -> value. runs: candidate number -> seed -> run. best: the candidate with the best
    mean of validation scores; None where none finished all seeds. ends: the settings of which it has the lowest or the
    highest value tried: path -> which.
    """

    arm: str
    values: dict[int, dict[str, Any]]
    runs: Runs
    best: int | None
    ends: dict[str, str]

    def scores(self, number: int, split: Literal["validation", "test"]) -> list[float]:
        """The scores of a candidate's seeds that finished."""
        found = [run.validation if split == "validation" else run.test for run in self.runs.get(number, {}).values()]
        return [score for score in found if math.isfinite(score)]


def tuned(spec: Mapping[str, Any]) -> dict[str, Search]:
    """The settings that every arm of a study tunes; those of the training, where the study is a search."""
    given = spec.get("tune") or {path: of for path, of in (spec.get("search") or {}).items() if path[:6] == "train."}
    about = ("trials", "extend", "seeds")
    return {path: Search.model_validate(search) for path, search in given.items() if path not in about}


def sensitivity(store: Store, study: Study) -> dict[str, list[Sweep]]:
    """What the arms tried so far, by task; arms that tried nothing are left out.

    A study tunes every arm, a search the base and the finalists: what it draws for others is not tuned but searched.
    """
    arms = store.arms(study.id)
    ledger = Measured(store, study.id, store.trials(study.id), study.spec)
    found = {}
    for task, about in study.provenance["tasks"].items():
        scores = ledger.scores(task, about, arms)
        sweeps = [sweep(arm.name, task, about, ledger, scores) for arm in arms]
        found[task] = [each for each in sweeps if each.values]
    return found


def sweep(arm: str, task: str, about: Mapping[str, Any], ledger: Measured, scores: Scores) -> Sweep:
    """What an arm tried on a task. about: the task, as the ledger has it. scores: of all arms on it."""
    searched = tuned(ledger.spec)
    trials = ledger.of(arm, task)
    if apart := _apart(ledger, arm, task):
        trials = apart
        runs = ledger.runs(trials, about["metric"])
        seeds = sorted({seed for own in runs.values() for seed in own})
        scores = Scores(arm, about["maximize"], about["chance"], {arm: runs}, {arm: seeds})
    # A finalist's values are its model's as well.
    own = {trial.number: {path: trial.values[path] for path in searched if path in trial.values} for trial in trials}
    values = {number: tried for number, tried in own.items() if tried}
    best = scores.best(arm)
    ends: dict[str, str] = {}
    if best in values:
        tried = [*values.values()]
        shared = {path: search for path, search in searched.items() if all(path in own for own in tried)}
        ends = edge(shared, tried, values[best])
    return Sweep(arm, values, scores.runs[arm], best, ends)


def _apart(ledger: Measured, arm: str, task: str) -> list[TrialRow]:
    """The trials of tuning, where they are not those that are confirmed: in ledgers of old releases."""
    trials = ledger.of(arm, task, "tune")
    if not ledger.spec.get("search"):
        return trials
    from deltalab.study.searching.phase import is_own  # It brings Optuna, which takes a second to load.

    space = Searching.model_validate(ledger.spec["search"])
    return [trial for trial in trials if is_own(trial.number, space)]


def ends(sweeps: Sequence[Sweep], spec: Mapping[str, Any]) -> Iterator[str]:
    """A line for each end of a range at which arms have their best value. sweeps: of one task."""
    searched = tuned(spec)
    found: dict[tuple[str, str, str, bool], list[str]] = {}
    for one in sweeps:
        for path, end in one.ends.items():
            assert one.best is not None
            value = one.values[one.best][path]
            low, *_, high = searched[path].extremes
            found.setdefault((path, end, f"{value:.3g}", low < value < high), []).append(one.arm)
    hint = "tune: {extend: true} tries further"
    if spec.get("search"):
        hint = "widen its range under search"
    elif (spec.get("tune") or {}).get("extend"):
        hint = "tune.extend moved it as far as it does"
    for (path, end, value, inside), names in found.items():
        beyond = "these arms may do better beyond it" if len(names) > 1 else "the arm may do better beyond it"
        more = hint
        if inside and spec.get("search"):
            more = "more trainings try values between it and the end of its range"
        yield f"The best {path} of {', '.join(names)} is the {end} that was tried, {value}: {beyond} ({more})."
