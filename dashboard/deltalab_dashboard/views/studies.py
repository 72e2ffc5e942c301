"""The page Studies: lists all studies with their best arms, tags and notes, and hides, deletes and restores them."""

import time
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store
from deltalab.store.studies import shelf
from deltalab.store.studies.shelf import ListedStudy
from deltalab.study.reports.best_arm import best_arm_text, keep_best_arm, without_best_arm
from deltalab_dashboard import downloads, sign_in
from deltalab_dashboard.frame import STUDY, ledger
from deltalab_dashboard.text import STATE_COLORS, badge, label, notes, plain

# The seconds after which a call of `fill_best_arms` begins no further study.
FILL_SECONDS = 0.3
# The seconds between two calls of `fill_best_arms`.
FILL_EVERY = 2
COLUMNS = {
    "study": st.column_config.TextColumn(pinned=True),
    "begun, UTC": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
    "best arm": st.column_config.TextColumn(
        help="The best mean on the first task with a better arm, once the study has ended. Better: at p <= 0.05.",
        width="medium",
    ),
    "trials": st.column_config.TextColumn(help="Recorded, of those that the study has in all."),
    "tags": st.column_config.ListColumn(width="small"),
    "notes": st.column_config.TextColumn(width="medium"),
    "description": st.column_config.TextColumn(width="large"),
}


def page(store: Store) -> None:
    """Draws the page."""
    st.title("Studies", anchor=False)
    listed, deleted = shelf.listed(store), shelf.listed(store, deleted=True)
    columns = st.columns([4, 3, 3, 2], vertical_alignment="bottom")
    words = columns[0].text_input(
        "Find", key="find", bind="query-params", placeholder="words in name, tags, notes, description or arms"
    )
    tags = sorted({tag for row in listed for tag in row.tags})
    picked_tags = columns[1].multiselect("Tags", tags, placeholder="any", key="tags", bind="query-params")
    states = columns[2].multiselect("States", list(STATE_COLORS), placeholder="any", key="states", bind="query-params")
    offered = ["listed", "listed and hidden", "deleted"]
    which = columns[3].selectbox("Show", offered, key="which", bind="query-params")
    rows = deleted if which == "deleted" else [row for row in listed if which != "listed" or not row.hidden]
    arms = shelf.arm_names(store)
    rows = [
        row
        for row in rows
        if row.says(words, arms.get(row.id, ()))
        and set(picked_tags) <= set(row.tags)
        and (not states or row.state in states)
    ]
    count = f"{len(rows)} of {len(deleted if which == 'deleted' else listed)} studies"
    hidden = sum(row.hidden for row in listed)
    if hidden and which == "listed":
        count += f", {hidden} hidden"
    if not rows:
        st.info(f"No study is like this: {count}.")
        return
    st.caption(
        f"{count}. A click on a cell opens its study. The box at the left of a row selects it for changes below."
    )
    row = selected_row(rows, study_table(store, rows, arms))
    if row is not None and which == "deleted":
        deleted_study(store, row)
    elif row is not None:
        listed_study(store, row)
    if which != "deleted" and without_best_arm(listed):
        st.fragment(fill_best_arms, run_every=FILL_EVERY)(store)


def study_table(store: Store, rows: Sequence[ListedStudy], arms: dict[int, list[str]]) -> str:
    """Draws the list of studies. Returns the session's key for the list, under which the selection is kept."""
    counts = shelf.trial_counts(store)
    typed = pd.DataFrame(
        [
            {
                "study": row.name,
                "profile": row.profile or "",
                "state": f"{row.state}, hidden" if row.hidden else row.state,
                "begun, UTC": row.created_at,
                "best arm": best_arm_text(row.best),
                "trials": _trial_count(counts.get(row.id, 0), row.total),
                "arms": len(arms.get(row.id, ())),
                "tags": list(row.tags),
                "notes": row.notes,
                "description": row.description,
                "id": row.id,
            }
            for row in rows
        ]
    )
    text = [
        {name: ", ".join(value) if isinstance(value, list) else str(value) for name, value in line.items()}
        for line in typed.assign(**{"begun, UTC": [f"{row.created_at:%Y-%m-%d %H:%M}" for row in rows]}).to_dict(
            "records"
        )
    ]
    # Streamlit keeps a selection as the index of a row. If the list has other rows, another key drops the selection.
    key = f"rows {' '.join(str(row.id) for row in rows)}"
    downloads.sortable(
        typed,
        "studies",
        text=text,
        columns=COLUMNS,
        key=key,
        on_select="rerun",
        selection_mode=["single-row", "single-cell"],
    )
    return key


