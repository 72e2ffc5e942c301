"""Checks a rule's file that a program wrote in a process of its own, so that it can harm nothing but its own verdict.

The process has a time limit, prints to nowhere, and works in a folder that is removed afterwards. Code of the file that
writes outside of this folder or starts a process gets a `PermissionError`, and so fails the check that ran it. This
stops mistakes of a program. It is no wall against code that is meant to get out, such as C code by ctypes.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 300.0
"""How long all checks of a file may take; on two busy cores they take about a minute."""
_RESULT = "verdict.json"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NO_FOLDER = -1
"""What stands in an audit event in place of an open folder, from which a path would begin."""
_CHANGING = ("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink")
_STARTING = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn")
_ELSEWHERE = (*_STARTING, "subprocess.Popen", "socket.connect", "os.kill", "os.killpg")


@dataclass(frozen=True)
class Quarantined:
    """What became of a file in quarantine.

    Attributes:
        rule: The name of the file's only rule; None if it has none, or could not be read.
        problem: Why the file is refused, in one line; None if its rule passed all checks.
    """

    rule: str | None
    problem: str | None


def quarantined(file: Path, seconds: float = SECONDS) -> Quarantined:
    """Checks the rule of a file in a process of its own, and keeps the verdict for studies.

    Args:
        file: The file, which defines one rule.
        seconds: How long the checks may take. Then the process and all that it started end.
    """
    with tempfile.TemporaryDirectory(prefix="deltalab-check-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, str(file.absolute())],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return Quarantined(None, f"its checks did not end within {seconds:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        try:
            return Quarantined(**json.loads((Path(folder) / _RESULT).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return Quarantined(None, f"its checks ended without a verdict, with exit code {process.returncode}")


def _guard(file: str, folder: str) -> None:
    """Refuses from now on what the code of a file does outside of a folder. Processes that are forked inherit this."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not (isinstance(flags, int) and flags & _WRITING) or _inside(path):
                return
            what = f"writes {path!r:.100}, outside of its folder"
        elif event in _CHANGING:
            paths = [path for path in arguments if not isinstance(path, int)]
            descriptors = arguments[len(paths) :] if event in ("os.link", "os.rename") else arguments[-1:]
            if all(map(_inside, paths)) and all(folder == _NO_FOLDER for folder in descriptors):
                return
            what = f"changes {paths[-1]!r:.100}, outside of its folder"
        elif event in _ELSEWHERE:
            what = "starts a process or a connection"
        else:
            return
        if _of_the_file():
            raise PermissionError(f"the rule's file {what} ({event})")

    def _of_the_file() -> bool:
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == file:
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def _inside(path: Any) -> bool:
        if isinstance(path, int):
            return True
        real = os.path.realpath(os.fsdecode(path))
        return real == os.devnull or os.path.commonpath([real, folder]) == folder

    sys.addaudithook(refuse)


def _main(file: str) -> None:
    """Checks the file and writes the result into the working folder."""
    from deltalab.authoring.verdict import checked, keep
    from deltalab.errors import InputError, one_line
    from deltalab.registry import add_plugin
    from deltalab.rule import UpdateRule

    folder = os.path.realpath(os.getcwd())
    _guard(file, folder)
    rule, problem = None, None
    try:
        names = [plugin.kind.name for plugin in add_plugin(file) if issubclass(plugin.kind, UpdateRule)]
        if len(names) == 1:
            (rule,) = names
            failed = keep(rule, checked(rule)).failed
            problem = f"fails the check '{failed[0][0]}': {failed[0][1]}" if failed else None
        else:
            problem = f"defines {', '.join(names) or 'no rule'}: a proposal is one rule"
    except InputError as error:
        problem = str(error).removeprefix(f"{file}: ")
    result = {"rule": rule, "problem": problem and one_line(problem)}
    (Path(folder) / _RESULT).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1])
