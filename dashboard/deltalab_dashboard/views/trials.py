"""The trials of a study, a page at a time. A row opens the page of its trial."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.store.models import Stage
from deltalab.store.trials import ListedTrial, Sort, State, listed
from deltalab.study.answers.answer import SPLIT
from deltalab.study.planning.tuning_candidates import recorded_as
from deltalab_dashboard.downloads import table_files
from deltalab_dashboard.frame import LISTED, STUDY, searched, show
from deltalab_dashboard.text import label, setting

ROWS = 100  # of a page
HEIGHT = 640  # pixels of the table; a row takes 35
PAGE = "part"  # the key of its number in the session and in the URL
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
    st.title("Trials", anchor=False)
    offered: dict[str, list[str]] = {
        "state": [*get_args(State)],
        "stage": [*get_args(Stage)],
        "task": list(study.provenance["tasks"]),
        "arm": [arm.name for arm in store.arms(study.id)],
    }
    wanted: dict[str, Any] = {
        f"{name}s": column.multiselect(
            name.capitalize(), options, placeholder="all", key=f"{name}s", bind="query-params", on_change=_first_page
        )
        for column, (name, options) in zip(st.columns(4), offered.items(), strict=True)
    }
    left, middle, right = st.columns(3, vertical_alignment="bottom")
    by = left.selectbox("Sorted by", list(SORTS), key="sort", bind="query-params", on_change=_first_page)
    descending = middle.toggle("Descending", key="descending", bind="query-params", on_change=_first_page)
    number = right.number_input(f"Page of {ROWS} trials", min_value=1, step=1, key=PAGE, bind="query-params")
    judged = {task: about["metric"] for task, about in study.provenance["tasks"].items()}
    found = listed(
        store,
        study.id,
        judged=judged,
        splits=SPLIT,
        **wanted,
        sort=SORTS[by],
        descending=descending,
        limit=ROWS,
        offset=ROWS * (number - 1),
    )
    if not found.total:
        st.info("No trial is recorded yet.")
        return
    pages = math.ceil(found.matching / ROWS)
    place = f" Page {number} of {pages}." if found.rows and pages > 1 else ""
    st.caption(
        f"{found.matching:,} of {found.total:,} trials.{place} The score is the mean of the seeds that finished. "
        "Tick the box of a row to open its trial."
    )
    if not found.rows:
        st.info(f"Page {number} is empty: the last is page {pages}." if pages else "No trial passes these filters.")
        return
    rows = [line(trial, searched(study), study.spec) for trial in found.rows]
    if not any(trial.error for trial in found.rows):
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
    open_ticked(study, found.rows, ticked["selection"]["rows"])


def _first_page() -> None:
    """Shows the first page when other trials are asked for."""
    st.session_state[PAGE] = 1


def open_ticked(study: Study, rows: list[ListedTrial], ticked: list[int]) -> None:
    """Goes to the page of the trial whose row is ticked, which leads back to this list as it is."""
    if ticked:
        st.session_state[LISTED] = {key: st.query_params.get_all(key) for key in st.query_params}
        st.switch_page("views/trial.py", query_params={STUDY: label(study), "trial": rows[ticked[0]].key})


def line(trial: ListedTrial, paths: Iterable[str], spec: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table. paths: the settings that the study tunes, empty where a trial has no value. spec: of it."""
    name = recorded_as(spec, trial.arm, trial.stage, trial.number)
    return {
        "arm": trial.arm,
        "task": trial.task,
        "stage": trial.stage,
        **({"trial": name} if spec.get("search") else {"number": trial.number}),
        "state": trial.state,
        "score": trial.score,
        **dict.fromkeys(paths),
        "rule": trial.rule,
        # A search may choose the rule as a whole: that value names the rule and its knobs, and takes its place.
        **{path: value if isinstance(value, int | float) else setting(value) for path, value in trial.values.items()},
        "why not done": "" if trial.error is None else trial.error.strip().rpartition("\n")[2],
        "seconds": trial.seconds,
        "seeds": trial.seeds,
        "diverged seeds": ", ".join(map(str, trial.diverged)),
        "us/token": 1e6 / trial.tokens_per_second if trial.tokens_per_second else None,
        "finished, UTC": trial.finished_at,
        "key": trial.key,
    }


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
