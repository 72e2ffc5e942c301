"""Reads the parameters of a page's address, and tells the reader which of them the page cannot use.

A widget with `bind="query-params"` takes its value from the parameter that has the same name as the widget's key. If
the widget does not offer that value, Streamlit drops the value without a message.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import streamlit as st

from deltalab.errors import shortened
from deltalab_dashboard.frame import STUDY

Parameters = Mapping[str, list[str]]
"""The parameters of an address: name -> values."""


def parameters() -> Parameters:
    """Returns the address's parameters. Call this before the page runs, since running removes unusable parameters."""
    return {key: st.query_params.get_all(key) for key in st.query_params if key != STUDY}


def complaints(requested: Parameters) -> Iterator[str]:
    """Yields a sentence about each parameter that the page does not know, or whose value the page does not offer.

    Call this after the page has run.

    Args:
        requested: The parameters that the address had before the page ran.
    """
    keys = [key for key in map(str, st.session_state) if key.isidentifier() and key != STUDY]
    for key, values in requested.items():
        if key not in keys:
            matches = get_close_matches(key, keys, n=1)
            hint = f" Did you mean '{matches[0]}'?" if matches else ""
            yield f"This page has nothing called '{shortened(key, 50)}' to show.{hint}"
        elif st.query_params.get_all(key) != values:  # A widget's default does not stay in the address.
            texts = _texts(st.session_state[key])
            missing = [value for value in values if value.casefold() not in map(str.casefold, texts)]
            if missing:
                noun = key.removesuffix("s").replace("_", " ")
                names = ", ".join(f"'{shortened(value, 50)}'" for value in missing)
                instead = f"shown is {', '.join(texts)}." if texts else "shown is what there is without it."
                yield f"There is no {noun} {names} here; {instead}"


def _texts(value: Any) -> list[str]:
    """Returns a widget's value as the list of texts that an address has for it."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    if isinstance(value, float) and value.is_integer():
        return [str(int(value))]
    return [str(value)]
