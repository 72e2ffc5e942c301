"""Shows a running study: a progress bar on a terminal, a line for each stack elsewhere."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from deltalab.study.plan import Job
from deltalab.study.schedule import Schedule
from deltalab.study.search import RANDOM_FROM, WARM_FROM


class Progress:
    """Counts trials, shows those in flight, and names the best arm so far on each task."""

    def __init__(self, schedule: Schedule, *, quiet: bool) -> None:
        self.schedule, self.quiet = schedule, quiet
        self.console = Console(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self._all = self._bars.add_task(schedule.plan.spec.name, total=schedule.total)
        self._flying: dict[str, TaskID] = {}
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def started(self, stack: Sequence[Job]) -> None:
        steps = stack[0].config["train"]["steps"]
        self._flying[stack[0].key] = self._bars.add_task(f"  {_name(stack)}", total=steps)
        self._show()

    def advanced(self, stack: Sequence[Job], step: int) -> None:
        self._bars.update(self._flying[stack[0].key], completed=step)

    def finished(self, stack: Sequence[Job]) -> None:
        self._bars.remove_task(self._flying.pop(stack[0].key))
        self._show()
        if not self.quiet and not self.console.is_terminal:
            done, total = self.schedule.completed, self.schedule.total
            self.console.print(
                f"[{done}/{total}] {time.monotonic() - self._began:.0f} s  {_name(stack)}  {self._leaders()}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def _show(self) -> None:
        text = "  ".join(filter(None, [self.schedule.plan.spec.name, self._leaders()]))
        self._bars.update(self._all, completed=self.schedule.completed, description=text)

    def _leaders(self) -> str:
        leaders = {task: self.schedule.leader(task) for task in self.schedule.plan.tasks}
        parts = [f"{task}: {found[0]} {found[1]:.3f}" for task, found in leaders.items() if found]
        return "best so far on validation: " + ", ".join(parts) if parts else ""


def _name(stack: Sequence[Job]) -> str:
    job, others = stack[0], len(stack) - 1
    kinds = {WARM_FROM: "warm start", RANDOM_FROM: "random", 0: "search" if job.stage == "tune" else "candidate"}
    kind, seeds = next(kind for first, kind in kinds.items() if job.number >= first), len(job.seeds)
    what = f"{kind} {job.number % RANDOM_FROM + 1}, {seeds} seed{'s' * (seeds != 1)}"
    return f"{job.task} / {job.arm} / {what}" + (f" and {others} more trial{'s' * (others != 1)}" if others else "")
