"""Draws a page of the chosen study, again whenever it has something new, and writes what the ledger holds as text."""

import os
import re
from collections.abc import Callable

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store, Study
from deltalab.store.shelf import Listed
from deltalab.study.budget import Searching, Tune
from deltalab.study.space import Search
from deltalab_dashboard.recorded import Recorded

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
COLORS = {"running": "blue", "done": "green", "failed": "red", "incomplete": "orange", "interrupted": "orange"}


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


def label(study: Study | Listed) -> str:
    """A study's name in the list of studies and in the URL: its id, name and profile."""
    return " ".join(filter(None, (str(study.id), study.name, study.profile)))


def badge(study: Study | Listed) -> str:
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


LINKED = re.compile(r"(?<=http)(?=s?://)|(?<=ww)(?=w\.)|(?=@[-\w]+\.)", re.IGNORECASE)
"""Where a word joiner keeps `http://x`, `www.x` and `me@x.y` from being a link."""


def plain(text: str) -> str:
    """Escapes text that Streamlit would read as Markdown.

    Streamlit makes links of addresses in spite of backslashes: a word joiner, which has no width, keeps it from that.

    >>> print(plain("a_b [1, 2]"))
    a\\_b \\[1, 2\\]
    >>> plain("accuracy@text.d")
    'accuracy\\u2060@text\\\\.d'
    """
    return re.sub(r"([\\`*_{}\[\]()#+\-.!|~$:<>])", r"\\\1", LINKED.sub("\u2060", text))
