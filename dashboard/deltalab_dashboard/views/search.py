"""What a search found: the front, its candidates by their settings, which settings mattered, and random search."""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.study.specs.budget import COSTS, Searching
from deltalab_dashboard import cache, downloads
from deltalab_dashboard.charts.candidates import Table, finite, lines, one, scatter, table, two
from deltalab_dashboard.colors import PALETTE
from deltalab_dashboard.frame import searched, show
from deltalab_dashboard.text import badge, plain

if TYPE_CHECKING:
    from deltalab.study.answers.search_results import Discovery

FRONT = "Base, finalists and the front"


def page(store: Store, study: Study) -> None:
    st.title("Search", anchor=False)
    st.markdown(badge(study))
    found = cache.found(store, study).search
    if found is None:
        st.info("This study searches nothing: it compares arms that it lists.")
        return
    from deltalab.study.reports.search_sections import sections  # It brings Optuna, which takes a second to load.

    if not found.candidates:
        st.info("No candidate has ended yet.")
    rungs = Searching.model_validate(study.spec["search"]).rungs
    rows = table(found.candidates, searched(study), found.objectives, len(rungs))
    st.markdown(plain(summary(rows, found)))
    told = sections(found)
    last = "What mattered" if any(section.title == "What mattered" for section in told) else "The front"
    for section in told:
        st.subheader(plain(section.title), anchor=False)
        if section.title.startswith("The front"):
            front(rows)
        elif section.title == "What mattered":
            importances(found, rows)
        elif section.title == "Beside random search":
            growth(found)
        cells = [dict(zip(section.headers, row, strict=True)) for row in section.rows]
        if cells:
            downloads.table(cells, f"table {section.title.split()[1]}")
        st.caption("\n".join(f"- {plain(note)}" for note in section.notes))
        if section.title.startswith(last):
            settings(rows, found)
    optuna(study)


def summary(rows: Table, found: "Discovery") -> str:
    """The answer of the search in a sentence or two."""
    objective = next(iter(rows.objectives))
    scored = [row for row in rows.rows if finite(row, objective) and row["kind"] != "stopped early"]
    if not scored:
        return ""
    best = (max if rows.objectives[objective] else min)(scored, key=lambda row: row[objective])
    said = f"The best {rows.labels[objective]} on validation is {best[objective]:.3f}, by {called(best)}."
    base = next((row for row in scored if row["kind"] == "base"), None)
    return said if base is None or base is best else f"{said} The base has {base[objective]:.3f}."


def called(row: Mapping[Any, Any]) -> str:
    """A candidate in a sentence."""
    if row["kind"] == "base":
        return "the base"
    return f"{row['name']} ({row['what']})" if row["kind"] == "finalist" else str(row["what"])


def front(rows: Table) -> None:
    """The candidates by two objectives."""
    names = list(rows.objectives)
    left, right = st.columns(2)
    down = left.selectbox("Objective", names, key="objective", format_func=rows.labels.__getitem__, bind="query-params")
    # A score is weighed against a cost first. Options that depend on another choice would get lost in the address.
    others = [*sorted(names[1:], key=lambda name: name.partition("@")[0] not in COSTS), names[0]]
    across = right.selectbox("Against", others, key="against", format_func=rows.labels.__getitem__, bind="query-params")
    if across == down and len(names) > 1:
        st.info("Choose two objectives.")
    elif (drawn := scatter(rows, down, across)) is not None:
        downloads.chart(drawn[0], "front", rows=drawn[1], about="Every candidate of the search by two objectives")
        if len(names) > 2:
            st.caption(
                "The line joins the candidates that no other beats in these two objectives. Those marked as on the "
                f"front are beaten by none in all {len(names)} at once. A candidate that is better than "
                "chance on none of the tasks is on neither."
            )


