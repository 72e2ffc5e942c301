"""Logs to MLflow, at MLFLOW_TRACKING_URI or in mlflow.db beside the ledger. Studies of one name share an experiment."""

import os
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before the import

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException

from deltalab.loggers import LoggedReport, LoggedRun, LoggedStudy, arms_of, flat

METRICS_AT_ONCE, PARAMS_AT_ONCE = 1000, 100
"""The largest numbers of metrics and of parameters in one request to MLflow's REST API."""
LONGEST_PARAM = 6000
STUDY, RUN = "deltalab.study", "deltalab.run"
"""The tags of a run: the study's id, and the run's id or "report"."""


class MlflowLogger:
    """Writes runs to an experiment of MLflow. `Logger` describes the methods."""

    where = ""

    def begin(self, study: LoggedStudy) -> Iterable[str]:
        """Opens the experiment of the study."""
        tracking_uri = os.environ.get("MLFLOW_TRACKING_URI")
        address = tracking_uri or f"sqlite:///{study.folder}/mlflow.db"
        self._client = MlflowClient(tracking_uri=address)
        self.where = address if tracking_uri else f"mlflow ui --backend-store-uri {address}"
        self._study = study
        self._experiment = self._experiment_id(
            os.environ.get("MLFLOW_EXPERIMENT_NAME") or f"deltalab/{study.name}",
            None if tracking_uri else f"file://{study.folder}/mlruns",
        )
        seen = []
        for run in self._runs(f"tags.`{RUN}` != 'report'"):
            if run.info.status in ("FINISHED", "FAILED"):
                seen.append(run.data.tags.get(RUN, ""))
            else:  # it was cut off
                self._client.delete_run(run.info.run_id)
        return seen

    def log(self, run: LoggedRun) -> None:
        """Writes a run."""
        facts = {"arm": run.arm, "task": run.task, "stage": run.stage, "number": run.number, "seed": run.seed}
        run_id = self._run(
            run.label, run.id, {"trial": run.trial, **facts, **({"error": run.error} if run.error else {})}
        )
        settings = [
            Param(_name(name), str(value)[:LONGEST_PARAM])
            for name, value in {**facts, **flat({**run.config, "tuned": run.values})}.items()
        ]
        for start in range(0, len(settings), PARAMS_AT_ONCE):
            self._client.log_batch(run_id, params=settings[start : start + PARAMS_AT_ONCE])
        now = int(1000 * time.time())
        points = [Metric(_name(name), value, now, step) for name, curve in run.curves.items() for step, value in curve]
        points += [Metric(f"run/{name}", value, now, 0) for name, value in run.facts.items()]
        for start in range(0, len(points), METRICS_AT_ONCE):
            self._client.log_batch(run_id, metrics=points[start : start + METRICS_AT_ONCE])
        self._client.set_terminated(run_id, "FINISHED" if run.state == "done" else "FAILED")

    def end(self, report: LoggedReport) -> None:
        """Writes the report as a run."""
        for run in self._runs(f"tags.`{RUN}` = 'report'"):
            self._client.delete_run(run.info.run_id)
        run_id = self._run(f"report of {self._study.label}", "report", {"state": report.state})
        now = int(1000 * time.time())
        scores = [
            Metric(_name(f"{arm['task']}/{arm['arm']}/{field}"), arm[field], now, 0)
            for arm in arms_of(report.report)
            for field in ("score", "difference", "p")
            if arm[field] is not None
        ]
        for start in range(0, len(scores), METRICS_AT_ONCE):
            self._client.log_batch(run_id, metrics=scores[start : start + METRICS_AT_ONCE])
        self._client.set_tag(run_id, "mlflow.note.content", report.markdown[:LONGEST_PARAM])
        self._client.log_text(run_id, report.markdown, "report.md")
        self._client.log_dict(run_id, report.report, "report.json")
        self._client.set_terminated(run_id)

    def _experiment_id(self, name: str, artifacts: str | None) -> str:
        """Returns the id of the experiment of this name, and creates the experiment if there is none."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name, artifacts))
            except MlflowException:  # another study made it just now
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _run(self, name: str, run: str, tags: dict[str, Any]) -> str:
        """Creates a run of MLflow and returns its id."""
        run_tags = {f"deltalab.{key}": str(value)[:LONGEST_PARAM] for key, value in tags.items()}
        run_tags |= {STUDY: self._study.id, "deltalab.label": self._study.label, RUN: run}
        return str(self._client.create_run(self._experiment, run_name=name, tags=run_tags).info.run_id)

    def _runs(self, further: str = "") -> Iterator[Run]:
        """Yields the study's runs in MLflow that meet the condition `further`, or all if it is empty."""
        condition, token = " and ".join(filter(None, [f"tags.`{STUDY}` = '{self._study.id}'", further])), None
        while True:
            page = self._client.search_runs([self._experiment], condition, max_results=1000, page_token=token)
            yield from page
            token = page.token
            if not token:
                return


def _name(text: str) -> str:
    """Returns a name with - for each character that MLflow refuses. It takes letters, digits and `_-. :/`."""
    return re.sub(r"[^\w\-. :/]", "-", text)
