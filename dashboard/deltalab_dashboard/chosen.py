"""Gives the chosen study to its page, and again every few seconds while the study runs."""

import os
import re
from collections.abc import Callable

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store, Study

DATABASE = "DELTALAB_DB"
"""Names the database. An argument would show a password in its URL to everybody who runs `ps`."""
STUDY = "study"
"""The key of the chosen study's id, in the session and in the URL."""
REFRESH_SECONDS = 3
COLORS = {"running": "blue", "done": "green", "failed": "red", "interrupted": "orange"}


def ledger() -> Store:
    """The ledger, opened once for all sessions. Raises InputError as `Store.open` does."""
    return _open(os.environ.get(DATABASE) or None)


@st.cache_resource(show_spinner=False)
def _open(where: str | None) -> Store:
    return Store.open(where, create=False)


def show(page: Callable[[Store, Study], None]) -> None:
    """Draws a page of the chosen study, and again while the study runs."""
    store, chosen = ledger(), st.session_state[STUDY]
    running = store.study(chosen).state == "running"

    def draw() -> None:
        try:
            study = store.study(chosen)
            if running and study.state != "running":
                st.rerun()
            page(store, study)
        except InputError as error:
            st.error(plain(str(error)))

    st.fragment(draw, run_every=REFRESH_SECONDS if running else None)()


def label(study: Study) -> str:
    """How a study is named where it is chosen, and in the URL."""
    return " ".join(filter(None, (str(study.id), study.name, study.profile)))


def badge(study: Study) -> str:
    """A study's state, in Markdown."""
    return f":{COLORS[study.state]}-badge[{study.state}]"


def plain(text: str) -> str:
    """Text of the ledger as it is, where Streamlit would read it as Markdown.

    >>> print(plain("a_b [1, 2]"))
    a\\_b \\[1, 2\\]
    """
    return re.sub(r"([\\`*_{}\[\]()#+\-.!|~$:<>])", r"\\\1", text)
