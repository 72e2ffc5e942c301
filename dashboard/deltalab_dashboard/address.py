"""What a page's address asks for, and one line about what the page does not have.

A widget with `bind="query-params"` takes its value from the parameter of the address that its key names. Streamlit
drops a value that the widget does not offer, and says nothing.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import streamlit as st

from deltalab.errors import shortened
from deltalab_dashboard.frame import STUDY

Asked = Mapping[str, list[str]]


def asked() -> Asked:
    """The parameters of the address; to be read before the page runs, which takes those away that it cannot use."""
    return {key: st.query_params.get_all(key) for key in st.query_params if key != STUDY}


def refused(asked: Asked) -> Iterator[str]:
    """A line for each parameter of the address that the page, which has run, does not know or does not offer."""
    keys = [key for key in map(str, st.session_state) if key.isidentifier() and key != STUDY]
    for key, wanted in asked.items():
        if key not in keys:
            near = get_close_matches(key, keys, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            yield f"This page has nothing called '{shortened(key, 50)}' to show.{hint}"
        elif st.query_params.get_all(key) != wanted:  # a widget's default does not stay in the address
            has = _said(st.session_state[key])
            missing = [value for value in wanted if value.casefold() not in map(str.casefold, has)]
            if missing:
                what = key.removesuffix("s").replace("_", " ")
                names = ", ".join(f"'{shortened(value, 50)}'" for value in missing)
                shown = f"shown is {', '.join(has)}." if has else "shown is what there is without it."
                yield f"There is no {what} {names} here; {shown}"


def _said(value: Any) -> list[str]:
    """A widget's value as an address has it."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [text for item in value for text in _said(item)]
    if isinstance(value, float) and value.is_integer():
        return [str(int(value))]
    return [str(value)]
