"""Logs to TensorBoard: a folder of events for each run, in tensorboard/STUDY-ID beside the ledger."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from deltalab.loggers import LoggedReport, LoggedRun, LoggedStudy, flat, local

IDS = "logged"
"""The folder of empty files, each named after a run that was logged as a whole."""


class TensorboardLogger:
    """Writes event files. `Logger` describes the methods."""

    where = ""

    def begin(self, study: LoggedStudy) -> Iterable[str]:
        """Opens the folder of the study."""
        self._folder = local(study.folder, "tensorboard", f"{study.name}-{study.id}")
        self.where = f"tensorboard --logdir {self._folder}"
        self._ids = local(str(self._folder), IDS)
        return [file.name for file in self._ids.iterdir()]

    def log(self, run: LoggedRun) -> None:
        """Writes a run."""
        seed = "failed" if run.seed is None else f"seed {run.seed}"
        folder = self._folder / run.arm / run.task / run.called / f"{seed} {run.id[:6]}"
        shutil.rmtree(folder, ignore_errors=True)  # the rest of a run that was cut off
        settings = {name: _plain(value) for name, value in flat({**run.config, "tuned": run.values}).items()}
        events = [Event(summary=hparams_pb({"arm": run.arm, "task": run.task, "state": run.state, **settings}))]
        for name, points in run.curves.items():
            events += [Event(step=step, summary=_scalar(name, value)) for step, value in points]
        events += [Event(summary=_scalar(f"run/{name}", value)) for name, value in run.facts.items()]
        if run.error:
            events.append(Event(summary=text_pb("error", run.error)))
        _write(folder, events)
        (self._ids / run.id).touch()

    def end(self, report: LoggedReport) -> None:
        """Writes the report."""
        folder = self._folder / "report"
        shutil.rmtree(folder, ignore_errors=True)
        _write(folder, [Event(summary=text_pb("report", report.markdown))])


def _write(folder: Path, events: list[Any]) -> None:
    """Writes events to a folder."""
    writer = EventFileWriter(str(folder))
    for event in events:
        writer.add_event(event)
    writer.close()


def _scalar(name: str, value: float) -> Any:
    """Returns a scalar as a summary of TensorBoard."""
    return Summary(value=[Summary.Value(tag=name, simple_value=value)])


def _plain(value: Any) -> bool | float | str:
    """Returns a value that TensorBoard's table of settings takes: the value itself, or its text."""
    return value if isinstance(value, bool | int | float | str) else str(value)
