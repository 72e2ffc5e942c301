"""The frame around every page: opens the ledger, offers its studies, runs the page. `platform dashboard` starts it."""

from pathlib import Path

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import shelf
from deltalab.store.shelf import Listed
from deltalab_dashboard import address
from deltalab_dashboard.frame import STUDY, ledger
from deltalab_dashboard.text import badge, label, plain

PAGES = {
    "Study": [
        st.Page("views/answer.py", title="Answer", icon=":material/forest:", default=True),
        st.Page("views/curves.py", title="Curves", icon=":material/show_chart:"),
        st.Page("views/search.py", title="Search", icon=":material/search:"),
        st.Page("views/sensitivity.py", title="Sensitivity", icon=":material/tune:"),
        st.Page("views/ladder.py", title="Ladder", icon=":material/stairs:"),
        st.Page("views/trials.py", title="Trials", icon=":material/list:"),
        st.Page("views/trial.py", title="Trial", icon=":material/description:"),
        st.Page("views/arms.py", title="Arms", icon=":material/call_split:"),
        st.Page("views/rule.py", title="Rule", icon=":material/function:"),
    ],
    "All": [
        st.Page("views/studies.py", title="Studies", icon=":material/inventory_2:"),
        st.Page("views/compare.py", title="Compare", icon=":material/compare_arrows:"),
        st.Page("views/trainings.py", title="Trainings", url_path="training", icon=":material/trending_down:"),
    ],
}
# Pages that have something to show in a ledger without studies: deleted ones, and trainings.
WITHOUT_STUDIES = ("studies", "training")
ICON = Path(__file__).parent / "icon.svg"  # Streamlit would fetch a Material icon from the network
NOTHING_YET = """
A study is one YAML file. Run one, and it appears here while it runs:

```bash
platform study run studies/quickstart.yaml
```
"""
# The key of the session with the label that the address has had; another one there means that a link was followed.
ADDRESSED = "study in the address"


def choose(studies: list[Listed]) -> None:
    """Lets one choose a study, at first the address's or the latest. The session keeps its id, the URL its label."""
    rows = {row.id: row for row in studies}
    labels = {row.id: label(row) for row in studies}
    asked = st.query_params.get(STUDY, "")
    if asked and asked != st.session_state.get(ADDRESSED):
        # An address that somebody wrote may have an id or NAME:PROFILE. Of several studies the latest is meant.
        ids = {name: row.id for row in reversed(studies) for name in (str(row.id), row.address, labels[row.id])}
        if asked in ids:
            st.session_state[STUDY] = ids[asked]
        else:
            st.warning(f"There is no study '{plain(asked)}' here; this is the latest.")
            st.session_state.pop(STUDY, None)
    if st.session_state.get(STUDY) not in rows:
        st.session_state[STUDY] = next((row.id for row in studies if not row.hidden), studies[0].id)
    offered = [row.id for row in studies if not row.hidden or row.id == st.session_state[STUDY]]
    chosen = st.sidebar.selectbox("Study", offered, format_func=labels.__getitem__, key=STUDY)
    # A bound widget keeps its first option out of the URL, and a link would move on to the next study that begins.
    st.query_params[STUDY] = st.session_state[ADDRESSED] = labels[chosen]
    st.sidebar.markdown(badge(rows[chosen]))


def main() -> None:
    st.set_page_config(page_title="deltalab", page_icon=ICON, layout="wide")
    page = st.navigation(PAGES)
    try:
        studies = shelf.listed(ledger())
        if studies:
            choose(studies)
        if studies or page.url_path in WITHOUT_STUDIES:
            asked, told = address.asked(), st.container()
            page.run()
            for line in address.refused(asked):
                told.warning(plain(line))
        else:
            st.title("No studies yet")
            st.markdown(NOTHING_YET)
    except InputError as error:
        st.error(plain(str(error)))


if __name__ == "__main__":
    main()
