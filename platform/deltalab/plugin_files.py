"""Imports the file of a plugin once, in a module of its own, and keeps a file from stopping the process that asks."""

import ast
import hashlib
import importlib.util
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from deltalab.errors import InputError, missing_file

MODULE = "deltalab_plugin_"
"""The prefix of the name of every module that is imported from a plugin file."""

IMPORT_SECONDS = 20.0
"""The longest time that the import of a plugin file may take."""

TRIES = 3
"""How often an import in a forked process is tried if the process is killed. The cause may be another than the file."""

FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
"""The signals that come from outside of a process, not from the file that it imports."""

watched = False
"""Whether another process watches this one and ends it if an import does not end; a worker's child sets it."""


def import_file(path: Path) -> ModuleType:
    """Returns the module of a plugin file, which is imported once in a process.

    Raises:
        InputError: There is no such file, or it does not import.
    """
    if not path.is_file():
        raise missing_file(path, "plugin file")
    name = module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get("__file__") == str(path):
            return module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)

    def execute() -> None:
        sys.modules[name] = module
        with import_guard():
            spec.loader.exec_module(module)  # type: ignore[union-attr]

    _require_end(path, execute)
    try:
        execute()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        sys.modules.pop(name, None)
        line, message = line_in(path, error), error.msg if isinstance(error, SyntaxError) else first_line(error)
        problem = f"does not import: {type(error).__name__}: {message}"
        raise InputError(problem, where=f"{path}{line}") from error
    sys.modules[name] = module
    return module


def _require_end(path: Path, execute: Callable[[], None]) -> None:
    """Raises `InputError` if the import of a file does not end, or ends the process.

    A forked process imports the file first, once for each version of the file. There is no fork if there are threads,
    as in a notebook, because a fork may stop a thread while it holds a lock.
    """
    if watched or not hasattr(os, "fork") or threading.active_count() > 1 or "ray" in sys.modules:
        return
    verdict_file = _verdict_file(path)
    try:
        problem = verdict_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        problems = (_import_in_fork(execute) for _ in range(TRIES))
        first = next((first for first in problems if first is not None), None)
        if first is None:
            raise InputError(f"{path}: does not import: something kills the process that imports it") from None
        problem = first
        with suppress(OSError):
            verdict_file.parent.mkdir(parents=True, exist_ok=True)
            verdict_file.write_text(problem, encoding="utf-8")
    if problem:
        raise InputError(f"{path}: does not import: {problem} (to try it again, delete {verdict_file})")


def _import_in_fork(execute: Callable[[], None]) -> str | None:
    """Runs an import in a forked process, and returns an error if the import does not end.

    The error is empty if the import ends, with or without an exception. It is None if one of the signals `FROM_OUTSIDE`
    killed the process.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        report = b"ended"
        try:
            os.close(reader)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(null, stream)
            execute()
        except KeyboardInterrupt:
            report = b"KeyboardInterrupt"
        finally:
            os.write(writer, report)
            os._exit(0)
    os.close(writer)
    try:
        late = not select.select([reader], [], [], IMPORT_SECONDS)[0]
        report = b"" if late else os.read(reader, 100)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if late:
        return f"it takes over {IMPORT_SECONDS:g} s"
    if report:
        return "" if report == b"ended" else report.decode()
    code = os.waitstatus_to_exitcode(status)
    if -code in FROM_OUTSIDE:
        return None
    return f"it ends the process, with {f'exit code {code}' if code >= 0 else signal.Signals(-code).name}"


def _verdict_file(path: Path) -> Path:
    """Returns the file that keeps whether an import ends: $XDG_CACHE_HOME/deltalab/imports/KEY, or below ~/.cache."""
    inputs = f"{sys.version} {path}\n".encode("utf-8", "surrogateescape") + path.read_bytes()
    key = hashlib.sha256(inputs).hexdigest()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "deltalab" / "imports" / key


def module_name(path: Path) -> str:
    """Returns the name of the module that a plugin file becomes."""
    return f"{MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


@contextmanager
def import_guard() -> Iterator[None]:
    """Guards the import of a plugin. Output of the plugin goes to stderr, and modules that it removes are restored."""
    modules = dict(sys.modules)
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)  # for output that does not go through Python's sys.stdout
        with redirect_stdout(sys.stderr), torch.device("cpu"):  # as in get_rule
            yield
            sys.stderr.flush()
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        for name, module in modules.items():
            sys.modules.setdefault(name, module)


def source_hash(source: bytes) -> str:
    """Returns the SHA-256 of a plugin's source without the lines of `published`, which no trial depends on."""
    return hashlib.sha256(_without_presets(source)).hexdigest()


@cache
def _without_presets(source: bytes) -> bytes:
    """Returns the source of a plugin without the statements that set `published` in a class."""
    lines = source.splitlines(keepends=True)
    for kind in ast.parse(source).body:
        for statement in kind.body if isinstance(kind, ast.ClassDef) else ():
            targets = statement.targets if isinstance(statement, ast.Assign) else ()
            if any(isinstance(target, ast.Name) and target.id == "published" for target in targets):
                for line in range(statement.lineno - 1, statement.end_lineno or 0):
                    lines[line] = b""
    return b"".join(lines)


@cache
def source_bytes(file: Path) -> bytes:
    """Returns the bytes of a file as it was imported.

    An edit of the file after its import must not change the hash of the code that runs.
    """
    return file.read_bytes()


def line_in(path: Path, error: BaseException) -> str:
    """Returns `, line N` for the line of `path` that raised an error; empty if the error came from another file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    return f", line {lines[-1]}" if lines else ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), "")
