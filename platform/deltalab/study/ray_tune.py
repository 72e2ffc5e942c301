"""Runs a study's trials on Ray Tune. The schedule is Tune's searcher, so one run holds a search and what follows it.

Tune's trial is a stack of ours. Ray never touches the database and never restores a run: the next driver asks again for
the trials that a killed one left behind.
"""

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.search import Searcher

from deltalab.errors import InputError
from deltalab.study.plan import Job
from deltalab.study.progress import Progress
from deltalab.study.schedule import Schedule
from deltalab.study.trial import execute, failed, from_json, to_json

_log = logging.getLogger("deltalab")


def run_all(schedule: Schedule, runs: Path, progress: Progress, *, workers: int | None, address: str | None) -> None:
    """Runs every stack that the schedule gives.

    Raises `InputError` for resources that the cluster does not have, and whatever the ledger raises.
    """
    wanted = schedule.plan.spec.resources
    _start(address)
    try:
        has: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        if wanted.cpu > has.get("CPU", 0) or wanted.gpu > has.get("GPU", 0):
            raise InputError(
                f"{schedule.plan.where}: resources: a stack wants {wanted.cpu:g} CPU and {wanted.gpu:g} GPU; "
                f"the cluster has {has.get('CPU', 0):g} and {has.get('GPU', 0):g}"
            )
        if idle := wanted.idle(has.get("GPU", 0)):
            _log.warning(idle)
        fit = wanted.places(has["CPU"], has.get("GPU", 0))
        places = min(fit, workers or fit)
        searcher = StackSearcher(schedule, places, progress)
        # One folder for each study, which its next driver empties: a killed driver leaves Tune's files behind.
        scratch = runs / f".ray-{schedule.plan.identity[:16]}"
        shutil.rmtree(scratch, ignore_errors=True)
        tuner = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(_stack, runs=str(runs), threads=wanted.threads),
                {"cpu": wanted.cpu, "gpu": wanted.gpu},
            ),
            tune_config=tune.TuneConfig(
                search_alg=searcher,
                num_samples=-1,
                reuse_actors=True,
                max_concurrent_trials=places,
            ),
            run_config=tune.RunConfig(name="study", storage_path=str(scratch), verbose=0),
        )
        try:
            tuner.fit()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if searcher.error is not None:
            raise searcher.error
    finally:
        ray.shutdown()


def _start(address: str | None) -> None:
    # Tune would warn that it finds no result files; they are off, since the ledger has the results.
    for name in ("ray", "ray.tune", "ray.tune.analysis.experiment_analysis"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if address is not None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(f"--address {address}: {str(error).splitlines()[0]}") from None
    else:
        # Without "local" Ray joins whatever cluster it finds on this machine.
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )


def _stack(config: dict[str, str], runs: str, threads: int) -> None:
    stack = stack_from_json(config["stack"])
    records = execute(stack, Path(runs), threads=threads, watch=lambda step: tune.report({"step": step}))
    tune.report({"step": stack[0].config["train"]["steps"], "records": [to_json(record) for record in records]})


class StackSearcher(Searcher):
    """Gives the schedule's stacks to Tune, and Tune's results to the schedule. places: stacks at a time."""

    def __init__(self, schedule: Schedule, places: int, progress: Progress) -> None:
        super().__init__(metric="step", mode="max")
        self.error: Exception | None = None
        self._schedule, self._places, self._progress = schedule, places, progress
        self._stacks: dict[str, list[Job]] = {}

    def suggest(self, trial_id: str) -> Any:
        if self.error is not None:
            return Searcher.FINISHED
        try:
            stack = self._schedule.next(self._places)
        except Exception as error:
            self.error = error
            return Searcher.FINISHED
        if not stack:
            return Searcher.FINISHED if self._schedule.done else None
        self._stacks[trial_id] = stack
        self._progress.started(stack)
        return {"stack": json.dumps([asdict(job) for job in stack])}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if "records" not in result and trial_id in self._stacks:
            self._progress.advanced(self._stacks[trial_id], result.get("step", 0))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        stack = self._stacks.pop(trial_id, None)
        if stack is None:
            return
        try:
            if result is not None and "records" in result:
                for record in map(from_json, result["records"]):
                    self._schedule.finished(record)
            elif len(stack) > 1:
                self._schedule.part(stack)
            else:
                self._schedule.finished(failed(stack[0], "the worker died before the trial ended"))
            self._progress.finished(stack)
        except Exception as caught:
            # Tune would log the error and go on. Keep it: the study must end with it.
            self.error = caught

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its searcher in order to restore it later, which a study never does.
        return {}

    def __deepcopy__(self, memo: object) -> "StackSearcher":
        return self

    def save(self, checkpoint_path: str) -> None:
        """The ledger is the only memory."""

    def restore(self, checkpoint_path: str) -> None:
        """The ledger is the only memory."""


def stack_from_json(text: str) -> list[Job]:
    return [
        Job(**{**given, "seeds": tuple(given["seeds"]), "plugins": tuple(map(tuple, given["plugins"]))})
        for given in json.loads(text)
    ]
