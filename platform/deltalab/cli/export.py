"""The command `deltalab export`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from deltalab.cli.options import AsJson, Db, Profile, find_study, print_result, wants_json
from deltalab.errors import InputError

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A study's NAME, NAME:PROFILE, id or file; or a folder: an export, a run of deltalab train or one of its "
        "checkpoints, a model of FLA.",
    ),
]


def _print_recipes(wanted: bool) -> None:
    """Prints the papers' recipes and ends the command, if it is wanted."""
    if wanted:
        from deltalab.export.papers import recipes_rows, recipes_table

        print(json.dumps(recipes_rows()) if wants_json() else "\n".join(recipes_table()))
        raise typer.Exit


def export(
    source: Source,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
    arm: Annotated[str | None, typer.Option("--arm", help="Which arm of the study.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The arm with the best score in the study's report.")] = False,
    to: Annotated[
        str, typer.Option("--to", help="hf (transformers), torchtitan (the same, and the engine's files), or fla.")
    ] = "hf",
    scale: Annotated[
        str | None,
        typer.Option("--scale", help="A paper's size, such as 340M or 1.3B; untrained. --recipes lists them."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", help="A paper's training: comba, rla, gka or llama; without it, the trial's, resized."
        ),
    ] = None,
    recipes: Annotated[
        bool,
        typer.Option("--recipes", callback=_print_recipes, is_eager=True, help="List the papers' recipes, and exit."),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change model.KEY, rule.KNOB or recipe.KEY; repeatable."),
    ] = None,
    weights: Annotated[
        bool | None, typer.Option("--weights/--no-weights", help="With or without weights; with, where they fit.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", help="bytes, a tokenizer.json, a folder with one, or a name on the Hugging Face Hub."
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="USER/NAME",
            help="Put the folder on the Hugging Face Hub, too; a new repository is private.",
        ),
    ] = None,
    task: Annotated[str | None, typer.Option("--task", help="Which task, where the study has several.")] = None,
    db: Db = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Export a model of a study, or of a folder, for real training: its code with kernels, its recipe, its weights.

    A study needs --arm or --best. Weights go along where the model keeps its size.
    """
    from deltalab.export.folders import from_folder, holds_a_model
    from deltalab.export.write import export as write

    if push is not None:
        from deltalab.export import hub

        hub.require_access(push)
    folder = Path(source)
    is_path = "/" in source and not source.endswith((".yaml", ".yml"))
    if is_path or (folder.is_dir() and holds_a_model(folder)):
        model, description = from_folder(folder), source
        for option, value in (("--arm", arm), ("--best", best), ("--task", task), ("--profile", profile)):
            if value:
                raise InputError(f"{option} is for a study; {source} is a folder, which holds one model")
    else:
        from deltalab.store import Store
        from deltalab.study.winners.best_run import best_run

        try:
            with Store.open(db, create=False) as store:
                study = find_study(store, source, profile).id
        except InputError as error:
            if folder.is_dir():
                raise InputError(f"{source}: the folder holds no model, and no study is found: {error}") from None
            raise
        with Store.open(db, create=False) as store:
            chosen = best_run(store, study, arm=arm, best=best, task=task)
        model, description = chosen.source, chosen.summary
    result = write(
        model,
        directory,
        to=to,
        scale=scale,
        recipe=recipe,
        given=settings or [],
        weights=weights,
        tokenizer=tokenizer,
    )
    trained = "with its weights" if result.trained else "untrained"
    remark = "a model of FLA, which deltalab train does not take" if to == "fla" else "recipe.yaml says how to train it"
    whole = f"{directory}: {result.parameters:,} parameters, {trained}; {remark}"
    pushed = None if push is None else hub.push(directory, push)
    at_hub = [] if pushed is None else [f"{pushed}: holds the same"]
    print_result(
        as_json,
        "\n".join([description, *(f"- {note}" for note in result.notes), whole, *at_hub]),
        folder=directory,
        source=description,
        form=to,
        parameters=result.parameters,
        trained=result.trained,
        notes=list(result.notes),
        pushed=pushed,
    )
