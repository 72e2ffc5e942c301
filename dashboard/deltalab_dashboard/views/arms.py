"""The settings of every arm: those in which it differs from the base, and all of them."""

from typing import Any

import streamlit as st

from deltalab.store import Arm, Store, Study
from deltalab.study.answers.recorded_scores import current
from deltalab.study.planning.config_difference import flat
from deltalab_dashboard.downloads import table
from deltalab_dashboard.frame import searched, show
from deltalab_dashboard.text import setting

DIFFERENT = "what differs from the base"
SHOWN = [DIFFERENT, "everything"]


def page(store: Store, study: Study) -> None:
    st.title("Arms", anchor=False)
    arms = store.arms(study.id)
    table(changes(arms), f"{study.name} arms")
    st.caption("Only the settings in which an arm differs from the base; an empty cell means: as in the base.")
    if study.spec.get("search"):
        found(store, study)

    st.subheader("One arm", anchor=False)
    left, middle, right = st.columns(3)
    configs = {arm.name: arm.config for arm in arms}
    name = left.selectbox("Arm", list(configs), key="arm", bind="query-params")
    if not configs[name]:
        return
    task = middle.selectbox("Task", list(configs[name]), key="task", bind="query-params")
    part = right.selectbox("Settings", SHOWN, key="settings", bind="query-params")
    base = next(arm for arm in arms if arm.is_base)
    rows = settings(configs[name].get(task, {}), base.config.get(task, {}), whole=part != DIFFERENT)
    if rows:
        table(rows, f"{study.name} {name} {task}")
        st.caption("Defaults are included. Values that tuning or a search chose are on the pages of the trials.")
    else:
        st.info("Every setting is that of the base.")


def changes(arms: list[Arm]) -> list[dict[str, str]]:
    """A row per arm and a column per setting that some arm changes."""
    base: dict[str, Any] = {}
    for arm in arms:
        base |= {key: before for key, (before, _) in arm.change.items()}
    rows = []
    for arm in arms:
        row = {"arm": arm.name}
        for key, before in base.items():
            value = before if arm.is_base else arm.change[key][1] if key in arm.change else None
            row[key] = setting(value) if arm.is_base or key in arm.change else ""
        rows.append(row)
    return rows


def settings(config: dict[str, Any], base: dict[str, Any], *, whole: bool) -> list[dict[str, str]]:
    """A row per setting of an arm, with that of the base beside it. whole: also those that are alike."""
    own, others = flat(config), flat(base)
    return [
        {"setting": path, "base": setting(others.get(path)), "this arm": setting(own.get(path))}
        for path in dict.fromkeys([*own, *others])
        if whole or own.get(path) != others.get(path)
    ]


def found(store: Store, study: Study) -> None:
    """The settings that a search gave its arms, once they are confirmed: a row for each arm on each task.

    An arm's first training is its own.
    """
    st.subheader("Found by the search", anchor=False)
    paths = list(searched(study))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    confirmed = (trial for trial in current(store.trials(study.id)) if trial.stage == "confirm" and trial.values)
    for trial in sorted(confirmed, key=lambda trial: trial.number):
        values = {path: setting(trial.values[path]) if path in trial.values else "" for path in paths}
        rows.setdefault((trial.arm, trial.task), {"arm": trial.arm, "task": trial.task} | values)
    if rows:
        if any(path.startswith("train.") for path in paths):
            st.caption("With an arm's own training. Its seeds try others, too: page Sensitivity.")
        table([*rows.values()], f"{study.name} found")
    else:
        st.info("The search has confirmed no arm yet.")


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
