"""Reports of studies: answers that can be shown on a terminal, in a notebook and as files."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult

from deltalab.store import Store
from deltalab.store.models import Stage
from deltalab.study.answers.answer import Answer, answer
from deltalab.study.reports import files
from deltalab.study.reports.files import Part

if TYPE_CHECKING:
    import pandas as pd


class Report(Answer):
    """An answer that can be shown; `console.print(report)` fits it to the console's width."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from deltalab.study.reports.terminal import drawn

        yield from drawn(self, options.max_width)

    def _repr_html_(self) -> str:
        from deltalab.study.reports.html.notebook import to_html

        return to_html(self)

    def to_markdown(self) -> str:
        """Returns the report as Markdown."""
        return files.markdown(self)

    def to_html(self) -> str:
        """Returns the report as a page of HTML with its charts, which a browser opens without a server."""
        from deltalab.study.reports.html.page import page

        return page(self)

    def to_json(self) -> str:
        """Returns every figure of the report as JSON; null for a figure that is not known."""
        return files.as_json(self)

    def to_csv(self) -> str:
        """Returns the report as CSV, with a line per task and arm. A figure that is not known is an empty field.

        The columns `scores` and `metrics` hold JSON: each seed's score with its difference, its candidate and the score
        of one setting; and each further metric's mean. If the study has several tasks, the lines of the task "over
        tasks" are the first.

        If the study has ladders, a table with a line per arm and size follows after an empty line. If models exported
        from the study were trained, a table with a line per training follows.
        """
        return files.as_csv(self)

    def to_frame(self, part: Part = "arms") -> "pd.DataFrame":
        """Returns a pandas DataFrame with the lines and columns of `to_csv`, as numbers, dicts and lists.

        Whole numbers have the type Int64, which can hold missing values; other figures are float64, NaN if they are not
        known. The frame is empty if the report has no such part.

        Args:
            part: "arms" has a line per task and arm, "seeds" one per task, arm and seed, "metrics" one per task, arm
                and further metric, "ladders" one per arm and size, "trainings" one per training,
                "comparisons" one per difference of a training's evaluation to that of another model.

        The columns of "seeds":

        - `score`: the mean of the seed's test scores, weighted by the arm's other seeds. This is what is compared.
        - `difference`: the score minus that of the base, or of the reference in its place, on the seeds that both
          have. NaN if the test did not take the seed.
        - `candidate` and `values`: the candidate with the greatest weight. NA if the seed's run of it did not finish.
        - `one_setting`: the test score of the values that are best on validation over all seeds. NaN if no candidate
          finished all seeds.

        The columns of "metrics" are the mean of a further metric over the `n` seeds that have it, weighted as the
        scores are, and its 95% t interval. No test compares them.

        Raises:
            InputError: There is no such part.
        """
        return files.as_frame(self, part)


def report(
    store: Store, study_id: int, *, which: Stage = "confirm", against: str | None = None, importances: bool = True
) -> Report:
    """Returns the report of a study, with the answer that `deltalab.study.answers.answer.answer` finds.

    Args:
        store: The ledger.
        study_id: The id of the study.
        which: The stage whose scores are shown, as in `answer`.
        against: The arm to compare the others with in place of the base, as in `answer`.
        importances: Whether to find how much each setting of a search explains, as in `answer`.

    Raises:
        InputError: There is no such study or arm, or `against` is given for the stage "tune".
    """
    return Report(**vars(answer(store, study_id, which=which, against=against, importances=importances)))


def open_report(
    study: str | int, *, db: str | Path | None = None, profile: str | None = None, against: str | None = None
) -> Report:
    """Opens the report of a study that has run or is running. In a notebook, `deltalab.report("quickstart")` shows it.

    Args:
        study: NAME, NAME:PROFILE or the id of the study.
        db: A file or the URL of a database; None is ./deltalab.db.
        profile: The profile, if `study` is NAME alone.
        against: The arm to compare the others with in place of the base. The test is the same. Its p-values hold for
            one such choice, made before looking at results.

    Raises:
        InputError: There is no such database, study or arm.
    """
    with Store.open(db, create=False) as store:
        return report(store, store.study(study, profile).id, against=against)
