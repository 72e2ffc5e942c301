"""Reads the suites of evaluation tasks, each of which is a YAML file of this folder."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.reading import read_text, read_yaml

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class SuiteTask:
    """A task of a suite.

    Attributes:
        name: The name, which is the harness's own if the harness asks it.
        metric: The metric that papers quote, and that the suite's mean is taken of; None if it enters no mean.
        also: Further metrics that are reported.
        needs: Data sets of the Hub, files, or options of `deltalab eval`.
        settings: What else the file says of the task.
    """

    name: str
    metric: str | None = None
    also: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """Tasks that papers quote together.

    Attributes:
        name: The name.
        version: Rises with every change that changes a value.
        about: A sentence that describes the suite.
        source: The papers whose protocol the suite follows.
        asked_by: Who asks its tasks: harness, recall, ruler or deltalab.
        tasks: The tasks, in the order in which they are reported.
        lengths: The tokens of texts, unless the user gives others; empty if the tasks have no lengths.
        examples: The examples of each task and length; None means all there are.
        few_shot: The solved examples before each question; None for the task's own number.
        twice: Whether the text is read twice.
        packages: Packages that its metrics import, beside those of the harness.
    """

    name: str
    version: int
    about: str
    source: str
    asked_by: str
    tasks: tuple[SuiteTask, ...]
    lengths: tuple[int, ...] = ()
    examples: int | None = None
    few_shot: int | None = None
    twice: bool = False
    packages: tuple[str, ...] = ()


def suite_names() -> list[str]:
    """Returns the names of all suites."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load_suite(name: str) -> Suite:
    """Reads a suite.

    Raises:
        InputError: If there is no suite of that name.
    """
    if name not in suite_names():
        raise unknown("suite", name, suite_names(), where="--suite")
    file = FOLDER / f"{name}.yaml"
    content = read_yaml(read_text(file), where=str(file))
    tasks = tuple(_task(task, dict(about)) for task, about in content.pop("tasks").items())
    lengths, packages = (tuple(content.pop(key, ())) for key in ("lengths", "packages"))
    return Suite(name, tasks=tasks, lengths=lengths, packages=packages, **content)


def chosen(names: Iterable[str]) -> list[tuple[Suite, tuple[SuiteTask, ...]]]:
    """Finds the suites that a user names, each with those of its tasks that are asked.

    Args:
        names: `SUITE` for all tasks of a suite, or `SUITE/TASK` for one.

    Raises:
        InputError: If there is no such suite or task.
    """
    asked: dict[str, list[str]] = {}
    for name in names:
        suite_name, _, task = name.partition("/")
        known = [one.name for one in load_suite(suite_name).tasks]
        if task and task not in known:
            raise unknown("task", task, known, where=f"--suite {suite_name}/")
        asked.setdefault(suite_name, []).extend([task] if task else known)
    suites = [(load_suite(name), tasks) for name, tasks in asked.items()]
    return [(suite, tuple(task for task in suite.tasks if task.name in tasks)) for suite, tasks in suites]


def suites_among(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Tells names of suites, and of their tasks, from names of other tasks, which come second."""
    known, found, others = suite_names(), list[str](), list[str]()
    for name in names:
        (found if name.partition("/")[0] in known else others).append(name)
    return found, others


def lengths_of(suite: Suite, given: Sequence[int]) -> tuple[int, ...]:
    """Returns the lengths in tokens at which a suite is asked.

    Raises:
        InputError: If the user gives lengths, and the suite has no lengths.
    """
    if given and not suite.lengths:
        raise InputError(f"--lengths: suite '{suite.name}' has no lengths; recall, recall_twice and ruler have")
    return tuple(dict.fromkeys(given)) or suite.lengths


def _task(name: str, about: dict[str, Any]) -> SuiteTask:
    metric, also, needs = about.pop("metric", None), about.pop("also", ()), about.pop("needs", ())
    return SuiteTask(name, metric, tuple(also), tuple(needs), about)
