"""Places the attention of a study's base: trains a supernet, scores placements, and confirms some as arms."""

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from deltalab import progress
from deltalab.authoring import verdict
from deltalab.errors import InputError
from deltalab.models.spec import ModelSpec
from deltalab.store import Store
from deltalab.study.answers.recorded_scores import RecordedScores
from deltalab.study.placing.hybrid import hybrid_of
from deltalab.study.placing.placements import (
    BEST,
    MOST_SCORED,
    SPREAD,
    Placement,
    confirmed,
    most_scored,
    ranked,
    scored_placements,
)
from deltalab.study.placing.supernet import Supernet
from deltalab.study.planning.make import make_plan, plan_study
from deltalab.study.planning.plan import Plan
from deltalab.study.reports.report import Report
from deltalab.study.running.run import run_study
from deltalab.study.running.settings import RunSettings, require_runnable
from deltalab.study.specs.overrides import Overrides
from deltalab.study.specs.recorded_study import recorded_tasks
from deltalab.study.specs.study_file import StudySpec
from deltalab.training.spec import TrainSpec
from deltalab.training.train import save

_log = logging.getLogger("deltalab")

SUFFIX = ".placed"
"""The end of the name of the study that confirms placements."""

FEWEST = 3
"""The fewest placements whose order a rank correlation says anything of."""

LINES = 20
"""The most lines that tell how many placements are scored."""


@dataclass(frozen=True)
class PlacedArm:
    """A placement that was trained from scratch.

    Attributes:
        name: The arm in the study that confirms.
        placement: The layers with attention, from 0.
        rank: The place of its supernet score among all, from 1, the best.
        supernet: The metric on validation with the supernet's weights; None if it is not finite.
        trained: The mean score on test over fresh seeds, as in the study's report; None if no seed counts.
    """

    name: str
    placement: Placement
    rank: int
    supernet: float | None
    trained: float | None


@dataclass(frozen=True)
class Placing:
    """What the placement of attention came to.

    Attributes:
        study: The name of the study in the ledger that holds the trainings from scratch and their test.
        metric: The metric of both scores.
        maximize: Whether more of it is better.
        layers: The layers of the model.
        possible: The placements that there are.
        scored: Those that the supernet scored.
        arms: The trained placements, the base first and then by rank.
        correlation: Spearman's rank correlation of supernet and trained scores over these arms; None if fewer than
            `FEWEST` have both, or if all have the same score.
        report: The report of the study that confirms.
    """

    study: str
    metric: str
    maximize: bool
    layers: int
    possible: int
    scored: int
    arms: tuple[PlacedArm, ...]
    correlation: float | None
    report: Report

    def to_json(self) -> str:
        """Returns all but the report, which `deltalab study report` has, as JSON."""
        figures = {name: value for name, value in vars(self).items() if name != "report"}
        return json.dumps(figures | {"arms": [asdict(arm) for arm in self.arms]})


def place(
    study: str | Path | Mapping[str, Any],
    settings: RunSettings,
    *,
    best: int = BEST,
    spread: int = SPREAD,
    steps: int | None = None,
    profile: str | None = None,
    overrides: Overrides = None,
) -> Placing:
    """Finds out where the attention layers of a study's base belong, as many as it has.

    The same call goes on after a kill, and answers at once from the ledger when all is done.

    Args:
        study: A study on one task, whose base has `model.attention`. Its own arms train, too.
        settings: The ledger and the executor.
        best: How many of the best placements to train from scratch.
        spread: How many of the others to train, at even distances in rank down to the worst.
        steps: The steps of the supernet; those of the base if None.
        profile: One of the study's profiles.
        overrides: Settings in place of the file's.

    Raises:
        InputError: The study has no placement to choose, the settings do not go together, or a training has no result.
        Busy: Another driver runs the confirmation.
    """
    plan = plan_study(study, profile=profile, overrides=overrides)
    require_runnable(plan, settings)
    model, train = hybrid_of(plan)
    if steps is not None:
        try:
            train = replace(train, steps=steps, evaluations=min(steps, train.evaluations))
        except InputError as error:
            raise InputError(str(error), where="--steps") from None
    if not settings.unchecked:
        verdict.demand(plan.rules, quiet=settings.quiet)
    scores = _supernet_scores(plan, model, train, settings)
    task = next(iter(plan.tasks.values()))
    sign = 1 if task.maximize else -1
    order = ranked({placement: -sign * score for placement, score in scores.items()})
    base = tuple(filter(model.is_attention, range(model.depth)))
    placements = {f"rank_{order.index(each) + 1}": each for each in confirmed(order, base, best, spread)}
    name, trained, report = _trained(plan, settings, placements)
    arms = tuple(
        PlacedArm(arm, each, order.index(each) + 1, _known(scores[each]), trained.get(arm))
        for arm, each in ({"base": base} | placements).items()
    )
    return Placing(
        study=name,
        metric=task.metric,
        maximize=task.maximize,
        layers=model.depth,
        possible=math.comb(model.depth, len(base)),
        scored=len(scores),
        arms=arms,
        correlation=_correlation([(arm.supernet, arm.trained) for arm in arms]),
        report=report,
    )


