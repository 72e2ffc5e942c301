"""Draws the choice of the study that the pages show."""

import streamlit as st

from deltalab.store.studies.shelf import ListedStudy
from deltalab_dashboard.frame import STUDY
from deltalab_dashboard.text import badge, label, plain

ADDRESSED = "study in the address"
"""The session's key for the label that this session last wrote into the address.

If the address holds another label, the reader followed a link.
"""


def choose(studies: list[ListedStudy]) -> None:
    """Draws the choice of a study. At first, the study that the address names is chosen, or else the latest study.

    The session keeps the id of the chosen study, and the address keeps the study's label.
    """
    rows = {row.id: row for row in studies}
    labels = {row.id: label(row) for row in studies}
    name = st.query_params.get(STUDY, "")
    if name and name != st.session_state.get(ADDRESSED):
        # An address that somebody typed may hold an id instead of a label, or NAME:PROFILE. The latter means the latest
        # study with that name and profile.
        ids = {text: row.id for row in reversed(studies) for text in (str(row.id), row.address, labels[row.id])}
        if name in ids:
            st.session_state[STUDY] = ids[name]
        else:
            st.warning(f"There is no study '{plain(name)}' here; this is the latest.")
            st.session_state.pop(STUDY, None)
    if st.session_state.get(STUDY) not in rows:
        st.session_state[STUDY] = next((row.id for row in studies if not row.hidden), studies[0].id)
    offered = [row.id for row in studies if not row.hidden or row.id == st.session_state[STUDY]]
    study_id = st.sidebar.selectbox("Study", offered, format_func=labels.__getitem__, key=STUDY)
    # A bound widget would leave its first option out of the address. A copied link would then open whichever study is
    # the latest when somebody follows the link.
    st.query_params[STUDY] = st.session_state[ADDRESSED] = labels[study_id]
    st.sidebar.markdown(badge(rows[study_id]))
