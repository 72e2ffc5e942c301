"""The script that `deltalab dashboard` starts: it opens the ledger, offers its studies, and runs the page."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import trainings
from deltalab.store.studies import shelf
from deltalab.store.studies.shelf import ListedStudy
from deltalab.study.specs.recorded_study import RecordedSpec
from deltalab_dashboard import address, sign_in
from deltalab_dashboard.frame import STUDY, ledger
from deltalab_dashboard.reach import draw_reach
from deltalab_dashboard.sidebar import saved_views
from deltalab_dashboard.sidebar.study_choice import choose
from deltalab_dashboard.text import plain


class View(NamedTuple):
    """A page of the dashboard.

    Attributes:
        name: The name of the page's module in `views`, which is also its address.
        title: The title in the navigation.
        icon: The name of the Material symbol beside the title.
    """

    name: str
    title: str
    icon: str


# The sections of the navigation, each with its pages. The address of the first page does not contain the page's name.
# Streamlit would draw a string that stands below a constant. Comments therefore describe the constants of this file and
# of the pages.
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
# The names of the pages that are drawn even if the ledger lists no study. They show deleted studies, and trainings.
WITHOUT_STUDIES = ("studies", "trainings")
ICON = Path(__file__).parent / "icon.svg"  # Streamlit would fetch a Material icon from the network.
NOTHING_YET = """
A study is one YAML file. Run one, and it appears here while it runs:

```bash
deltalab study run studies/quickstart.yaml
```
"""


def empty_views() -> set[str]:
    """Returns the pages that have nothing to show of the chosen study. The navigation leaves them out.

    The page Trial needs a trial, which a click on the page Trials chooses.
    """
    spec = RecordedSpec(ledger().study(st.session_state[STUDY]).spec)
    shown = {
        "search": spec.is_search,
        "sensitivity": bool(spec.tuned),
        "ladder": spec.is_ladder,
        "trainings": trainings.has_trainings(ledger()),
        "trial": False,
    }
    return {name for name, is_shown in shown.items() if not is_shown}


def _page(view: View, hidden: Collection[str]) -> Any:
    """Makes the Streamlit page of a view. A hidden page still opens by its address."""
    return st.Page(
        f"views/{view.name}.py",
        title=view.title,
        icon=f":material/{view.icon}:",
        default=view is VIEWS["Study"][0],
        visibility="hidden" if view.name in hidden else "visible",
    )


def main() -> None:
    """Draws the navigation, the choice of a study, and the page that the reader opened."""
    st.set_page_config(page_title="deltalab", page_icon=ICON, layout="wide")
    draw_reach()
    if not sign_in.may_read():
        # The pages are named, so that the address still leads to its page after the form.
        st.navigation([_page(view, ()) for views in VIEWS.values() for view in views], position="hidden")
        try:
            sign_in.ask()
        except InputError as error:
            st.error(plain(str(error)))
        return
    studies: list[ListedStudy] = []
    hidden: set[str] = set()
    failure: InputError | None = None
    try:
        studies = shelf.listed(ledger())
        if studies:
            choose(studies)
            hidden = empty_views()
    except InputError as error:
        failure = error
    pages = {view.name: _page(view, hidden) for views in VIEWS.values() for view in views}
    page = st.navigation({section: [pages[view.name] for view in views] for section, views in VIEWS.items()})
    try:
        if failure:
            raise failure
        if studies or page.url_path in WITHOUT_STUDIES:
            try:
                saved_views.follow(ledger(), studies, pages)
            except InputError as error:
                st.error(plain(str(error)))
                del st.query_params[saved_views.VIEW]
            parameters, above = address.parameters(), st.container()
            page.run()
            for line in address.complaints(parameters):
                above.warning(plain(line))
            if studies:
                saved_views.draw(ledger(), studies, pages, page)
        else:
            st.title("No studies yet")
            st.markdown(NOTHING_YET)
    except InputError as error:
        st.error(plain(str(error)))


if __name__ == "__main__":
    main()