def _supernet_scores(plan: Plan, model: ModelSpec, train: TrainSpec, settings: RunSettings) -> dict[Placement, float]:
    """Trains the supernet and scores placements, or goes on with it.

    Files beside the ledger keep what is done: `placements/HASH.json` the scores, and `placements/HASH.pt` the supernet,
    until all placements are scored.
    """
    computed = [plan.job(plan.arms[0], "confirm", 0, {}).key, train.steps, MOST_SCORED]
    name = hashlib.sha256(json.dumps(computed).encode()).hexdigest()[:32]
    with Store.open(settings.db) as store:
        file = store.folder / "placements" / f"{name}.json"
    known = _read(file)
    start = tuple(filter(model.is_attention, range(model.depth)))
    possible = most_scored(model.depth, len(start))
    supernet: Supernet | None = None

    def score(placement: Placement) -> float:
        nonlocal supernet
        if placement not in known:
            supernet = supernet or _trained_supernet(plan, model, train, file.with_suffix(".pt"), settings)
            known[placement] = supernet.score(placement)
            if len(known) % math.ceil(possible / LINES) == 0:
                _write(file, known)
                _tell(settings, f"placements scored: {len(known)} of at most {possible}", len(known), possible)
        return known[placement]

    sign = -1 if next(iter(plan.tasks.values())).maximize else 1
    found = scored_placements(model.depth, len(start), start, lambda placement: sign * score(placement))
    _write(file, known)
    file.with_suffix(".pt").unlink(missing_ok=True)
    return {placement: known[placement] for placement in found}


def _trained_supernet(
    plan: Plan, model: ModelSpec, train: TrainSpec, checkpoint: Path, settings: RunSettings
) -> Supernet:
    """Trains the supernet, from its checkpoint on if there is one."""
    supernet = Supernet(next(iter(plan.tasks.values())), model, train)
    if checkpoint.exists():
        try:
            supernet.load_state_dict(torch.load(checkpoint, map_location=supernet.device, weights_only=True))
        except (OSError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # as after a power cut
            message = (str(error).splitlines() or [type(error).__name__])[0]
            _log.warning("%s is damaged, so the supernet starts over: %s", checkpoint, message)
            supernet = Supernet(supernet.task, model, train)
    supernet.advance(
        lambda step, loss: _tell(
            settings, f"supernet: step {step} of {train.steps}, loss {loss:.4g}", step, train.steps
        ),
        lambda: save(supernet.state_dict(), checkpoint),
    )
    return supernet


def _trained(
    plan: Plan, settings: RunSettings, placements: Mapping[str, Placement]
) -> tuple[str, dict[str, float], Report]:
    """Trains placements from scratch, as arms beside the study's own.

    Returns:
        The name of the study that does, the mean score of each arm, and the report.
    """
    values = plan.spec.model_dump(mode="json")
    arms = {arm: {"model": {"attention": list(placement)}} for arm, placement in placements.items()}
    name = f"{plan.spec.name[: 100 - len(SUFFIX)]}{SUFFIX}"
    spec = StudySpec.model_validate({**values, "name": name, "arms": {**values["arms"], **arms}})
    of_placements = make_plan(spec, profile=plan.profile, study_file=plan.study_file)
    result = run_study(replace(of_placements, study_file=plan.study_file, overrides=plan.overrides), settings)
    if result.missing:
        lost = next(iter(result.missing.values()))
        raise InputError(f"{name}: {len(result.missing)} trials have no result: {lost}")
    with Store.open(settings.db) as store:
        recorded = store.study(result.study_id)
        (task,) = recorded_tasks(recorded).values()
        scores = RecordedScores(store, recorded, store.trials(recorded.id)).scores(task, store.arms(recorded.id))
    means = {arm: math.fsum(of.values()) / len(of) for arm, of in scores.results.items() if of}
    return name, means, result.report


def _correlation(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Spearman's rank correlation of pairs, of which those that lack a figure are left out.

    Examples:
        >>> _correlation([(1.0, 10.0), (2.0, 20.0), (3.0, 15.0), (4.0, None)])
        0.5
    """
    from scipy.stats import spearmanr  # Imported here, as in `statistics.intervals`: SciPy is slow to load.

    whole = [pair for pair in pairs if None not in pair]
    if len(whole) < FEWEST or any(len({*figures}) == 1 for figures in zip(*whole, strict=True)):
        return None
    return float(spearmanr(*zip(*whole, strict=True)).statistic)


def _known(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None


def _read(file: Path) -> dict[Placement, float]:
    """Reads the scores in a file; none if it does not exist."""
    if not file.exists():
        return {}
    try:
        listed = json.loads(file.read_text())
        return {tuple(placement): math.nan if score is None else float(score) for placement, score in listed}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file}: no scores of placements can be read: {error}: delete it to score anew") from None


def _write(file: Path, scores: Mapping[Placement, float]) -> None:
    """Writes scores to a file, whole or not at all."""
    partial = file.with_suffix(f".{uuid4().hex}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps([[placement, _known(score)] for placement, score in scores.items()]))
        partial.replace(file)
    except OSError as error:
        raise InputError(f"{file}: the scores of placements cannot be written: {error.strerror}") from None


def _tell(settings: RunSettings, text: str, done: int, total: int) -> None:
    if not settings.quiet:
        progress.advance(text, done=done, total=total)
