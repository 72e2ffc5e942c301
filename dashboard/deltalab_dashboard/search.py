"""What a search found: its finalists, the front, which settings mattered, and random search beside it."""

import math

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.study.found import Discovery
from deltalab.study.found_report import about, label, sections
from deltalab.study.report import report
from deltalab_dashboard.chosen import badge, plain, show

COLORS = {"base or finalist": "#1a9850", "on the front": "#2c6fbb", "other": "#c3c8cf"}


def page(store: Store, study: Study) -> None:
    st.title("Search", anchor=False)
    st.markdown(badge(study))
    found = report(store, study.id).search
    if found is None:
        st.info("This study searches nothing: it compares arms that it lists.")
        return
    if not found.candidates:
        st.info("No candidate has ended yet.")
    charts = {"The front": scatter, "What mattered": importances, "Beside random search": growth}
    for section in sections(found):
        st.subheader(plain(section.title), anchor=False)
        for title, chart in charts.items():
            if section.title.startswith(title) and (drawn := chart(found)) is not None:
                st.altair_chart(drawn)
        if section.rows:
            names = [plain(header) for header in section.headers]
            st.table(
                [dict(zip(names, map(plain, row), strict=True)) for row in section.rows],
                border="horizontal",
                hide_header=False,
            )
        st.caption("\n".join(f"- {plain(note)}" for note in section.notes))


def scatter(found: Discovery) -> alt.Chart | None:
    """Every candidate: one objective against another."""
    names = list(found.objectives)
    left, right = st.columns(2)
    down = left.selectbox("Objective", names, key="objective", format_func=lambda name: label(found, name))
    others = [name for name in names if name != down] or names
    across = right.selectbox("Against", others, key="against", format_func=lambda name: label(found, name))
    rows = [
        {
            "candidate": point.name,
            "drawn by": point.drawn_by,
            "kind": "base or finalist" if point.is_arm else "on the front" if point.on_front else "other",
            "down": point.scores[down],
            "across": point.scores[across],
            "differs": about(point),
        }
        for point in found.candidates
        if math.isfinite(point.scores[down]) and math.isfinite(point.scores[across])
    ]
    if not rows:
        return None
    chart: alt.Chart = (
        alt.Chart(pd.DataFrame(rows[::-1]), height=360)  # finalists last, on top of the others
        .mark_point(filled=True, size=80, opacity=0.9)
        .encode(
            x=alt.X("across:Q", title=label(found, across), scale=alt.Scale(zero=False)),
            y=alt.Y("down:Q", title=label(found, down), scale=alt.Scale(zero=False)),
            color=alt.Color(
                "kind:N",
                scale=alt.Scale(domain=list(COLORS), range=list(COLORS.values())),
                legend=alt.Legend(orient="top", title=None),
            ),
            tooltip=["candidate:N", "drawn by:N", "down:Q", "across:Q", "differs:N"],
        )
    )
    return chart


def importances(found: Discovery) -> alt.LayerChart | alt.FacetChart | None:
    """The importance of each setting for one metric, with its interval."""
    offered = [metric for metric, told in found.importances.items() if told]
    if not offered:
        return None
    metric = offered[0]
    if len(offered) > 1:
        metric = st.selectbox("Metric", offered, key="metric", format_func=lambda name: label(found, name))
    rows = [vars(each) for each in found.importances[metric]]
    base = alt.Chart(pd.DataFrame(rows), height=alt.Step(26)).encode(
        y=alt.Y("path:N", sort=None, title=None, axis=alt.Axis(labelLimit=0)),
        tooltip=["path:N", *(alt.Tooltip(f"{name}:Q", format=".3f") for name in ("share", "low", "high")), "among:Q"],
    )
    lines = base.mark_rule(strokeWidth=2.5, color="#2c6fbb").encode(
        x=alt.X("low:Q", title=f"share of the variance of {label(found, metric)}"), x2="high:Q"
    )
    points = base.mark_point(filled=True, size=90, opacity=1, color="#2c6fbb").encode(x="share:Q")
    return alt.layer(lines, points)


def growth(found: Discovery) -> alt.Chart | None:
    """The hypervolume of the search and of random search by the number of candidates."""
    if found.control is None:
        return None
    rows = [
        {"by": name, "candidates": number, "hypervolume": value}
        for name, values in found.control.by_number.items()
        for number, value in enumerate(values, 1)
    ]
    chart: alt.Chart = (
        alt.Chart(pd.DataFrame(rows), height=260)
        .mark_line(interpolate="step-after")
        .encode(
            x="candidates:Q",
            y=alt.Y("hypervolume:Q", scale=alt.Scale(zero=False)),
            color=alt.Color("by:N", sort=None, legend=alt.Legend(orient="top", title=None)),
        )
    )
    return chart


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
