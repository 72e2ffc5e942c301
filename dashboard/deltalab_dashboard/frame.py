"""Opens the ledger, and draws the pages of the chosen study."""

import os
from collections.abc import Callable

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store, Study
from deltalab.study.specs.recorded_study import RecordedSpec
from deltalab.study.specs.search_space import Search
from deltalab_dashboard.cache import CachedStore
from deltalab_dashboard.text import plain

DATABASE = "DELTALAB_DB"
"""The environment variable with the database. `ps` would show everybody an argument, and a URL may hold a password."""
PLUGINS = "DELTALAB_PLUGINS"
"""The environment variable with the plugin files of `platform --plugin FILE dashboard`, separated as in PATH."""
STUDY = "study"
"""The key of the chosen study. The session holds the study's id, and the address holds its label."""
LISTED = "listed"
"""The session's key for the parameters that the list of trials had when a row was opened."""
REFRESH_SECONDS = 3
"""The seconds between two looks at a running study."""


def ledger() -> Store:
    """Returns the ledger, which is opened once for all sessions.

    Raises:
        InputError: There is no such database, or it cannot be read.
    """
    return _open(os.environ.get(DATABASE) or None)


@st.cache_resource(show_spinner=False)
def _open(where: str | None) -> Store:
    """Opens the ledger at a path or URL. Without patience, a page says at once what is wrong."""
    return CachedStore.open(where, create=False, patience=0)


def show(page: Callable[[Store, Study], None]) -> None:
    """Draws a page of the chosen study. While the study runs, the page is drawn again when a trial is new."""
    store, study_id = ledger(), st.session_state[STUDY]
    mark = store.mark(study_id)
    running = store.study(study_id).state == "running"

    def draw() -> None:
        """Draws the page."""
        try:
            page(store, store.study(study_id))
        except InputError as error:
            st.error(plain(str(error)))

    def watch() -> None:
        """Runs the script again if a trial is new, or the study has ended."""
        try:
            new = store.mark(study_id) != mark
        except InputError:  # The page shows the error when it reads the ledger itself.
            return
        if new:
            st.rerun()

    st.fragment(draw)()
    if running:
        st.fragment(watch, run_every=REFRESH_SECONDS)()


def searched_settings(study: Study) -> dict[str, Search]:
    """Returns the settings that a study tunes or searches, by path, with the space of their values."""
    spec = RecordedSpec(study.spec)
    return spec.search.searched if spec.is_search else spec.tuned
