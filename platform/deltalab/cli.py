"""The command `platform`. Whatever is wrong with what a user types is one line on stderr."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deltalab import __version__
from deltalab.authoring.check import CheckResult, author_line
from deltalab.cli_data import data
from deltalab.cli_eval import evaluate
from deltalab.cli_export import export
from deltalab.cli_options import AsJson, Db, Folder, Params, Profile, StudyFile, StudyName, find_study
from deltalab.cli_train import train
from deltalab.errors import InputError, WrongRules
from deltalab.registry import add_plugin, get_rule, get_task, list_rules, list_tasks, rule_plugin, task_plugin
from deltalab.tasks import Task

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
study = typer.Typer(no_args_is_help=True, help="Run, plan, report and start studies.")
rule = typer.Typer(no_args_is_help=True, help="List, show, check, time and start update rules.")
task = typer.Typer(no_args_is_help=True, help="List, show, check and start proxy tasks.")
db = typer.Typer(no_args_is_help=True, help="Look after the database.")
for name, group in (("study", study), ("rule", rule), ("task", task), ("data", data), ("db", db)):
    app.add_typer(group, name=name)

console = Console()
FORKED = hasattr(os, "fork")
"""Whether each check runs in a process of its own: compiled code that crashes then fails the check alone."""
INTERRUPTED = 130
"""The exit code of Typer for Ctrl-C; it prints nothing."""


@app.callback()
def _plugins(
    ctx: typer.Context,
    plugin: Annotated[list[Path] | None, typer.Option("--plugin", help="A Python file with rules or tasks.")] = None,
) -> None:
    """deltalab: does my change to a recurrent update rule help, by how much, and at what cost?"""
    ctx.obj = plugin or []
    for file in ctx.obj:
        add_plugin(file)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@study.command("run")
def study_run(
    file: StudyFile,
    db: Db = None,
    profile: Profile = None,
    executor: Annotated[str, typer.Option(help="ray, or inline for this process.")] = "ray",
    workers: Annotated[int | None, typer.Option(min=1, help="Stacks of trials at a time.")] = None,
    address: Annotated[str | None, typer.Option(help="Address of a Ray cluster.")] = None,
    storage: Annotated[str | None, typer.Option(help="Folder for weights; shared, on a cluster.")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed trials again.")] = False,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Run rules that fail their checks; the report says so.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a study, or go on with one; print its report. Exit 1 if a trial failed, 2 if a rule fails its checks."""
    from deltalab.study.run import run_study

    result = run_study(
        file,
        db=db,
        profile=profile,
        executor=executor,  # type: ignore[arg-type]
        workers=workers,
        address=address,
        storage=storage,
        retry_failed=retry_failed,
        quiet=False,
        unchecked=unchecked,
    )
    if as_json:
        print(result.report.to_json())
    else:
        console.print(result.report)
        infeasible = f", {result.infeasible} candidates made no model" if result.infeasible else ""
        print(f"{result.trials} trials, {result.known} of them known before, {result.failed} failed{infeasible}")
    if result.failed:
        raise typer.Exit(1)


