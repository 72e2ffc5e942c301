"""Keeps weights and checkpoints at a URL: in an object store or any other file system that fsspec knows.

A stack trains in a folder of the machine that it runs on. Each new checkpoint is copied to the URL at an evaluation, so
that any machine can go on with the stack. The weights are copied when the stack has ended.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from deltalab.errors import InputError
from deltalab.store import TrialRecord
from deltalab.study.workers import jobs
from deltalab.study.workers.jobs import Job, Lost, checkpoint_file
from deltalab.study.workers.worker import Watch, Worker

P = ParamSpec("P")
R = TypeVar("R")

EXTRAS = {"s3": "s3", "s3a": "s3"}
"""The extra of deltalab that installs what a kind of URL needs."""


def runs_at(storage: str) -> Path | str:
    """Reads `--storage`: an absolute folder, or the URL if it names no local folder.

    Raises:
        InputError: The URL is of a kind that is not known or not installed, or nothing can be written there.

    Examples:
        >>> runs_at("file:///shared/lab")
        PosixPath('/shared/lab')
    """
    if "://" not in storage:
        return Path(storage).resolve()
    if storage.startswith("file://"):
        return Path(storage.removeprefix("file://")).resolve()
    url = storage.rstrip("/")
    try:
        Remote(url).write("deltalab.txt", b"Weights and checkpoints of deltalab's studies.\n")
    except Exception as error:
        raise InputError(f"--storage {storage}: {_line(error)}") from None
    return url


def read(path: str) -> bytes:
    """Reads the bytes of an artifact.

    Raises:
        OSError: The artifact cannot be read.
        InputError: The artifact is at a URL whose kind is not installed.
    """
    if "://" not in path:
        return Path(path).read_bytes()
    folder, _, name = path.rpartition("/")
    return Remote(folder).read(name)


class Remote:
    """The folder at a URL. Errors of the file system pass through every method.

    Attributes:
        url: The URL.
    """

    def __init__(self, url: str) -> None:
        """Opens the file system. Raises `InputError` if it is not installed."""
        self.url, kind = url, url.partition("://")[0]
        try:
            self._files, self._root = url_to_fs(url, use_listings_cache=False)
        except ImportError:
            extra = EXTRAS.get(kind)
            needs = f"pip install 'deltalab[{extra}]'" if extra else known_implementations[kind]["err"]
            raise InputError(f"{kind}:// is not installed: {needs}") from None

    def write(self, name: str, data: bytes) -> None:
        """Writes a file."""
        self._files.pipe_file(f"{self._root}/{name}", data)

    def read(self, name: str) -> bytes:
        """Reads a file."""
        data: bytes = self._files.cat_file(f"{self._root}/{name}")
        return data

    def names(self, folder: str) -> set[str]:
        """The names of the files in a folder, which need not exist."""
        try:
            files = self._files.ls(f"{self._root}/{folder}", detail=False)
        except FileNotFoundError:
            return set()
        return {file.rpartition("/")[2] for file in files}

    def put(self, file: Path, name: str) -> None:
        """Copies a local file to the URL."""
        self._files.put_file(str(file), f"{self._root}/{name}")

    def get(self, name: str, file: Path) -> None:
        """Copies a file from the URL to a local file."""
        self._files.get_file(f"{self._root}/{name}", str(file))

    def remove(self, name: str) -> None:
        """Removes a file."""
        self._files.rm_file(f"{self._root}/{name}")


def make_worker(runs: Path | str, *, threads: int = 1, memory: int | None = None) -> Worker:
    """Makes a worker that keeps weights and checkpoints in a folder or at a URL.

    Args:
        runs: The folder or the URL.
        threads: The threads of a trial.
        memory: Bytes that a stack may use; None for the share of the only worker of this machine.
    """
    kind = Worker if isinstance(runs, Path) else RemoteWorker
    return kind(runs, threads=threads, memory=memory)  # type: ignore[arg-type]


def interrupted_stacks(runs: Path | str) -> list[tuple[str, ...]]:
    """Lists the stacks of several jobs that left a checkpoint but no result.

    A stack is a tuple of its jobs' keys.

    Args:
        runs: The folder or the URL of weights and checkpoints.
    """
    if isinstance(runs, Path):
        return jobs.interrupted_stacks_in(runs)
    remote = Remote(runs)
    names = remote.names("checkpoints")
    listed = sorted(name for name in names if name.endswith(".json") and name.replace(".json", ".pt") in names)
    return [tuple(json.loads(remote.read(f"checkpoints/{name}"))) for name in listed]


class RemoteWorker(Worker):
    """A worker that keeps weights and checkpoints at a URL. Raises `Lost` also if the URL cannot be reached."""

    def __init__(self, url: str, *, threads: int = 1, memory: int | None = None) -> None:
        """Makes a local folder, from which the worker's files are copied to the URL."""
        self._remote: Remote | None = None
        self._url = url
        # Each URL has one folder, so that the next worker uses or overwrites what a killed worker leaves behind.
        folder = Path(tempfile.gettempdir()) / f"deltalab-{os.getuid()}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise InputError(f"{folder}: belongs to another user")
        super().__init__(folder, threads=threads, memory=memory)

    def execute(
        self, stack: Sequence[Job], watch: Watch | None = None, between: Watch | None = None
    ) -> list[TrialRecord]:
        """Executes a stack as `Worker.execute` does, with its checkpoint and its weights at the URL."""
        checkpoint = checkpoint_file(stack, self.runs)
        files = [checkpoint] if len(stack) == 1 else [checkpoint, checkpoint.with_suffix(".json")]
        copied: float | None = None

        def watched(step: int) -> None:
            nonlocal copied
            if checkpoint.exists() and checkpoint.stat().st_mtime != copied:
                copied = checkpoint.stat().st_mtime
                for file in files:
                    self._reached(Remote.put, file, _name(file, self.runs))
            if watch is not None:
                watch(step)

        there = self._reached(Remote.names, "checkpoints")
        if checkpoint.name in there:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            self._reached(Remote.get, _name(checkpoint, self.runs), checkpoint)
        try:
            records = [self._kept(record) for record in super().execute(stack, watched, between or watch)]
        except Lost as lost:
            if lost.of == "trial":
                self._forget(files)
            raise
        self._forget(files)
        return records

    def _kept(self, record: TrialRecord) -> TrialRecord:
        """Moves a trial's weights to the URL, and puts their new places into the record."""
        runs = []
        for run in record.runs:
            artifacts = []
            for artifact in run.artifacts:
                file = Path(artifact.path)
                name = _name(file, self.runs)
                self._reached(Remote.put, file, name)
                file.unlink()
                artifacts.append(replace(artifact, path=f"{self._url}/{name}"))
            runs.append(replace(run, artifacts=artifacts))
        return replace(record, runs=runs)

    def _forget(self, files: Sequence[Path]) -> None:
        """Removes files here and at the URL."""
        there = self._reached(Remote.names, "checkpoints")
        for file in files:
            file.unlink(missing_ok=True)
            if file.name in there:
                self._reached(Remote.remove, _name(file, self.runs))

    def _reached(self, do: Callable[Concatenate[Remote, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a method of the remote folder; raises `Lost` if it fails."""
        try:
            if self._remote is None:
                self._remote = Remote(self._url)
            return do(self._remote, *args, **kwargs)
        except Exception as error:
            raise Lost(f"{self._url}: {_line(error)}", "infrastructure") from None


def _name(file: Path, runs: Path) -> str:
    """The name of a local file at the URL."""
    return file.relative_to(runs).as_posix()


def _line(error: Exception) -> str:
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
