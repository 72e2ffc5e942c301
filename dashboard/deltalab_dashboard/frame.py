"""Draws a page of the chosen study, again whenever it has something new."""

import os
from collections.abc import Callable

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store, Study
from deltalab.study.specs.budget import Searching, Tune
from deltalab.study.specs.search_space import Search
from deltalab_dashboard.cache import Recorded
from deltalab_dashboard.text import plain

DATABASE = "DELTALAB_DB"
"""The environment variable with the database. In an argument, `ps` would show everybody a password in its URL."""
PLUGINS = "DELTALAB_PLUGINS"
"""The environment variable with the plugin files of `platform --plugin FILE dashboard`, separated as in PATH."""
STUDY = "study"
"""The key of the chosen study: of its id in the session, of its label in the URL."""
LISTED = "listed"
"""The key, in the session, of the URL's parameters under which the list of trials was left for one of them."""
REFRESH_SECONDS = 3
"""Seconds between two looks at a running study."""


def ledger() -> Store:
    """The ledger, opened once for all sessions. Raises InputError as `Store.open` does."""
    return _open(os.environ.get(DATABASE) or None)


@st.cache_resource(show_spinner=False)
def _open(where: str | None) -> Store:
    return Recorded.open(where, create=False, patience=0)  # a page says at once what is wrong


def show(page: Callable[[Store, Study], None]) -> None:
    """Draws a page of the chosen study, and again whenever the study has something new while it runs."""
    store, chosen = ledger(), st.session_state[STUDY]
    drawn = store.mark(chosen)
    running = store.study(chosen).state == "running"

    def draw() -> None:
        try:
            page(store, store.study(chosen))
        except InputError as error:
            st.error(plain(str(error)))

    def watch() -> None:
        try:
            new = store.mark(chosen) != drawn
        except InputError:  # the page says so where it reads the ledger itself
            return
        if new:
            st.rerun()

    st.fragment(draw)()
    if running:
        st.fragment(watch, run_every=REFRESH_SECONDS)()


def searched(study: Study) -> dict[str, Search]:
    """The settings that a study tunes or searches, by path, and where their values lie."""
    for kind, key in ((Searching, "search"), (Tune, "tune")):
        if study.spec.get(key):
            return kind.model_validate(study.spec[key]).searched
    return {}
