"""Opens the ledger, and draws the pages of the chosen study."""

import os
from collections.abc import Callable

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store, Study
from deltalab.study.specs.recorded_study import RecordedSpec
from deltalab.study.specs.sections.search_space import Search
from deltalab_dashboard.cache import CachedStore
from deltalab_dashboard.text import plain

DATABASE = "DELTALAB_DB"
"""The environment variable that names the database.

The database is not a command-line argument, since `ps` shows arguments to everybody and a URL may hold a password.
"""
PLUGINS = "DELTALAB_PLUGINS"
"""The environment variable that lists the plugin files of `deltalab --plugin FILE dashboard`, separated as in PATH."""
STUDY = "study"
"""The key of the chosen study, both in the session and in the address.

The session holds the study's id under this key, and the address holds the study's label.
"""
LISTED = "listed"
"""The session's key for the address parameters of the page Trials at the time when the reader opened a trial there."""
REFRESH_SECONDS = 3
"""The seconds after which a page looks again whether a running study has changed."""


def ledger() -> Store:
    """Returns the ledger. It is opened once for all sessions.

    Raises:
        InputError: The database does not exist, or it cannot be read.
    """
    return _open(os.environ.get(DATABASE) or None)


@st.cache_resource(show_spinner=False)
def _open(where: str | None) -> Store:
    """Opens the ledger at a path or URL. If that fails, the page says so at once, since `patience` is 0."""
    return CachedStore.open(where, create=False, patience=0)


def show(page: Callable[[Store, Study], None]) -> None:
    """Draws a page of the chosen study. While the study runs, each new trial makes the page draw itself again."""
    store, study_id = ledger(), st.session_state[STUDY]
    mark = store.mark(study_id)
    running = store.study(study_id).state == "running"

    def draw() -> None:
        """Draws the page, or the error that the page raises."""
        try:
            page(store, store.study(study_id))
        except InputError as error:
            st.error(plain(str(error)))

    def watch() -> None:
        """Runs the script again if the study has a new trial or has ended."""
        try:
            new = store.mark(study_id) != mark
        except InputError:  # When the page next reads the ledger, it shows the error.
            return
        if new:
            st.rerun()

    st.fragment(draw)()
    if running:
        st.fragment(watch, run_every=REFRESH_SECONDS)()


def searched_settings(study: Study) -> dict[str, Search]:
    """Returns the settings that a study tunes or searches: path -> space of the values."""
    spec = RecordedSpec(study.spec)
    return spec.search.searched if spec.is_search else spec.tuned
