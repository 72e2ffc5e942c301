"""Draws tables and charts with buttons to download them.

A table can be downloaded as CSV and LaTeX, and a chart as CSV, PNG and SVG.
"""

import csv
import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from deltalab_dashboard.reach import HIDDEN
from deltalab_dashboard.text import plain

PIXELS = 2
"""The pixels of a PNG for each unit of a chart's size."""
SIZE = {"width": 720, "height": 400}
"""The size in a downloaded file of a chart that has no size itself. On a page, a chart is as wide as the page."""
LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "†": r"$^\dagger$", "*": "$^*$", "★": r"$\star$"}
    | {"▲": r"$\blacktriangle$", "▼": r"$\blacktriangledown$", "○": r"$\circ$", "\u00a0": "~"}
)
"""How LaTeX writes each special character."""


def chart(
    figure: Any,
    name: str,
    *,
    rows: pd.DataFrame | None = None,
    description: str | None = None,
    caption: str = "",
    height: int | None = None,
    **options: Any,
) -> None:
    """Draws an Altair chart with its downloads.

    Args:
        figure: The chart.
        name: The name of the downloaded files, without an ending. No other chart or table on the page has this name.
        rows: The content of the CSV. If None, no CSV is offered.
        description: The text that a screen reader reads instead of the chart.
        caption: The text beside the downloads.
        height: The height in pixels. If None, the chart keeps the height that it has.
        options: Further arguments of `st.altair_chart`.
    """
    figure = figure.configure_legend(symbolOpacity=1)  # Otherwise a legend is as faint as the bands that it names.
    st.altair_chart(figure, height=height or "content", alt=description, **options)
    files: dict[str, Callable[[], str | bytes]] = {}
    if rows is not None:
        files["CSV"] = lambda: rows.to_csv(index=False)
    files["PNG"] = lambda: to_png(figure)
    files["SVG"] = lambda: to_svg(figure)
    _below(name, files, caption)


def table(rows: Sequence[Mapping[str, str]], name: str, *, strong: Collection[int] = (), legend: str = "") -> None:
    """Draws a table of text with its downloads. Cells are shown as they are, not read as Markdown.

    Args:
        rows: The rows, each as header -> cell. All rows have the same headers.
        name: The name of the downloaded files, as in `chart`.
        strong: The indexes of the rows to write in bold, counted from 0.
        legend: Explains the marks in the table. It is written below the table, and as a comment in the LaTeX file.
    """
    st.table(
        [{plain(key): _cell(cell, at in strong) for key, cell in row.items()} for at, row in enumerate(rows)],
        border="horizontal",
        hide_header=False,
    )
    table_files(rows, name, legend)


def sortable(
    rows: Any, name: str, *, text: Sequence[Mapping[str, str]], columns: Any, legend: str = "", **options: Any
) -> None:
    """Draws a table with its downloads. A click on a header sorts the table.

    Args:
        rows: The values with their types, as a DataFrame or as a DataFrame's Styler.
        name: The name of the downloaded files, as in `chart`.
        text: The same rows as text. The downloaded files hold this text.
        columns: The argument `column_config` of `st.dataframe`.
        legend: Explains the marks in the table, as in `table`.
        options: Further arguments of `st.dataframe`.
    """
    st.dataframe(rows, hide_index=True, column_config=columns, **options)
    table_files(text, name, legend)


def table_files(rows: Sequence[Mapping[str, str]], name: str, legend: str = "", *, caption: str | None = None) -> None:
    """Draws the line below a table: its legend, or a caption in its place, and its downloads."""
    if rows:
        files = {"CSV": lambda: to_csv(rows), "LaTeX": lambda: to_latex(rows, legend)}
        _below(name, files, legend if caption is None else caption)


def zoom() -> alt.Parameter:
    """Makes the parameter that lets a reader pan a chart by dragging, and zoom it with shift and the wheel.

    The wheel without shift scrolls the page. With `chart.interactive()`, the wheel without shift would zoom the chart.
    """
    return alt.selection_interval(bind="scales", zoom="wheel![event.shiftKey]")


def to_csv(rows: Sequence[Mapping[str, str]]) -> str:
    """Writes a table as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def to_latex(rows: Sequence[Mapping[str, str]], legend: str = "") -> str:
    """Writes a table as a `tabular` for the package booktabs."""
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


def to_png(figure: Any) -> bytes:
    """Draws a chart as a PNG."""
    import vl_convert  # Importing it starts a JavaScript engine, which takes a second and 70 MB.

    return bytes(vl_convert.vegalite_to_png(_vega_lite(figure), scale=PIXELS))


def to_svg(figure: Any) -> str:
    """Draws a chart as an SVG."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(_vega_lite(figure)))


def _vega_lite(figure: Any) -> dict[str, Any]:
    """Returns a chart as a Vega-Lite specification.

    A single chart without a size gets the size `SIZE`. In a chart of several charts side by side, each has a size.
    """
    with alt.data_transformers.enable("default", max_rows=None):
        spec: dict[str, Any] = figure.to_dict()
    if "layer" in spec or "mark" in spec:
        spec = {**SIZE, **spec}
    return {"background": "white", **spec}


def _below(name: str, files: Mapping[str, Callable[[], str | bytes]], caption: str) -> None:
    """Draws a caption, and beside it a download button for each file. The buttons of a page have different names."""
    with st.container(horizontal=True, horizontal_alignment="right", vertical_alignment="center", gap="small"):
        if caption:
            st.caption(plain(caption))
        for kind, content in files.items():
            ending = {"LaTeX": "tex"}.get(kind, kind.lower())
            st.download_button(
                f"{kind} {HIDDEN}[of {plain(name)}]",  # A screen reader tells the buttons of a page apart.
                content,
                f"{name}.{ending}",
                key=f"download {name} {kind}",
                help=f"{name}.{ending}",
                type="tertiary",
                icon=":material/download:",
                on_click="ignore",
            )


def _cell(text: str, strong: bool) -> str:
    """Writes the text of a table's cell in Markdown, in bold if `strong`."""
    return f"**{plain(text)}**" if text and strong else plain(text)


def _latex(text: str) -> str:
    r"""Writes text as LaTeX.

    Examples:
        >>> print(_latex("without_d"), _latex("0.486 (-0.435*)"))
        without\_d 0.486 ($-$0.435$^*$)
    """
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", text.translate(LATEX))
