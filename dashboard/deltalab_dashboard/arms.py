"""The settings of every arm: those in which it differs from the base, and all of them."""

from typing import Any

import streamlit as st

from deltalab.store import Store, Study
from deltalab.study.measured import current
from deltalab_dashboard.chosen import plain, searched, setting, show


def page(store: Store, study: Study) -> None:
    st.title("Arms", anchor=False)
    arms = store.arms(study.id)
    base: dict[str, Any] = {}
    for arm in arms:
        base |= {key: before for key, (before, _) in arm.change.items()}
    rows = []
    for arm in arms:
        row = {"arm": f"**{plain(arm.name)}**" if arm.is_base else plain(arm.name)}
        for key, before in base.items():
            value = before if arm.is_base else arm.change[key][1] if key in arm.change else None
            row[plain(key)] = plain(setting(value)) if arm.is_base or key in arm.change else ""
        rows.append(row)
    st.table(rows, border="horizontal", hide_header=False)
    st.caption("Only the settings in which an arm differs from the base; an empty cell means: as in the base.")
    if study.spec.get("search"):
        found(store, study)

    st.subheader("Everything", anchor=False)
    st.caption("Every setting, defaults included, before tuning or search.")
    left, right = st.columns(2)
    configs = {arm.name: arm.config for arm in arms}
    name = left.selectbox("Arm", list(configs), key="arm", bind="query-params")
    if configs[name]:
        task = right.selectbox("Task", list(configs[name]), key="task", bind="query-params")
        st.json(configs[name][task])


def found(store: Store, study: Study) -> None:
    """The settings that a search gave its arms, once they are confirmed: a row for each arm, not for each look."""
    st.subheader("Found by the search", anchor=False)
    paths = list(searched(study))
    rows = []
    for trial in current(store.trials(study.id)):
        row = {"arm": plain(trial.arm), "task": plain(trial.task)} | {
            plain(path): plain(setting(trial.values[path])) if path in trial.values else "" for path in paths
        }
        if trial.stage == "confirm" and trial.values and row not in rows:
            rows.append(row)
    if rows:
        st.table(rows, border="horizontal", hide_header=False)
    else:
        st.info("The search has confirmed no arm yet.")


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