def settings(rows: Table, found: "Discovery") -> None:
    """The candidates by their settings: all side by side, one, and two."""
    names = list(rows.objectives)
    trained = ", ".join(f"{path} {value}" for path, value in found.fidelity.items())
    scores = f"Scores are those with {trained}, which all candidates have. " if trained else ""
    st.subheader("All settings side by side", anchor=False)
    offered = {FRONT: {row["name"] for row in rows.rows if row["kind"] in ("base", "finalist", "on the front")}}
    for name, more in rows.objectives.items():
        scored = [row for row in rows.rows if finite(row, ("first", name))]
        scored.sort(key=lambda row: (-1 if more else 1) * row["first", name])
        offered[f"The best tenth by {rows.labels[name]}"] = {row["name"] for row in scored[: len(scored) // 10 or 1]}
    light = st.selectbox("Highlight", list(offered), key="highlight", bind="query-params")
    drawn, frame, left_out = lines(rows, offered[light], names[0])
    downloads.chart(
        drawn, "settings", rows=frame, about="A line for each candidate across all of its settings and scores"
    )
    st.caption(
        f"{scores}A line is a candidate; up is better on the objectives. A click on a line lifts it out. Absent: the "
        "candidate has no such setting, since the setting depends on another one."
        + (f" {left_out} candidates with worse scores are left out." if left_out else "")
    )
    paths = by_importance(rows, found)
    st.subheader("One setting", anchor=False)
    left, right = st.columns(2)
    path = left.selectbox("Setting", paths, key="setting", bind="query-params")
    score = right.selectbox("Score", names, key="score", format_func=rows.labels.__getitem__, bind="query-params")
    if (found_one := one(rows, path, score)) is None:
        st.info("No candidate has this setting.")
    else:
        downloads.chart(found_one[0], "setting", rows=found_one[1], about="The score of the candidates by one setting")
        st.caption(
            f"{scores}{lacking(rows, path)}Orange: the mean of the candidates with this value, or in this part of the "
            "range. Other settings vary at the same time."
        )
    if len(paths) < 2:
        return
    st.subheader("Two settings", anchor=False)
    first, second = st.columns(2)
    across = first.selectbox("Across", paths, key="across", bind="query-params")
    down = second.selectbox("Down", [*paths[1:], paths[0]], key="down", bind="query-params")
    if across == down:
        st.info("Choose two settings.")
    elif (found_two := two(rows, across, down, score)) is None:
        st.info("No candidate has both settings.")
    else:
        downloads.chart(found_two[0], "two settings", rows=found_two[1], about="The mean score by two settings")
        st.caption(f"{scores}{lacking(rows, across, down)}A cell in which no candidate was tried stays empty.")


def by_importance(rows: Table, found: "Discovery") -> list[str]:
    """The settings that candidates have: those that explain most first, then those that most candidates have."""
    share: dict[str, float] = {}
    for told in found.importances.values():
        for each in told:
            path = each.path.partition("[")[0].removesuffix(".length")  # of a pattern's places and its length
            share[path] = max(share.get(path, 0.0), each.share)
    held = {path: sum(row[path] is not None for row in rows.rows) for path in rows.searched}
    return sorted(filter(held.__getitem__, held), key=lambda path: (-share.get(path, 0.0), -held[path]))


def lacking(rows: Table, *paths: str) -> str:
    """How many candidates do not have one of the settings."""
    some = [path for path in paths if any(row[path] is None for row in rows.rows)]
    without = sum(any(row[path] is None for path in some) for row in rows.rows)
    return f"{without} of {len(rows.rows)} have no {' or no '.join(some)}, and are left out. " if some else ""


def importances(found: "Discovery", rows: Table) -> None:
    """The importance of each setting for one metric, with its interval."""
    offered = [metric for metric, told in found.importances.items() if told]
    if not offered:
        return
    metric = offered[0]
    if len(offered) > 1:
        metric = st.selectbox("Metric", offered, key="metric", format_func=rows.labels.__getitem__, bind="query-params")
    told = sorted(
        found.importances[metric], key=lambda each: (each.path.startswith("("), -each.share)
    )  # (nothing) last
    frame = pd.DataFrame([vars(each) for each in told])
    base = alt.Chart(frame, height=alt.Step(26)).encode(
        y=alt.Y("path:N", sort=None, title=None, axis=alt.Axis(labelLimit=0)),
        tooltip=["path:N", *(alt.Tooltip(f"{name}:Q", format=".3f") for name in ("share", "low", "high")), "among:Q"],
    )
    bars = base.mark_rule(strokeWidth=2.5, color=PALETTE[0]).encode(
        x=alt.X("low:Q", title=f"share of the variance of {rows.labels[metric]}"), x2="high:Q"
    )
    points = base.mark_point(filled=True, size=90, opacity=1, color=PALETTE[0]).encode(x="share:Q")
    downloads.chart(alt.layer(bars, points), "importance", rows=frame, about="How much each setting explains")


def growth(found: "Discovery") -> None:
    """The hypervolume of the search and of random search by the number of candidates."""
    if found.control is None:
        return
    frame = pd.DataFrame(
        [
            {"by": name, "candidates": number, "hypervolume": value}
            for name, values in found.control.by_number.items()
            for number, value in enumerate(values, 1)
        ]
    )
    names = list(found.control.by_number)
    drawn = (
        alt.Chart(frame, height=260)
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
        drawn, "random search", rows=frame, about="The hypervolume of the search beside that of random search"
    )


def optuna(study: Study) -> None:
    """The commands that open the search in Optuna's dashboard."""
    st.subheader("In Optuna's dashboard", anchor=False)
    file = f"{study.name}.optuna.db"
    st.code(
        "pip install optuna-dashboard\n"
        f"platform study export-optuna {shlex.quote(study.address)} {shlex.quote(file)}\n"
        f"optuna-dashboard {shlex.quote(f'sqlite:///{file}')}",
        language="bash",
    )


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
