"""A study's answer, ready to be shown: on a terminal, in a notebook, and as files."""

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult

from deltalab.reading import pairs
from deltalab.store import Store
from deltalab.store.models import Stage
from deltalab.study.answers.answer import Answer, answer
from deltalab.study.answers.rows import TaskTable
from deltalab.study.reports import files
from deltalab.study.reports.files import Part
from deltalab.study.specs.setting_paths import training_part

if TYPE_CHECKING:
    import pandas as pd

    from deltalab.study.reports.search_sections import Section


class Report(Answer):
    """An answer that can be shown; `console.print(report)` fits it to the console's width."""

    @property
    def title(self) -> str:
        """The study, how it was run, and how far it is."""
        profile = f"profile {self.profile}" if self.profile else "default profile"
        state = self.state if self.state in ("done", "failed") else f"{self.state}: verdicts may change"
        settings = f", with {pairs(self.overrides)}" if self.overrides else ""
        return f"{self.study}, {profile}{settings}, id {self.study_id} ({state})"

    @property
    def shown(self) -> list[TaskTable]:
        """The tables as readers see them.

        A search says what each of its arms is in a line of its own, so that its tables leave that out.
        """
        if self.search is None:
            return self.tables
        return [
            replace(table, rows=[replace(row, tuned=training_part(row.tuned)) for row in table.rows])
            for table in self.tables
        ]

    def sections(self, most: int | None = None) -> "list[Section]":
        """What a search found, in sections; nothing for a study that is none.

        Args:
            most: Rows of a table; None shows all.
        """
        if self.search is None:
            return []
        from deltalab.study.reports.search_sections import sections  # It brings Optuna, which takes a second to load.

        return sections(self.search, most)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from deltalab.study.reports.terminal import drawn

        yield from drawn(self, options.max_width)

    def _repr_html_(self) -> str:
        from deltalab.study.reports.notebook import to_html

        return to_html(self)

    def to_markdown(self) -> str:
        """The report as Markdown."""
        return files.markdown(self)

    def to_json(self) -> str:
        """Every figure; null for a figure that is not known."""
        return files.as_json(self)

    def to_csv(self) -> str:
        """A line per task and arm; an empty field for a figure that is not known.

        An empty line and a table with a line per arm and size follow for a study with ladders; another table has a
        line per training.
        """
        return files.as_csv(self)

    def to_frame(self, part: Part = "arms") -> "pd.DataFrame":
        """The figures as a pandas DataFrame: the lines and columns of `to_csv`, as numbers, dicts and lists.

        Whole numbers have the type Int64, which knows missing ones; other figures are float64, NaN if they are not
        known. The frame is empty if the report has no such part.

        Args:
            part: "arms" has a line per task and arm, "ladders" one per arm and size, "trainings" one per training.

        Raises:
            InputError: There is no such part.
        """
        return files.as_frame(self, part)


def report(store: Store, study_id: int, *, which: Stage = "confirm") -> Report:
    """A study's answer as `deltalab.study.answers.answer.answer` finds it, ready to be shown.

    Args:
        store: The ledger.
        study_id: The id of the study.
        which: The stage whose scores are shown, as of `answer`.

    Raises:
        InputError: There is no such study.
    """
    return Report(**vars(answer(store, study_id, which=which)))
