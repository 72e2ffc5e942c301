"""Says how many of a study's first trials the ledger knows, and why it does not know the others."""

from collections import Counter
from collections.abc import Iterator

from deltalab.registry import rule_plugin
from deltalab.store import Store, TrialRow
from deltalab.store.models import Study
from deltalab.study.planning.config_difference import difference, flat
from deltalab.study.planning.plan import Infeasible, Plan
from deltalab.study.workers.jobs import Job
from deltalab.training.train import NUMERICS

MOST_JOBS = 500
"""The most trials of a plan that are looked up."""

MOST_READ = 5000
"""The most recorded trials that are compared with those of the plan."""

MOST_REASONS = 4
"""The most reasons that are told."""

OF_ENGINE = ("name", "evaluate", "evaluate_every", "lengths", "limit")
"""The keys of the section `engine` that are part of a trial's key: `Engine.learns_by`."""


def known_trials(plan: Plan, store: Store) -> str | None:
    """Says how many of a study's first trials the ledger knows, and in what the others differ from recorded ones.

    A trial is known by its key, a hash of all that it computes. The recorded trials are those of the latest study of
    the same name and profile, which another release or another state of the file may have run.

    Args:
        plan: The study.
        store: The ledger.

    Returns:
        A sentence; None if the ledger has neither the study's trials nor a study of its name, and for a search, whose
        trials depend on results.
    """
    if plan.spec.search is not None:
        return None
    jobs = list(_first_jobs(plan))
    known = store.known_trials(job.key for job in jobs)
    same = [study for study in store.studies() if (study.name, study.profile) == (plan.spec.name, plan.profile)]
    if not known and not same:
        return None
    said = f"The ledger knows {sum(job.key in known for job in jobs)} of the first {len(jobs)} trials"
    if not same or plan.identity in {study.identity for study in same}:
        return f"{said}."
    earlier = max(same, key=lambda study: study.id)
    rows = store.trials(earlier.id, limit=MOST_READ)
    reasons = Counter(_reason(job, rows, earlier) for job in jobs if job.key not in known)
    release = earlier.provenance.get("versions", {}).get("deltalab", "an early release")
    of_earlier = f"study {earlier.id}, '{earlier.address}', of deltalab {release}"
    told = [f"{count} {reason}" for reason, count in reasons.most_common(MOST_REASONS)]
    return f"{said}. Beside {of_earlier}, {'; '.join(told)}." if told else f"{said}."


def _first_jobs(plan: Plan) -> Iterator[Job]:
    """Yields the trials with which each arm begins, which depend on no result."""
    left = MOST_JOBS
    for arm in plan.arms:
        tried = 0
        for number, values in enumerate(plan.candidates(arm)):
            if tried == plan.tried(arm):
                break
            if not left:
                return
            left -= 1
            try:
                yield plan.job(arm, "confirm", number, values)
            except Infeasible:
                continue
            tried += 1


def _reason(job: Job, rows: list[TrialRow], study: Study) -> str:
    """Says why a trial is none of a study's: in what it differs from the most similar trial of its arm."""
    of_arm = [row for row in rows if (row.arm, row.task) == (job.arm, job.task)]
    if not of_arm:
        return "are of an arm or a task that has no trial there"
    fewest = min((_differences(job, row, study) for row in of_arm), key=len)
    return f"differ in {' and '.join(fewest) or 'what a ledger does not record, such as the code of a task'}"


def _differences(job: Job, row: TrialRow, study: Study) -> list[str]:
    """Lists in what a trial differs from a recorded trial of its arm."""
    found = []
    task = study.provenance.get("tasks", {}).get(job.task, {})
    name = job.config["rule"]["name"]
    if study.provenance.get("numerics", NUMERICS) != NUMERICS:
        found.append("numerics")
    if row.rule == name and row.rule_hash != rule_plugin(name).hash:
        found.append(f"the file of rule '{name}'")
    if row.task_version != job.task_version:
        found.append(f"the version of task '{job.task}'")
    parameters = task.get("parameters", job.task_params)
    if any(parameters[key] != value for key, value in job.task_params.items() if key in parameters):
        found.append(f"the parameters of task '{job.task}'")
    if row.runs and tuple(row.runs) != job.seeds:
        found.append("seeds")
    before, now = (section or {} for section in (study.spec.get("engine"), job.engine))
    found += [f"engine.{key}" for key in OF_ENGINE if (before.get(key) or None) != (now.get(key) or None)]
    recorded = flat(row.config)
    # A setting that the recorded trial lacks is one of a later release.
    changed = [
        f"the tuned {key}" if key in job.values else key
        for key in difference(row.config, job.config)
        if key in recorded
    ]
    return [*found, *changed]
