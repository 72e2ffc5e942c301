"""The answer of a study: each arm against the base or another arm, with error bars, p-values and costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from deltalab.errors import InputError, unknown
from deltalab.statistics.joint_test import Outcome
from deltalab.statistics.seed_choice import Scores, outcomes
from deltalab.store import Arm, Store, Study, TrialRow
from deltalab.store.models import Stage
from deltalab.store.trainings import TrainingRow, trainings
from deltalab.study.answers.ladder_trends import TaskLadder, ladders
from deltalab.study.answers.presets import preset_text
from deltalab.study.answers.recorded_scores import RecordedScores
from deltalab.study.answers.remarks import answer_notes, infeasible_notes, other_reference
from deltalab.study.answers.rows import TaskTable
from deltalab.study.answers.tables import comparison_table, headline_table, tuning_table
from deltalab.study.planning.tuning_candidates import recorded_trial_name

if TYPE_CHECKING:
    from deltalab.study.answers.search_results import Discovery

MOST_GIVEN_UP = 5
"""How many given-up stacks of trials the answer of an incomplete study names at most."""


@dataclass(frozen=True)
class Failure:
    """A trial that raised an error.

    Attributes:
        arm: The arm that the trial belongs to.
        task: The task that it trained on.
        stage: The stage of the study.
        number: The number of the candidate.
        key: The key of the trial.
        message: The line of the traceback that names the error.
        name: What the trial is called.
    """

    arm: str
    task: str
    stage: Stage
    number: int
    key: str
    message: str
    name: str


@dataclass(frozen=True)
class InfeasibleCandidate:
    """A candidate whose drawn values make no valid model, so that no trial ran.

    Attributes:
        arm: The arm that the values were drawn for.
        task: The task.
        number: The number of the candidate.
        values: The values by path.
        reason: Why the values make no model.
    """

    arm: str
    task: str
    number: int
    values: dict[str, Any]
    reason: str


@dataclass(frozen=True)
class Answer:
    """A study's answer, with its tables, its warnings and the trials that failed.

    Attributes:
        study: The name of the study.
        profile: The profile that it ran with; None is the default one.
        study_id: The id of the study in the ledger.
        state: The state of the study, such as "done".
        stage: The stage whose scores are shown.
        warnings: Sentences, each with a reason to doubt the whole answer.
        headline: The arms over all tasks; None for a study with a single task or with a ladder, and while it tunes.
        tables: A table for each task.
        failures: The trials that raised errors.
        infeasible: The candidates that make no model.
        notes: Sentences that explain how to read the answer.
        trainings: Later trainings of models that were exported from the study.
        ladders: The ladder of each task, if the study has `scales`.
        search: The findings of the search; None for a study without a search.
        overrides: Settings by key that the user gave in addition to the study's file.
        against: The arm that the others are compared with in place of the base; None if it is the base.
    """

    study: str
    profile: str | None
    study_id: int
    state: str
    stage: Stage
    warnings: list[str]
    headline: TaskTable | None
    tables: list[TaskTable]
    failures: list[Failure]
    infeasible: list[InfeasibleCandidate]
    notes: list[str]
    trainings: list[TrainingRow] = field(default_factory=list)
    ladders: list[TaskLadder] = field(default_factory=list)
    search: "Discovery | None" = None
    overrides: dict[str, Any] = field(default_factory=dict)
    against: str | None = None

    @property
    def all_tables(self) -> list[TaskTable]:
        """The tables as a report shows them: the headline, if there is one, and those of the tasks."""
        return [*([self.headline] if self.headline else []), *self.tables]


def answer(
    store: Store,
    study_id: int,
    *,
    which: Stage = "confirm",
    intervals: bool = True,
    against: str | None = None,
    importances: bool = True,
) -> Answer:
    """Finds the answer of a study.

    Args:
        store: The ledger.
        study_id: The id of the study.
        which: "confirm" compares the arms on the test split. "tune" shows each arm's best candidate so far on the
            validation split while the study runs. "tune" compares no arms, because the best score of a sweep is
            optimistic.
        intervals: Whether to compute intervals of undecided arms. False leaves them infinite, and takes a tenth of the
            time.
        against: The arm to compare the others with in place of the base. The test is the same.
        importances: Whether to find how much each setting of a search explains. It takes seconds unless the ledger
            keeps it from an earlier report.

    Raises:
        InputError: There is no such study or arm, or `against` is given for the stage "tune".
    """
    study = store.study(study_id)
    arms, trials = store.arms(study_id), store.trials(study_id)
    against = _other_than_base(against, study, arms, which)
    ledger = RecordedScores(store, study, trials)
    climbed: list[TaskLadder] = []
    scores: dict[str, Scores] = {}
    headline: TaskTable | None = None
    if which == "tune":
        tables = [tuning_table(task, arms, ledger) for task in ledger.tasks.values()]
    else:
        scores = {name: ledger.scores(task, arms, against) for name, task in ledger.compared.items()}
        headline = headline_table(arms, ledger, scores, intervals=intervals)
        compared = _compared(ledger, scores, intervals, afterwards=against is not None)
        climbed = ladders(arms, ledger, scores, compared)
        if study.state not in (
            "done",
            "failed",
        ):  # an arm that seems to have stopped may go on when a range is extended
            compared = {
                task: {arm: replace(outcome, stopped=None) for arm, outcome in by_arm.items()}
                for task, by_arm in compared.items()
            }
        tables = [
            comparison_table(task, arms, ledger, scores[name], compared[name]) for name, task in ledger.compared.items()
        ]
    if not ledger.spec.is_search:
        for at, table in enumerate(tables):
            notes = infeasible_notes([trial for trial in trials if trial.task == table.task])
            tables[at] = replace(table, notes=[*table.notes, *notes])
    is_choice = ledger.spec.is_tuned or any(len(runs) > 1 for table in scores.values() for runs in table.runs.values())
    return Answer(
        study.name,
        study.profile,
        study.id,
        study.state,
        which,
        [*_warnings(study, arms, against)],
        headline,
        tables,
        [_failure(study, trial) for trial in trials if trial.state == "failed"],
        [
            InfeasibleCandidate(trial.arm, trial.task, trial.number, trial.values, trial.error or "")
            for trial in trials
            if trial.state == "infeasible"
        ],
        answer_notes(
            which,
            ledger,
            is_choice=is_choice,
            is_open=any(row.seeds_needed for table in tables for row in table.rows),
            against=against,
            has_metrics=any(table.metrics for table in tables),
            has_headline=headline is not None,
            presets="" if ledger.spec.is_search else preset_text({trial.arm: trial.config for trial in trials}),
        ),
        trainings(store, study),
        climbed,
        _discovery(store, study, arms, trials, importances) if ledger.spec.is_search else None,
        study.overrides,
        against,
    )


def _other_than_base(against: str | None, study: Study, arms: Sequence[Arm], which: Stage) -> str | None:
    """The arm to compare the others with; None if it is the base."""
    if against is None:
        return None
    if which == "tune":
        raise InputError(f"{study.address}: the stage tune compares no arms, so none with '{against}'")
    if against not in (names := [arm.name for arm in arms]):
        raise unknown("arm", against, names, where=study.address)
    return None if any(arm.is_base for arm in arms if arm.name == against) else against


def _compared(
    ledger: RecordedScores, scores: dict[str, Scores], intervals: bool, *, afterwards: bool
) -> dict[str, dict[str, Outcome]]:
    """The outcomes of the test: task -> arm -> outcome. All arms of a family are tested together."""
    compared: dict[str, dict[str, Outcome]] = {}
    for family in ledger.spec.families(list(scores)):
        tables = [scores[task] for task in family]
        by_task = outcomes(tables, ledger.looks, intervals=intervals, afterwards=afterwards)
        compared |= dict(zip(family, by_task, strict=True))
    return compared


def _warnings(study: Study, arms: Sequence[Arm], against: str | None) -> Iterator[str]:
    if against is not None:
        yield other_reference(against, next(arm.name for arm in arms if arm.is_base))
    for rule, reason in study.provenance.get("unchecked", {}).items():
        yield f"rule '{rule}': {reason} (the study ran with --unchecked), so its equation may not be what it trains"
    if study.state == "incomplete":
        given_up = study.provenance.get("given_up", [])
        yield from given_up[:MOST_GIVEN_UP]
        if len(given_up) > MOST_GIVEN_UP:
            yield f"{len(given_up) - MOST_GIVEN_UP} more stacks of trials were given up"


def _failure(study: Study, trial: TrialRow) -> Failure:
    name = recorded_trial_name(study.spec, trial.arm, trial.stage, trial.number)
    return Failure(trial.arm, trial.task, trial.stage, trial.number, trial.key, _exception(trial.error), name)


def _discovery(
    store: Store, study: Study, arms: Sequence[Arm], trials: list[TrialRow], importances: bool
) -> "Discovery":
    from deltalab.study.answers.search_results import discovery  # Most studies search nothing.

    return discovery(store, study, arms, trials, importances=importances)


def _exception(error: str | None) -> str:
    """The line of a traceback that names the exception. A message of several lines is cut after its first line."""
    lines = (error or "").strip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith("  File ")]
    return next((line for line in lines[frames[-1] + 1 if frames else 0 :] if line[:1].strip()), "")
