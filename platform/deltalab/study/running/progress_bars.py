"""Shows a running study and when it will end: bars on a terminal, elsewhere a line for each stack and each minute."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from deltalab import progress
from deltalab.store.studies.driver_status import duration
from deltalab.study.running.activity import DriverActivity
from deltalab.study.running.schedule import StackSource, stack_label
from deltalab.study.workers.jobs import Job
from deltalab.training.time_budget import reached

SILENCE = 60.0
"""Seconds without a line after which the step of a running stack is printed, if no bars are drawn."""


class _Eta(ProgressColumn):
    """Shows beside the study's bar when the study will end."""

    max_refresh = 1.0

    def __init__(self, eta: Callable[[], float | None]) -> None:
        super().__init__(Column(no_wrap=True))
        self._eta = eta

    def render(self, task: Task) -> Text:
        return Text("" if task.id or task.finished else f"ETA {duration(self._eta())}")


class _Done(MofNCompleteColumn):
    """Shows what is done of all, with the unit that seconds have."""

    def render(self, task: Task) -> Text:
        return super().render(task).append(task.fields.get("unit", ""))


class ProgressBars:
    """Counts trials, shows stacks that run, names the best arm so far on each task, and says when the study will end.

    Attributes:
        schedule: The stacks of the study.
        activity: The activity of the driver, which is told what the executor reports.
        quiet: Whether nothing is shown.
        console: Where the bars and the lines go.
    """

    def __init__(self, schedule: StackSource, activity: DriverActivity, *, quiet: bool) -> None:
        """Makes the bars, which `with` shows."""
        self.schedule, self.activity, self.quiet = schedule, activity, quiet
        self.console = Console(stderr=True)
        self._bars = Bars(
            # A text that is too long for the terminal loses its end; the figures beside it stay whole.
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            BarColumn(bar_width=12, table_column=Column(no_wrap=True)),
            _Done(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            _Eta(self.eta),
            console=self.console,
            disable=quiet or progress.is_json() or not self.console.is_terminal,
            expand=True,
        )
        self._all = self._bars.add_task(schedule.plan.spec.name, total=schedule.total)
        self._running: dict[str, TaskID] = {}
        self._began = self._said = time.monotonic()
        self._started = False
        self.activity.counted(schedule.stages(), schedule.pace())

    def __enter__(self) -> Self:
        """Shows the bars."""
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the bars away, and counts the trials a last time."""
        self._bars.stop()
        if error is None:  # After an error, another thread may hold the schedule and wait for a database that is gone.
            self.activity.counted(self.schedule.stages(), self.schedule.pace())

    def eta(self) -> float | None:
        """Seconds until the study ends; None if nobody can tell."""
        return self.activity.eta()

    def started(self, stack: Sequence[Job], *, here: bool = True) -> None:
        """Shows a stack that begins.

        Args:
            stack: The stack.
            here: True if this driver trains the stack, False if a joined driver does.
        """
        train = stack[0].config["train"]
        total, unit = (train["seconds"], " s") if train.get("seconds") else (train["steps"], "")
        name = stack_label(stack, self.schedule.plan)
        if not self._started:
            self._say(f"starts with {name}", eta=False)
            self._started = True
        self.activity.started(stack, name, here=here)
        self._running[stack[0].key] = self._bars.add_task(f"  {name}", total=total, unit=unit)
        self._show()

    def advanced(self, stack: Sequence[Job], step: int, device: str | None = None) -> None:
        """Shows the step that a stack has reached, and notes on which device the stack trains."""
        self.activity.advanced(stack, step, device)
        train = stack[0].config["train"]
        steps, seconds = train["steps"], train.get("seconds")
        self._bars.update(self._running[stack[0].key], completed=step if seconds is None else step / steps * seconds)
        if time.monotonic() - self._said >= SILENCE:
            name = stack_label(stack, self.schedule.plan)
            self._say(f"{len(self._running)} running, {name} at {reached(step, steps, seconds)}")

    def finished(self, stack: Sequence[Job], device: str | None = None) -> None:
        """Shows that a stack has ended, with results or without."""
        self.activity.ended(stack, device)
        self._bars.remove_task(self._running.pop(stack[0].key))
        self._show()
        self._say(stack_label(stack, self.schedule.plan), self._stages(), self._leaders())

    def _say(self, *news: str, eta: bool = True) -> None:
        """Prints a line if no bars are drawn: how many trials have ended, the time, when the study ends, the news."""
        self._said = time.monotonic()
        if not self.quiet and (progress.is_json() or not self.console.is_terminal):
            done, total, seconds = self.schedule.completed, self.schedule.total, self._said - self._began
            left = self.eta() if eta and done < total else None
            end = f"ETA {duration(self.eta())}" if eta and done < total else ""
            line = "  ".join(filter(None, [f"[{done}/{total}] {seconds:.0f} s", end, *news]))
            progress.advance(line, done=done, total=total, seconds=round(seconds, 1), eta=left)

    def _show(self) -> None:
        """Draws the study's bar anew."""
        self.activity.counted(self.schedule.stages(), self.schedule.pace())
        text = "  ".join(filter(None, [self.schedule.plan.spec.name, self._stages(), self._leaders()]))
        self._bars.update(self._all, completed=self.schedule.completed, total=self.schedule.total, description=text)

    def _stages(self) -> str:
        """Says how many trials of each stage have ended, if there are two stages."""
        stages = self.activity.stages
        counts = (f"{stage} {count.ended}/{count.total}" for stage, count in stages.items())
        return ", ".join(counts) if len(stages) > 1 else ""

    def _leaders(self) -> str:
        """Names the best arm so far on each task."""
        leaders = {task: self.schedule.leader(task) for task in self.schedule.plan.tasks}
        parts = [f"{task}: {leader[0]} {leader[1]:.3f}" for task, leader in leaders.items() if leader]
        return "best so far on validation: " + ", ".join(parts) if parts else ""
