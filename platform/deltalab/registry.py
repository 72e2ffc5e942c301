"""Finds rules and tasks: in installed packages that announce them, in ./plugins, and in files that --plugin names."""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
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
from deltalab.tasks.task import MOST_LENGTH, MOST_VOCABULARY

_named_files: list[Path] = []
_MODULE = "deltalab_plugin_"
"""The names of modules that are imported from plugin files begin so."""

IMPORT_SECONDS = 20.0
"""How long the import of a plugin file may take."""

_broken: list[str] = []
"""What is wrong with the plugins that were left out, a line for each."""
_twice: dict[str, str] = {}
"""Names that two plugins have -> which."""
_made: dict[tuple[type, str] | None, UpdateRule] = {}
"""Rules by class and knobs. A search makes the same ones thousands of times, at 1 to 2 ms each."""
MOST_MADE = 1024
_NAME = re.compile(r"\w[\w.-]{0,99}")
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
    _everything.cache_clear()
    _made.clear()
    _broken.clear()
    _twice.clear()


def left_out() -> list[str]:
    """What is wrong with the plugins that were left out, a line for each; none before rules or tasks were asked for."""
    return list(dict.fromkeys([*_broken, *_twice.values()]))


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
        made = kind, json.dumps(knobs, sort_keys=True)
    except (TypeError, ValueError, RecursionError):  # a gate in place of its description, or what is refused below
        made = None
    if made in _made:
        return _made[made]
    try:
        with torch.device("cpu"):  # gates compute numbers, and a tensor on the meta device has none
            rule = kind.configured(knobs)
    except InputError:
        raise
    except Exception as error:
        raise _not_made("rule", rule_plugin(name), error) from error
    if made is not None:
        if len(_made) >= MOST_MADE:
            _made.clear()
        _made[made] = rule
    return rule


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
    for label, other in {"": task, **evaluations}.items():  # refuse before training what could not be evaluated
        for what, most in (("length", MOST_LENGTH), ("vocab_size", MOST_VOCABULARY)):
            if (size := getattr(other, what)) > most:
                at = f", at '{label}'," if label else ""
                raise InputError(f"task '{name}': {what}{at} is {size:,}, and at most {most:,}")
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
    if name in _twice:
        raise InputError(_twice[name])
    if name not in found:
        more = "".join(f"; left out: {line}" for line in left_out())
        raise InputError(f"{unknown(what, name, sorted(found))}{more}")
    return found[name]


@cache
def _all(kind: type) -> dict[str, Plugin]:
    found: dict[str, Plugin] = {}
    twice: dict[str, str] = {}
    for plugin in _everything():
        if not issubclass(plugin.kind, kind):
            continue
        name = plugin.kind.name
        if name in found and found[name].kind is not plugin.kind:
            places = [f"{each.file}{_line_of(each.kind)}" for each in (found[name], plugin)]
            twice[name] = f"'{name}' is defined twice, in {places[0]} and in {places[1]}: rename one"
            if plugin.file in _named_files:
                raise InputError(twice[name])
        found.setdefault(name, plugin)
    _twice.update(twice)
    return {name: plugin for name, plugin in found.items() if name not in twice}


@cache
def _everything() -> tuple[Plugin, ...]:
    """All rules and tasks. `_broken` gets what is wrong with the others: a broken plugin must not stop the rest."""
    found = [Plugin(task, Path(inspect.getfile(task))) for task in BUILTIN.values()]
    for point in [*entry_points(group="deltalab.rules"), *entry_points(group="deltalab.tasks")]:
        with _noted(f"package {point.value}"), _apart():
            package = point.load()
            found += _in_module(package)
            names = [
                f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(getattr(package, "__path__", []))
            ]
            for name in names:
                with _noted(f"module {name}"):
                    found += _in_module(importlib.import_module(name))
    for path in _files():
        with nullcontext() if path in _named_files else _noted(str(path)):
            found += _in_module(_load(path))
    return tuple(found)


