"""The page Trials: a table of a study's trials, a hundred at a time. Ticking a row opens the page Trial."""

import math
from collections.abc import Iterable
from typing import Any, get_args

import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.store.models import Stage
from deltalab.store.studies.trials import ListedTrial, Sort, State, listed
from deltalab.study.answers.rows import SPLIT
from deltalab.study.planning.tuning_candidates import recorded_trial_name
from deltalab.study.specs.recorded_study import RecordedSpec, recorded_tasks
from deltalab_dashboard.downloads import table_files
from deltalab_dashboard.frame import LISTED, STUDY, searched_settings, show
from deltalab_dashboard.text import label, setting

# The most trials that the table shows at a time.
ROWS = 100
# The greatest height of the table in pixels. A row takes 35 pixels.
HEIGHT = 640
# The name under which the session and the address hold the number of the table's page.
PAGE = "part"
# The figures by which the trials can be sorted: name on the page -> name in the ledger.
SORTS: dict[str, Sort] = {
    "arm": "arm",
    "score": "score",
    "seconds": "seconds",
    "tokens/s": "tokens_per_second",
    "finished": "finished_at",
}
COLUMNS = {
    "score": st.column_config.NumberColumn(format="%.4f"),
    "seconds": st.column_config.NumberColumn(format="%.1f"),
    "us/token": st.column_config.NumberColumn(format="%.1f"),
    "finished, UTC": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm:ss"),
}


def page(store: Store, study: Study) -> None:
    """Draws the page."""
    st.title("Trials", anchor=False)
    tasks = recorded_tasks(study)
    options_of: dict[str, list[str]] = {
        "state": [*get_args(State)],
        "stage": [*get_args(Stage)],
        "task": list(tasks),
        "arm": [arm.name for arm in store.arms(study.id)],
    }
    filters: dict[str, Any] = {
        f"{name}s": column.multiselect(
            name.capitalize(), options, placeholder="all", key=f"{name}s", bind="query-params", on_change=_first_page
        )
        for column, (name, options) in zip(st.columns(4), options_of.items(), strict=True)
    }
    left, middle, right = st.columns(3, vertical_alignment="bottom")
    by = left.selectbox("Sorted by", list(SORTS), key="sort", bind="query-params", on_change=_first_page)
    descending = middle.toggle("Descending", key="descending", bind="query-params", on_change=_first_page)
    number = right.number_input(f"Page of {ROWS} trials", min_value=1, step=1, key=PAGE, bind="query-params")
    listing = listed(
        store,
        study.id,
        judged={name: task.metric for name, task in tasks.items()},
        splits=SPLIT,
        **filters,
        sort=SORTS[by],
        descending=descending,
        limit=ROWS,
        offset=ROWS * (number - 1),
    )
    if not listing.total:
        st.info("No trial is recorded yet.")
        return
    pages = math.ceil(listing.matching / ROWS)
    place = f" Page {number} of {pages}." if listing.rows and pages > 1 else ""
    st.caption(
        f"{listing.matching:,} of {listing.total:,} trials.{place} The score is the mean of the seeds that finished. "
        "Tick the box of a row to open its trial."
    )
    if not listing.rows:
        st.info(f"Page {number} is empty: the last is page {pages}." if pages else "No trial passes these filters.")
        return
    paths = searched_settings(study)
    rows = [table_row(trial, paths, study) for trial in listing.rows]
    for path in paths:
        of_one_kind(rows, path)
    if not any(trial.error for trial in listing.rows):
        for row in rows:
            del row["why not done"]
    ticked = st.dataframe(
        pd.DataFrame(rows),
        height=min(HEIGHT, 36 * (len(rows) + 1)),
        hide_index=True,
        column_config=COLUMNS,
        placeholder="",
        key=f"table of page {number}",
        on_select="rerun",
        selection_mode="single-row",
        alt="The trials of this page, a row each.",
    )
    text = [{name: "" if cell is None else str(cell) for name, cell in row.items()} for row in rows]
    table_files(text, f"{study.name} trials {number}")
    open_ticked(study, listing.rows, ticked["selection"]["rows"])


def _first_page() -> None:
    """Goes to the first page of the table. Widgets call this when a filter or the order changes."""
    st.session_state[PAGE] = 1


def open_ticked(study: Study, rows: list[ListedTrial], ticked: list[int]) -> None:
    """Opens the page of the trial whose row is ticked.

    The session keeps the present filters, so that the trial's page can link back to the same list.
    """
    if ticked:
        st.session_state[LISTED] = {key: st.query_params.get_all(key) for key in st.query_params}
        st.switch_page("views/trial.py", query_params={STUDY: label(study), "trial": rows[ticked[0]].key})


def table_row(trial: ListedTrial, paths: Iterable[str], study: Study) -> dict[str, Any]:
    """Returns the row of a trial in the table.

    Args:
        trial: The trial.
        paths: The paths of the settings that the study tunes or searches. Each has a cell, which is None if the trial
            does not have the setting.
        study: The study.
    """
    name = recorded_trial_name(study.spec, trial.arm, trial.stage, trial.number)
    return {
        "arm": trial.arm,
        "task": trial.task,
        "stage": trial.stage,
        **({"trial": name} if RecordedSpec(study.spec).is_search else {"number": trial.number}),
        "state": trial.state,
        "score": trial.score,
        **dict.fromkeys(paths),
        "rule": trial.rule,
        # In a search for whole rules, `trial.values` has a value for "rule", which replaces the rule's name above. That
        # value names the rule and its knobs.
        **{path: value if isinstance(value, int | float) else setting(value) for path, value in trial.values.items()},
        "why not done": "" if trial.error is None else trial.error.strip().rpartition("\n")[2],
        "seconds": trial.seconds,
        "seeds": trial.seeds,
        "diverged seeds": ", ".join(map(str, trial.diverged)),
        "us/token": 1e6 / trial.tokens_per_second if trial.tokens_per_second else None,
        "finished, UTC": trial.finished_at,
        "key": trial.key,
    }


def of_one_kind(rows: Iterable[dict[str, Any]], name: str) -> None:
    """Writes a column's values as words, unless all are numbers or all are yes and no. A table's column has one kind.

    >>> rows = [{"rule.b": 1}, {"rule.b": "head_sigmoid"}, {"rule.b": None}]
    >>> of_one_kind(rows, "rule.b")
    >>> rows
    [{'rule.b': '1'}, {'rule.b': 'head_sigmoid'}, {'rule.b': None}]
    """
    given = [row for row in rows if row[name] is not None]
    if len({str if isinstance(row[name], str) else isinstance(row[name], bool) for row in given}) > 1:
        for row in given:
            row[name] = row[name] if isinstance(row[name], str) else setting(row[name])


if __name__ == "__main__":  # Streamlit runs a page as a script.
    show(page)
