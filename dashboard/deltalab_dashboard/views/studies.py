"""All studies: their states, best arms, tags and notes; hides, deletes and restores them."""

import time
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store, shelf
from deltalab.store.shelf import Listed
from deltalab.study.reports.best_arm import keep, lacking, told
from deltalab_dashboard import downloads
from deltalab_dashboard.frame import STUDY, ledger
from deltalab_dashboard.text import COLORS, badge, label, plain

# How long one run of the page looks for best arms that an earlier release has not kept.
FILL_SECONDS = 0.3
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
    st.title("Studies", anchor=False)
    kept, deleted = shelf.listed(store), shelf.listed(store, deleted=True)
    where = st.columns([4, 3, 3, 2], vertical_alignment="bottom")
    find = where[0].text_input(
        "Find", key="find", bind="query-params", placeholder="words in name, tags, notes, description or arms"
    )
    tags = sorted({tag for row in kept for tag in row.tags})
    tagged = where[1].multiselect("Tags", tags, placeholder="any", key="tags", bind="query-params")
    states = where[2].multiselect("States", list(COLORS), placeholder="any", key="states", bind="query-params")
    offered = ["listed", "listed and hidden", "deleted"]
    which = where[3].selectbox("Show", offered, key="which", bind="query-params")
    rows = deleted if which == "deleted" else [row for row in kept if which != "listed" or not row.hidden]
    arms = shelf.arm_names(store)
    rows = [
        row
        for row in rows
        if row.says(find, arms.get(row.id, ())) and set(tagged) <= set(row.tags) and (not states or row.state in states)
    ]
    said = f"{len(rows)} of {len(deleted if which == 'deleted' else kept)} studies"
    hidden = sum(row.hidden for row in kept)
    if hidden and which == "listed":
        said += f", {hidden} hidden"
    if not rows:
        st.info(f"No study is like this: {said}.")
        return
    st.caption(f"{said}. A click on a cell opens its study. The box at the left of a row selects it for changes below.")
    row = chosen(rows, table(store, rows, arms))
    if row is not None and which == "deleted":
        restored(store, row)
    elif row is not None:
        changes(store, row)
    if which != "deleted" and lacking(kept):
        st.fragment(fill, run_every=FILL_EVERY)(store)


def table(store: Store, rows: Sequence[Listed], arms: dict[int, list[str]]) -> str:
    """Draws the list. Returns the key of what is selected in it."""
    counts = shelf.trial_counts(store)
    typed = pd.DataFrame(
        [
            {
                "study": row.name,
                "profile": row.profile or "",
                "state": f"{row.state}, hidden" if row.hidden else row.state,
                "begun, UTC": row.created_at,
                "best arm": told(row.best),
                "trials": _of(counts.get(row.id, 0), row.total),
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
    key = f"rows {' '.join(str(row.id) for row in rows)}"  # a selection by place means nothing among other rows
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


def chosen(rows: Sequence[Listed], key: str) -> Listed | None:
    """The study whose row is selected. Opens the one of which a cell is."""
    selection = st.session_state[key]["selection"]
    for at, _ in selection["cells"]:
        st.switch_page("views/answer.py", query_params={STUDY: label(rows[at])})
    return next((rows[at] for at in selection["rows"]), None)


def changes(store: Store, row: Listed) -> None:
    """What one may change about a study."""
    with st.container(border=True):
        st.markdown(f"**{plain(row.address)}** {badge(row)} id {row.id}")
        st.page_link("views/answer.py", label="Open", icon=":material/open_in_new:", query_params={STUDY: label(row)})
        with st.form(f"shelf {row.id}", border=False):
            known = sorted({tag for other in shelf.listed(store) for tag in other.tags})
            tags = st.multiselect("Tags of this study", known, default=row.tags, accept_new_options=True)
            notes = st.text_area("Notes", row.notes, max_chars=shelf.LONGEST_NOTES)
            if st.form_submit_button("Save"):
                shelf.tag(store, row.id, tags)
                shelf.note(store, row.id, notes)
                st.rerun()
        with st.container(horizontal=True):
            word = "Show in lists again" if row.hidden else "Hide from lists"
            if st.button(word, icon=":material/visibility:" if row.hidden else ":material/visibility_off:"):
                shelf.hide(store, row.id, not row.hidden)
                st.rerun()
            with st.popover("Delete", icon=":material/delete:", disabled=row.state == "running"):
                st.markdown(
                    plain(f"Delete {row.address}, id {row.id}: {shelf.contents(store, row.id)}?")
                    + f"\n\nIt can be restored here, or with `platform study restore {row.id}`, until "
                    "`platform db vacuum` removes it for good."
                )
                if st.button("Delete this study", type="primary"):
                    shelf.delete(store, row.id)
                    st.rerun()
        if row.state == "running":
            st.caption("A study that runs cannot be deleted.")


def restored(store: Store, row: Listed) -> None:
    with st.container(border=True):
        st.markdown(f"**{plain(row.address)}** id {row.id} is deleted.")
        if st.button("Restore this study", icon=":material/restore_from_trash:"):
            shelf.restore(store, row.id)
            st.rerun()


def fill(store: Store) -> None:
    """Finds best arms that an earlier release has not kept, a few at a time."""
    begun = time.monotonic()
    left = lacking(shelf.listed(store))
    try:
        for row in left:
            keep(store, row.id)
            if time.monotonic() - begun > FILL_SECONDS:
                break
    except InputError:  # the ledger may not be written: it is listed without best arms
        return
    rest = len(lacking(shelf.listed(store)))
    if not rest:
        st.rerun()
    st.caption(f"The best arms of {rest} studies are still being worked out.")


def _of(recorded: int, total: int | None) -> str:
    return f"{recorded:,} of {total:,}" if total and total >= recorded else f"{recorded:,}"


if __name__ == "__main__":  # how Streamlit runs a page
    try:
        page(ledger())
    except InputError as error:
        st.error(plain(str(error)))
