"""The commands `deltalab rule ...`, `deltalab module ...` and `deltalab task ...`."""

import json
import os
import sys
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deltalab import trust
from deltalab.authoring.check import CheckResult, author_line
from deltalab.cli.options import (
    AsJson,
    Db,
    Folder,
    Params,
    Profile,
    Progress,
    StudyName,
    find_study,
    print_result,
    print_rows,
)
from deltalab.errors import InputError

if TYPE_CHECKING:
    from deltalab.tasks import Task

rule = typer.Typer(no_args_is_help=True, help="List, show, check, time and start update rules.")
module = typer.Typer(no_args_is_help=True, help="Check modules of any author, which stand in place of rules.")
model = typer.Typer(no_args_is_help=True, help="List and show published hybrids, the presets of a model.")
task = typer.Typer(no_args_is_help=True, help="List, show, check and start proxy tasks.")
console = Console()
FORKED = hasattr(os, "fork")
"""Whether each check runs in a process of its own. Compiled code that crashes then fails that check alone."""


def trust_folder(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder; those below it count, too.")],
    as_json: AsJson = False,
) -> None:
    """Let the Python files of a folder run: plugins, modules of a study, the code of an exported model."""
    trust.record(folder)
    whole, listed = folder.resolve(), trust.recorded_in()
    text = f"{whole}: trusted from now on; {listed} lists the trusted folders"
    print_result(as_json, text, trusted=whole, recorded_in=listed)


@rule.command("list")
def rule_list(as_json: AsJson = False) -> None:
    """List the rules that can be found."""
    from deltalab.registry import get_rule, list_rules

    rows = [
        {"name": name, "paper": kind.paper, "knobs": ", ".join(kind.options()), "about": _first_line(kind)}
        for name in list_rules()
        for kind in [type(get_rule(name))]
    ]
    print_rows(rows, as_json)


@rule.command("show")
def rule_show(name: Annotated[str, typer.Argument(metavar="NAME|FILE")], as_json: AsJson = False) -> None:
    """Show a rule's card: equation, knobs, gates, structure, cost and size."""
    from rich.markdown import Markdown

    from deltalab.authoring.card import card
    from deltalab.registry import rule_plugin
    from deltalab.rule import UpdateRule

    for rule_name in _plugin_names(name, UpdateRule):
        try:
            rule_card = card(rule_name)
        except InputError as error:
            file = str(rule_plugin(rule_name).file)
            raise error if file in str(error) else InputError(f"{file}: {error}") from error
        except Exception as error:
            place = f" ({line})" if (line := author_line(error)) else ""
            raise InputError(
                f"rule '{rule_name}'{place} does not run: {type(error).__name__}: {error}; "
                f"`deltalab rule check {name}` says more"
            ) from error
        if as_json:
            print(rule_card.to_json())
        elif console.is_terminal:
            console.print(Markdown(rule_card.to_markdown()))
        else:  # whole lines for the next command of a pipe
            print(rule_card.to_markdown())


@rule.command("check")
def rule_check(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE")],
    quick: Annotated[
        bool, typer.Option("--quick", help="The checks of seconds, on the rule as it stands: no verdict for a study.")
    ] = False,
    backend: Annotated[
        str | None, typer.Option(help="Hold a back end to the equation instead: chunked, triton, fla or flash_qla.")
    ] = None,
    as_json: AsJson = False,
    progress_form: Progress = "text",
) -> None:
    """Hold a rule to the contract, and keep the verdict for studies. Exit 1 if a check fails."""
    if backend is not None:
        _check_backend(name, backend, quick, as_json)
        return
    from deltalab.authoring.kernel_line import kernel_line
    from deltalab.authoring.verdict import checked, keep
    from deltalab.registry import get_rule
    from deltalab.rule import UpdateRule

    results_of = {rule: checked(rule, quick=quick) for rule in _plugin_names(name, UpdateRule)}
    if not quick:
        for rule, results in results_of.items():
            keep(rule, results)
    for rule, results in results_of.items():
        if not as_json and all(result.passed for result in results):  # a rule that fails may not run
            print(f"{rule}: Triton kernels {kernel_line(get_rule(rule))}")
    _print_checks(results_of, "rule", as_json)


def _check_backend(name: str, backend: str, quick: bool, as_json: bool) -> None:
    """Holds a back end to the equation of each rule, and prints the results."""
    from deltalab.authoring.rule_checks.backend_checks import check_backend
    from deltalab.registry import get_rule
    from deltalab.rule import UpdateRule

    if quick:
        raise InputError("--quick has no effect with --backend: leave it out")
    results = {rule: check_backend(get_rule(rule), backend) for rule in _plugin_names(name, UpdateRule)}
    _print_checks(results, "rule", as_json)


