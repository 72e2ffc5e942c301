"""The frame around every page: opens the ledger, offers its studies, runs the page. `platform dashboard` starts it."""

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
    st.Page("search.py", title="Search", icon=":material/search:"),
    st.Page("rule.py", title="Rule", icon=":material/function:"),
    st.Page("training.py", title="Training", icon=":material/trending_down:"),
]
ICON = Path(__file__).parent / "icon.svg"  # Streamlit would fetch a Material icon from the network
NOTHING_YET = """
A study is one YAML file. Run one, and it appears here while it runs:

```bash
platform study run studies/quickstart.yaml
```
"""


def choose(studies: dict[int, Study]) -> None:
    """Lets one choose a study, at first the URL's or the latest. The session keeps its id, the URL its label."""
    labels = {study.id: label(study) for study in studies.values()}
    if st.session_state.get(STUDY) not in studies:
        ids = {text: study_id for study_id, text in labels.items()}
        asked = st.query_params.get(STUDY, "")
        if asked and asked not in ids:
            st.warning(f"There is no study '{plain(asked)}' here; this is the latest.")
        st.session_state[STUDY] = ids.get(asked, next(iter(studies)))
    chosen = st.sidebar.selectbox("Study", list(labels), format_func=labels.__getitem__, key=STUDY)
    # A bound widget keeps its first option out of the URL, and a link would move on to the next study that begins.
    st.query_params[STUDY] = labels[chosen]
    st.sidebar.markdown(badge(studies[chosen]))


def main() -> None:
    st.set_page_config(page_title="deltalab", page_icon=ICON, layout="wide")
    page = st.navigation(PAGES)
    try:
        studies = {study.id: study for study in ledger().studies()}
        if studies:
            choose(studies)
            page.run()
        elif page.url_path == "training":  # a ledger may hold trainings alone
            page.run()
        else:
            st.title("No studies yet")
            st.markdown(NOTHING_YET)
    except InputError as error:
        st.error(plain(str(error)))


if __name__ == "__main__":
    main()
