"""The page Ladder: how each arm's difference to the base changes with size, and whether fits predict the difference."""

import math

import altair as alt
import numpy as np
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.study.answers.ladder_trends import TaskLadder
from deltalab.study.reports.lines import ladder_caption, ladder_cells, ladder_headers, ladder_notes
from deltalab.study.specs.recorded_study import RecordedSpec
from deltalab_dashboard import cache, colors, downloads
from deltalab_dashboard.frame import show
from deltalab_dashboard.text import bullets, plain

FIT_POINTS = 60  # The number of points with which a fit's line is drawn.
HEIGHT = 380  # The height of a chart in pixels.


def page(store: Store, study: Study) -> None:
    """Draws the page."""
    st.title("Ladder of sizes", anchor=False)
    if not RecordedSpec(study.spec).is_ladder:
        st.info("This study runs at one size. A study with `scales` has a ladder.")
        return
    ladders = cache.report_of(store, study).ladders
    if not ladders:
        st.info("Not every size has been run yet.")
    for ladder in ladders:
        st.subheader(plain(ladder_caption(ladder)), anchor=f"ladder-{ladder.task}")
        color_of = colors.arm_colors(
            [row.arm for row in ladder.arms], next(row.arm for row in ladder.arms if row.verdict == "base")
        )
        rows = difference_rows(ladder)
        if not rows.empty:
            description = (
                f"The differences of the arms to the base on {ladder.task}, by operations of the base's training"
            )
            figure = difference_chart(rows, ladder, color_of)
            name = f"{study.name} {ladder.task} ladder"
            downloads.chart(figure, name, rows=rows, description=description, height=HEIGHT)
            st.caption("A band is the interval at each size; the intervals hold jointly over sizes and arms.")
        names = ladder_headers(ladder)
        cells = [dict(zip(names, row, strict=True)) for row in ladder_cells(ladder)]
        downloads.table(cells, f"{study.name} {ladder.task} ladder table")
        fits, predictions = fit_rows(ladder), prediction_rows(ladder)
        if not fits.empty:
            st.markdown("**Fits of the loss against compute**")
            name = f"{study.name} {ladder.task} fits"
            fit_figure = fit_chart(fits, ladder, color_of)
            downloads.chart(fit_figure, name, rows=fits, description="Fits of loss", height=HEIGHT)
            st.caption("Each line is a + b C^-c. Dashed: sizes that the fits left out, which they predict.")
        if not predictions.empty:
            st.markdown("**Predicted and measured at the sizes that the fits left out**")
            description = "Predicted and measured differences in loss to the base"
            name = f"{study.name} {ladder.task} predictions"
            downloads.chart(prediction_chart(predictions), name, rows=predictions, description=description)
        st.caption(bullets(ladder_notes(ladder)))


def difference_rows(ladder: TaskLadder) -> pd.DataFrame:
    """Returns a row for each arm at each size, with the arm's difference to the base."""
    return pd.DataFrame(
        [
            {
                "arm": row.arm,
                "verdict": row.verdict,
                "size": size.label,
                "compute": size.compute,
                "difference": difference.mean,
                "low": difference.low,
                "high": difference.high,
            }
            for row in ladder.arms
            for size, difference in zip(ladder.sizes, row.differences, strict=False)
            if math.isfinite(difference.low)
        ]
    )


def fit_rows(ladder: TaskLadder) -> pd.DataFrame:
    """Returns a row for each point of the line of each arm's fit.

    The column `left_out` is true for points beyond the sizes that the fit used.
    """
    first, last = ladder.sizes[0].compute, ladder.sizes[-1].compute
    predicted = max((len(row.predictions) for row in ladder.arms), default=0)
    used = ladder.sizes[-1 - predicted].compute
    grid = np.unique([*np.geomspace(first, last, FIT_POINTS), used])
    # The point where the two parts of the line meet belongs to both parts, so that the line has no gap.
    parts = [(compute, left_out) for left_out in (False, True) for compute in grid
             if (compute >= used if left_out else compute <= used)]  # fmt: skip
    return pd.DataFrame(
        [
            {
                "arm": row.arm,
                "compute": compute,
                "left_out": left_out,
                "loss": row.fit.at(compute / first),
            }
            for row in ladder.arms
            if row.fit
            for compute, left_out in parts
        ]
    )


def prediction_rows(ladder: TaskLadder) -> pd.DataFrame:
    """Returns two rows for each arm at each size that the fits left out: the predicted and the measured difference."""
    return pd.DataFrame(
        [
            {
                "arm": row.arm,
                "size": prediction.label,
                "which": which,
                "agrees": "agrees" if prediction.agrees else "misses",
                "difference": interval.mean,
                "low": interval.low,
                "high": interval.high,
            }
            for row in ladder.arms
            for prediction in row.predictions
            for which, interval in (("predicted", prediction.predicted), ("measured", prediction.measured))
        ]
    )


def difference_chart(
    rows: pd.DataFrame, ladder: TaskLadder, color_of: dict[str, str]
) -> alt.LayerChart | alt.FacetChart:
    """Draws the differences to the base against compute: a line with a band for each arm."""
    base = alt.Chart(rows).encode(
        x=_compute(),
        color=_color(color_of, list(rows["arm"].unique())),
        tooltip=[
            "arm:N",
            "verdict:N",
            "size:N",
            *(alt.Tooltip(f"{n}:Q", format=".4f") for n in ("difference", "low", "high")),
        ],
    )
    better = "higher is better →" if ladder.maximize else "← lower is better"
    title = f"{ladder.metric}, arm minus base ({better})"
    zero = (
        alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(strokeDash=[4, 4], color=colors.UNDECIDED).encode(y="zero:Q")
    )
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", title=title), y2="high:Q")
    line = base.mark_line(strokeWidth=2.5, point=True).encode(y="difference:Q", shape=alt.Shape("arm:N", legend=None))
    return alt.layer(zero, band, line)


def fit_chart(rows: pd.DataFrame, ladder: TaskLadder, color_of: dict[str, str]) -> alt.Chart:
    """Draws the fits of the loss against compute. The part that a fit predicts is dashed."""
    chart: alt.Chart = (
        alt.Chart(rows)
        .mark_line(strokeWidth=2)
        .encode(
            x=_compute(),
            y=alt.Y("loss:Q", title=f"fitted loss on {ladder.task}", scale=alt.Scale(zero=False)),
            color=_color(color_of, list(rows["arm"].unique())),
            strokeDash=alt.StrokeDash(
                "left_out:N", scale=alt.Scale(domain=[False, True], range=[[1, 0], [5, 4]]), legend=None
            ),
            tooltip=["arm:N", "compute:Q", alt.Tooltip("loss:Q", format=".4f")],
        )
    )
    return chart


def prediction_chart(rows: pd.DataFrame) -> alt.LayerChart | alt.FacetChart:
    """Draws the predicted and the measured differences with their intervals."""
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
    """Makes the horizontal axis of compute, which is logarithmic."""
    scale = alt.Scale(type="log", nice=False, padding=15)
    return alt.X("compute:Q", title="operations of the base's training", scale=scale, axis=alt.Axis(format="~s"))


def _color(color_of: dict[str, str], arms: list[str]) -> alt.Color:
    """Makes the colours of the arms that a chart shows."""
    scale = alt.Scale(domain=arms, range=[color_of[arm] for arm in arms])
    return alt.Color("arm:N", scale=scale, sort=None, legend=alt.Legend(orient="bottom", title=None, labelLimit=0))


if __name__ == "__main__":  # Streamlit runs a page as a script.
    show(page)
