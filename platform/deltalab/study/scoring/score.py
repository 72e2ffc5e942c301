"""Scores a rule that a program proposes, as an arm of a study, and keeps in the ledger what its loop has spent."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from deltalab.authoring.quarantine import quarantined
from deltalab.errors import InputError, missing_file
from deltalab.registry import add_plugin
from deltalab.statistics.joint_test import ALPHA, Difference, compare
from deltalab.statistics.pairs import Contrast, Paired
from deltalab.store import Store
from deltalab.store.models import Proposal
from deltalab.store.studies import proposals, shelf
from deltalab.study.answers.recorded_scores import RecordedScores
from deltalab.study.planning.make import make_plan, plan_study
from deltalab.study.planning.plan import Plan
from deltalab.study.running.run import run_study
from deltalab.study.running.settings import RunSettings, require_settings
from deltalab.study.scoring import design
from deltalab.study.specs.overrides import Overrides
from deltalab.study.specs.recorded_study import recorded_tasks
from deltalab.study.specs.study_file import StudySpec

Verdict = Literal["keep", "discard", "invalid"]
"""The rule is better than the base; it was not found to be; it fails its checks or does not train."""


@dataclass(frozen=True)
class Score:
    """The answer to a proposal. The keys of its JSON are those that evolution by programs reads.

    Attributes:
        combined_score: The gain over the base, of which more is better, in the unit of the study's metric, or on the
            scale from chance to perfect where the study has several tasks; None if the rule is invalid. A confirmed
            gain is that of the fresh seeds alone.
        verdict: What to do with the rule.
        artifacts: What the score rests on: `low` and `high`, the gain's 95% interval, `seeds`, `p` and `alpha` of the
            confirmation, `proposals` and `confirmations` of the loop with this one, and `reason`, a sentence.
    """

    combined_score: float | None
    verdict: Verdict
    artifacts: dict[str, Any]

    def to_json(self) -> str:
        """Returns the answer as JSON."""
        return json.dumps(asdict(self))


def score(
    rule_file: Path,
    study: str | Path | Mapping[str, Any],
    settings: RunSettings,
    *,
    profile: str | None = None,
    overrides: Overrides = None,
) -> Score:
    """Trains a rule as an arm of a study, and judges whether to keep it.

    A file that was scored before has the answer that it had. After a kill, the same call goes on.

    Args:
        rule_file: A file with one rule.
        study: The study whose base, task, seeds and tuning the rule is scored with. Its own arms do not train.
        settings: The ledger and the executor.
        profile: One of the study's profiles.
        overrides: Settings in place of the file's.

    Raises:
        InputError: A file is missing, the settings do not go together, or the study has a search, sizes, a single seed,
            or several tasks without bounds.
        Busy: Another process scores the same file.
    """
    if not rule_file.is_file():
        raise missing_file(rule_file, "rule file")
    if rule_file.suffix != ".py":
        raise InputError(f"{rule_file}: a rule is a Python file, whose name ends in .py")
    require_settings(settings)
    plan = plan_study(study, profile=profile, overrides=overrides)
    _require_scorable(plan)
    screening = _spec(plan, None, seeds=plan.spec.looks[0].seeds)
    loop, source = make_plan(screening, profile=plan.profile).identity, _hash(rule_file)
    with Store.open(settings.db) as store:
        asked = [known for known in proposals.proposals(store, loop) if known.source == source]
    if asked and asked[0].answer is not None:
        return Score(**asked[0].answer)
    checked = quarantined(rule_file)
    with Store.open(settings.db) as store:
        proposal = proposals.propose(store, loop, checked.rule or rule_file.stem, source)
    if checked.rule is None or checked.problem is not None:
        return _answered(settings, proposal, None, "invalid", f"{rule_file.name}: {checked.problem}", {})
    add_plugin(rule_file)
    return _judged(plan, settings, proposal, checked.rule)


def _judged(plan: Plan, settings: RunSettings, proposal: Proposal, rule: str) -> Score:
    """Trains a rule that passed its checks, in one stage or two, and judges it."""
    seeds, first = plan.spec.looks[0].seeds, plan.spec.first_seed
    screened = _trained(plan, settings, rule, seeds, first)
    if isinstance(screened, str):
        return _answered(settings, proposal, None, "invalid", screened, {"seeds": seeds})
    pairs, sign = screened
    artifacts = {"seeds": seeds, **_interval(compare([pairs])[0], sign)}
    if not design.is_promising(sign * pairs.differences):
        reason = f"no promising gain in {seeds} seeds of screening"
        return _answered(settings, proposal, artifacts.pop("gain"), "discard", reason, artifacts)
    with Store.open(settings.db) as store:
        number = proposals.confirm(store, proposal)
    alpha, fresh = design.alpha_of(number), design.seeds_of(number)
    confirmed = _trained(plan, settings, rule, fresh, design.first_seed_of(number))
    if isinstance(confirmed, str):
        return _answered(settings, proposal, None, "invalid", confirmed, {"seeds": fresh})
    pairs, sign = confirmed
    p = design.p_of(pairs, sign, alpha)
    artifacts = {"seeds": fresh, **_interval(compare([pairs])[0], sign), "p": p, "alpha": alpha}
    said = f"p {p:.2g} {'<=' if p <= alpha else '>'} alpha {alpha:.2g} in {fresh} fresh seeds of confirmation {number}"
    verdict: Verdict = "keep" if p <= alpha else "discard"
    return _answered(settings, proposal, artifacts.pop("gain"), verdict, said, artifacts)


def _answered(
    settings: RunSettings,
    proposal: Proposal,
    gain: float | None,
    verdict: Verdict,
    reason: str,
    artifacts: dict[str, Any],
) -> Score:
    """Keeps the answer to a proposal in the ledger, and returns it."""
    with Store.open(settings.db) as store:
        others = proposals.proposals(store, proposal.loop)
        counted = {
            "rule": proposal.rule,
            "proposal": proposal.number,
            "confirmations": sum(other.confirmation is not None for other in others),
            "spent": math.fsum(design.alpha_of(other.confirmation) for other in others if other.confirmation),
            "promised": ALPHA,
        }
        answer = Score(gain, verdict, {"reason": reason, **artifacts, **counted})
        proposals.answer(store, proposal, asdict(answer))
    return answer


def _require_scorable(plan: Plan) -> None:
    """Raises `InputError` for a study that a rule cannot be scored against."""
    where, spec = plan.study_file, plan.spec
    if spec.search is not None:
        raise InputError(f"{where}: search: a rule is scored against a base: take a study without search", key="search")
    if spec.scales is not None:
        raise InputError(f"{where}: scales: a rule is scored at one size: leave out scales", key="scales")
    if spec.looks[0].seeds < 2:
        problem = "screening needs at least 2 seeds, and 7 to find what is there"
        raise InputError(f"{where}: seeds: {problem}", key="seeds")
    unbounded = [name for name, task in plan.tasks.items() if task.bounds is None]
    if len(plan.tasks) > 1 and unbounded:
        raise InputError(
            f"{where}: task.{unbounded[0]}: its metric has no bounds, so that no mean over tasks is a score"
        )


def _spec(plan: Plan, rule: str | None, *, seeds: int, first_seed: int | None = None) -> StudySpec:
    """Returns the study with the rule as its only arm, or without an arm."""
    values = plan.spec.model_dump(mode="json")
    for key in ("ablate", "factorial", "arms"):
        values.pop(key)
    name = plan.spec.name if rule is None else f"{plan.spec.name[:60]}.score"
    arms = {} if rule is None else {"arms": {"proposal": {"rule": rule}}}
    first = {} if first_seed is None else {"first_seed": first_seed}
    return StudySpec.model_validate({**values, **arms, **first, "name": name, "seeds": seeds})


def _trained(plan: Plan, settings: RunSettings, rule: str, seeds: int, first_seed: int) -> tuple[Paired, int] | str:
    """Trains rule and base on some seeds.

    Returns:
        Their pairs and the sign of a gain; or why the rule does not train, in one line.
    """
    spec = _spec(plan, rule, seeds=seeds, first_seed=first_seed)
    try:
        of_rule = make_plan(spec, profile=plan.profile, study_file=rule)
    except InputError as error:
        return str(error)
    result = run_study(replace(of_rule, overrides=plan.overrides), settings)
    with Store.open(settings.db) as store:
        shelf.hide(store, result.study_id, True)
        study, arms = store.study(result.study_id), store.arms(result.study_id)
        trials = store.trials(result.study_id)
        ledger, tasks = RecordedScores(store, study, trials), [*recorded_tasks(study).values()]
        scores = [ledger.scores(task, arms) for task in tasks]
    if result.missing:
        raise InputError(f"{rule}: {len(result.missing)} trials have no result: {next(iter(result.missing.values()))}")
    if any("proposal" not in of_task.others for of_task in scores):
        failed = [trial.error or "" for trial in trials if trial.state == "failed" and trial.arm == "proposal"]
        return f"rule '{rule}' does not train: {(failed or ['it makes no model'])[0].strip().splitlines()[-1]}"
    pairs = [of_task.pairs("proposal") for of_task in scores]
    if len(tasks) == 1:
        return pairs[0], tasks[0].sign
    whole = [
        of.normalized(task.chance, task.perfect)
        for of, task in zip(pairs, tasks, strict=True)
        if task.perfect is not None
    ]
    return Contrast(tuple(whole), (1 / len(whole),) * len(whole)), 1


def _interval(difference: Difference, sign: int) -> dict[str, Any]:
    """Returns a gain with its 95% interval. An end that so few seeds cannot give is None."""
    ends = sorted((sign * difference.low, sign * difference.high))
    low, high = (end if math.isfinite(end) else None for end in ends)
    return {"gain": sign * difference.mean, "low": low, "high": high}


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
