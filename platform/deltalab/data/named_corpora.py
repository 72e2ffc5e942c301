"""The corpora on which the papers of delta rules train, each by a short name in place of that on the Hub."""

from difflib import get_close_matches

CORPORA = {
    "fineweb-edu": "HuggingFaceFW/fineweb-edu:sample-100BT",
    "slimpajama": "cerebras/SlimPajama-627B",
}
"""The short name of a corpus -> its name as a source. All have their documents in the field `text`.

References:
    Penedo et al. 2024, arXiv:2406.17557 (FineWeb-Edu).
    Shen et al. 2023, arXiv:2309.10818 (SlimPajama).
"""


def written_out(name: str) -> str:
    """Returns a source's name with that of the Hub in place of a short one. A revision behind it stays.

    Examples:
        >>> written_out("fineweb-edu@abc")
        'HuggingFaceFW/fineweb-edu:sample-100BT@abc'
        >>> written_out("org/name")
        'org/name'
    """
    corpus, at, revision = name.partition("@")
    return CORPORA[corpus] + at + revision if corpus in CORPORA else name


def nearest(name: str) -> str | None:
    """Returns the short name that a user may have meant; None if none is near."""
    near = get_close_matches(name.partition("@")[0].lower().replace("_", "-"), CORPORA, n=1)
    return near[0] if near else None
