"""Finds rules and tasks in installed packages that announce them, in ./plugins, and in the files given by --plugin.

Files of ./plugins, and modules that a study or an export names, run only if their folder is trusted (`deltalab.trust`).
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from deltalab import trust
from deltalab.errors import InputError, unknown
from deltalab.gates import Gate
from deltalab.module_files import maker, remember_place
from deltalab.own_module import is_path, of_module
from deltalab.plugin_files import (
    MODULE,
    first_line,
    import_file,
    import_guard,
    line_in,
    module_name,
    source_bytes,
    source_hash,
)
from deltalab.rule import UpdateRule
from deltalab.tasks import BUILTIN, Task
from deltalab.tasks.task import MOST_LENGTH, MOST_VOCABULARY

_named_files: list[Path] = []
"""The files that were given to `add_plugin`."""
_broken: list[str] = []
"""One line for each plugin that was left out, with its error."""
_duplicates: dict[str, str] = {}
"""Each name that two plugins claim, with the error to raise if the name is used."""
_rule_cache: dict[tuple[type, str] | None, UpdateRule] = {}
"""Rules that were made, by class and knobs.

A search asks for the same rules thousands of times, and making a rule takes 1 to 2 ms.
"""
MOST_CACHED = 1024
"""The number of rules at which `_rule_cache` is emptied."""
_NAME = re.compile(r"\w[\w.-]{0,99}")
_OF_A_TASK = ("version", "metric", "maximize")


@dataclass(frozen=True)
class Plugin:
    """The class of a rule or a task, and the file that defines it. Another process finds the class by this file.

    Attributes:
        package: For a module of an installed package, its version, or a hash of its files if they may change.
    """

    kind: type[UpdateRule] | type[Task]
    file: Path
    package: str = ""

    @property
    def source(self) -> str:
        """The text of the file as it was imported."""
        return source_bytes(self.file).decode("utf-8", "replace")

    @property
    def hash(self) -> str:
        """The SHA-256 of the file as it was imported, without the lines of `published`, which no trial depends on."""
        digest = source_hash(source_bytes(self.file))
        return hashlib.sha256(f"{digest} {self.package}".encode()).hexdigest() if self.package else digest


def add_plugin(file: str | Path) -> list[Plugin]:
    """Registers the rules and tasks that a Python file defines for this process, and returns them.

    Raises:
        InputError: The file is missing, does not import, or defines neither a rule nor a task.
    """
    path = Path(file).resolve()
    module = import_file(path)
    plugins = _in_module(module)
    if not plugins:
        unnamed = "".join(
            f'; {kind.__name__}{_line_of(kind)} needs `name: ClassVar[str] = "{kind.__name__.lower()}"`'
            for kind in _kinds(module)
        )
        raise InputError(f"{file}: defines no UpdateRule and no Task with a name{unnamed}")
    if path not in _named_files:
        _named_files.append(path)
        refresh()
    return plugins


def named_files() -> list[str]:
    """Returns the files that `add_plugin` took."""
    return [*map(str, _named_files)]


def refresh() -> None:
    """Forgets the plugins that were found, so that the next use of a rule or task searches again.

    Call this function after a change of the working folder or of ./plugins.
    """
    _all.cache_clear()
    _plugins.cache_clear()
    _module_plugin.cache_clear()
    _rule_cache.clear()
    _broken.clear()
    _duplicates.clear()


def left_out() -> list[str]:
    """Returns one line for each plugin that was left out, with its error. Before the first search there are none."""
    return list(dict.fromkeys([*_broken, *_duplicates.values()]))


@contextmanager
def isolated() -> Iterator[None]:
    """Starts without known plugins, as a new process does, and forgets at the end the plugins that were found."""
    files = list(_named_files)
    modules = {name: module for name, module in sys.modules.items() if name.startswith(MODULE)}
    _forget()
    try:
        yield
    finally:
        _forget()
        _named_files.extend(files)
        sys.modules.update(modules)


def _forget() -> None:
    _named_files.clear()
    source_bytes.cache_clear()
    refresh()
    for name in [name for name in sys.modules if name.startswith(MODULE)]:
        del sys.modules[name]


def list_rules() -> list[str]:
    """Returns the names of all rules.

    Examples:
        >>> "comba" in list_rules()
        True
    """
    return sorted(_all(UpdateRule))


def list_tasks() -> list[str]:
    """Returns the names of all tasks."""
    return sorted(_all(Task))


def rule_plugin(name: str) -> Plugin:
    """Returns the class and the file of a rule, or of a module that stands for one: see `own_module`.

    Raises:
        InputError: No plugin has this name, or no module is found by it.
    """
    if is_path(name) and name not in _all(UpdateRule):
        return _module_plugin(name)
    return _find(UpdateRule, "rule", name)


def task_plugin(name: str) -> Plugin:
    """Returns the class and the file of a task.

    Raises:
        InputError: No plugin has this name.
    """
    return _find(Task, "task", name)


def get_rule(name: str, /, **knobs: object) -> UpdateRule:
    """Returns a rule by name.

    Args:
        name: The name of the rule.
        **knobs: The knobs to set, each with its option as YAML writes it. All other knobs have their defaults.

    Raises:
        InputError: The rule, a knob or an option does not exist.

    Examples:
        >>> get_rule("comba", transition="iplr", d={"head": {"init": 1.0}}).transition.reads
        'decayed_state'
    """
    if isinstance(name, str) and "@" in name:
        plain = name.partition("@")[0]
        raise InputError(f"'{name}' sets a rule and the layer around it, and here a rule alone is wanted: say {plain}")
    kind = rule_plugin(name).kind
    assert issubclass(kind, UpdateRule)
    try:
        key = kind, json.dumps(knobs, sort_keys=True)
    except (TypeError, ValueError, RecursionError):  # a `Gate` instead of YAML, or a value that is refused below
        key = None
    if key in _rule_cache:
        return _rule_cache[key]
    try:
        with torch.device("cpu"):  # gates compute numbers, which a tensor on the meta device does not have
            rule = kind.configured(knobs)
    except InputError:
        raise
    except Exception as error:
        raise _not_made("rule", rule_plugin(name), error) from error
    if key is not None:
        if len(_rule_cache) >= MOST_CACHED:
            _rule_cache.clear()
        _rule_cache[key] = rule
    return rule


def add_module(name: str, file: str | Path) -> Plugin:
    """Finds a module `file.py:Name` by the path of its file as another process had it, and returns its plugin.

    The folder of the file is trusted in this process, since its caller names the file.
    """
    remember_place(name, Path(file))
    _module_plugin.cache_clear()
    return rule_plugin(name)


@cache
def _module_plugin(name: str) -> Plugin:
    """Returns the plugin of a module `file.py:Name` or `package.Name`: a class, or a function that makes a module."""
    make, file, package = maker(name)
    source_bytes(file)
    return Plugin(of_module(name, make), file, package)


def get_task(name: str, /, **params: object) -> Task:
    """Returns a task by name.

    Args:
        name: The name of the task.
        **params: The parameters to set, as a study file writes them. All other parameters have their defaults.

    Raises:
        InputError: The task or a parameter does not exist, or a parameter has a value that the task does not take.

    Examples:
        >>> get_task("mqar", length=16, pairs=2, vocab_size=32).batch("train", size=3, seed=0, step=0).inputs.shape
        torch.Size([3, 16])
    """
    kind: Any = task_plugin(name).kind
    allowed = inspect.signature(kind).parameters
    for parameter in params:
        if parameter not in allowed:
            raise unknown("parameter", parameter, allowed, where=f"task '{name}'")
    missing = [p.name for p in allowed.values() if p.default is p.empty and p.name not in params]
    if missing:
        raise InputError(f"needs {', '.join(missing)}", where=f"task '{name}'", key=missing[0])
    try:
        task: Task = kind(**params)
        evaluations = task.evaluations()
    except InputError:
        raise
    except Exception as error:
        raise _not_made("task", task_plugin(name), error) from error
    for label, other in {"": task, **evaluations}.items():  # check before a training whose evaluation would fail
        for size_name, most in (("length", MOST_LENGTH), ("vocab_size", MOST_VOCABULARY)):
            if (size := getattr(other, size_name)) > most:
                place = f", at '{label}'," if label else ""
                raise InputError(f"task '{name}': {size_name}{place} is {size:,}, and at most {most:,}")
        if other.vocab_size != task.vocab_size:
            raise InputError(
                f"task '{name}': has {task.vocab_size} tokens and is evaluated, at '{label}', on {other.vocab_size}"
            )
    return task


def _not_made(noun: str, plugin: Plugin, error: Exception) -> InputError:
    line = line_in(plugin.file, error)
    where = f" ({plugin.file}{line})" if line else ""
    return InputError(f"{noun} '{plugin.kind.name}'{where} cannot be made: {type(error).__name__}: {first_line(error)}")


def _find(kind: type, noun: str, name: object) -> Plugin:
    if not isinstance(name, str):
        hint = f"; make one: {name.__name__}()" if isinstance(name, type) else ""
        raise InputError(f"takes a {noun} or the name of one, such as '{min(_all(kind))}', not {name!r}{hint}")
    plugins = _all(kind)
    if name in _duplicates:
        raise InputError(_duplicates[name])
    if name not in plugins:
        hints = "".join(f"; left out: {line}" for line in left_out())
        wrong = unknown(noun, name, sorted(plugins))
        raise InputError(f"{wrong}{hints}") from wrong
    return plugins[name]


@cache
def _all(kind: type) -> dict[str, Plugin]:
    plugins: dict[str, Plugin] = {}
    duplicates: dict[str, str] = {}
    for plugin in _plugins():
        if not issubclass(plugin.kind, kind):
            continue
        name = plugin.kind.name
        if name in plugins and plugins[name].kind is not plugin.kind:
            places = [f"{other.file}{_line_of(other.kind)}" for other in (plugins[name], plugin)]
            duplicates[name] = f"'{name}' is defined twice, in {places[0]} and in {places[1]}: rename one"
            if plugin.file in _named_files:
                raise InputError(duplicates[name])
        plugins.setdefault(name, plugin)
    _duplicates.update(duplicates)
    return {name: plugin for name, plugin in plugins.items() if name not in duplicates}


@cache
def _plugins() -> tuple[Plugin, ...]:
    """Returns all rules and tasks. A broken plugin is left out, and its error goes to `_broken`."""
    plugins = [Plugin(task, Path(inspect.getfile(task))) for task in BUILTIN.values()]
    for point in [*entry_points(group="deltalab.rules"), *entry_points(group="deltalab.tasks")]:
        with _noting_errors(f"package {point.value}"), import_guard():
            package = point.load()
            plugins += _in_module(package)
            names = [
                f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(getattr(package, "__path__", []))
            ]
            for name in names:
                with _noting_errors(f"module {name}"):
                    plugins += _in_module(importlib.import_module(name))
    for path in _files():
        with nullcontext() if path in _named_files else _noting_errors(str(path)):
            plugins += _in_module(import_file(path))
    return tuple(plugins)


@contextmanager
def _noting_errors(source: str) -> Iterator[None]:
    """Catches an error, and adds it to `_broken` with the name of the source that caused it."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        message = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {first_line(error)}"
        _broken.append(message if message.startswith(source) else f"{source}: {message}")


