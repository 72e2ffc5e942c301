"""Finds rules and tasks: in installed packages that announce them, in ./plugins, and in files that --plugin names."""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from deltalab.errors import InputError, unknown
from deltalab.gates import Gate
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
    module = _load(path)
    found = _in_module(module)
    if not found:
        unnamed = "".join(
            f'; {kind.__name__}{_line_of(kind)} needs `name: ClassVar[str] = "{kind.__name__.lower()}"`'
            for kind in _kinds(module)
        )
        raise InputError(f"{file}: defines no UpdateRule and no Task with a name{unnamed}")
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
        with torch.device("cpu"):  # gates compute numbers, and a tensor on the meta device has none
            return kind.configured(knobs)
    except InputError:
        raise
    except Exception as error:
        raise _not_made("rule", rule_plugin(name), error) from error


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
        raise _not_made("task", task_plugin(name), error) from error
    for label, other in evaluations.items():  # refuse before training what could not be evaluated
        if other.vocab_size != task.vocab_size:
            raise InputError(
                f"task '{name}': has {task.vocab_size} tokens and is evaluated, at '{label}', on {other.vocab_size}"
            )
    return task


def _not_made(what: str, plugin: Plugin, error: Exception) -> InputError:
    at = _line_in(plugin.file, error)
    where = f" ({plugin.file}{at})" if at else ""
    return InputError(
        f"{what} '{plugin.kind.name}'{where} cannot be made: {type(error).__name__}: {_first_line(error)}"
    )


def _find(kind: type, what: str, name: object) -> Plugin:
    if not isinstance(name, str):
        hint = f"; make one: {name.__name__}()" if isinstance(name, type) else ""
        raise InputError(f"takes a {what} or the name of one, such as '{min(_all(kind))}', not {name!r}{hint}")
    found = _all(kind)
    if name not in found:
        raise unknown(what, name, sorted(found))
    return found[name]


@cache
def _all(kind: type) -> dict[str, Plugin]:
    found: dict[str, Plugin] = {}
    with torch.device("cpu"):  # as in get_rule
        plugins = list(_everything())
    for plugin in plugins:
        if not issubclass(plugin.kind, kind):
            continue
        name = plugin.kind.name
        if name in found and found[name].kind is not plugin.kind:
            places = [f"{each.file}{_line_of(each.kind)}" for each in (found[name], plugin)]
            raise InputError(f"'{name}' is defined twice, in {places[0]} and in {places[1]}: rename one")
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
    for path in _files():
        yield from _in_module(_load(path))


def _files() -> list[Path]:
    """The files of ./plugins, and those that were named."""
    return [*sorted(Path("plugins").resolve().glob("*.py")), *_named_files]


def _in_module(module: ModuleType) -> list[Plugin]:
    found = []
    for kind in _kinds(module):
        file = Path(inspect.getfile(kind)).resolve()
        _read(file)
        if wrong := _wrong(kind):
            raise InputError(f"{file}{_line_of(kind)}: {kind.__name__}{wrong}")
        if hasattr(kind, "name"):
            found.append(Plugin(kind, file))
    return found


def _wrong(kind: type[UpdateRule] | type[Task]) -> str:
    """What is wrong with the declaration of a rule or a task; nothing if it is right."""
    if any(isinstance(field, dataclasses.Field) for field in vars(kind).values()):
        return " needs @dataclass(frozen=True, kw_only=True)"
    if issubclass(kind, Task):
        lacks = [name for name in _OF_A_TASK if hasattr(kind, "name") and not hasattr(kind, name)]
        return f" needs {', '.join(lacks)}" if lacks else ""
    for knob, options in kind.options().items():
        for option in options:
            if not _alike(option, options[0]):
                hint = ": for a number, write gates.const(...)" if isinstance(options[0], Gate) else ""
                return f".{knob}: the option {option!r} must be a {type(options[0]).__name__}, as {options[0]} is{hint}"
    return ""


def _kinds(module: ModuleType) -> list[type[UpdateRule] | type[Task]]:
    """The classes of rules and tasks that a module defines."""
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, UpdateRule | Task) and value.__module__ == module.__name__
    ]


def _alike(option: object, default: object) -> bool:
    """Whether a knob can have both: values of one type, or numbers."""
    numbers = (type(option), type(default)) in ((int, float), (float, int))
    return numbers or isinstance(option, type(default)) or isinstance(default, type(option))


def _line_of(kind: type) -> str:
    """`, line N` where a class is defined; nothing where its source is not known."""
    try:
        return f", line {inspect.getsourcelines(kind)[1]}"
    except OSError:
        return ""


@cache
def _read(file: Path) -> bytes:
    """The file as it was imported: an edit after the import must not change the hash of the code that runs."""
    return file.read_bytes()


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{path}: no such plugin file")
    name = _module_name(path)
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
        at, said = _line_in(path, error), error.msg if isinstance(error, SyntaxError) else _first_line(error)
        raise InputError(f"{path}{at}: does not import: {type(error).__name__}: {said}") from error
    return module


def _module_name(path: Path) -> str:
    return f"{_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


class _Unpickled(MetaPathFinder, Loader):
    """Imports the modules of plugin files by name, as unpickling does: a known file, which may have moved since."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith(_MODULE) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        stem = spec.name.removeprefix(_MODULE).rpartition("_")[0]
        found = [path for path in _files() if path.stem == stem]
        exact = [path for path in found if _module_name(path) == spec.name]
        if len(exact or found) != 1:
            known = "which is not known here" if not found else f"which may be any of {', '.join(map(str, found))}"
            raise ModuleNotFoundError(
                f"needs the plugin file {stem}.py, {known}: call deltalab.registry.add_plugin(FILE) first",
                name=spec.name,
            )
        return _load((exact or found)[0])

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: `create_module` returns a module that has run."""


sys.meta_path.append(_Unpickled())


def _line_in(path: Path, error: BaseException) -> str:
    """`, line N`: where an error came up in a file; nothing where it did not."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    return f", line {lines[-1]}" if lines else ""


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")
