"""Draws tables and charts, each with its downloads: CSV and LaTeX, or CSV, PNG and SVG."""

import csv
import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from deltalab_dashboard.text import plain

PIXELS = 2
"""Pixels of a PNG for each unit of a chart."""
SIZE = {"width": 720, "height": 400}
"""Units of a chart in a file, where the chart does not say. On a page it is as wide as the page."""
LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "†": r"$^\dagger$", "*": "$^*$", "★": r"$\star$"}
    | {"▲": r"$\blacktriangle$", "▼": r"$\blacktriangledown$", "○": r"$\circ$", "\u00a0": "~"}
)


def chart(
    drawn: Any,
    name: str,
    *,
    rows: pd.DataFrame | None = None,
    about: str | None = None,
    caption: str = "",
    height: int | None = None,
    **given: Any,
) -> None:
    """Draws an Altair chart.

    name: of the downloaded files, without an ending; no other chart or table of the page has it. rows: what the CSV
    holds; None leaves the CSV out. about: what a screen reader says of the chart. height: pixels; None: the chart's.
    given: further arguments of `st.altair_chart`.
    """
    drawn = drawn.configure_legend(symbolOpacity=1)  # else the keys of bands are as faint as these
    st.altair_chart(drawn, height=height or "content", alt=about, **given)
    files: dict[str, Callable[[], str | bytes]] = {}
    if rows is not None:
        files["CSV"] = lambda: rows.to_csv(index=False)
    files["PNG"] = lambda: to_png(drawn)
    files["SVG"] = lambda: to_svg(drawn)
    _below(name, files, caption)


def table(rows: Sequence[Mapping[str, str]], name: str, *, strong: Collection[int] = (), legend: str = "") -> None:
    """Draws a table of text as it stands: Streamlit reads none of it as Markdown.

    rows: cells by their header, the same headers in each row. name: as of `chart`. strong: the numbers of the rows in
    bold. legend: what the marks in the table mean; it stands below the table, and in LaTeX as a comment.
    """
    st.table(
        [{plain(key): _cell(cell, at in strong) for key, cell in row.items()} for at, row in enumerate(rows)],
        border="horizontal",
        hide_header=False,
    )
    table_files(rows, name, legend)


def sortable(
    rows: Any, name: str, *, text: Sequence[Mapping[str, str]], columns: Any, legend: str = "", **given: Any
) -> None:
    """Draws a table that a click on a header sorts.

    rows: the typed values, a DataFrame or its Styler. name: as of `chart`. text: the same rows as text, for the files.
    columns: Streamlit's `column_config`. legend: as of `table`. given: further arguments of `st.dataframe`.
    """
    st.dataframe(rows, hide_index=True, column_config=columns, **given)
    table_files(text, name, legend)


def table_files(rows: Sequence[Mapping[str, str]], name: str, legend: str = "") -> None:
    """The line below a table: its legend and its downloads."""
    if rows:
        _below(name, {"CSV": lambda: to_csv(rows), "LaTeX": lambda: to_latex(rows, legend)}, legend)


def zoom() -> alt.Parameter:
    """The parameter with which a chart pans by dragging, and zooms by the wheel while shift is held.

    The wheel alone scrolls the page; `chart.interactive()` would keep it.
    """
    return alt.selection_interval(bind="scales", zoom="wheel![event.shiftKey]")


def to_csv(rows: Sequence[Mapping[str, str]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def to_latex(rows: Sequence[Mapping[str, str]], legend: str = "") -> str:
    """A `tabular` for the package booktabs."""
    head, *lines = (" & ".join(map(_latex, line)) + r" \\" for line in (rows[0], *(row.values() for row in rows)))
    columns = "l" + "r" * (len(rows[0]) - 1)
    return "\n".join(
        [
            *([f"% {legend}"] if legend else []),
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            head,
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def to_png(drawn: Any) -> bytes:
    import vl_convert  # It starts a JavaScript engine, which takes a second and 70 MB: only for who asks.

    return bytes(vl_convert.vegalite_to_png(_sized(drawn), scale=PIXELS))


def to_svg(drawn: Any) -> str:
    import vl_convert

    return str(vl_convert.vegalite_to_svg(_sized(drawn)))


def _sized(drawn: Any) -> dict[str, Any]:
    """A chart as Vega-Lite, with a size. Charts beside each other have sizes of their own."""
    with alt.data_transformers.enable("default", max_rows=None):
        spec: dict[str, Any] = drawn.to_dict()
    if "layer" in spec or "mark" in spec:
        spec = {**SIZE, **spec}
    return {"background": "white", **spec}


def _below(name: str, files: Mapping[str, Callable[[], str | bytes]], caption: str) -> None:
    """A line with a caption, and a button for each file."""
    with st.container(horizontal=True, horizontal_alignment="right", vertical_alignment="center", gap="small"):
        if caption:
            st.caption(plain(caption))
        for kind, made in files.items():
            ending = {"LaTeX": "tex"}.get(kind, kind.lower())
            st.download_button(
                kind,
                made,
                f"{name}.{ending}",
                key=f"download {name} {kind}",
                help=f"{name}.{ending}",
                type="tertiary",
                icon=":material/download:",
                on_click="ignore",
            )


def _cell(text: str, strong: bool) -> str:
    return f"**{plain(text)}**" if text and strong else plain(text)


def _latex(text: str) -> str:
    r"""Text as LaTeX.

    >>> print(_latex("without_d"), _latex("0.486 (-0.435*)"))
    without\_d 0.486 ($-$0.435$^*$)
    """
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", text.translate(LATEX))
