"""The frame of every page: opens the ledger, lets one choose a study, runs the page. `platform dashboard` starts it."""

from pathlib import Path

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Study
from deltalab_dashboard.chosen import STUDY, badge, label, ledger, plain

PAGES = [
    st.Page("study.py", title="Study", icon=":material/forest:", default=True),
    st.Page("curves.py", title="Curves", icon=":material/show_chart:"),
    st.Page("trials.py", title="Trials", icon=":material/list:"),
    st.Page("arms.py", title="Arms", icon=":material/call_split:"),
    st.Page("rule.py", title="Rule", icon=":material/function:"),
]
ICON = Path(__file__).parent / "icon.svg"  # a Material icon would be fetched from the network
NOTHING_YET = """
A study is one YAML file. Run one, and it appears here while it runs:

```bash
platform study run studies/quickstart.yaml
```
"""


def choose(studies: dict[int, Study]) -> None:
    """Puts the chosen study's id into the session and the URL: the one in the URL, else the latest."""
    names = {study.id: label(study) for study in studies.values()}
    asked = st.query_params.get(STUDY)
    if asked and asked not in names.values():
        st.warning(f"There is no study '{plain(asked)}' here; this is the latest.")
    if st.session_state.get(STUDY) not in studies:
        # Not the widget's default: that one stays out of the URL, which a new study would then point elsewhere.
        st.session_state[STUDY] = next(iter(studies))
        if asked not in names.values():
            st.query_params[STUDY] = names[st.session_state[STUDY]]
    st.sidebar.selectbox(
        "Study", list(names), index=None, format_func=names.__getitem__, key=STUDY, bind="query-params"
    )
    st.sidebar.markdown(badge(studies[st.session_state[STUDY]]))


def main() -> None:
    st.set_page_config(page_title="deltalab", page_icon=ICON, layout="wide")
    page = st.navigation(PAGES)
    try:
        studies = {study.id: study for study in ledger().studies()}
        if studies:
            choose(studies)
            page.run()
        else:
            st.title("No studies yet")
            st.markdown(NOTHING_YET)
    except InputError as error:
        st.error(plain(str(error)))


if __name__ == "__main__":
    main()
