"""The page Search: the front, the candidates by their settings, the settings that mattered, and random search."""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.study.specs.recorded_study import RecordedSpec
from deltalab.study.specs.sections.budget import COSTS
from deltalab_dashboard import cache, downloads
from deltalab_dashboard.charts.candidate_settings import by_all_settings, by_setting, by_two_settings
from deltalab_dashboard.charts.candidates import CandidateTable, by_objectives, candidate_table, finite
from deltalab_dashboard.colors import PALETTE
from deltalab_dashboard.frame import show
from deltalab_dashboard.text import badge, bullets, plain

if TYPE_CHECKING:
    from deltalab.study.answers.search_results import Discovery

FRONT = "Base, finalists and the front"
# The views of the page: name -> how the titles of its sections begin. "Settings" has charts alone.
VIEWS: dict[str, tuple[str, ...]] = {
    "Found": ("The front", "What was found"),
    "Settings": (),
    "What mattered": ("What mattered", "The rules tried"),
    "Method": ("Beside random search", "Left out"),
}
# The views that show or rank by what each setting explains, which may take seconds to find.
WITH_IMPORTANCES = ("Settings", "What mattered")


def page(store: Store, study: Study) -> None:
    """Draws the page."""
    st.title("Search", anchor=False)
    st.markdown(badge(study))
    if not RecordedSpec(study.spec).is_search:
        st.info("This study searches nothing: it compares arms that it lists.")
        return
    view = st.radio("Show", list(VIEWS), horizontal=True, key="view", bind="query-params", label_visibility="collapsed")
    search = cache.report_of(store, study, importances=view in WITH_IMPORTANCES).search
    assert search is not None
    from deltalab.study.reports.search_sections import sections  # Most studies search nothing.

    if not search.candidates:
        st.info("No candidate has ended yet.")
    space = RecordedSpec(study.spec).search
    table = candidate_table(search.candidates, space.searched, search.objectives, len(space.rungs))
    st.markdown(plain(summary(table)))
    if view == "Settings":
        by_settings(table, search)
        return
    for section in sections(search):
        if not section.title.startswith(VIEWS[view]):
            continue
        st.subheader(plain(section.title), anchor=False)
        if section.title.startswith("The front"):
            front(table)
        elif section.title == "What mattered":
            importances(search, table)
        elif section.title == "Beside random search":
            hypervolumes(search)
        cells = [dict(zip(section.headers, row, strict=True)) for row in section.rows]
        if cells:
            downloads.table(cells, f"table {section.title.split()[1]}")
        st.caption(bullets(section.notes))
    if view == "Method":
        optuna_commands(study)


def summary(table: CandidateTable) -> str:
    """Writes the result of the search in one or two sentences. The text is empty if no candidate has a score."""
    objective = next(iter(table.objectives))
    best = table.best(objective)
    if best is None:
        return ""
    sentence = f"The best {table.labels[objective]} on validation is {best[objective]:.3f}, by {candidate_name(best)}."
    base = next((row for row in table.rows if row["kind"] == "base" and finite(row, objective)), None)
    return sentence if base is None or base is best else f"{sentence} The base, tuned, has {base[objective]:.3f}."


def candidate_name(row: Mapping[Any, Any]) -> str:
    """Returns the name that a candidate has within a sentence."""
    if row["kind"] == "base":
        return "the base"
    return f"{row['name']} ({row['what']})" if row["kind"] == "finalist" else str(row["what"])


def front(table: CandidateTable) -> None:
    """Draws the candidates by two objectives that the reader chooses."""
    names = list(table.objectives)
    labels = table.labels
    left, right = st.columns(2)
    down = left.selectbox("Objective", names, key="objective", format_func=labels.__getitem__, bind="query-params")
    # Costs come first, since readers weigh a score against a cost. The options do not depend on the choice of the
    # objective: if an option that was chosen were no longer offered, the address would lose it.
    others = [*sorted(names[1:], key=lambda name: name.partition("@")[0] not in COSTS), names[0]]
    across = right.selectbox("Against", others, key="against", format_func=labels.__getitem__, bind="query-params")
    zoomed = st.toggle("Zoom to the finalists", key="zoom", bind="query-params")
    if across == down and len(names) > 1:
        st.info("Choose two objectives.")
    elif (drawing := by_objectives(table, down, across, zoomed=zoomed)) is not None:
        figure, data = drawing
        downloads.chart(figure, "front", rows=data, description="Every candidate of the search by two objectives")
        if len(names) > 2:
            st.caption(
                "The line joins the candidates that no other beats in these two objectives. Those marked as on the "
                f"front are beaten by none in all {len(names)} at once. A candidate that is better than "
                "chance on none of the tasks is on neither."
            )


