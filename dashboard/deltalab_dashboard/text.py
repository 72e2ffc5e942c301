"""Writes texts of the ledger so that Streamlit shows them unchanged instead of reading them as Markdown."""

import re
from collections.abc import Iterable

from deltalab.store import Study
from deltalab.store.studies.shelf import ListedStudy
from deltalab.study.specs.setting_text import setting_text

STATE_COLORS = {"running": "blue", "done": "green", "failed": "red", "incomplete": "orange", "interrupted": "orange"}
"""The colour of a study's badge: state -> colour."""


def label(study: Study | ListedStudy) -> str:
    """Returns a study's label: its id, name and profile. The choice of a study and the address use this label."""
    return " ".join(filter(None, (str(study.id), study.name, study.profile)))


def badge(study: Study | ListedStudy) -> str:
    """Writes a study's state as a coloured badge in Markdown."""
    return f":{STATE_COLORS[study.state]}-badge[{study.state}]"


def setting(value: object) -> str:
    """Writes the value of a setting with at most six digits, for which a page has room."""
    return setting_text(value, 6)


def bullets(lines: Iterable[str]) -> str:
    """Writes lines of text as a list in Markdown."""
    return "\n".join(f"- {plain(line)}" for line in lines)


def notes(text: str) -> str:
    r"""Returns notes as Markdown without images, which a browser would fetch from elsewhere. Streamlit draws no HTML.

    Examples:
        >>> print(notes("**Sure**: ![x](http://a/b.png)"))
        **Sure**: !\[x](http://a/b.png)
    """
    return text.replace("![", "!\\[")


LINKED = re.compile(r"(?<=http)(?=s?://)|(?<=ww)(?=w\.)|(?=@[-\w]+\.)", re.IGNORECASE)
"""Matches the places where `plain` inserts a word joiner, so that `http://x`, `www.x` and `me@x.y` become no links."""


def plain(text: str) -> str:
    r"""Escapes text that Streamlit would read as Markdown.

    Streamlit turns addresses into links even if they are escaped with backslashes. A word joiner, a character without
    width, prevents the link.

    Examples:
        >>> print(plain("a_b [1, 2]"))
        a\_b \[1, 2\]
        >>> plain("accuracy@text.d")
        'accuracy\u2060@text\\.d'
    """
    return re.sub(r"([\\`*_{}\[\]()#+\-.!|~$:<>])", r"\\\1", LINKED.sub("\u2060", text))
