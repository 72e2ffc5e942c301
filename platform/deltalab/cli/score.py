"""The command `deltalab score`, which programs ask about each rule that they propose."""

from pathlib import Path
from typing import Annotated

import typer

from deltalab.cli.options import AsJson, Db, ExecutorHere, Overrides, Profile, Progress, Workers


def score(
    rule_file: Annotated[Path, typer.Argument(metavar="RULE.py", help="A file with one rule.")],
    settings: Overrides = None,
    against: Annotated[str, typer.Option("--against", metavar="FILE|NAME", help="The study with the base.")] = ...,  # type: ignore[assignment]
    db: Db = None,
    profile: Profile = None,
    executor: ExecutorHere = "ray",
    workers: Workers = None,
    as_json: AsJson = False,
    progress_form: Progress = "text",
) -> None:
    """Score a rule as an arm of a study: keep it or not, with at most 5% of loops keeping any by noise.

    The ledger counts the proposals of each study. Exit 1 if the rule fails its checks or does not train.
    """
    from deltalab.study.running.settings import RunSettings
    from deltalab.study.scoring.score import score as scored

    run = RunSettings(db=db, executor=executor, workers=workers, quiet=False)  # type: ignore[arg-type]
    answer = scored(rule_file, against, run, profile=profile, overrides=settings)
    if as_json:
        print(answer.to_json())
    else:
        about, gain = answer.artifacts, answer.combined_score
        low, high = ("?" if end is None else f"{end:+.4g}" for end in (about.get("low"), about.get("high")))
        number = "" if gain is None else f"{gain:+.4g} [{low}, {high}]  "
        print(f"{number}{answer.verdict}: {about['reason']}")
        print(
            f"proposal {about['proposal']}, {about['confirmations']} confirmed; "
            f"{about['spent']:.2g} of the error of {about['promised']:g} is spent"
        )
    if answer.verdict == "invalid":
        raise typer.Exit(1)
