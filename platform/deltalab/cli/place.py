"""The command `deltalab place`, which finds out where the attention layers of a hybrid belong."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltalab.cli.options import AsJson, Db, ExecutorHere, Overrides, Profile, Progress, StudyFile, Workers
from deltalab.study.placing.placements import BEST, SPREAD


def place(
    study_file: StudyFile,
    settings: Overrides = None,
    best: Annotated[int, typer.Option(min=1, max=100, help="The best placements to train from scratch.")] = BEST,
    spread: Annotated[
        int, typer.Option(min=1, max=100, help="Other placements to train, evenly down to the worst.")
    ] = SPREAD,
    steps: Annotated[
        int | None, typer.Option(min=1, help="The steps of the supernet; those of the base by default.")
    ] = None,
    db: Db = None,
    profile: Profile = None,
    executor: ExecutorHere = "ray",
    workers: Workers = None,
    as_json: AsJson = False,
    progress_form: Progress = "text",
) -> None:
    """Place the attention layers of a study's base: by one supernet that holds both mixers, then by training.

    The base says how many layers have attention. Its placement is the one that all others are tested against.
    """
    from deltalab.study.placing.place import place as placed
    from deltalab.study.running.settings import RunSettings

    run = RunSettings(db=db, executor=executor, workers=workers, quiet=False)  # type: ignore[arg-type]
    found = placed(study_file, run, best=best, spread=spread, steps=steps, profile=profile, overrides=settings)
    if as_json:
        print(found.to_json())
        return
    console = Console()
    console.print(found.report)
    table = Table(box=None, pad_edge=False, title="\nPlacements", title_justify="left")
    for heading in ("arm", "attention in layers", f"rank of {found.scored}", "supernet, validation", "trained, test"):
        table.add_column(Text(heading), overflow="fold")
    for arm in found.arms:
        figures = ("?" if figure is None else f"{figure:.4g}" for figure in (arm.supernet, arm.trained))
        layers = ", ".join(map(str, arm.placement))
        table.add_row(*map(Text, (arm.name, layers, str(arm.rank), *figures)))
    console.print(table)
    scored = "all" if found.scored == found.possible else f"{found.scored:,} of {found.possible:,}"
    print(
        f"Scores are {found.metric}, of which {'more' if found.maximize else 'less'} is better; {scored} were scored."
    )
    if found.correlation is None:
        print("Rank correlation of both scores: not known for so few.")
    else:
        print(f"Rank correlation of both scores over these {len(found.arms)} placements: {found.correlation:+.2f}")
