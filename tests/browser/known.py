"""What is Streamlit's own and cannot be changed from here, one by one."""

from typing import Any
from urllib.parse import urlsplit

PROBES = ("/_stcore/health", "/_stcore/host-config")


def probe(url: str) -> bool:
    """Whether Streamlit looks for its server below a page's address first: the 404 there leads it to the root."""
    path = urlsplit(url).path
    return path.endswith(PROBES) and not path.startswith("/_stcore")


OWN = (
    (
        "color-contrast",
        'style="display: inline-block; color: rgb',
        "st.json colours numbers and words by a theme of its own, which no option reaches",
    ),
    (
        "color-contrast",
        '<span class="token ',
        "st.code colours the words of a language by a theme of its own, which no option reaches",
    ),
    ("list", 'data-testid="stSidebarNavItems"', "the navigation puts its sections' names between its links"),
    ("listitem", '<li class="st-emotion-cache', "the same; a list of ours has no class"),
    (
        "scrollable-region-focusable",
        '<div class="st-emotion-cache',
        "a table scrolls sideways where it is wider than the page, and takes no attributes",
    ),
    (
        "scrollable-region-focusable",
        'data-testid="stMarkdownContainer"',
        "a cell of st.table scrolls by itself where a word is wider than the page, and cells take no attributes",
    ),
)
"""(rule of axe-core, part of the HTML, why it is Streamlit's own)."""


def streamlits_own(rule: str, node: dict[str, Any]) -> bool:
    return any(rule == own and html in node["html"] for own, html, _ in OWN)
