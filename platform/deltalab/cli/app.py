"""The command `deltalab`. A wrong input of the user is reported as one line on stderr."""

import gc
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deltalab import __version__, progress
from deltalab.cli import studies
from deltalab.cli.data import data
from deltalab.cli.db import db
from deltalab.cli.eval import evaluate
from deltalab.cli.export import export
from deltalab.cli.machine_commands.doctor import doctor
from deltalab.cli.machine_commands.servers import dashboard, mcp
from deltalab.cli.options import (
    AsJson,
    BackupEvery,
    Db,
    Folder,
    LogTo,
    Overrides,
    Profile,
    Progress,
    StudyFile,
    StudyName,
    Workers,
    find_study,
    latest_study,
    not_empty,
    print_result,
    seconds,
    wants_json_errors,
)
from deltalab.cli.place import place
from deltalab.cli.plugins import model, module, rule, task, trust_folder
from deltalab.cli.score import score
from deltalab.cli.train import train
from deltalab.errors import InputError, WrongRules, nearest_of, one_line, unknown

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
study = typer.Typer(no_args_is_help=True, help="Run, plan, report and start studies.")
for name, group in (
    ("study", study),
    ("rule", rule),
    ("module", module),
    ("model", model),
    ("task", task),
    ("data", data),
    ("db", db),
):
    app.add_typer(group, name=name)
studies.add_to(study)

console = Console()
INTERRUPTED = (130, 143, 129, 131)
"""The exit codes after SIGINT, for which Typer prints nothing, after SIGTERM, SIGHUP and SIGQUIT."""


@app.callback()
def _plugins(
    ctx: typer.Context,
    plugin: Annotated[list[Path] | None, typer.Option("--plugin", help="A Python file with rules or tasks.")] = None,
) -> None:
    """deltalab: does my change to a recurrent update rule help, by how much, and at what cost?"""
    ctx.obj = plugin or []
    if ctx.obj:
        from deltalab.registry import add_plugin

        for file in ctx.obj:
            add_plugin(file)


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    print_result(as_json, __version__, version=__version__)


@study.command("run")
def study_run(
    study_file: StudyFile,
    settings: Overrides = None,
    db: Db = None,
    profile: Profile = None,
    executor: Annotated[
        str, typer.Option(help="ray; inline for one stack at a time without Ray; or slurm, which submits jobs.")
    ] = "ray",
    workers: Workers = None,
    address: Annotated[str | None, typer.Option(callback=not_empty, help="Address of a Ray cluster.")] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="What a job of Slurm asks for, such as partition=gpu; repeatable."),
    ] = None,
    storage: Annotated[
        str | None, typer.Option(callback=not_empty, help="Folder or URL for weights; shared, on a cluster.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed trials again.")] = False,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Run rules that fail their checks; the report says so.")
    ] = False,
    join: Annotated[
        bool, typer.Option("--join", help="Take part in the study that another driver runs with the same database.")
    ] = False,
    log_to: LogTo = None,
    backup_every: BackupEvery = None,
    supervised: Annotated[
        bool, typer.Option("--supervise", help="Start the driver again if it dies, up to 5 times an hour.")
    ] = False,
    as_json: AsJson = False,
    progress_form: Progress = "text",
) -> None:
    """Run a study, or go on with one; print its report.

    Exit 1 if a trial failed or is missing, or the database's file was deleted meanwhile; 2 if a rule fails its checks
    or another driver runs the study; 130, 143, 129 or 131 after SIGINT, SIGTERM, SIGHUP or SIGQUIT.
    """
    if supervised:
        from deltalab.cli.machine_commands.supervisor import supervise

        code = supervise([word for word in sys.argv[1:] if word != "--supervise"])
        os._exit(code)  # The driver has printed all that there is to say, also of an end by a signal.
    with _nothing_is_garbage():
        from deltalab.study.running.run import run_study_file

    result = run_study_file(
        study_file,
        db=db,
        profile=profile,
        executor=executor,  # type: ignore[arg-type]
        workers=workers,
        address=address,
        storage=storage,
        retry_failed=retry_failed,
        quiet=False,
        unchecked=unchecked,
        join=join,
        overrides=settings,
        log_to=log_to or [],
        backup_every=None if backup_every is None else seconds(backup_every, "--backup-every"),
        slurm=slurm or (),
    )
    if as_json:
        print(result.report.to_json())
    else:
        console.print(result.report)
        infeasible = f", {result.infeasible} candidates made no model" if result.infeasible else ""
        print(f"{result.trials} trials, {result.known} of them known before, {result.failed} failed{infeasible}")
    if result.state != "done":
        raise typer.Exit(1)