def _files() -> list[Path]:
    """Returns the files in ./plugins, if that folder is trusted, and the files that were given to `add_plugin`."""
    found = sorted(Path("plugins").resolve().glob("*.py"))
    if found and not trust.is_trusted(found[0].parent):
        folder, names = found[0].parent, ", ".join(file.name for file in found[:5])
        _broken.append(
            f"{folder}: not run: {names}{' and more' if found[5:] else ''}: the folder is not trusted; read these "
            f"files, then `deltalab trust {folder}` lets them run"
        )
        found = []
    return [*found, *_named_files]


def _in_module(module: ModuleType) -> list[Plugin]:
    plugins = []
    for kind in _kinds(module):
        file = Path(inspect.getfile(kind)).resolve()
        source_bytes(file)
        if error := _declaration_error(kind):
            raise InputError(f"{file}{_line_of(kind)}: {kind.__name__}{error}")
        if hasattr(kind, "name"):
            if not isinstance(kind.name, str) or not _NAME.fullmatch(kind.name):
                place = f"{file}{_line_of(kind)}: {kind.__name__}"
                raise InputError(f"{place}: a name has letters, digits, '_', '.' and '-', and not {kind.name!r:.100}")
            plugins.append(Plugin(kind, file))
    return plugins


def _declaration_error(kind: type[UpdateRule] | type[Task]) -> str:
    """Returns the error in the declaration of a rule or a task; empty if there is none."""
    if any(isinstance(field, dataclasses.Field) for field in vars(kind).values()):
        return " needs @dataclass(frozen=True, kw_only=True)"
    if issubclass(kind, Task):
        missing = [name for name in _OF_A_TASK if hasattr(kind, "name") and not hasattr(kind, name)]
        return f" needs {', '.join(missing)}" if missing else ""
    for knob, options in kind.options().items():
        for option in options:
            if not _same_type(option, options[0]):
                hint = ": for a number, write gates.const(...)" if isinstance(options[0], Gate) else ""
                return f".{knob}: the option {option!r} must be a {type(options[0]).__name__}, as {options[0]} is{hint}"
    return ""