def selected_row(rows: Sequence[ListedStudy], key: str) -> ListedStudy | None:
    """Returns the study whose row is selected, if any. If a cell is selected, opens the study of that cell."""
    selection = st.session_state[key]["selection"]
    for at, _ in selection["cells"]:
        st.switch_page("views/answer.py", query_params={STUDY: label(rows[at])})
    return next((rows[at] for at in selection["rows"]), None)


def listed_study(store: Store, row: ListedStudy) -> None:
    """Draws the selected study, with the controls that change its tags and notes, hide it, or delete it."""
    with st.container(border=True):
        st.markdown(f"**{plain(row.address)}** {badge(row)} id {row.id}")
        st.markdown(notes(row.notes))
        st.page_link("views/answer.py", label="Open", icon=":material/open_in_new:", query_params={STUDY: label(row)})
        with st.form(f"shelf {row.id}", border=False):
            known = sorted({tag for other in shelf.listed(store) for tag in other.tags})
            tags = st.multiselect("Tags of this study", known, default=row.tags, accept_new_options=True)
            written = st.text_area("Notes, in Markdown", row.notes, max_chars=shelf.LONGEST_NOTES)
            if st.form_submit_button("Save"):
                shelf.tag(store, row.id, tags)
                shelf.note(store, row.id, written)
                st.rerun()
        with st.container(horizontal=True):
            word = "Show in lists again" if row.hidden else "Hide from lists"
            if st.button(word, icon=":material/visibility:" if row.hidden else ":material/visibility_off:"):
                shelf.hide(store, row.id, not row.hidden)
                st.rerun()
            with st.popover("Delete", icon=":material/delete:", disabled=row.state == "running"):
                st.markdown(
                    plain(f"Delete {row.address}, id {row.id}: {shelf.contents(store, row.id)}?")
                    + f"\n\nIt can be restored here, or with `deltalab study restore {row.id}`, until "
                    "`deltalab db vacuum` removes it for good."
                )
                given = st.text_input("Token", type="password") if sign_in.has_token() else None
                if st.button("Delete this study", type="primary"):
                    if given is None or sign_in.is_token(given):
                        shelf.delete(store, row.id)
                        st.rerun()
                    st.error("Give the token again to delete a study.")
        if row.state == "running":
            st.caption("A study that runs cannot be deleted.")


def deleted_study(store: Store, row: ListedStudy) -> None:
    """Draws the selected study, which is a deleted one, with a button that restores it."""
    with st.container(border=True):
        st.markdown(f"**{plain(row.address)}** id {row.id} is deleted.")
        if st.button("Restore this study", icon=":material/restore_from_trash:"):
            shelf.restore(store, row.id)
            st.rerun()


def fill_best_arms(store: Store) -> None:
    """Computes and stores the best arms of a few studies that ended under a release which stored no best arm."""
    begun = time.monotonic()
    try:
        for row in without_best_arm(shelf.listed(store)):
            keep_best_arm(store, row.id)
            if time.monotonic() - begun > FILL_SECONDS:
                break
    except InputError:  # If the ledger cannot be written, the list shows no best arms.
        return
    remaining = len(without_best_arm(shelf.listed(store)))
    if not remaining:
        st.rerun()
    st.caption(f"The best arms of {remaining} studies are still being worked out.")


def _trial_count(recorded: int, total: int | None) -> str:
    """Writes how many trials of a study are recorded, and of how many, if the total is known."""
    return f"{recorded:,} of {total:,}" if total and total >= recorded else f"{recorded:,}"


if __name__ == "__main__":  # Streamlit runs a page as a script.
    try:
        page(ledger())
    except InputError as error:
        st.error(plain(str(error)))