@study.command("plan")
def study_plan(
    study_file: StudyFile,
    settings: Overrides = None,
    profile: Profile = None,
    workers: Workers = None,
    db: Db = None,
    sd: Annotated[
        float | None,
        typer.Option(min=0.0, help="Standard deviation of a seed's score; else from the database, or as shipped."),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="The price of a GPU's hour, for the cost.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show arms, trials, runs, the time they take here, and the effect that the study can find. Runs nothing."""
    from deltalab.store import Store
    from deltalab.study.forecast.estimate import estimate
    from deltalab.study.forecast.power import Spread, nearest_spreads, shipped, spreads
    from deltalab.study.planning import warm_starts
    from deltalab.study.planning.further_looks import as_further_look
    from deltalab.study.planning.known_trials import known_trials
    from deltalab.study.planning.make import plan_study

    if sd is not None and not math.isfinite(sd):
        raise InputError(f"--sd must be a finite number, not {sd}")
    if price is not None and not math.isfinite(price):
        raise InputError(f"--price must be a finite number, not {price}")
    plan = plan_study(study_file, profile=profile, overrides=settings)
    known_spreads: list[Spread] = []
    if Store.exists(db):
        with Store.open(db, create=False) as store:
            plan = as_further_look(plan, store)
            known_spreads = spreads(store, plan.tasks)
            if known_line := known_trials(plan, store):
                plan = replace(plan, notes=(*plan.notes, known_line))
    if sd is not None:
        known_spreads = [Spread(name, task.metric, sd, "given by --sd") for name, task in plan.tasks.items()]
    else:
        known = {spread.task for spread in known_spreads}
        steps = {arm.task: arm.config["train"]["steps"] for arm in plan.arms if arm.is_base}
        unknown = {name: task for name, task in plan.tasks.items() if name not in known}
        known_spreads += nearest_spreads(unknown, steps, shipped())
    warm_starts.require_recorded(plan, db)
    forecast = estimate(plan, workers=workers, spreads=known_spreads, price=price)
    if as_json:
        print(forecast.to_json())
    else:
        console.print(forecast.to_rich())


@study.command("report")
def study_report(
    study_name: Annotated[
        str | None,
        typer.Argument(metavar="STUDY", help="A study's NAME, NAME:PROFILE, id or file; by default the latest."),
    ] = None,
    settings: Overrides = None,
    db: Db = None,
    profile: Profile = None,
    as_json: AsJson = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    html: Annotated[bool, typer.Option("--html", help="Print a page of HTML with its charts.")] = False,
    against: Annotated[
        str | None, typer.Option("--against", metavar="ARM", help="Compare with this arm in place of the base.")
    ] = None,
    progress_form: Progress = "text",
) -> None:
    """Compare a study's arms with its base, or with another arm."""
    from deltalab.store import Store
    from deltalab.store.studies.driver_status import study_progress
    from deltalab.study.reports.report import report

    if as_json + csv + markdown + html > 1:
        raise InputError("--json, --csv, --markdown and --html: give one of them")
    with _nothing_is_garbage(), Store.open(db, create=False) as store:
        study_row = find_study(store, study_name or latest_study(store), profile, settings)
        comparison = report(store, study_row.id, against=against)
        running = study_progress(store, [study_row.id]).get(study_row.id)
    if running:
        progress.note(f"study '{study_row.address}' runs: {running.line}")
    if as_json:
        print(comparison.to_json())
    elif csv:
        print(comparison.to_csv(), end="")
    elif markdown:
        print(comparison.to_markdown())
    elif html:
        print(comparison.to_html())
    else:
        console.print(comparison)


@study.command("export-optuna")
def study_export_optuna(
    study_name: StudyName,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new SQLite file.")],
    db: Db = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Write the candidates of a search to a file of Optuna's, which optuna-dashboard and Optuna's plots open."""
    from deltalab.store import Store
    from deltalab.study.reports.to_optuna import export_optuna

    with Store.open(db, create=False) as store:
        searches = list(export_optuna(store, find_study(store, study_name, profile).id, file))
    lines = [f"{search.name}: {search.complete} of {search.trials} candidates have all scores" for search in searches]
    lines.append(f"{file}: written; pip install optuna-dashboard, then: optuna-dashboard sqlite:///{file}")
    counts = [{"name": search.name, "complete": search.complete, "trials": search.trials} for search in searches]
    print_result(as_json, "\n".join(lines), file=file, searches=counts)


@study.command("calibrate")
def study_calibrate(
    study_name: StudyName,
    settings: Overrides = None,
    db: Db = None,
    profile: Profile = None,
    repeats: Annotated[int, typer.Option(min=1, max=10**6, help="A/A studies to simulate.")] = 400,
    real: Annotated[
        bool, typer.Option("--real", help="Train the base on a seed for every run of every arm, and split those.")
    ] = False,
    as_json: AsJson = False,
    progress_form: Progress = "text",
) -> None:
    """Measure how often this study finds a difference between arms that are alike, and whether it keeps to 5%."""
    from deltalab.store import Store
    from deltalab.study.forecast import calibration
    from deltalab.study.planning.make import plan_study

    if real:
        plan = plan_study(study_name, profile=profile, overrides=settings)
        rates = calibration.real(plan, db=db, repeats=repeats, quiet=False)
    else:
        try:
            with Store.open(db, create=False) as store:
                study_id = find_study(store, study_name, profile, settings).id
                rates = calibration.simulated(store, study_id, repeats=repeats, quiet=False)
        except InputError as error:
            raise InputError(f"{error}; run it first (deltalab study run {study_name}), or give --real") from None
    if as_json:
        print(json.dumps([asdict(row) for row in rates]))
    else:
        for row in rates:
            print(row)


@study.command("schema")
def study_schema(
    out: Annotated[
        Path | None, typer.Option("--out", help="Write it to this file, in place of an earlier one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the JSON schema of a study file, for editors."""
    from deltalab.study.specs.json_schema import schema_text

    if out is None:
        print(schema_text(), end="")
    else:
        out.write_text(schema_text(), encoding="utf-8")
        comment = f"# yaml-language-server: $schema={out.name}"
        print_result(as_json, f"{out}: begin a study beside it with: {comment}", file=out, comment=comment)


@study.command("new")
def study_new(name: str, folder: Folder = Path("studies"), as_json: AsJson = False) -> None:
    """Write a commented study file that can be planned and run, to start from."""
    from deltalab.authoring.files.scaffold import new_study

    file = new_study(name, folder)
    print_result(as_json, f"{file}: change it, then: deltalab study plan {file}", name=name, file=file)


@study.command("import")
def study_import(
    tool: Annotated[str, typer.Argument(metavar="zoology|mad", help="The tool whose configuration it is.")],
    config: Annotated[Path, typer.Argument(help="zoology: a Python file that makes `configs`; mad: a task's YAML.")],
    out: Annotated[Path | None, typer.Option("--out", help="The study file; studies/NAME.yaml by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a study from a configuration of zoology or mad-lab, which is read as text. Nothing of it is run."""
    from deltalab.authoring.imports.mad import from_mad
    from deltalab.authoring.imports.written import write_study
    from deltalab.authoring.imports.zoology import from_zoology

    readers = {"zoology": from_zoology, "mad": from_mad}
    if tool not in readers:
        raise unknown("tool", tool, readers)
    imported = readers[tool](config)
    file = out or Path("studies") / f"{imported.name}.yaml"
    write_study(imported, file)
    if not as_json:
        for note in imported.left_out:
            progress.note(f"not as in {tool}: {note}")
    tasks, arms = len(imported.tasks), len(imported.arms) + 1
    text = f"{file}: {tasks} tasks, {arms} arms; then: deltalab study plan {file}"
    print_result(as_json, text, name=imported.name, file=file, tasks=tasks, arms=arms, left_out=list(imported.left_out))


app.command()(place)
app.command()(score)
app.command()(export)
app.command()(train)
app.command()(doctor)
app.command()(mcp)
app.command()(dashboard)
app.command("trust")(trust_folder)
app.command("eval")(evaluate)


@contextmanager
def _nothing_is_garbage() -> Iterator[None]:
    """Has what a block imports or reads passed over by the garbage collector, in the block and from then on.

    It all stays. To look through it again and again takes a sixth of the time of an import, and a third of that of a
    report of 20,000 trials.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def main() -> None:
    """Runs the command and exits.

    The exit code is 0 if the command is done, 1 if a trial or a check failed, 2 if the input was wrong, and 130, 143,
    129 or 131 after SIGINT, SIGTERM, SIGHUP or SIGQUIT.
    """
    code = _run()
    try:
        sys.stdout.flush()
    except OSError as error:
        # Drop what is left to write. Otherwise Python tries again at exit, and prints a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not code and not isinstance(error, BrokenPipeError):
            code = _report(InputError(error.strerror or str(error), where="output", kind="file"))
    sys.exit(code)


def _run() -> int:
    """Runs the command and returns its exit code."""
    called = Path(sys.argv[0]).name
    try:
        # The shell's completion asks by the name that it was installed for.
        code = app(prog_name="platform" if called == "platform" else "deltalab", standalone_mode=False)
    except InputError as error:
        return _report(error)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED[0]
    except SystemExit as error:
        if error.code not in INTERRUPTED:
            raise
        code = error.code
    except OSError as error:
        where = str(error.filename or "output")
        return _report(InputError(error.strerror or str(error), where=where, kind="file"))
    except Exception as error:
        # Typer has its own copy of click. Its exceptions are recognized without importing its internals.
        if not hasattr(error, "format_message"):
            if wants_json_errors():
                traceback.print_exc()
                _print_error(InputError(f"{type(error).__name__}: {error}", kind="internal"))
                return 1
            raise
        if type(error).__name__ == "NoArgsIsHelpError" and not wants_json_errors():
            print(error.format_message(), file=sys.stderr)
            return 2
        return _report(_of_usage(error))
    if registry := sys.modules.get("deltalab.registry"):  # the registry loads torch, which many commands do not need
        for line in registry.left_out():
            progress.note(f"warning: left out: {line}")
    if code in INTERRUPTED:
        going_on = InputError("interrupted: the same command goes on from here", kind="interrupted")
        if wants_json_errors():
            _print_error(going_on)
        else:
            print(going_on, file=sys.stderr)
    return code if isinstance(code, int) else 0


def _of_usage(error: Any) -> InputError:
    """Returns the error that Typer raised about the user's words."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return InputError("name a command: --help lists them", kind="usage")
    key = getattr(error, "option_name", None)
    if key is None and (param := getattr(error, "param", None)) is not None:
        key = max(param.opts, key=len) if param.param_type_name == "option" else param.metavar or param.name.upper()
    usage = InputError(error.format_message(), key=key, kind="usage")
    group = getattr(getattr(error, "ctx", None), "command", None)
    if group is not None and hasattr(error, "option_name"):
        allowed = [name for param in group.params for name in param.opts if name.startswith("--")]
    elif group is not None and (command := re.match("No such command '(.*?)'", error.message)):
        key, allowed = command[1], sorted(group.commands)
    else:
        return usage
    return usage.with_fields(key=key, allowed=allowed, nearest=nearest_of(str(key), allowed))


def _report(error: InputError) -> int:
    """Prints an error, and returns its exit code."""
    if wants_json_errors():
        _print_error(error)
    else:
        for line in error.lines if isinstance(error, WrongRules) else [str(error)]:
            print("error: " + one_line(line), file=sys.stderr)
    return error.exit_code


def _print_error(error: InputError) -> None:
    """Prints an error as a line of JSON."""
    print(json.dumps({"error": error.fields()}, default=str), file=sys.stderr)