@study.command("plan")
def study_plan(
    file: StudyFile,
    profile: Profile = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Stacks of trials at a time.")] = None,
    db: Db = None,
    sd: Annotated[
        float | None, typer.Option(min=0.0, help="Standard deviation of a seed's score; else from the database.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show arms, trials, runs, the time they take here, and the effect that the study can find. Runs nothing."""
    from deltalab.store import Store
    from deltalab.study.estimate import estimate
    from deltalab.study.plan import make_plan
    from deltalab.study.power import Spread, spreads
    from deltalab.study.spec import load_study

    plan = make_plan(load_study(file, profile=profile), profile=profile, where=str(file))
    known: list[Spread] = []
    if sd is not None:
        known = [Spread(name, task.metric, sd, "given by --sd") for name, task in plan.tasks.items()]
    elif Store.exists(db):
        with Store.open(db, create=False) as store:
            known = spreads(store, plan.tasks)
    found = estimate(plan, workers=workers, spreads=known)
    if as_json:
        print(found.to_json())
    else:
        console.print(found.to_rich())


@study.command("list")
def study_list(
    db: Db = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="Those that come with deltalab instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the studies in the database, or those that come with deltalab, which run by their names."""
    if shipped:
        from deltalab.authoring.shipped import shipped_studies
        from deltalab.study.spec import load_study

        _print_rows([{"name": s, "about": load_study(s).description} for s in shipped_studies()], as_json)
        return
    from deltalab.store import Store

    with Store.open(db, create=False) as store:
        rows = [
            {
                "id": s.id,
                "name": s.name,
                "profile": s.profile,
                "state": s.state,
                "created": s.created_at.isoformat(timespec="seconds"),
                "arms": len(store.arms(s.id)),
            }
            for s in store.studies()
        ]
    _print_rows(rows, as_json)


@study.command("report")
def study_report(
    name: StudyName,
    db: Db = None,
    profile: Profile = None,
    as_json: AsJson = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Compare a study's arms with its base."""
    from deltalab.store import Store
    from deltalab.study.report import report

    if as_json + csv + markdown > 1:
        raise InputError("--json, --csv and --markdown: give one of them")
    with Store.open(db, create=False) as store:
        found = report(store, find_study(store, name, profile).id)
    if as_json:
        print(found.to_json())
    elif csv:
        print(found.to_csv(), end="")
    elif markdown:
        print(found.to_markdown())
    else:
        console.print(found)


@study.command("calibrate")
def study_calibrate(
    name: StudyName,
    db: Db = None,
    profile: Profile = None,
    repeats: Annotated[int, typer.Option(min=1, help="A/A studies to simulate.")] = 400,
    real: Annotated[
        bool, typer.Option("--real", help="Train the base on a seed for every run of every arm, and split those.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure how often this study finds a difference between arms that are alike, and whether it keeps to 5%."""
    from deltalab.store import Store
    from deltalab.study import calibrate
    from deltalab.study.spec import load_study

    if real:
        spec = load_study(name, profile=profile)
        found = calibrate.real(spec, where=name, profile=profile, db=db, repeats=repeats, quiet=False)
    else:
        try:
            with Store.open(db, create=False) as store:
                study_id = find_study(store, name, profile).id
                found = calibrate.simulated(store, study_id, repeats=repeats, quiet=False)
        except InputError as error:
            raise InputError(f"{error}; run it first (platform study run {name}), or give --real") from None
    if as_json:
        print(json.dumps([asdict(row) for row in found]))
    else:
        for row in found:
            print(row)


@study.command("schema")
def study_schema() -> None:
    """Print the JSON schema of a study file, for editors."""
    from deltalab.study.spec import schema

    print(json.dumps(schema(), indent=2))


@study.command("new")
def study_new(name: str, folder: Folder = Path("studies")) -> None:
    """Write a commented study file that can be planned and run, to start from."""
    from deltalab.authoring.scaffold import new_study

    file = new_study(name, folder)
    print(f"{file}: change it, then: platform study plan {file}")


@rule.command("list")
def rule_list(as_json: AsJson = False) -> None:
    """List the rules that can be found."""
    rows = [
        {"name": name, "paper": kind.paper, "knobs": ", ".join(kind.options()), "about": _about(kind)}
        for name in list_rules()
        for kind in [type(get_rule(name))]
    ]
    _print_rows(rows, as_json)


@rule.command("show")
def rule_show(name: Annotated[str, typer.Argument(metavar="NAME|FILE")], as_json: AsJson = False) -> None:
    """Show a rule's card: equation, knobs, gates, structure, cost and size."""
    from rich.markdown import Markdown

    from deltalab.authoring.card import card
    from deltalab.rule import UpdateRule

    for rule_name in _named(name, UpdateRule):
        try:
            found = card(rule_name)
        except InputError as error:
            file = str(rule_plugin(rule_name).file)
            raise error if file in str(error) else InputError(f"{file}: {error}") from error
        except Exception as error:
            at = f" ({line})" if (line := author_line(error)) else ""
            raise InputError(
                f"rule '{rule_name}'{at} does not run: {type(error).__name__}: {error}; "
                f"`platform rule check {name}` says more"
            ) from error
        if as_json:
            print(found.to_json())
        else:
            console.print(Markdown(found.to_markdown()))


@rule.command("check")
def rule_check(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE")],
    quick: Annotated[
        bool, typer.Option("--quick", help="The checks of seconds, on the rule as it stands: no verdict for a study.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Hold a rule to the contract, and keep the verdict for studies. Exit 1 if a check fails."""
    from deltalab.authoring.verdict import checked, keep
    from deltalab.rule import UpdateRule

    found = {rule: checked(rule, quick=quick) for rule in _named(name, UpdateRule)}
    if not quick:
        for rule, results in found.items():
            keep(rule, results)
    _print_checks(found, "rule", as_json)


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
) -> None:
    """Time a rule, forward, with backward and decoding, with its memory; on the GPU, or else on the CPU."""
    from deltalab.bench.measure import bench
    from deltalab.rule import UpdateRule

    for found in _named(name, UpdateRule):
        results = bench(get_rule(found), shape=shape, dtype=dtype, lengths=lengths, against=against, out=out)
        print(results.to_json() if as_json else results.to_text())


@rule.command("new")
def rule_new(
    name: str,
    folder: Folder = Path("plugins"),
    kernel: Annotated[bool, typer.Option("--kernel", help="A rule with a Triton kernel of its own.")] = False,
) -> None:
    """Write a rule file that passes its checks, to start from."""
    from deltalab.authoring.scaffold import new_rule

    file = new_rule(name, folder, kernel=kernel)
    print(f"{file}: change it, then: platform rule check {file}")


@rule.command("from-search")
def rule_from_search(
    study: StudyName,
    arm: Annotated[str, typer.Option("--arm", help="What the search found, such as found_1.")],
    name: Annotated[str, typer.Option("--name", help="The name of the new rule.")],
    out: Annotated[Path | None, typer.Option("--out", help="The file to write; plugins/NAME.py by default.")] = None,
    db: Db = None,
    profile: Profile = None,
) -> None:
    """Write the rule that a search found as a file of its own, with only what it uses and with its equation."""
    from deltalab.store import Store
    from deltalab.study.from_search import rule_from_search as write

    with Store.open(db, create=False) as store:
        file = write(store, find_study(store, study, profile).id, arm=arm, name=name, out=out)
    print(f"{file}: read its equation, then: platform rule check {file}")


@task.command("list")
def task_list(as_json: AsJson = False) -> None:
    """List the proxy tasks."""
    rows = [
        {"name": name, "version": kind.version, "metric": kind.metric, "about": _about(kind)}  # type: ignore[union-attr]
        for name in list_tasks()
        for kind in [task_plugin(name).kind]
    ]
    _print_rows(rows, as_json)


@task.command("show")
def task_show(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE")], param: Params = None, as_json: AsJson = False
) -> None:
    """Print a task's facts and one example."""
    for found in _tasks(name, param):
        batch = found.batch("validation", 1, 0, 0)
        facts = {
            "name": found.name,
            "version": found.version,
            "metric": found.metric,
            "maximize": found.maximize,
            "chance": found.chance,
            "vocab_size": found.vocab_size,
            "parameters": asdict(found),
            "inputs": batch.inputs[0].tolist(),
            "targets": batch.targets[0].tolist(),
        }
        print(json.dumps(facts) if as_json else "\n".join(f"{key}: {value}" for key, value in facts.items()))


@task.command("check")
def task_check(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE")], param: Params = None, as_json: AsJson = False
) -> None:
    """Hold a task to the contract. Exit 1 if a check fails."""
    from deltalab.authoring.task_checks import check_task

    checks = {found.name: check_task(found, forked=FORKED) for found in _tasks(name, param)}
    _print_checks(checks, "task", as_json)


@task.command("new")
def task_new(name: str, folder: Folder = Path("plugins")) -> None:
    """Write a task file that passes its checks, to start from."""
    from deltalab.authoring.scaffold import new_task

    file = new_task(name, folder)
    print(f"{file}: change it, then: platform task check {file}")


@app.command()
def dashboard(
    ctx: typer.Context,
    db: Db = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8501,
    browser: bool = True,
) -> None:
    """Compare studies in the browser, on 127.0.0.1."""
    import importlib.util

    from deltalab.store import Store

    with Store.open(db, create=False):
        pass
    spec = importlib.util.find_spec("deltalab_dashboard")
    if spec is None or spec.origin is None:
        raise InputError("the dashboard is not installed")
    options = {
        "server.address": "127.0.0.1",
        "server.port": port,
        "server.headless": not browser,
        "browser.gatherUsageStats": False,
        "server.fileWatcherType": "none",  # a reloaded plugin would not be the source that this process hashed
    }
    flags = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    command = [sys.executable, "-m", "streamlit", "run", str(Path(spec.origin).parent / "app.py"), *flags]
    # A database's URL may hold a password, and other users can read a process's arguments. So the URL goes through the
    # environment, and Streamlit replaces this process, whose arguments may hold it too.
    environment = {**os.environ, **({"DELTALAB_DB": db} if db else {})}
    if ctx.obj:
        environment["DELTALAB_PLUGINS"] = os.pathsep.join(map(str, ctx.obj))
    os.execve(sys.executable, command, environment)


app.command()(export)
app.command()(train)
app.command("eval")(evaluate)


@db.command("upgrade")
def db_upgrade(db: Db = None) -> None:
    """Migrate an older database to this version."""
    from deltalab.store import Store

    Store.upgrade(db)


@db.command("import")
def db_import(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs of `platform train`.")],
    db: Db = None,
) -> None:
    """Record trainings that ran on another machine, from their folders; again, to bring them up to date."""
    from deltalab.store import Store
    from deltalab.store.trainings import record

    with Store.open(db) as store:
        for run in runs:
            record(store, run)
            print(f"{run}: recorded")


def _named(name: str, kind: type) -> list[str]:
    """The names of the rules, or tasks, that a name or a plugin file stands for."""
    if not name.endswith(".py"):
        return [name]
    found = [plugin.kind.name for plugin in add_plugin(name) if issubclass(plugin.kind, kind)]
    if not found:
        raise InputError(f"{name}: defines no {kind.__name__}")
    return found


def _tasks(name: str, given: list[str] | None) -> list[Task]:
    """The tasks that a name or a plugin file stands for: their examples, with the given parameters."""
    from deltalab.study.spec import read_yaml

    params: dict[str, Any] = {}
    for pair in given or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"'{pair}': give parameters as KEY=VALUE")
        params[key] = read_yaml(value, where=f"'{pair}'")
    plugins = [task_plugin(found) for found in _named(name, Task)]
    return [get_task(p.kind.name, **{**p.kind.example, **params}) for p in plugins]  # type: ignore[union-attr]


def _print_checks(checks: dict[str, list[CheckResult]], what: str, as_json: bool) -> None:
    for name, results in checks.items():
        if as_json:
            print(json.dumps({what: name, "checks": [asdict(result) for result in results]}))
            continue
        table = Table(title=name, title_justify="left", box=None, pad_edge=False)
        for column in ("", "check", "figure", "what"):
            table.add_column(column, overflow="fold")
        for result in results:
            mark = "[green]ok[/]" if result.passed else "[red]FAILED[/]"
            figure = f"{result.figure:.3g}" if isinstance(result.figure, float) else str(result.figure or "")
            table.add_row(mark, result.name, figure, escape(result.message))
        console.print(table)
        if failed := [result.name for result in results if not result.passed]:
            console.print(f"[red]{len(failed)} of {len(results)} checks failed:[/] {', '.join(failed)}")
    if not all(result.passed for results in checks.values() for result in results):
        raise typer.Exit(1)


def _about(kind: type) -> str:
    return (sys.modules[kind.__module__].__doc__ or "").strip().partition("\n")[0]


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(box=None, pad_edge=False)
    for key in rows[0] if rows else []:
        table.add_column(key)
    for row in rows:
        table.add_row(*("" if value is None else escape(str(value)) for value in row.values()))
    console.print(table if rows else "nothing yet")


def main() -> None:
    """Exit 0 done; 1 a trial or a check failed; 2 the input was wrong."""
    code = _run()
    try:
        sys.stdout.flush()
    except OSError as error:
        # Drop what is left to write: Python would try again at exit, and end in a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not code and not isinstance(error, BrokenPipeError):
            code = _wrong(f"output: {error.strerror}")
    sys.exit(code)


def _run() -> int:
    try:
        code = app(prog_name="platform", standalone_mode=False)
    except InputError as error:
        return _wrong(*(error.lines if isinstance(error, WrongRules) else [str(error)]))
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except OSError as error:
        return _wrong(f"{error.filename or 'output'}: {error.strerror or error}")
    except Exception as error:
        # Typer has its own copy of click; recognize its exceptions without importing its internals.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return 2
        return _wrong(error.format_message())
    if code == INTERRUPTED:
        print("interrupted: the same command goes on from here", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _wrong(*messages: str) -> int:
    for message in messages:
        print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2
