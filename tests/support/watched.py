"""A process with deltalab in it: it answers commands, each in a fork, which is killed over its time or memory."""

import contextlib
import io
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 5.0
"""Of wall time, but for the time in which the process waits for a processor that other processes use."""
LOOP_SECONDS = 0.19
"""What the loop of `slowness` takes where 5 s are allowed: 0.42 s on a core with 2.2 times the time for a check."""
MOST_BYTES = 500 * 10**6
"""What a command may add to the memory of the process."""
PATIENCE = 20.0
"""Seconds of the same time until the fork is killed."""


@cache
def slowness() -> float:
    """How many times as long as a usual core this one takes, 1 at least: a lent core may have half the speed."""
    times = []
    for _ in range(3):
        start, total = time.process_time(), 0
        for i in range(3_000_000):
            total += i * i % 7
        times.append(time.process_time() - start)
    return max(1.0, min(times) / LOOP_SECONDS)


@dataclass(frozen=True)
class Answer:
    """What a command said.

    Attributes:
        code: The exit code; None where the fork died or had to be killed.
        said: What it wrote to stderr, or why it has no code.
        wall: Seconds of wall time.
        seconds: Those of them in which it had a processor, or waited for anything else.
        cpu: Seconds of processor time, of all threads; a busy machine counts it by ticks, and coarsely.
        extra: Bytes of memory that it added.
    """

    code: int | None
    said: str
    wall: float
    seconds: float
    cpu: float
    extra: int

    @property
    def wrong(self) -> str | None:
        """What the answer does against the promise; None where it is a result, or exit 2 in one line."""
        if self.code is None:
            return f"died: {self.said}"
        if "Traceback" in self.said or self.code not in (0, 2):
            return "traceback: " + (self.said.strip().splitlines() or [""])[-1][:100]
        if self.seconds > MOST_SECONDS * slowness():
            return f"hang: {self.seconds:.1f} s, {self.cpu:.1f} s of processor time, code {self.code}"
        if self.extra > MOST_BYTES:
            return f"memory: {self.extra / 1e6:.0f} MB, code {self.code}"
        if self.code == 2 and (self.said.count("\n") != 1 or not self.said.startswith("error: ")):
            return "not one line: " + self.said[:60]
        if self.code == 2 and (len(self.said) > 4000 or not self.said[:-1].isprintable()):
            return "a line that no terminal can show: " + self.said[:60]
        return None


class Watched:
    """The process. A fork finds deltalab imported and nothing computed, as a command does after its imports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None

    def ask(self, *words: str) -> Answer:
        """The answer of `deltalab WORDS`."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
        return Answer(**json.loads(process.stdout.readline()))

    def plan(self, text: bytes) -> Answer:
        """The answer of `deltalab study plan` to a file."""
        file = self.folder / "hostile.yaml"
        file.write_bytes(text)
        return self.ask("study", "plan", file.name)

    def close(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        # One thread: a fork has no others, and its processor time is that of one core.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # The folder is another, in which a relative path would name nothing, and an installed deltalab would answer.
        paths = os.pathsep.join(str(ROOT / name) for name in ("platform", "plugins"))
        environment = {**os.environ, **threads, "PYTHONPATH": paths}
        command = [sys.executable, str(Path(__file__).resolve())]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self.folder, env=environment,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        return process


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _peak() -> int:
    """The most memory since the last reset, or ever where it cannot be reset."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def _waited(pid: int) -> float:
    """The seconds for which a process was ready to run and had no processor; 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _serve() -> None:
    """Answers each line of words with a line of JSON."""
    out, stdin = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    import deltalab.study.forecast.estimate
    import deltalab.study.planning.make  # noqa: F401
    from deltalab.cli.app import main
    from deltalab.registry import list_rules, list_tasks

    list_rules(), list_tasks()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0), os.dup2(nothing, 1)
    print("ready", file=out, flush=True)
    for line in iter(stdin.readline, ""):
        print(json.dumps(asdict(_in_fork(main, json.loads(line)))), file=out, flush=True)


def _in_fork(main: Callable[[], None], words: list[str]) -> Answer:
    reading, writing = os.pipe()
    began, idle = time.monotonic(), _resident(os.getpid())
    pid = os.fork()
    if not pid:
        with os.fdopen(writing, "w") as pipe:
            json.dump(_said(main, words), pipe)
        os._exit(0)
    os.close(writing)
    why, extra, waited = None, 0, 0.0
    while why is None and not select.select([reading], [], [], 0.05)[0]:
        extra, waited = _resident(pid) - idle, _waited(pid)
        if time.monotonic() - began - waited > PATIENCE:
            why = f"no answer for {PATIENCE:.0f} s"
        elif extra > 2 * MOST_BYTES:
            why = f"{extra / 1e6:.0f} MB"
    if why is not None:
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status, used = os.wait4(pid, 0)
    wall, cpu = time.monotonic() - began, used.ru_utime + used.ru_stime
    if not text:
        return Answer(None, why or f"exit {os.waitstatus_to_exitcode(status)}", wall, wall - waited, cpu, extra)
    code, said, waited, extra = json.loads(text)
    return Answer(code, said, wall, max(0.0, wall - waited), cpu, extra)


def _said(main: Callable[[], None], words: list[str]) -> tuple[int, str, float, int]:
    """Runs a command. Returns its exit code, its stderr, the seconds it waited, and the bytes it added."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before, waited = _resident(os.getpid()), _waited(os.getpid())
    said = io.StringIO()
    sys.argv = ["deltalab", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
    return code, said.getvalue(), _waited(os.getpid()) - waited, max(0, _peak() - before)


if __name__ == "__main__":
    _serve()