@contextmanager
def _noted(source: str) -> Iterator[None]:
    """Notes in `_broken` what goes wrong. source: what it goes wrong with."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        said = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {_first_line(error)}"
        _broken.append(said if said.startswith(source) else f"{source}: {said}")


@contextmanager
def _apart() -> Iterator[None]:
    """For the import of a plugin: what it prints goes to stderr, and modules that it takes away come back."""
    before = dict(sys.modules)
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)  # for what prints without Python
        with redirect_stdout(sys.stderr), torch.device("cpu"):  # as in get_rule
            yield
            sys.stderr.flush()
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        for name, module in before.items():
            sys.modules.setdefault(name, module)


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
            if not isinstance(kind.name, str) or not _NAME.fullmatch(kind.name):
                at = f"{file}{_line_of(kind)}: {kind.__name__}"
                raise InputError(f"{at}: a name has letters, digits, '_', '.' and '-', and not {kind.name!r:.100}")
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
        if isinstance(module, ModuleType) and vars(module).get("__file__") == str(path):
            return module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)

    def execute() -> None:
        sys.modules[name] = module
        with _apart():
            spec.loader.exec_module(module)  # type: ignore[union-attr]

    _require_end(path, execute)
    try:
        execute()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        sys.modules.pop(name, None)
        at, said = _line_in(path, error), error.msg if isinstance(error, SyntaxError) else _first_line(error)
        raise InputError(f"{path}{at}: does not import: {type(error).__name__}: {said}") from error
    sys.modules[name] = module
    return module


TRIES = 3
"""How often a file is imported whose process is killed, which says nothing of the file: memory may have run out."""

FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}

watched = False
"""Whether somebody watches this process, and ends it where an import does not: a worker's child sets it."""


def _require_end(path: Path, execute: Callable[[], None]) -> None:
    """Raises `InputError` for a file whose import does not end, or ends the process.

    A forked process imports it first, once for each version of the file. Not where there are threads, which a fork may
    stop while they hold a lock, as in a notebook.
    """
    if watched or not hasattr(os, "fork") or threading.active_count() > 1 or "ray" in sys.modules:
        return
    kept = _kept(path)
    try:
        found = kept.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        ends = (_tried(execute) for _ in range(TRIES))
        end = next((end for end in ends if end is not None), None)
        if end is None:
            raise InputError(f"{path}: does not import: something kills the process that imports it") from None
        found = end
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(found, encoding="utf-8")
    if found:
        raise InputError(f"{path}: does not import: {found} (to try it again, delete {kept})")


def _tried(execute: Callable[[], None]) -> str | None:
    """What is wrong with an import in a forked process: "" where it ends, with or without an exception.

    None where the process was killed, as from outside.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        said = b"ended"
        try:
            os.close(reader)
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nowhere, stream)
            execute()
        except KeyboardInterrupt:
            said = b"KeyboardInterrupt"
        finally:
            os.write(writer, said)
            os._exit(0)
    os.close(writer)
    try:
        late = not select.select([reader], [], [], IMPORT_SECONDS)[0]
        said = b"" if late else os.read(reader, 100)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if late:
        return f"it takes over {IMPORT_SECONDS:g} s"
    if said:
        return "" if said == b"ended" else said.decode()
    code = os.waitstatus_to_exitcode(status)
    if -code in FROM_OUTSIDE:
        return None
    return f"it ends the process, with {f'exit code {code}' if code >= 0 else signal.Signals(-code).name}"


def _kept(path: Path) -> Path:
    """The file of the verdict on an import: $XDG_CACHE_HOME/deltalab/imports/KEY, in ~/.cache by default."""
    rested_on = f"{sys.version} {path}\n".encode("utf-8", "surrogateescape") + path.read_bytes()
    key = hashlib.sha256(rested_on).hexdigest()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "deltalab" / "imports" / key


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
