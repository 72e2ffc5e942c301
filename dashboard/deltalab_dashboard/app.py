"""The script that `platform dashboard` starts: it opens the ledger, offers its studies, and runs the page."""

from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st

from deltalab.errors import InputError
from deltalab.store.studies import shelf
from deltalab.store.studies.shelf import ListedStudy
from deltalab_dashboard import address
from deltalab_dashboard.frame import STUDY, ledger
from deltalab_dashboard.text import badge, label, plain


class View(NamedTuple):
    """A page.

    Attributes:
        name: The name of the page's module in `views`, which is also its address.
        title: The title in the navigation.
        icon: The name of a Material symbol.
    """

    name: str
    title: str
    icon: str


# The pages by section of the navigation. The address of the first page has no name. Streamlit would show a string that
# stands below a constant, so constants of this file and of the pages have comments instead.
VIEWS = {
    "Study": (
        View("answer", "Answer", "forest"),
        View("curves", "Curves", "show_chart"),
        View("search", "Search", "search"),
        View("sensitivity", "Sensitivity", "tune"),
        View("ladder", "Ladder", "stairs"),
        View("trials", "Trials", "list"),
        View("trial", "Trial", "description"),
        View("arms", "Arms", "call_split"),
        View("rule", "Rule", "function"),
    ),
    "All": (
        View("studies", "Studies", "inventory_2"),
        View("compare", "Compare", "compare_arrows"),
        View("trainings", "Trainings", "trending_down"),
    ),
}
# The pages that show something in a ledger without studies: deleted studies, and trainings.
WITHOUT_STUDIES = ("studies", "trainings")
ICON = Path(__file__).parent / "icon.svg"  # Streamlit would fetch a Material icon from the network.
NOTHING_YET = """
A study is one YAML file. Run one, and it appears here while it runs:

```bash
platform study run studies/quickstart.yaml
```
"""
# The session's key for the label that this session wrote into the address. Another label there comes from a link.
ADDRESSED = "study in the address"


def choose(studies: list[ListedStudy]) -> None:
    """Draws the choice of a study: at first the address's, or else the latest.

    The session keeps the id of the chosen study, and the address keeps its label.
    """
    rows = {row.id: row for row in studies}
    labels = {row.id: label(row) for row in studies}
    name = st.query_params.get(STUDY, "")
    if name and name != st.session_state.get(ADDRESSED):
        # An address that somebody typed may hold an id or NAME:PROFILE, which means the latest study of that name.
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
    # A bound widget keeps its first option out of the address, so that a link would move on to the next new study.
    st.query_params[STUDY] = st.session_state[ADDRESSED] = labels[study_id]
    st.sidebar.markdown(badge(rows[study_id]))


def _page(view: View) -> Any:
    """Makes a page of Streamlit."""
    is_first = view is VIEWS["Study"][0]
    return st.Page(f"views/{view.name}.py", title=view.title, icon=f":material/{view.icon}:", default=is_first)


def main() -> None:
    """Draws the navigation, the choice of a study, and the page."""
    st.set_page_config(page_title="deltalab", page_icon=ICON, layout="wide")
    page = st.navigation({section: [*map(_page, views)] for section, views in VIEWS.items()})
    try:
        studies = shelf.listed(ledger())
        if studies:
            choose(studies)
        if studies or page.url_path in WITHOUT_STUDIES:
            parameters, above = address.parameters(), st.container()
            page.run()
            for line in address.complaints(parameters):
                above.warning(plain(line))
        else:
            st.title("No studies yet")
            st.markdown(NOTHING_YET)
    except InputError as error:
        st.error(plain(str(error)))


if __name__ == "__main__":
    main()