def by_settings(table: CandidateTable, search: "Discovery") -> None:
    """Draws three charts of the candidates: by all settings side by side, by one setting, and by two settings."""
    names = list(table.objectives)
    trained = ", ".join(f"{path} {value}" for path, value in search.fidelity.items())
    scores = f"Scores are those with {trained}, which all candidates have. " if trained else ""
    st.subheader("All settings side by side", anchor=False)
    groups = {FRONT: {row["name"] for row in table.rows if row["kind"] in ("base", "finalist", "on the front")}}
    groups |= {f"The best tenth by {table.labels[name]}": table.best_tenth(name) for name in names}
    group = st.selectbox("Highlight", list(groups), key="highlight", bind="query-params")
    figure, data, left_out = by_all_settings(table, groups[group], names[0])
    downloads.chart(
        figure, "settings", rows=data, description="A line for each candidate across all of its settings and scores"
    )
    st.caption(
        f"{scores}A line is a candidate; right is better on the objectives. A click on a line lifts it out. "
        "Absent: the candidate has no such setting, since the setting depends on another one."
        + (f" {left_out} candidates with worse scores are left out." if left_out else "")
    )
    paths = by_importance(table, search)
    st.subheader("One setting", anchor=False)
    left, right = st.columns(2)
    path = left.selectbox("Setting", paths, key="setting", bind="query-params")
    score = right.selectbox("Score", names, key="score", format_func=table.labels.__getitem__, bind="query-params")
    if (drawing := by_setting(table, path, score)) is None:
        st.info("No candidate has this setting.")
    else:
        figure, data = drawing
        downloads.chart(figure, "setting", rows=data, description="The score of the candidates by one setting")
        st.caption(
            f"{scores}{left_out_text(table, path)}Orange: the mean of the candidates with this value, or in this part "
            "of the range. Other settings vary at the same time."
        )
    if len(paths) < 2:
        return
    st.subheader("Two settings", anchor=False)
    first, second = st.columns(2)
    across = first.selectbox("Across", paths, key="across", bind="query-params")
    down = second.selectbox("Down", [*paths[1:], paths[0]], key="down", bind="query-params")
    if across == down:
        st.info("Choose two settings.")
    elif (drawing := by_two_settings(table, across, down, score)) is None:
        st.info("No candidate has both settings.")
    else:
        figure, data = drawing
        downloads.chart(figure, "two settings", rows=data, description="The mean score by two settings")
        st.caption(f"{scores}{left_out_text(table, across, down)}A cell in which no candidate was tried stays empty.")


def by_importance(table: CandidateTable, search: "Discovery") -> list[str]:
    """Returns the settings that at least one candidate has, the most important first.

    A setting's importance is its largest share over the metrics. Of equally important settings, the one that more
    candidates have comes first.
    """
    share: dict[str, float] = {}
    for importances_of_metric in search.importances.values():
        for importance in importances_of_metric:
            # A pattern of layers has several importances: one for its length, and one for each place in it.
            path = importance.path.partition("[")[0].removesuffix(".length")
            share[path] = max(share.get(path, 0.0), importance.share)
    counts = {path: sum(row[path] is not None for row in table.rows) for path in table.searched}
    return sorted(filter(counts.__getitem__, counts), key=lambda path: (-share.get(path, 0.0), -counts[path]))


def left_out_text(table: CandidateTable, *paths: str) -> str:
    """Writes how many candidates lack at least one of the settings. If no candidate lacks one, the text is empty."""
    optional = [path for path in paths if any(row[path] is None for row in table.rows)]
    without = sum(any(row[path] is None for path in optional) for row in table.rows)
    total = len(table.rows)
    return f"{without} of {total} have no {' or no '.join(optional)}, and are left out. " if optional else ""


def importances(search: "Discovery", table: CandidateTable) -> None:
    """Draws each setting's importance for one metric, with the interval of the importance."""
    metrics = [metric for metric, of_metric in search.importances.items() if of_metric]
    if not metrics:
        return
    metric = metrics[0]
    labels = table.labels
    if len(metrics) > 1:
        metric = st.selectbox("Metric", metrics, key="metric", format_func=labels.__getitem__, bind="query-params")
    # The setting "(nothing)" comes last.
    ranked = sorted(
        search.importances[metric], key=lambda importance: (importance.path.startswith("("), -importance.share)
    )
    data = pd.DataFrame([vars(importance) for importance in ranked])
    base = alt.Chart(data, height=alt.Step(26)).encode(
        y=alt.Y("path:N", sort=None, title=None, axis=alt.Axis(labelLimit=0)),
        tooltip=["path:N", *(alt.Tooltip(f"{name}:Q", format=".3f") for name in ("share", "low", "high")), "among:Q"],
    )
    bars = base.mark_rule(strokeWidth=2.5, color=PALETTE[0]).encode(
        x=alt.X("low:Q", title=f"share of the variance of {labels[metric]}"), x2="high:Q"
    )
    points = base.mark_point(filled=True, size=90, opacity=1, color=PALETTE[0]).encode(x="share:Q")
    downloads.chart(alt.layer(bars, points), "importance", rows=data, description="How much each setting explains")


def hypervolumes(search: "Discovery") -> None:
    """Draws the hypervolumes of the search and of random search against the number of candidates."""
    if search.control is None:
        return
    data = pd.DataFrame(
        [
            {"by": name, "candidates": number, "hypervolume": value}
            for name, values in search.control.by_number.items()
            for number, value in enumerate(values, 1)
        ]
    )
    names = list(search.control.by_number)
    figure = (
        alt.Chart(data, height=260)
        .mark_line(interpolate="step-after", strokeWidth=2.5)
        .encode(
            x="candidates:Q",
            y=alt.Y("hypervolume:Q", scale=alt.Scale(zero=False)),
            color=alt.Color(
                "by:N", scale=alt.Scale(domain=names, range=list(PALETTE)), legend=alt.Legend(orient="top", title=None)
            ),
            strokeDash=alt.StrokeDash("by:N", sort=names, legend=None),
        )
    )
    downloads.chart(
        figure, "random search", rows=data, description="The hypervolume of the search beside that of random search"
    )


def optuna_commands(study: Study) -> None:
    """Draws the commands that open the search in Optuna's dashboard."""
    st.subheader("In Optuna's dashboard", anchor=False)
    file = f"{study.name}.optuna.db"
    st.code(
        "pip install optuna-dashboard\n"
        f"deltalab study export-optuna {shlex.quote(study.address)} {shlex.quote(file)}\n"
        f"optuna-dashboard {shlex.quote(f'sqlite:///{file}')}",
        language="bash",
    )


if __name__ == "__main__":  # Streamlit runs a page as a script.
    show(page)
