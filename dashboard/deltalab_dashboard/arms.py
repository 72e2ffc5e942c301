"""What makes an arm: the settings in which it differs from the base, and all of them."""

from typing import Any

import streamlit as st

from deltalab.store import Store, Study
from deltalab_dashboard.chosen import plain, show


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
            row[plain(key)] = said(value) if arm.is_base or key in arm.change else ""
        rows.append(row)
    st.caption("Only the settings in which an arm differs; an empty cell is as in the base.")
    st.table(rows, border="horizontal", hide_header=False)

    st.subheader("Everything", anchor=False)
    st.caption("Every default spelled out, before tuning.")
    left, right = st.columns(2)
    configs = {arm.name: arm.config for arm in arms}
    name = left.selectbox("Arm", list(configs), key="arm", bind="query-params")
    if configs[name]:
        task = right.selectbox("Task", list(configs[name]), key="task", bind="query-params")
        st.json(configs[name][task])


def said(value: object) -> str:
    """A setting as one would write it down.

    >>> said({"head": {"init": 1}}), said({"metala_decay": {}}), said(None)
    ('head\\\\(init=1\\\\)', 'metala\\\\_decay', 'absent')
    """
    if value is None:
        return "absent"
    if isinstance(value, dict) and len(value) == 1:
        [(form, given)] = value.items()
        if isinstance(given, dict):
            arguments = ", ".join(f"{key}={item}" for key, item in given.items())
            return plain(f"{form}({arguments})" if arguments else form)
    return plain(str(value))


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