@rule.command("bench")
def rule_bench(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE")],
    against: Annotated[str | None, typer.Option(help="Peers: fla, flash_qla, sdpa; with commas between them.")] = None,
    shape: Annotated[str | None, typer.Option(help="B,T,H,K,V.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Values of T with commas between them, each with as many tokens as --shape.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for NAME.json and, with --lengths, NAME.png.")] = None,
    as_json: AsJson = False,
    progress_form: Progress = "text",
) -> None:
    """Time a rule, forward, with backward and decoding, with its memory; on the GPU, or else on the CPU."""
    from deltalab.bench.measure import bench
    from deltalab.registry import get_rule
    from deltalab.rule import UpdateRule

    for rule_name in _plugin_names(name, UpdateRule):
        results = bench(get_rule(rule_name), shape=shape, dtype=dtype, lengths=lengths, against=against, out=out)
        print(results.to_json() if as_json else results.to_text())


@rule.command("new")
def rule_new(
    name: str,
    folder: Folder = Path("plugins"),
    kernel: Annotated[bool, typer.Option("--kernel", help="A rule with a Triton kernel of its own.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a rule file that passes its checks, to start from."""
    from deltalab.authoring.files.scaffold import new_rule

    file = new_rule(name, folder, kernel=kernel)
    print_result(as_json, f"{file}: change it, then: deltalab rule check {file}", name=name, file=file)


@rule.command("from-search")
def rule_from_search(
    study_name: StudyName,
    arm: Annotated[str, typer.Option("--arm", help="What the search found, such as found_1.")],
    name: Annotated[str, typer.Option("--name", help="The name of the new rule.")],
    out: Annotated[Path | None, typer.Option("--out", help="The file to write; plugins/NAME.py by default.")] = None,
    db: Db = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Write the rule that a search found as a file of its own, with only what it uses and with its equation."""
    from deltalab.store import Store
    from deltalab.study.reports.rule_from_search import rule_from_search as write

    with Store.open(db, create=False) as store:
        file = write(store, find_study(store, study_name, profile).id, arm=arm, name=name, out=out)
    print_result(as_json, f"{file}: read its equation, then: deltalab rule check {file}", name=name, file=file)


@module.command("check")
def module_check(
    name: Annotated[str, typer.Argument(metavar="FILE.py:NAME|PACKAGE.NAME", help="A class, or a function.")],
    kwargs: Params = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="KEY=VALUE", help="A setting of the model: d_model=64.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Hold a torch.nn.Module to what a study relies on. KEY=VALUE are its arguments. Exit 1 if a check fails."""
    from deltalab.authoring.module_checks.module_suite import check_module, tried
    from deltalab.own_module import OwnModule, as_rule
    from deltalab.reading import read_pairs
    from deltalab.registry import get_rule

    file, colon, _ = name.rpartition(":")
    trust.for_now(Path(file).parent if colon else Path.cwd())  # the user names the code in the command
    mixer = as_rule({"module": name, "kwargs": read_pairs(kwargs or [])}, "deltalab module check")
    own = get_rule(mixer.pop("name"), **mixer)
    if not isinstance(own, OwnModule):
        raise InputError(f"'{name}' is a rule: deltalab rule check {name}")
    _print_checks({name: check_module(own, tried(own, read_pairs(model or [])), forked=FORKED)}, "module", as_json)


@model.command("list")
def model_list(as_json: AsJson = False) -> None:
    """List the published hybrids that `model: {preset: NAME}` stands for."""
    from deltalab.models.hybrids import HYBRIDS

    rows = [{"name": name, "source": hybrid.source, "lacks": hybrid.lacks} for name, hybrid in HYBRIDS.items()]
    print_rows(rows, as_json)


@model.command("show")
def model_show(
    name: str,
    sizes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings: d_model=256 heads=8 layers=8.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a hybrid: its source, what it lacks, its layers, and its parameters at the sizes given."""
    import torch
    import yaml

    from deltalab.models.hybrids import PRESET, hybrid_text
    from deltalab.models.model import Model
    from deltalab.models.spec import ModelSpec
    from deltalab.reading import read_pairs

    given = read_pairs(sizes or [])
    spec = ModelSpec.of({"vocab_size": 1, **given, PRESET: name})
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Model(spec).parameters()) - spec.d_model
    shown = {**hybrid_text(name, **given), "parameters without embedding": count}
    print(json.dumps(shown) if as_json else yaml.safe_dump(shown, sort_keys=False, width=110).strip())


@task.command("list")
def task_list(as_json: AsJson = False) -> None:
    """List the proxy tasks."""
    from deltalab.registry import list_tasks, task_plugin

    rows = [
        {"name": name, "version": kind.version, "metric": kind.metric, "about": _first_line(kind)}  # type: ignore[union-attr]
        for name in list_tasks()
        for kind in [task_plugin(name).kind]
    ]
    print_rows(rows, as_json)


@task.command("show")
def task_show(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE")], param: Params = None, as_json: AsJson = False
) -> None:
    """Print a task's facts and one example, with the parameters that a study leaves out at their defaults."""
    for shown_task in _tasks(name, param, as_a_study=True):
        batch = shown_task.batch("validation", 1, 0, 0)
        facts = {
            "name": shown_task.name,
            "version": shown_task.version,
            "metric": shown_task.metric,
            "maximize": shown_task.maximize,
            "chance": shown_task.chance,
            "ceiling": shown_task.ceiling,
            "vocab_size": shown_task.vocab_size,
            "parameters": asdict(shown_task),
            "inputs": batch.inputs[0].tolist(),
            "targets": batch.targets[0].tolist(),
        }
        if facts["ceiling"] is None and not as_json:
            facts["ceiling"] = "not stated"
        print(json.dumps(facts) if as_json else "\n".join(f"{key}: {value}" for key, value in facts.items()))


@task.command("check")
def task_check(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE")], param: Params = None, as_json: AsJson = False
) -> None:
    """Hold a task to the contract. Exit 1 if a check fails."""
    from deltalab.authoring.task_checks.task_suite import check_task

    checks = {checked_task.name: check_task(checked_task, forked=FORKED) for checked_task in _tasks(name, param)}
    _print_checks(checks, "task", as_json)


@task.command("new")
def task_new(name: str, folder: Folder = Path("plugins"), as_json: AsJson = False) -> None:
    """Write a task file that passes its checks, to start from."""
    from deltalab.authoring.files.scaffold import new_task

    file = new_task(name, folder)
    print_result(as_json, f"{file}: change it, then: deltalab task check {file}", name=name, file=file)


def _plugin_names(name: str, kind: type) -> list[str]:
    """Returns the names of the rules or tasks, as `kind` says, that a user means by a name or a plugin file."""
    if not name.endswith(".py"):
        from deltalab.own_module import is_path
        from deltalab.registry import list_rules, list_tasks

        if is_path(name) and name not in [*list_rules(), *list_tasks()]:
            raise InputError(f"'{name}' names a module, which is no {kind.__name__}: deltalab module check {name}")
        return [name]
    from deltalab.registry import add_plugin

    names = [plugin.kind.name for plugin in add_plugin(name) if issubclass(plugin.kind, kind)]
    if not names:
        raise InputError(f"{name}: defines no {kind.__name__}")
    return names


def _tasks(name: str, words: list[str] | None, *, as_a_study: bool = False) -> "list[Task]":
    """Returns the tasks that a user means by a name or a plugin file.

    Args:
        name: The name or the file.
        words: Parameters as KEY=VALUE.
        as_a_study: Whether the other parameters are at their defaults, as in a study; else, and where a parameter has
            none, they are those of the task's example, which is small.
    """
    from deltalab.reading import read_pairs
    from deltalab.registry import get_task, task_plugin
    from deltalab.tasks import Task

    params = read_pairs(words or [])
    plugins = [task_plugin(task_name) for task_name in _plugin_names(name, Task)]
    tasks = []
    for kind in (plugin.kind for plugin in plugins):
        needed = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
        example = kind.example  # type: ignore[union-attr]
        given = {key: example[key] for key in needed if key in example} if as_a_study else example
        tasks.append(get_task(kind.name, **{**given, **params}))
    return tasks


def _print_checks(checks: dict[str, list[CheckResult]], what: str, as_json: bool) -> None:
    """Prints the results of checks. Exits with 1 if a check failed."""
    for name, results in checks.items():
        if as_json:
            print(json.dumps({what: name, "checks": [asdict(result) for result in results]}))
            continue
        rows = [
            ("ok" if result.passed else "FAILED", result.name, _figure(result), result.message) for result in results
        ]
        if console.is_terminal:
            table = Table(title=name, title_justify="left", box=None, pad_edge=False)
            for column in ("", "check", "figure", "what"):
                table.add_column(column, overflow="fold")
            for mark, *cells in rows:
                table.add_row(f"[{'green' if mark == 'ok' else 'red'}]{mark}[/]", *map(escape, cells))
            console.print(table)
        else:  # a line for each check, however long, so that grep finds what a message says
            print(name, *(f"{mark:6}  {check:24}  {figure:8}  {what}" for mark, check, figure, what in rows), sep="\n")
        if failed := [result.name for result in results if not result.passed]:
            summary = f"[red]{len(failed)} of {len(results)} checks failed:[/] {', '.join(failed)}"
            console.print(summary, soft_wrap=not console.is_terminal)
        else:
            console.print(f"{name}: all {len(results)} checks passed")
    if not all(result.passed for results in checks.values() for result in results):
        raise typer.Exit(1)


def _figure(result: CheckResult) -> str:
    """Returns the figure of a check as text, empty if there is none."""
    return f"{result.figure:.3g}" if isinstance(result.figure, float) else str(result.figure or "")


def _first_line(kind: type) -> str:
    """Returns the first line of the docstring of the module of a class."""
    return (sys.modules[kind.__module__].__doc__ or "").strip().partition("\n")[0]
