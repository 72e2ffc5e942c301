"""Logs to Weights & Biases. Each run of a study becomes a run of wandb, in a group for the study.

The project is WANDB_PROJECT, or `deltalab`. wandb finds its server and its key itself. It logs offline if WANDB_MODE
says so.
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import wandb

from deltalab.loggers import LoggedReport, LoggedRun, LoggedStudy, arms_of, local

WHOLE = "logged"
"""The name of a file with the run's id, in the folder of an offline run that was logged as a whole."""


class WandbLogger:
    """Writes runs to a project of wandb. `Logger` describes the methods."""

    where = ""

    def begin(self, study: LoggedStudy) -> Iterable[str]:
        """Opens the project."""
        self._study = study
        self._folder = local(study.folder)
        self._project = os.environ.get("WANDB_PROJECT") or "deltalab"
        settings = wandb.setup().settings
        self._offline = settings.mode != "online"
        if self._offline:
            self.where = f"wandb sync {self._folder}/wandb/offline-run-*"
            return [file.read_text(encoding="utf-8") for file in self._folder.glob(f"wandb/offline-run-*/{WHOLE}")]
        api = wandb.Api(timeout=30)
        entity = os.environ.get("WANDB_ENTITY") or api.default_entity
        self.where = f"{settings.app_url}/{entity}/{self._project}"
        try:
            runs = api.runs(f"{entity}/{self._project}", filters={"group": self._group}, per_page=500)
            return [run.id for run in runs if run.state in ("finished", "failed")]
        except ValueError:  # there is no such project yet
            return []

    def log(self, run: LoggedRun) -> None:
        """Writes a run."""
        facts = {"arm": run.arm, "task": run.task, "stage": run.stage, "number": run.number, "seed": run.seed}
        config = {**run.config, **facts, "trial": run.trial, "tuned": run.values, "study": self._study.label}
        tags = [run.stage, *([] if run.state == "done" else [run.state])]
        steps: dict[int, dict[str, float]] = {}
        for name, points in run.curves.items():
            for step, value in points:
                steps.setdefault(step, {})[name] = value
        with self._run(run.id, run.label, run.arm, config, tags) as target:
            for step in sorted(steps):
                target.log(steps[step], step=step)
            target.summary.update({"state": run.state, "error": run.error, **run.facts})
            target.finish(exit_code=0 if run.state == "done" else 1)
            if self._offline:
                Path(target.dir).parent.joinpath(WHOLE).write_text(run.id, encoding="utf-8")

    def end(self, report: LoggedReport) -> None:
        """Writes the report as a run."""
        rows = arms_of(report.report)
        config = {"study": self._study.label, "spec": self._study.spec, "arms": self._study.arms}
        with self._run(f"{self._study.id}-report", f"report of {self._study.label}", "report", config, []) as target:
            columns: list[str | int] = [*rows[0]] if rows else []
            target.log({"arms": wandb.Table(columns=columns, data=[[*row.values()] for row in rows])})
            for row in rows:
                values = {field: row[field] for field in ("score", "difference", "p", "verdict")}
                target.summary.update({f"{row['task']}/{row['arm']}/{field}": value for field, value in values.items()})
            target.summary.update({"state": report.state})
            for name, text in (("report.md", report.markdown), ("report.json", json.dumps(report.report))):
                file = Path(target.dir, name)
                file.write_text(text, encoding="utf-8")
                target.save(str(file), base_path=target.dir, policy="now")
            target.finish()

    @property
    def _group(self) -> str:
        return f"{self._study.name}-{self._study.id}"

    def _run(self, run: str, name: str, kind: str, config: dict[str, Any], tags: list[str]) -> Any:
        """Begins a run of wandb."""
        if self._offline:  # the server would append to a run that was cut off, or to an earlier report
            for earlier in self._folder.glob(f"wandb/offline-run-*-{run}*"):
                shutil.rmtree(earlier, ignore_errors=True)
        return wandb.init(
            project=self._project,
            id=run,
            name=name,
            group=self._group,
            job_type=kind,
            config=config,
            tags=tags,
            dir=str(self._folder),
            reinit="create_new",
            resume=None if self._offline else "allow",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
