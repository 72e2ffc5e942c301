"""Makes the pages usable by keyboard and by screen reader where Streamlit alone does not."""

import streamlit as st

HIDDEN = ":gray"
"""The Markdown directive for words in a button's label that a screen reader reads, and the page does not show."""
STYLE = """
[data-testid=stApp] :focus-visible { outline: 2px solid currentColor !important; outline-offset: 2px; }
[data-testid=stDownloadButton] .stMarkdownColoredText {
  position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
"""
"""What has the focus gets an outline, and the `HIDDEN` words of a download's button are not drawn."""
LEAVE = """
if (!window.tabLeavesTables) {
  window.tabLeavesTables = true
  const stops = 'a[href], button, input, select, textarea, summary, [tabindex="0"]'
  document.addEventListener('keydown', event => {
    const table = document.activeElement?.closest('[data-testid=stDataFrame]')
    if (event.key !== 'Tab' || !table) return
    const wanted = event.shiftKey ? Node.DOCUMENT_POSITION_PRECEDING : Node.DOCUMENT_POSITION_FOLLOWING
    const others = [...document.querySelectorAll(stops)].filter(stop =>
      !stop.closest('[data-testid=stElementToolbar]') && !table.contains(stop) && !stop.disabled && stop.tabIndex >= 0
      && stop.getClientRects().length && table.compareDocumentPosition(stop) & wanted)
    const next = event.shiftKey ? others.at(-1) : others[0]
    if (!next) return
    event.preventDefault()
    event.stopImmediatePropagation()
    next.focus()
  }, true)
}
"""
"""Tab leaves a table, whose cells the arrow keys reach. Streamlit's table would take Tab to its next cell."""


def draw_reach() -> None:
    """Adds the style and the script to the page."""
    st.html(f"<style>{STYLE}</style><script>{LEAVE}</script>", unsafe_allow_javascript=True)
