"""Finds the code behind a name, `file.py:Name` or `package.Name`, and runs it only if its folder is trusted."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType

from torch import nn

from deltalab import trust
from deltalab.errors import InputError, unknown
from deltalab.plugin_files import first_line, import_file, import_guard

OURS = __name__.partition(".")[0]
"""The package whose modules, like the files of its rules, are trusted, and known by their file alone."""

_moved: dict[str, Path] = {}
"""Where the files of modules lie that are named by a path relative to the folder of another process."""


_beside: list[str] = []
"""The folders in which packages are looked for after all others, besides the folder where the command is given."""


def remember_place(name: str, file: Path) -> None:
    """Lets a module be found by the path of its file as another process had it, and trusts the folder of the file."""
    trust.for_now(file.parent)
    if ":" in name:
        _moved[name.rpartition(":")[0]] = file
        return
    folder = file.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    _beside.append(str(folder))


def maker(name: str) -> tuple[Callable[..., object], Path, str]:
    """Returns what makes a module, a class or a function, with its file and the version of its package.

    The version is empty for a module of a file, and for one of deltalab.

    Raises:
        InputError: Nothing of that name makes a module, or its folder is not trusted.
    """
    file_name, colon, attribute = name.rpartition(":")
    if colon:
        path = Path(file_name)
        path = (path if path.is_file() else _moved.get(file_name, path)).resolve()
        if path.is_file():
            trust.require(path, f"module '{name}' runs it")
        module = import_file(path)
        where = file_name
    else:
        where, _, attribute = name.rpartition(".")
        module = _imported(where, name)
    make = getattr(module, attribute, None)
    if not colon and callable(make):
        _require_module(name, make)
    if not callable(make):
        modules = [n for n, value in vars(module).items() if inspect.isclass(value) and issubclass(value, nn.Module)]
        raise unknown("module", attribute, modules, where=where)
    try:
        file = Path(inspect.getfile(make)).resolve()
    except TypeError:
        raise InputError(f"module '{name}' has no Python source") from None
    top = where.partition(".")[0]
    return make, file, "" if colon or top == OURS else _package(top)


def _require_module(name: str, make: Callable[..., object]) -> None:
    """Refuses a callable of an installed package that is no module, such as `subprocess.run`: a study would call it."""
    if inspect.isclass(make) and issubclass(make, nn.Module):
        return
    file = Path(str(getattr(sys.modules.get(make.__module__ or ""), "__file__", None) or "/"))
    if {"site-packages", "dist-packages"} & set(file.parts) or not trust.is_trusted(file.parent):
        raise InputError(
            f"module '{name}': is no torch.nn.Module; a function that makes one must lie in a file or a package of a "
            "trusted folder"
        )


def _imported(package: str, name: str) -> ModuleType:
    origin = None
    with _searching([os.getcwd(), *_beside]), suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package.partition(".")[0])
        origin = spec.origin if spec is not None else None
    file = Path(origin or "").resolve()
    # Installed packages may lie below the working folder, as those of a checkout's .venv do.
    installed = any(file.is_relative_to(Path(sysconfig.get_path(kind)).resolve()) for kind in ("purelib", "platlib"))
    beside = any(file.is_relative_to(Path(folder).resolve()) for folder in [os.getcwd(), *_beside])
    if file.is_file() and beside and not installed and package.partition(".")[0] != OURS:
        trust.require(file, f"module '{name}' runs it")
    try:
        with import_guard(), _searching([os.getcwd(), *_beside]):
            return importlib.import_module(package)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        if error.name and (package == error.name or package.startswith(f"{error.name}.")):
            attribute = name.rpartition(".")[2]
            raise InputError(
                f"'{name}' is neither a rule nor a module: no package '{error.name}' is installed; for a module of a "
                f"file, say file.py:{attribute}"
            ) from None
        raise InputError(f"module '{name}': package '{package}' needs '{error.name}', which is not installed") from None
    except BaseException as error:
        raise InputError(
            f"module '{name}': package '{package}' does not import: {type(error).__name__}: {first_line(error)}"
        ) from error


@contextmanager
def _searching(folders: list[str]) -> Iterator[None]:
    """Looks for modules in folders, too, after all others."""
    before = list(sys.path)
    sys.path.extend(folder for folder in folders if folder not in before)
    try:
        yield
    finally:
        sys.path[:] = before


def _package(top: str) -> str:
    """Returns the version of an installed package, or a hash of all its Python files if it lies elsewhere."""
    folders = [Path(path) for path in getattr(sys.modules[top], "__path__", [])]
    if any({"site-packages", "dist-packages"} & set(folder.parts) for folder in folders):
        names = packages_distributions().get(top, [])
        return " ".join(f"{name} {version(name)}" for name in sorted(set(names)))
    digest = hashlib.sha256()
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return f"{top} {digest.hexdigest()}"
