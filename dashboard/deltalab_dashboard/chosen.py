"""Draws a page of the chosen study, again every few seconds while it runs, and writes what the ledger holds as text."""

import os
import re
from collections.abc import Callable

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store, Study
from deltalab.study.space import Search, Searching, Tune

DATABASE = "DELTALAB_DB"
"""The environment variable with the database. In an argument, `ps` would show everybody a password in its URL."""
PLUGINS = "DELTALAB_PLUGINS"
"""The environment variable with the plugin files of `platform --plugin FILE dashboard`, separated as in PATH."""
STUDY = "study"
"""The key of the chosen study: of its id in the session, of its label in the URL."""
REFRESH_SECONDS = 3
COLORS = {"running": "blue", "done": "green", "failed": "red", "interrupted": "orange"}


def ledger() -> Store:
    """The ledger, opened once for all sessions. Raises InputError as `Store.open` does."""
    return _open(os.environ.get(DATABASE) or None)


@st.cache_resource(show_spinner=False)
def _open(where: str | None) -> Store:
    return Store.open(where, create=False)


def show(page: Callable[[Store, Study], None]) -> None:
    """Draws a page of the chosen study, again every `REFRESH_SECONDS` while the study runs."""
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
    """A study's name in the list of studies and in the URL: its id, name and profile."""
    return " ".join(filter(None, (str(study.id), study.name, study.profile)))


def badge(study: Study) -> str:
    """A study's state, in Markdown."""
    return f":{COLORS[study.state]}-badge[{study.state}]"


def searched(study: Study) -> dict[str, Search]:
    """The settings that a study tunes or searches, by path, and where their values lie."""
    for kind, key in ((Searching, "search"), (Tune, "tune")):
        if study.spec.get(key):
            return kind.model_validate(study.spec[key]).searched
    return {}


def setting(value: object) -> str:
    """A setting as one would write it down.

    >>> setting({"head": {"init": 1}}), setting({"metala_decay": {}}), setting(None)
    ('head(init=1)', 'metala_decay', 'absent')
    >>> setting({"name": "comba", "transition": "iplr", "d": {"const": {"value": 0.5}}})
    'comba(transition=iplr, d=const(value=0.5))'
    """
    if value is None:
        return "absent"
    if isinstance(value, float):
        return f"{value:g}"
    if not isinstance(value, dict):
        return str(value)
    if "name" in value:  # a rule with its knobs
        value = {value["name"]: {key: given for key, given in value.items() if key != "name"}}
    if len(value) != 1:
        return str(value)
    [(form, given)] = value.items()
    if not isinstance(given, dict):
        return str(value)
    arguments = ", ".join(f"{key}={setting(item)}" for key, item in given.items())
    return f"{form}({arguments})" if arguments else form


def plain(text: str) -> str:
    """Escapes text that Streamlit would read as Markdown.

    >>> print(plain("a_b [1, 2]"))
    a\\_b \\[1, 2\\]
    """
    return re.sub(r"([\\`*_{}\[\]()#+\-.!|~$:<>])", r"\\\1", text)
