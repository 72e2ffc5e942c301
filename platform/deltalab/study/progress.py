"""Shows a running study: progress bars on a terminal, a line for each stack elsewhere. Both say when it will end."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from deltalab.store.progress import duration
from deltalab.study.account import Account
from deltalab.study.job import Job
from deltalab.study.schedule import Stacks, named


class _Eta(ProgressColumn):
    """When the study will end, beside its own bar."""

    max_refresh = 1.0

    def __init__(self, eta: Callable[[], float | None]) -> None:
        super().__init__()
        self._eta = eta

    def render(self, task: Task) -> Text:
        return Text("" if task.id or task.finished else f"ETA {duration(self._eta())}")


class Progress:
    """Counts trials, shows those that run, names the best arm so far on each task, and says when the study will end.

    account: takes in all that the executor tells.
    """

    def __init__(self, schedule: Stacks, account: Account, *, quiet: bool) -> None:
        self.schedule, self.account, self.quiet = schedule, account, quiet
        self.console = Console(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _Eta(self.eta),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self._all = self._bars.add_task(schedule.plan.spec.name, total=schedule.total)
        self._running: dict[str, TaskID] = {}
        self._began = time.monotonic()
        self._started = False
        self.account.counted(schedule.stages(), schedule.pace())

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
        if error is None:  # else another thread may hold the schedule, and wait for a database that is gone
            self.account.counted(self.schedule.stages(), self.schedule.pace())

    def eta(self) -> float | None:
        """Seconds until the study ends; None where nobody can tell."""
        return self.account.eta()

    def started(self, stack: Sequence[Job], *, here: bool = True) -> None:
        """here: whether this driver trains the stack, and not one that has joined it."""
        steps = stack[0].config["train"]["steps"]
        name = named(stack, self.schedule.plan)
        if not self._started:
            done, total = self.schedule.completed, self.schedule.total
            self._say(f"[{done}/{total}] {time.monotonic() - self._began:.0f} s  starts with {name}")
            self._started = True
        self.account.started(stack, name, here=here)
        self._running[stack[0].key] = self._bars.add_task(f"  {name}", total=steps)
        self._show()

    def advanced(self, stack: Sequence[Job], step: int, device: str | None = None) -> None:
        self.account.advanced(stack, step, device)
        self._bars.update(self._running[stack[0].key], completed=step)

    def finished(self, stack: Sequence[Job], device: str | None = None) -> None:
        """A stack has ended, with results or without."""
        self.account.ended(stack, device)
        self._bars.remove_task(self._running.pop(stack[0].key))
        self._show()
        done, total = self.schedule.completed, self.schedule.total
        eta = f"ETA {duration(self.eta())}" if done < total else ""
        name = named(stack, self.schedule.plan)
        parts = [f"{time.monotonic() - self._began:.0f} s", eta, name, self._stages(), self._leaders()]
        self._say(f"[{done}/{total}] {'  '.join(filter(None, parts))}")

    def _say(self, line: str) -> None:
        """Prints a line where no bars are drawn."""
        if not self.quiet and not self.console.is_terminal:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _show(self) -> None:
        self.account.counted(self.schedule.stages(), self.schedule.pace())
        text = "  ".join(filter(None, [self.schedule.plan.spec.name, self._stages(), self._leaders()]))
        self._bars.update(self._all, completed=self.schedule.completed, total=self.schedule.total, description=text)

    def _stages(self) -> str:
        """How far each stage is, where there are two."""
        stages = self.account.stages
        counts = (f"{stage} {count.ended}/{count.total}" for stage, count in stages.items())
        return ", ".join(counts) if len(stages) > 1 else ""

    def _leaders(self) -> str:
        leaders = {task: self.schedule.leader(task) for task in self.schedule.plan.tasks}
        parts = [f"{task}: {found[0]} {found[1]:.3f}" for task, found in leaders.items() if found]
        return "best so far on validation: " + ", ".join(parts) if parts else ""
