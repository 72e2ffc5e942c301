"""Trains an exported folder on an engine, follows its progress, and keeps the run's records."""

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from deltalab.engines import checkpoints
from deltalab.engines.deltalab_train import launcher
from deltalab.engines.deltalab_train.lock import FILE as LOCK
from deltalab.engines.outcome import Transient, raise_from_log
from deltalab.engines.preparation import Launch
from deltalab.engines.progress_line import Progress
from deltalab.engines.resumed_pickles import require_harmless
from deltalab.engines.stopping import end, signals_raise
from deltalab.engines.torchtitan import PACKAGE, package
from deltalab.export.recipe import RECIPE_FILE

EVERY_SECONDS = 10.0
"""Seconds between two lines of progress."""
RECORD_SECONDS = 30.0
"""Seconds between two records of a run in the ledger."""


def start(
    launch: Launch,
    *,
    say: Callable[[str], None] = print,
    record: Callable[[Path], None] | None = None,
    stepped: Callable[[int], None] | None = None,
) -> int:
    """Trains to the end, from the newest complete checkpoint if there is one.

    Args:
        launch: The training, from `prepare`.
        say: Is called with each line of progress.
        record: Is called with the run's folder at the start, during the training, and at the end, even after an error.
        stepped: Is called with each step of which the engine tells. An exception that it raises ends the engine.

    Returns:
        The exit status of the engine, or minus the signal that ended it.

    Raises:
        Transient: If another process trains the run, or if the disk is full.
        InputError: If the newest checkpoint asks for code, and the run's folder is not trusted.
        KeyboardInterrupt: The process got SIGINT, in the main thread. All processes of the engine have ended.
        SystemExit: The same for SIGTERM, with code 143, and SIGHUP, with code 129.
    """
    record = record or (lambda run: None)
    run = launch.run
    run.mkdir(parents=True, exist_ok=True)
    with _alone(run):
        torn = checkpoints.remove_torn(run)
        if torn:
            say(f"removed checkpoints that were not finished: {', '.join(torn)}")
        complete = checkpoints.complete_checkpoints(run)
        say(f"from {complete[-1].name}" if complete else "from the start")
        _write(launch)
        record(run)
        if _is_trained(launch):
            return 0  # starting the engine would take minutes
        for newest in complete[-1:]:
            require_harmless(newest)
        say(launch.text())
        try:
            status = _follow(launch, say, record, stepped)
        finally:
            record(run)
    if status and _is_trained(launch):  # PyTorch may abort while it ends its threads, when all is written
        say(f"the engine ended with status {status} after its last checkpoint")
        return 0
    if status:
        raise_from_log(run, launch.about["parameters"])
    return status


def _is_trained(launch: Launch) -> bool:
    """Returns whether the checkpoint of the last step is complete."""
    complete = checkpoints.complete_checkpoints(launch.run)
    if not complete:
        return False
    step = int(complete[-1].name.removeprefix("step-"))
    return step >= launch.recipe["steps"] or _timed_out(launch, step)


def _timed_out(launch: Launch, step: int) -> bool:
    """Returns whether the time of a run ended with a step, as the engine writes after the checkpoint of this step."""
    metrics, seconds = launch.run / "metrics.jsonl", launch.recipe["seconds"]
    if seconds is None or not metrics.is_file():
        return False
    whole = [line for line in metrics.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
    rows = [row for line in whole if (row := json.loads(line))["name"] == "seconds" and row["step"] == step]
    return bool(rows) and bool(rows[-1]["value"] >= seconds)


def _write(launch: Launch) -> None:
    """Writes the recipe, `run.json` and, for Accelerate, the code. `run.json` comes last: it makes a folder a run."""
    if launch.engine == "accelerate":
        code = launch.run / "code" / PACKAGE
        code.mkdir(parents=True, exist_ok=True)
        for name, text in package().items():
            (code / name).write_text(text, encoding="utf-8")
    texts = {
        RECIPE_FILE: yaml.safe_dump(launch.recipe, sort_keys=False),
        "run.json": json.dumps(launch.about, indent=2, default=str) + "\n",
    }
    for name, text in texts.items():
        partial = launch.run / f".{name}"
        partial.write_text(text, encoding="utf-8")
        partial.replace(launch.run / name)


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Locks the run for this process and its children. Raises `InputError` if another process holds the lock."""
    with (run / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Transient(f"{run}: another process is training it") from None
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _follow(
    launch: Launch,
    say: Callable[[str], None],
    record: Callable[[Path], None],
    stepped: Callable[[int], None] | None,
) -> int:
    """Runs the engine with its output in `log.txt`, reports progress, and records the run. Returns the exit status."""
    metrics = launch.run / "metrics.jsonl"
    size = _whole_lines(metrics)
    extra = {
        launcher.VARIABLE: launcher.identity(os.getpid()) or "",
        **({} if launch.gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }
    with (launch.run / "log.txt").open("ab") as log, signals_raise():
        child = subprocess.Popen(
            launch.command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **launch.environment, **extra}
        )
        last_line = last_record = time.monotonic()
        try:
            with metrics.open("a+", encoding="utf-8") as lines:
                lines.seek(size)
                progress = Progress(launch.recipe)
                while child.poll() is None:
                    time.sleep(0.2)
                    before = progress.step
                    progress.read(lines)
                    if stepped is not None and progress.step > before:
                        stepped(progress.step)
                    now = time.monotonic()
                    if progress.news and (now - last_line > EVERY_SECONDS or progress.news_is_validation):
                        last_line = now
                        say(progress.line())
                    if now - last_record > RECORD_SECONDS:
                        last_record = now
                        _try(record, launch.run, say)
                progress.read(lines)
                if progress.news:
                    say(progress.line())
        except BaseException:
            end(child)
            raise
    return child.returncode


def _try(record: Callable[[Path], None], run: Path, say: Callable[[str], None]) -> None:
    """Records a run during its training. An error, such as that of a database that is away, must not end the run."""
    try:
        record(run)
    except Exception as error:
        say(f"the ledger was not brought up to date: {' '.join(str(error).split())}")


def _whole_lines(file: Path) -> int:
    """Cuts off a last line that a killed process did not finish, and returns the file's size."""
    if not file.exists():
        return 0
    size = file.read_bytes().rfind(b"\n") + 1
    os.truncate(file, size)
    return size
