"""Makes folders for the local Rays that drivers start, and removes them.

Ray keeps sockets and logs in a temporary folder, and two agents of a killed driver live on for a minute. So each driver
gives Ray a separate folder, with a file that says which driver made it. The driver removes the folder at its end, or a
later driver does if the first was killed. Nothing else in the temporary directory is touched: neither a Ray that
somebody else started, nor a folder of another user, nor a folder whose driver lives or cannot be seen.
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
"""How the name of a folder for Ray begins."""
OWNER = "driver.json"
"""The name of the file in a folder for Ray that says which driver made the folder."""


def temporary() -> Path:
    """The folder in which folders for Ray are made. Raises `InputError` if RAY_TMPDIR names no folder."""
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()).absolute()
    if not base.is_dir():
        raise InputError(f"RAY_TMPDIR: there is no folder {base}")
    return base


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Makes a folder for the files of a local Ray, and removes it at the end of the block.

    Ray must be shut down before the block ends. First of all, the folders are removed that killed drivers of this user
    left on this machine.
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
    """Removes folders in `base` whose driver (of this user and machine) is gone, and ends the Rays that use them."""
    for file in base.glob(f"{PREFIX}*/{OWNER}"):
        # Another driver may be removing the folder now, or the file may be of another program.
        with suppress(OSError, ValueError, TypeError):
            if file.stat().st_uid == os.getuid() and Process(**json.loads(file.read_text())).lives is False:
                _remove(file.parent)


def _remove(folder: Path) -> None:
    """Ends the processes of Ray that use a folder, and removes the folder."""
    for pid in _of_ray(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # The owner's file goes last, so that a removal that is cut off is tried again.
    for entry in [entry for entry in folder.iterdir() if entry.name != OWNER]:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _of_ray(folder: Path) -> list[int]:
    """Processes of Ray with an open file in the folder. Only Linux lists them; elsewhere they end by themselves."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            files = [os.readlink(file) for file in (process / "fd").iterdir()]
        except OSError:  # The process has ended, or is another user's.
            continue
        inside = any(Path(file).is_relative_to(folder) for file in files)
        if inside and int(process.name) != os.getpid() and (command.startswith(b"ray::") or b"/ray/" in command):
            pids.append(int(process.name))
    return pids
