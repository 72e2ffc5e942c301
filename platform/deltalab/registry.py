"""Finds rules and tasks: in installed packages that announce them, in ./plugins, and in files that --plugin names."""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.rule import UpdateRule
from deltalab.tasks import BUILTIN, Task

_named_files: list[Path] = []
_MODULE = "deltalab_plugin_"
"""The names of modules that are imported from plugin files begin so."""

_OF_A_TASK = ("version", "metric", "maximize")


@dataclass(frozen=True)
class Plugin:
    """A rule's or a task's class and the file that defines it, by which another process finds the same one."""

    kind: type[UpdateRule] | type[Task]
    file: Path

    @property
    def source(self) -> str:
        return _read(self.file).decode("utf-8", "replace")

    @property
    def hash(self) -> str:
        return hashlib.sha256(_read(self.file)).hexdigest()


def add_plugin(file: str | Path) -> list[Plugin]:
    """Makes the rules and tasks of a Python file known to this process, and returns them.

    Raises `InputError` for a file that is missing, does not import, or defines neither.
    """
    path = Path(file).resolve()
    found = _in_module(_load(path))
    if not found:
        raise InputError(f"{file}: defines no UpdateRule and no Task with a name")
    if path not in _named_files:
        _named_files.append(path)
        refresh()
    return found


def refresh() -> None:
    """Searches for plugins again on the next use, as is needed after a change of folder or of ./plugins."""
    _all.cache_clear()


@contextmanager
def isolated() -> Iterator[None]:
    """Searches for plugins and imports their files as a new process would; on leaving, it forgets them again."""
    named = list(_named_files)
    modules = {name: module for name, module in sys.modules.items() if name.startswith(_MODULE)}
    _forget()
    try:
        yield
    finally:
        _forget()
        _named_files.extend(named)
        sys.modules.update(modules)


def _forget() -> None:
    _named_files.clear()
    _read.cache_clear()
    refresh()
    for name in [name for name in sys.modules if name.startswith(_MODULE)]:
        del sys.modules[name]


def list_rules() -> list[str]:
    """The names of all rules.

    >>> "comba" in list_rules()
    True
    """
    return sorted(_all(UpdateRule))


def list_tasks() -> list[str]:
    """The names of all tasks."""
    return sorted(_all(Task))


def rule_plugin(name: str) -> Plugin:
    """The rule's class and file. Raises `InputError` for a name that no plugin has."""
    return _find(UpdateRule, "rule", name)


def task_plugin(name: str) -> Plugin:
    """The task's class and file. Raises `InputError` for a name that no plugin has."""
    return _find(Task, "task", name)


def get_rule(name: str, /, **knobs: object) -> UpdateRule:
    """A rule by name, with its knobs as YAML gives them.

    Raises `InputError` for a rule, a knob or an option that does not exist.

    >>> get_rule("comba", transition="iplr", d={"head": {"init": 1.0}}).transition.reads
    'decayed_state'
    """
    kind = rule_plugin(name).kind
    assert issubclass(kind, UpdateRule)
    try:
        return kind.configured(knobs)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"rule '{name}' cannot be made: {type(error).__name__}: {_first_line(error)}") from error


def get_task(name: str, /, **params: object) -> Task:
    """A task by name. Raises `InputError` for a task or a parameter that does not exist, or cannot be met.

    >>> get_task("mqar", length=16, pairs=2, vocab_size=32).batch("train", size=3, seed=0, step=0).inputs.shape
    torch.Size([3, 16])
    """
    kind: Any = task_plugin(name).kind
    allowed = inspect.signature(kind).parameters
    for given in params:
        if given not in allowed:
            raise unknown("parameter", given, allowed, where=f"task '{name}'")
    missing = [p.name for p in allowed.values() if p.default is p.empty and p.name not in params]
    if missing:
        raise InputError(f"task '{name}': needs {', '.join(missing)}")
    try:
        task: Task = kind(**params)
        evaluations = task.evaluations()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"task '{name}' cannot be made: {type(error).__name__}: {_first_line(error)}") from error
    for label, other in evaluations.items():  # refuse before training what could not be evaluated
        if other.vocab_size != task.vocab_size:
            raise InputError(
                f"task '{name}': has {task.vocab_size} tokens and is evaluated, at '{label}', on {other.vocab_size}"
            )
    return task


def _find(kind: type, what: str, name: str) -> Plugin:
    found = _all(kind)
    if name not in found:
        raise unknown(what, name, sorted(found))
    return found[name]


@cache
def _all(kind: type) -> dict[str, Plugin]:
    found: dict[str, Plugin] = {}
    for plugin in _everything():
        if not issubclass(plugin.kind, kind):
            continue
        name = plugin.kind.name
        if name in found and found[name].file != plugin.file:
            raise InputError(f"'{name}' is defined twice, in {found[name].file} and in {plugin.file}: rename one")
        found[name] = plugin
    return found


def _everything() -> Iterable[Plugin]:
    for task in BUILTIN.values():
        yield Plugin(task, Path(inspect.getfile(task)))
    for point in [*entry_points(group="deltalab.rules"), *entry_points(group="deltalab.tasks")]:
        package = point.load()
        yield from _in_module(package)
        for info in pkgutil.iter_modules(getattr(package, "__path__", [])):
            yield from _in_module(importlib.import_module(f"{package.__name__}.{info.name}"))
    for path in [*sorted(Path("plugins").resolve().glob("*.py")), *_named_files]:
        yield from _in_module(_load(path))


def _in_module(module: ModuleType) -> list[Plugin]:
    found = []
    for value in vars(module).values():
        if inspect.isclass(value) and issubclass(value, UpdateRule | Task) and value.__module__ == module.__name__:
            file = Path(inspect.getfile(value)).resolve()
            _read(file)
            if any(isinstance(field, dataclasses.Field) for field in vars(value).values()):
                raise InputError(f"{file}: {value.__name__} needs @dataclass(frozen=True, kw_only=True)")
            if hasattr(value, "name"):
                lacks = [name for name in _OF_A_TASK if issubclass(value, Task) and not hasattr(value, name)]
                if lacks:
                    raise InputError(f"{file}: {value.__name__} needs {', '.join(lacks)}")
                found.append(Plugin(value, file))
    return found


@cache
def _read(file: Path) -> bytes:
    """The file as it was imported: an edit after the import must not change the hash of the code that runs."""
    return file.read_bytes()


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{path}: no such plugin file")
    name = f"{_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"{path}: does not import: {type(error).__name__}: {_first_line(error)}") from error
    return module


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")
