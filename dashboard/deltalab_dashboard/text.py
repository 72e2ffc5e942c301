"""What the ledger holds, as text that Streamlit shows as it stands."""

import re

from deltalab.store import Study
from deltalab.store.shelf import Listed

COLORS = {"running": "blue", "done": "green", "failed": "red", "incomplete": "orange", "interrupted": "orange"}


def label(study: Study | Listed) -> str:
    """A study's name in the list of studies and in the URL: its id, name and profile."""
    return " ".join(filter(None, (str(study.id), study.name, study.profile)))


def badge(study: Study | Listed) -> str:
    """A study's state, in Markdown."""
    return f":{COLORS[study.state]}-badge[{study.state}]"


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
