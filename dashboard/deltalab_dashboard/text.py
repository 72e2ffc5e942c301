"""Text of the ledger, written so that Streamlit shows it as it stands."""

import re
from collections.abc import Iterable

from deltalab.store import Study
from deltalab.store.studies.shelf import ListedStudy
from deltalab.study.specs.setting_text import setting_text

STATE_COLORS = {"running": "blue", "done": "green", "failed": "red", "incomplete": "orange", "interrupted": "orange"}
"""The colour of a study's badge, by its state."""


def label(study: Study | ListedStudy) -> str:
    """Names a study by its id, name and profile, as the list of studies and the address do."""
    return " ".join(filter(None, (str(study.id), study.name, study.profile)))


def badge(study: Study | ListedStudy) -> str:
    """Writes a study's state in Markdown."""
    return f":{STATE_COLORS[study.state]}-badge[{study.state}]"


def setting(value: object) -> str:
    """Writes a setting with as many digits as a page has room for."""
    return setting_text(value, 6)


def bullets(lines: Iterable[str]) -> str:
    """Writes lines of text as a list in Markdown."""
    return "\n".join(f"- {plain(line)}" for line in lines)


LINKED = re.compile(r"(?<=http)(?=s?://)|(?<=ww)(?=w\.)|(?=@[-\w]+\.)", re.IGNORECASE)
"""The places where a word joiner keeps `http://x`, `www.x` and `me@x.y` from becoming links."""


def plain(text: str) -> str:
    r"""Escapes text that Streamlit would read as Markdown.

    Streamlit makes links of addresses in spite of backslashes. A word joiner, which has no width, prevents that.

    Examples:
        >>> print(plain("a_b [1, 2]"))
        a\_b \[1, 2\]
        >>> plain("accuracy@text.d")
        'accuracy\u2060@text\\.d'
    """
    return re.sub(r"([\\`*_{}\[\]()#+\-.!|~$:<>])", r"\\\1", LINKED.sub("\u2060", text))