def _kinds(module: ModuleType) -> list[type[UpdateRule] | type[Task]]:
    """Returns the classes of rules and tasks that a module defines."""
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, UpdateRule | Task) and value.__module__ == module.__name__
    ]


def _same_type(option: object, default: object) -> bool:
    """Returns whether one knob can have both values, because they have the same type or are both numbers."""
    numbers = (type(option), type(default)) in ((int, float), (float, int))
    return numbers or isinstance(option, type(default)) or isinstance(default, type(option))


def _line_of(kind: type) -> str:
    """Returns `, line N` for the line where a class is defined; empty if its source is not known."""
    try:
        return f", line {inspect.getsourcelines(kind)[1]}"
    except OSError:
        return ""


class _PluginFinder(MetaPathFinder, Loader):
    """Imports the module of a plugin file by its name, for unpickling. The file may have moved since the pickling."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith(MODULE) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        stem = spec.name.removeprefix(MODULE).rpartition("_")[0]
        candidates = [path for path in _files() if path.stem == stem]
        exact = [path for path in candidates if module_name(path) == spec.name]
        if len(exact or candidates) != 1:
            reason = (
                "which is not known here"
                if not candidates
                else f"which may be any of {', '.join(map(str, candidates))}"
            )
            raise ModuleNotFoundError(
                f"needs the plugin file {stem}.py, {reason}: call deltalab.registry.add_plugin(FILE) first",
                name=spec.name,
            )
        return import_file((exact or candidates)[0])

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: `create_module` returns a module that has run."""


sys.meta_path.append(_PluginFinder())
