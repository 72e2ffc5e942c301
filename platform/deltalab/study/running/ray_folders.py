"""A folder for each local Ray of ours, and its removal: by the driver that made it, or by a later one if it was killed.

Ray keeps sockets and logs in a temporary folder, and two agents of a killed driver live on for a minute. So each driver
gives Ray a folder of its own, with a file that says whose it is. Nothing else in the temporary directory is touched:
neither a Ray that somebody else started, nor a folder of another user, nor one whose driver lives or cannot be seen.
"""

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from deltalab.errors import InputError
from deltalab.store.process import Process

PREFIX = "deltalab-"
OWNER = "driver.json"


def temporary() -> Path:
    """The folder that Ray's folders are made in. Raises `InputError` where RAY_TMPDIR names none."""
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    if not base.is_dir():
        raise InputError(f"RAY_TMPDIR: there is no folder {base}")
    return base


@contextmanager
def ray_folder() -> Iterator[Path]:
    """A folder for the files of a local Ray, which is to be shut down before this block ends; then it is removed.

    First removes what killed drivers of this user left on this machine.
    """
    base = temporary()
    sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    try:
        (folder / OWNER).write_text(json.dumps(asdict(Process.here())))
        yield folder
    finally:
        _remove(folder)


def sweep(base: Path) -> None:
    """Removes the folders in `base` whose drivers, of this user and machine, are gone, with Ray's processes there."""
    for file in base.glob(f"{PREFIX}*/{OWNER}"):
        with suppress(OSError, ValueError, TypeError):  # another driver removes it now, or it is not our file
            if file.stat().st_uid == os.getuid() and Process(**json.loads(file.read_text())).lives is False:
                _remove(file.parent)


def _remove(folder: Path) -> None:
    for pid in _of_ray(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # The owner's file goes last: a removal that is cut off must be tried again.
    for entry in [entry for entry in folder.iterdir() if entry.name != OWNER]:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _of_ray(folder: Path) -> list[int]:
    """Processes of Ray that have a file in the folder open. Only Linux lists them; elsewhere they end by themselves."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            files = [os.readlink(file) for file in (process / "fd").iterdir()]
        except OSError:  # it has ended, or is another user's
            continue
        ours = any(Path(file).is_relative_to(folder) for file in files)
        if ours and int(process.name) != os.getpid() and (command.startswith(b"ray::") or b"/ray/" in command):
            found.append(int(process.name))
    return found
