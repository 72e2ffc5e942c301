"""The page Arms: the settings in which each arm differs from the base, and all settings of one arm."""

from typing import Any

import streamlit as st

from deltalab.store import Arm, Store, Study, TrialRow
from deltalab.study.answers.recorded_scores import current
from deltalab.study.planning.config_difference import flat
from deltalab.study.specs.recorded_study import RecordedSpec
from deltalab.study.specs.setting_paths import of_training
from deltalab_dashboard.downloads import table
from deltalab_dashboard.frame import searched_settings, show
from deltalab_dashboard.text import setting

DIFFERENT = "what differs from the base"
PARTS = [DIFFERENT, "everything"]


def page(store: Store, study: Study) -> None:
    """Draws the page."""
    st.title("Arms", anchor=False)
    arms = store.arms(study.id)
    rows = change_rows(arms)
    captions = ["Only the settings in which an arm differs from the base; an empty cell means: as in the base."]
    if RecordedSpec(study.spec).is_search:
        found = confirmed_settings(store, study)
        empty = dict.fromkeys(searched_settings(study), "")
        rows = [{"arm": row["arm"], **empty, **row, **found.get(row["arm"], {})} for row in rows]
        captions = ["What the search chose for each arm; an empty cell means: the arm has no such setting."]
        if not found:
            captions.append("The search has confirmed no arm yet.")
        elif any(map(of_training, searched_settings(study))):
            captions.append("Training is the arm's own, by task where it differs. Its seeds try others: Sensitivity.")
    table(rows, f"{study.name} arms")
    st.caption(" ".join(captions))

    st.subheader("One arm", anchor=False)
    left, middle, right = st.columns(3)
    configs = {arm.name: arm.config for arm in arms}
    name = left.selectbox("Arm", list(configs), key="arm", bind="query-params")
    if not configs[name]:
        return
    task = middle.selectbox("Task", list(configs[name]), key="task", bind="query-params")
    part = right.selectbox("Settings", PARTS, key="settings", bind="query-params")
    base = next(arm for arm in arms if arm.is_base)
    rows = setting_rows(configs[name].get(task, {}), base.config.get(task, {}), whole=part != DIFFERENT)
    if rows:
        table(rows, f"{study.name} {name} {task}")
        st.caption("Defaults are included. Values that tuning or a search chose are on the pages of the trials.")
    else:
        st.info("Every setting is that of the base.")


def change_rows(arms: list[Arm]) -> list[dict[str, str]]:
    """Returns a row for each arm, with a cell for each setting that at least one arm changes."""
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


def setting_rows(config: dict[str, Any], base: dict[str, Any], *, whole: bool) -> list[dict[str, str]]:
    """Returns a row for each setting, with the base's value and the arm's value.

    Unless `whole`, only the settings in which the arm differs from the base are returned.
    """
    of_arm, of_base = flat(config), flat(base)
    return [
        {"setting": path, "base": setting(of_base.get(path)), "this arm": setting(of_arm.get(path))}
        for path in dict.fromkeys([*of_arm, *of_base])
        if whole or of_arm.get(path) != of_base.get(path)
    ]


def confirmed_settings(store: Store, study: Study) -> dict[str, dict[str, str]]:
    """Returns the settings that a search chose for the confirmed arms: arm -> path -> text.

    If an arm has several confirmed trials on a task, its settings are those of the trial with the lowest number, which
    has the training that the search chose for the arm. A text has several values if they differ between tasks.
    """
    paths = list(searched_settings(study))
    chosen: dict[tuple[str, str], TrialRow] = {}
    confirmed = (trial for trial in current(store.trials(study.id)) if trial.stage == "confirm" and trial.values)
    for trial in sorted(confirmed, key=lambda trial: trial.number):
        chosen.setdefault((trial.arm, trial.task), trial)
    values: dict[str, dict[str, dict[str, None]]] = {}
    for (arm, _), trial in chosen.items():
        of_arm = values.setdefault(arm, {path: {} for path in paths})
        for path in paths:
            if path in trial.values:
                of_arm[path][setting(trial.values[path])] = None
    return {arm: {path: ", ".join(texts) for path, texts in of_arm.items()} for arm, of_arm in values.items()}


if __name__ == "__main__":  # Streamlit runs a page as a script.
    show(page)
