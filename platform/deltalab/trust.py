"""Which folders a user trusts: Python files of other folders do not run unless the user names them in the command.

A trusted folder is recorded once under the user's configuration, or named by the environment variable `DELTALAB_TRUST`.
The folders below it are trusted, too.
"""

import os
from pathlib import Path

from deltalab.errors import InputError

VARIABLE = "DELTALAB_TRUST"
"""The environment variable that names trusted folders, as PATH names folders: for machines without a user to ask."""

_named: list[Path] = []
"""The folders that are trusted by this process alone."""


def configuration() -> Path:
    """Returns the folder of the user's configuration: in $XDG_CONFIG_HOME, or else ~/.config."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "deltalab"


def recorded_in() -> Path:
    """Returns the file that lists trusted folders, one a line."""
    return configuration() / "trusted"


def is_trusted(folder: Path) -> bool:
    """Returns whether the Python files of a folder may run."""
    folder = folder.resolve()
    listed = [Path(text).resolve() for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text]
    return any(folder.is_relative_to(trusted) for trusted in [*_named, *listed, *map(Path, _recorded())])


def record(folder: Path) -> None:
    """Trusts a folder from now on.

    Raises:
        InputError: It is no folder, or the record cannot be written.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name the folder whose Python files may run")
    text, file = str(folder.resolve()), recorded_in()
    if "\n" in text:
        raise InputError(f"{folder!r}: a folder whose name has a line break cannot be recorded")
    if text not in (known := _recorded()):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"{line}\n" for line in [*known, text]), encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"{file}: cannot be written: {error.strerror}; {VARIABLE}={text} trusts the folder, too"
            ) from None


def for_now(folder: Path) -> None:
    """Trusts a folder in this process."""
    _named.append(folder.resolve())


def require(file: Path, why: str) -> None:
    """Raises `InputError` if a Python file would run that lies in no trusted folder.

    Args:
        file: The file.
        why: What runs it, for the message.
    """
    if not is_trusted(file.parent):
        mend = f"read it, then `deltalab trust {file.parent}` lets it run"
        raise InputError(f"{why}, and its folder is not trusted", where=str(file), mend=mend)


def _recorded() -> list[str]:
    try:
        return [line for line in recorded_in().read_text(encoding="utf-8").splitlines() if line]
    except FileNotFoundError:
        return []
