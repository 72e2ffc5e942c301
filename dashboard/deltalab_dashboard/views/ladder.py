"""The ladders of a study: how each arm's difference to the base goes with size, and whether a fit predicts it."""

import math

import altair as alt
import numpy as np
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.study.answers.ladder_trends import Ladder
from deltalab.study.reports.report import ladder_caption, ladder_cells, ladder_headers, ladder_notes
from deltalab_dashboard import cache, colors, downloads
from deltalab_dashboard.frame import show
from deltalab_dashboard.text import plain

FITTED = 60  # points of the line of a fit
HEIGHT = 380  # pixels


def page(store: Store, study: Study) -> None:
    st.title("Ladder of sizes", anchor=False)
    if not study.spec.get("scales"):
        st.info("This study runs at one size. A study with `scales` has a ladder.")
        return
    ladders = cache.found(store, study).ladders
    if not ladders:
        st.info("Not every size has been run yet.")
    for ladder in ladders:
        st.subheader(plain(ladder_caption(ladder)), anchor=f"ladder-{ladder.task}")
        own = colors.arms(
            [row.arm for row in ladder.arms], next(row.arm for row in ladder.arms if row.verdict == "base")
        )
        rows = differences(ladder)
        if not rows.empty:
            about = f"The differences of the arms to the base on {ladder.task}, by operations of the base's training"
            drawn = climb(rows, ladder, own)
            downloads.chart(drawn, f"{study.name} {ladder.task} ladder", rows=rows, about=about, height=HEIGHT)
            st.caption("A band is the interval at each size; the intervals hold jointly over sizes and arms.")
        names = ladder_headers(ladder)
        cells = [dict(zip(names, row, strict=True)) for row in ladder_cells(ladder)]
        downloads.table(cells, f"{study.name} {ladder.task} ladder table")
        fits, kept_out = fitted(ladder), predictions(ladder)
        if not fits.empty:
            st.markdown("**Fits of the loss against compute**")
            name = f"{study.name} {ladder.task} fits"
            downloads.chart(losses(fits, ladder, own), name, rows=fits, about="Fits of loss", height=HEIGHT)
            st.caption("Each line is a + b C^-c. Dashed: sizes that the fits left out, which they predict.")
        if not kept_out.empty:
            st.markdown("**Predicted and measured at the sizes that the fits left out**")
            about = "Predicted and measured differences in loss to the base"
            downloads.chart(foretold(kept_out), f"{study.name} {ladder.task} predictions", rows=kept_out, about=about)
        st.caption("\n".join(f"- {plain(note)}" for note in ladder_notes(ladder)))


def differences(ladder: Ladder) -> pd.DataFrame:
    """A row for each arm beside the base and each size."""
    return pd.DataFrame(
        [
            {
                "arm": row.arm,
                "verdict": row.verdict,
                "size": size.label,
                "compute": size.compute,
                "difference": found.mean,
                "low": found.low,
                "high": found.high,
            }
            for row in ladder.arms
            for size, found in zip(ladder.sizes, row.differences, strict=False)
            if math.isfinite(found.low)
        ]
    )


def fitted(ladder: Ladder) -> pd.DataFrame:
    """The line of each arm's fit from the smallest to the largest size; `left_out` beyond the sizes that it used."""
    first, last = ladder.sizes[0].compute, ladder.sizes[-1].compute
    foretold = max((len(row.predictions) for row in ladder.arms), default=0)
    used = ladder.sizes[-1 - foretold].compute
    grid = np.unique([*np.geomspace(first, last, FITTED), used])
    # The point between the two parts belongs to both, so that the line has no gap.
    parts = [(compute, left_out) for left_out in (False, True) for compute in grid
             if (compute >= used if left_out else compute <= used)]  # fmt: skip
    return pd.DataFrame(
        [
            {
                "arm": row.arm,
                "compute": compute,
                "left_out": left_out,
                "loss": row.fit.a + row.fit.b * (compute / first) ** -row.fit.c,
            }
            for row in ladder.arms
            if row.fit
            for compute, left_out in parts
        ]
    )


def predictions(ladder: Ladder) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "arm": row.arm,
                "size": found.label,
                "which": which,
                "agrees": "agrees" if found.agrees else "misses",
                "difference": interval.mean,
                "low": interval.low,
                "high": interval.high,
            }
            for row in ladder.arms
            for found in row.predictions
            for which, interval in (("predicted", found.predicted), ("measured", found.measured))
        ]
    )


def climb(rows: pd.DataFrame, ladder: Ladder, own: dict[str, str]) -> alt.LayerChart | alt.FacetChart:
    base = alt.Chart(rows).encode(
        x=_compute(),
        color=_color(own, list(rows["arm"].unique())),
        tooltip=[
            "arm:N",
            "verdict:N",
            "size:N",
            *(alt.Tooltip(f"{n}:Q", format=".4f") for n in ("difference", "low", "high")),
        ],
    )
    where = "higher is better →" if ladder.maximize else "← lower is better"
    title = f"{ladder.metric}, arm minus base ({where})"
    zero = (
        alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(strokeDash=[4, 4], color=colors.UNDECIDED).encode(y="zero:Q")
    )
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", title=title), y2="high:Q")
    line = base.mark_line(strokeWidth=2.5, point=True).encode(y="difference:Q", shape=alt.Shape("arm:N", legend=None))
    return alt.layer(zero, band, line)


def losses(rows: pd.DataFrame, ladder: Ladder, own: dict[str, str]) -> alt.Chart:
    chart: alt.Chart = (
        alt.Chart(rows)
        .mark_line(strokeWidth=2)
        .encode(
            x=_compute(),
            y=alt.Y("loss:Q", title=f"fitted loss on {ladder.task}", scale=alt.Scale(zero=False)),
            color=_color(own, list(rows["arm"].unique())),
            strokeDash=alt.StrokeDash(
                "left_out:N", scale=alt.Scale(domain=[False, True], range=[[1, 0], [5, 4]]), legend=None
            ),
            tooltip=["arm:N", "compute:Q", alt.Tooltip("loss:Q", format=".4f")],
        )
    )
    return chart


def foretold(rows: pd.DataFrame) -> alt.LayerChart | alt.FacetChart:
    base = alt.Chart(rows).encode(
        y=alt.Y("arm:N", title=None, axis=alt.Axis(labelLimit=0)),
        yOffset=alt.YOffset("which:N"),
        color=alt.Color(
            "which:N", scale=alt.Scale(domain=["predicted", "measured"], range=[colors.ACCENT, colors.BASE])
        ),
        tooltip=[
            "arm:N",
            "size:N",
            "which:N",
            "agrees:N",
            *(alt.Tooltip(f"{n}:Q", format=".4f") for n in ("difference", "low", "high")),
        ],
    )
    bars = base.mark_rule(strokeWidth=2.5).encode(x=alt.X("low:Q", title="difference in loss to the base"), x2="high:Q")
    points = base.mark_point(filled=True, size=90, opacity=1).encode(x="difference:Q", shape="which:N")
    return alt.layer(bars, points)


def _compute() -> alt.X:
    scale = alt.Scale(type="log", nice=False, padding=15)
    return alt.X("compute:Q", title="operations of the base's training", scale=scale, axis=alt.Axis(format="~s"))


def _color(own: dict[str, str], drawn: list[str]) -> alt.Color:
    scale = alt.Scale(domain=drawn, range=[own[arm] for arm in drawn])
    return alt.Color("arm:N", scale=scale, sort=None, legend=alt.Legend(orient="bottom", title=None, labelLimit=0))


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
