"""Asks the reader for the token, if the dashboard has one. `deltalab dashboard` says when it has."""

import hmac
import os
from pathlib import Path

import streamlit as st

from deltalab.errors import InputError

TOKEN_FILE = "DELTALAB_TOKEN_FILE"
"""The environment variable that names the file with the token. Without it, nobody is asked."""
SIGNED_IN = "signed in"
"""The session's key that says that the reader gave the token."""


def has_token() -> bool:
    """Returns whether the dashboard has a token."""
    return TOKEN_FILE in os.environ


def is_token(given: str) -> bool:
    """Returns whether a text is the token, in a time that does not tell how much of it is right.

    Raises:
        InputError: The file of the token cannot be read.
    """
    try:
        token = Path(os.environ[TOKEN_FILE]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        raise InputError("the file of the token cannot be read; start the dashboard again") from None
    return bool(token) and hmac.compare_digest(given.strip().encode(), token.encode())


def may_read() -> bool:
    """Returns whether the reader of this session may see studies."""
    return not has_token() or st.session_state.get(SIGNED_IN) is True


def ask() -> None:
    """Draws the form that asks for the token."""
    st.title("deltalab", anchor=False)
    with st.form("sign in"):
        given = st.text_input("Token", type="password", autocomplete="current-password")
        if st.form_submit_button("Sign in"):
            if is_token(given):
                st.session_state[SIGNED_IN] = True
                st.rerun()
            st.error("This is not the token.")
    st.caption("The token stands in the file that `deltalab dashboard` named when it began.")
