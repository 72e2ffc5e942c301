"""Every trial with its state, the tracebacks of those that failed, and the scores of tuning."""

import math
from collections.abc import Iterable
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study, TrialRow
from deltalab.study.answer import SPLIT
from deltalab.study.space import Search
from deltalab_dashboard.chosen import plain, searched, setting, show

COLUMNS = {
    "score": st.column_config.NumberColumn(format="%.4f"),
    "seconds": st.column_config.NumberColumn(format="%.1f"),
    "us/token": st.column_config.NumberColumn(format="%.1f"),
    "finished, UTC": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm:ss"),
}


def page(store: Store, study: Study) -> None:
    st.title("Trials", anchor=False)
    every = store.trials(study.id)
    if not every:
        st.info("No trial is recorded yet.")
        return
    offered: dict[str, list[str]] = {
        "state": ["done", "diverged", "failed", "infeasible"],
        "stage": sorted(set[str](trial.stage for trial in every)),
        "task": sorted({trial.task for trial in every}),
        "arm": list(dict.fromkeys(trial.arm for trial in every)),
    }
    wanted = {
        name: column.multiselect(name.capitalize(), options, placeholder="all", key=f"{name}s", bind="query-params")
        for column, (name, options) in zip(st.columns(4), offered.items(), strict=True)
    }
    scores = means(store, study)
    rows = [(trial, line(trial, scores.get(trial.key), searched(study))) for trial in every]
    rows = [(trial, row) for trial, row in rows if all(row[name] in (wanted[name] or offered[name]) for name in wanted)]
    st.caption(f"{len(rows)} of {len(every)} trials. The score is the mean of the seeds that finished.")
    st.dataframe(pd.DataFrame([row for _, row in rows]), hide_index=True, column_config=COLUMNS, placeholder="")
    for trial, _ in rows:
        if trial.error is not None:
            last = trial.error.strip().rpartition("\n")[2]
            with st.expander(plain(f"{trial.arm}, {trial.stage} {trial.number} on {trial.task}: {last}")):
                st.code(trial.error, language=None)
    searches = [trial for trial in every if trial.stage == "tune"]
    tuning(study, searches or [trial for trial in every if trial.values], scores)


def means(store: Store, study: Study) -> dict[str, float]:
    """The mean that the report compares, of each trial that has one, by its key."""
    values: dict[str, list[float]] = {}
    for final in store.final_metrics(study.id):
        judged = (study.provenance["tasks"][final.task]["metric"], SPLIT[final.stage])
        if (final.metric, final.split) == judged and final.run_state == "done":
            values.setdefault(final.trial, []).append(final.value)
    return {key: math.fsum(found) / len(found) for key, found in values.items()}


def line(trial: TrialRow, score: float | None, paths: Iterable[str]) -> dict[str, Any]:
    """A row of the table. paths: the settings that the study tunes, empty where a trial has no value."""
    diverged = [str(seed) for seed, state in trial.runs.items() if state == "diverged"]
    state = "diverged" if diverged and trial.state == "done" else trial.state
    return {
        "arm": trial.arm,
        "task": trial.task,
        "stage": trial.stage,
        "number": trial.number,
        "state": state,
        "score": score,
        **dict.fromkeys(paths),
        "rule": trial.rule,
        # A search may choose the rule as a whole: that value names the rule and its knobs, and takes its place.
        **{path: value if isinstance(value, int | float) else setting(value) for path, value in trial.values.items()},
        "seconds": trial.seconds,
        "seeds": len(trial.runs),
        "diverged seeds": ", ".join(diverged),
        "us/token": 1e6 / trial.tokens_per_second if trial.tokens_per_second else None,
        "finished, UTC": trial.finished_at,
        "key": trial.key,
    }


def tuning(study: Study, trials: list[TrialRow], scores: dict[str, float]) -> None:
    """The score of the candidates against one setting, on one task."""
    tuned = list(dict.fromkeys(name for trial in trials for name in trial.values))
    if not tuned:
        return
    st.subheader("Tuning", anchor=False)
    left, right = st.columns(2)
    name = left.selectbox("Tuned", tuned, key="tuned", bind="query-params")
    task = right.selectbox("On", list(dict.fromkeys(trial.task for trial in trials)), key="on", bind="query-params")
    meant = [trial for trial in trials if trial.task == task and name in trial.values]
    points = [line(trial, scores[trial.key], searched(study)) for trial in meant if trial.key in scores]
    st.caption(f"{len(points)} of {len(meant)} trials have a score.")
    if points:
        st.altair_chart(sweep(pd.DataFrame(points), name, searched(study)[name]), height=380)


def sweep(points: pd.DataFrame, name: str, space: Search) -> alt.Chart:
    field = name.replace(".", "\\.")  # Vega-Lite reads an unescaped dot as a path into an object
    if space.choice or space.pattern:
        x = alt.X(f"{field}:N", title=name)
    else:
        scale = alt.Scale(type="log" if space.log_uniform else "linear", zero=False, nice=False)
        x = alt.X(f"{field}:Q", title=name, scale=scale)
    chart: alt.Chart = (
        alt.Chart(points)
        .mark_point(filled=True, size=90, opacity=0.8)
        .encode(
            x=x,
            y=alt.Y("score:Q", scale=alt.Scale(zero=False)),
            color=alt.Color("arm:N", sort=None, legend=alt.Legend(title=None, labelLimit=0)),
            shape=alt.Shape("state:N", scale=alt.Scale(domain=["done", "diverged"], range=["circle", "cross"])),
            tooltip=["arm:N", "number:Q", alt.Tooltip("score:Q", format=".4f"), "state:N"],
        )
    )
    return chart


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
