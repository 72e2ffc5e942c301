"""Draws the views that readers saved: each a page with the study, the arms, the columns and the order on it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store
from deltalab.store.models import SavedView
from deltalab.store.studies import saved_views
from deltalab.store.studies.shelf import ListedStudy
from deltalab_dashboard import address
from deltalab_dashboard.frame import STUDY
from deltalab_dashboard.text import label, plain

VIEW = "saved"
"""The parameter of an address that names a saved view."""
OF_ALL_STUDIES = "studies"
"""The page that shows no single study, so that its views stay when a study is deleted."""


def follow(store: Store, studies: Sequence[ListedStudy], pages: Mapping[str, Any]) -> None:
    """Opens the view that the address names, if it names one: the address becomes that of the view's page.

    Args:
        store: The ledger.
        studies: The studies of the ledger.
        pages: The Streamlit page of each page's name.

    Raises:
        InputError: There is no such view, or no such page.
    """
    if VIEW not in st.query_params:
        return
    view = saved_views.named(store, st.query_params[VIEW])
    if view.page not in pages:
        raise InputError(f"view '{view.name}': this deltalab has no page '{view.page}'")
    st.switch_page(pages[view.page], query_params=_parameters(view, studies))


def draw(store: Store, studies: Sequence[ListedStudy], pages: Mapping[str, Any], page: Any) -> None:
    """Draws links to the saved views, a form that saves the present view, and the controls that change a view.

    Args:
        store: The ledger.
        studies: The studies of the ledger.
        pages: The Streamlit page of each page's name.
        page: The page that the reader sees.
    """
    views = saved_views.saved(store)
    with st.sidebar.expander("Saved views", icon=":material/bookmark:"):
        for view in views:
            target = pages.get(view.page, page)
            # From another page, Streamlit would drop the parameters that the widgets of both pages have. `follow` sets
            # them once that page's widgets are gone.
            is_here = target is page and view.page in pages
            query = _parameters(view, studies) if is_here else {VIEW: view.name}
            st.page_link(target, label=plain(view.name), query_params=query)
        name = next(name for name, known in pages.items() if known.url_path == page.url_path)
        for controls in (partial(_save, store, name, len(views)), *([partial(_change, store, views)] if views else [])):
            try:
                controls()
            except InputError as error:
                st.error(plain(str(error)))


def _parameters(view: SavedView, studies: Sequence[ListedStudy]) -> dict[str, Any]:
    """Returns the parameters of a view's address, with the label that its study has in this ledger."""
    label_of = {study.id: label(study) for study in studies}
    return view.parameters | ({STUDY: label_of[view.study_id]} if view.study_id in label_of else {})


def _save(store: Store, page: str, count: int) -> None:
    """Draws the form that saves what the reader sees. `count` views are saved so far."""
    with st.form("save a view", border=False):
        # With another key, the field is empty again once a view is saved.
        name = st.text_input("Save this view as", key=f"name of view {count + 1}", max_chars=saved_views.LONGEST_NAME)
        if st.form_submit_button("Save"):
            study_id = None if page == OF_ALL_STUDIES else st.session_state[STUDY]
            saved_views.save(store, name, page, address.parameters(), study_id)
            st.rerun()


def _change(store: Store, views: Sequence[SavedView]) -> None:
    """Draws the controls that rename and delete a view."""
    # A form sends both fields with the click, so that a name that was just typed counts.
    with st.popover("Rename or delete", type="tertiary"), st.form("change a view", border=False):
        name = st.selectbox("View", [view.name for view in views])
        new = st.text_input("Its new name", max_chars=saved_views.LONGEST_NAME)
        if st.form_submit_button("Rename"):
            saved_views.rename(store, name, new)
            st.rerun()
        if st.form_submit_button("Delete this view"):
            saved_views.delete(store, name)
            st.rerun()
