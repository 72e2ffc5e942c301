"""The page Trial: everything about one trial.

Its address ends with `?study=...&trial=KEY`, where the beginning of the trial's key is enough for KEY.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store, Study
from deltalab.store.database import without_password
from deltalab.store.studies.trials import Holder, Point, Seed, TrialDetails, curves_of, find_trial
from deltalab.study.answers.rows import SPLIT
from deltalab.study.planning.config_difference import difference
from deltalab.study.planning.tuning_candidates import recorded_trial_name
from deltalab.study.specs.recorded_study import RecordedTask, recorded_tasks
from deltalab_dashboard.colors import BETTER, WORSE
from deltalab_dashboard.downloads import chart, table
from deltalab_dashboard.frame import DATABASE, LISTED, STUDY, show
from deltalab_dashboard.text import label, plain, setting

# The name under which the address and the session hold the trial's key, or its beginning.
KEY = "trial"
# How many characters of a trial's key the name of a downloaded file contains.
SHORT = 12
# The colour of a trial's badge: state -> colour.
STATES = {"done": "green", "diverged": "orange", "failed": "red", "infeasible": "gray"}
# The most points that are read of a curve. A screen shows no more.
POINTS = 300
NOT_HERE = "remote, not looked for"


def page(store: Store, study: Study) -> None:
    """Draws the page."""
    st.title("Trial", anchor=False)
    back = st.session_state.get(LISTED) or {STUDY: label(study)}
    st.page_link("views/trials.py", label="All trials", icon=":material/arrow_back:", query_params=back)
    key = st.text_input(
        "Key", key=KEY, bind="query-params", help="The beginning of a trial's key is enough.", max_chars=80
    ).strip()
    if not key:
        st.info("Type the beginning of a trial's key, or choose a trial on the page Trials.")
        return
    try:
        details = find_trial(store, key)
    except InputError as error:
        st.error(plain(str(error)))
        return
    studies = {study.id: study for study in store.studies()}
    holders = [holder for holder in details.holders if holder.study_id in studies]
    in_study = [holder for holder in holders if holder.study_id == study.id]
    if holders and not in_study:
        others = ", ".join(dict.fromkeys(label(studies[holder.study_id]) for holder in holders))
        st.warning(plain(f"{study.name} does not have this trial. It belongs to: {others}."))
    home = next(iter(in_study or holders), None)
    home_study = studies[home.study_id] if home else None
    task = recorded_tasks(home_study).get(details.trial.task) if home_study else None
    heading(details, home, home_study)
    failure(details)
    facts(details, task)
    finals(details, task)
    curves(store, details, task)
    configuration(store, details, home)
    holder_table(details, holders, studies)
    weights(details)
    if home and home_study:
        commands(store, details, home, home_study)
    rule(details)


def heading(details: TrialDetails, home: Holder | None, study: Study | None) -> None:
    """Draws the trial's name, state and key."""
    trial = details.trial
    state = _state(details)
    name = recorded_trial_name(study.spec, home.arm, trial.stage, home.number) if home and study else trial.stage
    st.subheader(plain(f"{name} on {trial.task}"), anchor=False)
    st.markdown(f":{STATES[state]}-badge[{state}] &nbsp; `{trial.key}`")


def failure(details: TrialDetails) -> None:
    """Draws why a trial has no result: a traceback, or the reason why no model can be built with the trial's values."""
    error = details.trial.error
    if error is None:
        return
    st.error(plain(error.strip().rpartition("\n")[2]))
    if "\n" in error.strip():
        st.code(error, language=None)


def facts(details: TrialDetails, task: RecordedTask | None) -> None:
    """Draws the trial's times and sizes on the left, and its hardware on the right."""
    trial = details.trial
    speed = trial.tokens_per_second
    version = str(trial.task_version)
    if task is not None and task.version not in (None, trial.task_version):
        version += f"; the study's is {task.version}"
    sizes = {
        "task": f"{trial.task}, version {version}",
        "started": _time(trial.started_at),
        "finished": _time(trial.finished_at),
        "seconds": f"{trial.seconds:,.1f}",
        "tokens/s": "" if speed is None else f"{speed:,.0f}",
        "us/token": "" if not speed else f"{1e6 / speed:.3g}",
        "parameters": "" if trial.parameters is None else f"{trial.parameters:,}",
        "state, elements": "" if trial.state_size is None else f"{trial.state_size:,}",
    }
    left, right = st.columns(2)
    with left:
        _facts("Times and sizes", sizes)
    with right:
        _facts("Hardware", {name: setting(value) for name, value in trial.hardware.items()})
    st.caption("Seconds are the trial's share of the time of all runs that were trained as one.")


def finals(details: TrialDetails, task: RecordedTask | None) -> None:
    """Draws how each seed ended, and every metric of each seed at the last step."""
    st.subheader("Seeds", anchor=False)
    if not details.seeds:
        st.info("No seed of this trial ran.")
        return
    main: list[dict[str, str]] = []
    others: list[dict[str, str]] = []
    main_metrics = _main_metrics(task)
    for split, metric in _metrics(details, task):
        done = [seed.finals[split, metric][1] for seed in details.seeds if _is_done(seed, split, metric)]
        values = {
            _header(seed): _figure(seed.finals[split, metric][1]) if (split, metric) in seed.finals else ""
            for seed in details.seeds
        }
        mean = _figure(fmean(done)) if done else ""
        row = {"metric": metric, "split": split, "mean": mean, **values}
        (main if metric in main_metrics else others).append(row)
    state = {"metric": "state", "split": "", "mean": "", **{_header(seed): _ending(seed) for seed in details.seeds}}
    table([state, *main], f"seeds {details.trial.key[:SHORT]}")
    st.caption("Metrics at the last step. Means are over the seeds that finished.")
    if others:
        with st.expander(f"{len(others)} further metrics"):
            table(others, f"further metrics {details.trial.key[:SHORT]}")


def curves(store: Store, details: TrialDetails, task: RecordedTask | None) -> None:
    """Draws a chart for each metric and split that was measured at several steps."""
    points = pd.DataFrame(curves_of(store, details.trial.id, max_points=POINTS), columns=Point._fields)
    curves_by_metric = {
        (str(metric), str(split)): rows
        for (split, metric), rows in points.groupby(["split", "metric"])
        if rows["step"].nunique() > 1
    }
    if not curves_by_metric:
        return
    st.subheader("Learning curves", anchor=False)
    st.caption("A thin line is a seed, dashed where it diverged. The thick line is the mean of those that finished.")
    # The judged metric comes before the loss, and the split `train` before `validation`.
    main = [pair for metric in _main_metrics(task) for pair in curves_by_metric if pair[0] == metric]
    _charts({pair: curves_by_metric[pair] for pair in main}, details)
    if further := {pair: rows for pair, rows in curves_by_metric.items() if pair not in main}:
        with st.expander(f"{len(further)} further curves"):
            _charts(further, details)


def _charts(curves_by_metric: Mapping[tuple[str, str], pd.DataFrame], details: TrialDetails) -> None:
    """Draws a chart for each metric and split, two side by side."""
    columns = st.columns(2)
    for at, ((metric, split), rows) in enumerate(curves_by_metric.items()):
        with columns[at % 2]:
            name = f"{metric} {split} {details.trial.key[:SHORT]}"
            description = f"{metric} on {split} by step, a line a seed"
            chart(seed_chart(rows, f"{metric}, {split}"), name, rows=rows, description=description)


def seed_chart(points: pd.DataFrame, title: str) -> alt.LayerChart | alt.FacetChart:
    """Draws a thin line for each seed, and a thick line for the mean of the seeds that finished."""
    base = alt.Chart(points, height=240).encode(
        x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=6, format="~s")),
        y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=6)),
    )
    states = ["done", "diverged"]
    seeds = base.mark_line(strokeWidth=1.2, opacity=0.55).encode(
        detail="seed:N",
        color=alt.Color("state:N", scale=alt.Scale(domain=states, range=[BETTER, WORSE]), legend=None),
        strokeDash=alt.StrokeDash("state:N", scale=alt.Scale(domain=states, range=[[1, 0], [4, 3]]), legend=None),
        tooltip=["seed:N", "step:Q", alt.Tooltip("value:Q", format=".5g"), "state:N"],
    )
    mean = base.transform_filter(alt.datum.state == "done").mark_line(strokeWidth=3, color=BETTER)
    return alt.layer(seeds, mean.encode(y=alt.Y("mean(value):Q", title=title)))


def configuration(store: Store, details: TrialDetails, home: Holder | None) -> None:
    """Draws the settings of a trial.

    First come the settings that differ from the study's base, then the values that tuning or a search chose, and then
    all settings. `home` is the place of the trial in a study. If it is None, only all settings are drawn.
    """
    st.subheader("Configuration", anchor=False)
    trial = details.trial
    if home:
        base = next(arm for arm in store.arms(home.study_id) if arm.is_base)
        changed = difference(base.config.get(trial.task, {}), trial.config)
        rows = [
            {
                "setting": path,
                f"base ({base.name})" if base.name != "base" else "base": setting(before),
                "this trial": setting(after),
                "set by": "tuning" if _is_tuned(path, home.values) else "the arm",
            }
            for path, (before, after) in changed.items()
        ]
        if rows:
            table(rows, f"differences {trial.key[:SHORT]}")
            st.caption("Where this trial differs from the base as the study's file has it, before tuning.")
        else:
            st.caption("All settings are those of the base.")
        if home.values:
            table(
                [{"tuned or searched": path, "value": setting(value)} for path, value in home.values.items()],
                f"values {trial.key[:SHORT]}",
            )
    with st.expander("Every setting, defaults included"):
        st.json(trial.config)


def holder_table(details: TrialDetails, holders: Sequence[Holder], studies: Mapping[int, Study]) -> None:
    """Draws the studies and arms that share the trial. It was trained once for all of them."""
    st.subheader("Studies that have this trial", anchor=False)
    if not holders:
        st.info("No study has this trial any more.")
        return
    rows = [
        {
            "study": label(studies[holder.study_id]),
            "arm": holder.arm + (" (base)" if holder.is_base and holder.arm != "base" else ""),
            "trial": recorded_trial_name(studies[holder.study_id].spec, holder.arm, details.trial.stage, holder.number),
            "values": ", ".join(f"{path}={setting(value)}" for path, value in holder.values.items()),
        }
        for holder in holders
    ]
    table(rows, "studies with this trial")
    others = dict.fromkeys(holder.study_id for holder in holders if holder.study_id != st.session_state[STUDY])
    with st.container(horizontal=True):
        for study_id in others:
            name = plain(f"Show it in {label(studies[study_id])}")
            if st.button(name, key=f"to study {study_id}", on_click=_choose, args=(study_id,)):
                st.rerun()


def weights(details: TrialDetails) -> None:
    """Draws a table of the files that hold the weights of each seed."""
    st.subheader("Weights", anchor=False)
    files = [(seed, artifact) for seed in details.seeds for artifact in seed.artifacts]
    if not files:
        st.caption("No weights of this trial were kept.")
        return
    folders = {artifact.path.rpartition("/")[0] for _, artifact in files}
    folder = folders.pop() if len(folders) == 1 else ""
    if folder:
        st.markdown(f"In `{folder}`:")
    rows = [
        {
            "seed": str(seed.seed),
            "file": artifact.path.removeprefix(f"{folder}/"),
            "still there": _presence(artifact.path, artifact.bytes),
            "bytes": f"{artifact.bytes:,}",
            "SHA-256": artifact.sha256,
        }
        for seed, artifact in files
    ]
    table(rows, f"weights {details.trial.key[:SHORT]}")


def commands(store: Store, details: TrialDetails, home: Holder, study: Study) -> None:
    """Draws two commands: one exports the trial's arm, and the other runs the study again."""
    st.subheader("Commands", anchor=False)
    database = os.environ.get(DATABASE, "")
    file = ["--db", database] if database and "://" not in database else []
    latest = store.study(study.name, study.profile).id == study.id
    several = len(recorded_tasks(study)) > 1
    export = [
        "deltalab", "export", study.address if latest else str(study.id), "exported", "--arm", home.arm,
        *(["--task", details.trial.task] if several else []), *file,
    ]  # fmt: skip
    st.caption("Export the arm: its best candidate with its best seed, both by validation, for training at scale.")
    st.code(shlex.join(export), language="bash")
    st.caption("Run the study again. It trains nothing that the database already holds.")
    st.code(shlex.join(run_command(study)), language="bash")
    if "://" in database:
        st.caption(f"Both read the database's address from {DATABASE}.")


def run_command(study: Study) -> list[str]:
    """Returns the command that ran the study. If Python code ran the study, returns a command that would run it."""
    words = [without_password(word) for word in study.provenance.get("command") or []]
    if words[1:] and Path(words[0]).name in ("deltalab", "platform", "__main__.py", "cli.py", "app.py"):
        return ["deltalab", *words[1:]]
    return ["deltalab", "study", "run", study.name, *(["--profile", study.profile] if study.profile else [])]


def rule(details: TrialDetails) -> None:
    """Draws the source of the trial's rule as it was when the trial ran."""
    st.subheader("Rule", anchor=False)
    st.markdown(plain(details.rule.name))
    st.caption(f"SHA-256 of the source: {details.rule.hash}")
    with st.expander("Source, as it ran"):
        st.code(details.rule.source, language="python", line_numbers=True)


def _choose(study_id: int) -> None:
    """Makes a study the chosen study of the session."""
    st.session_state[STUDY] = study_id


def _state(details: TrialDetails) -> str:
    """Returns the state of a trial, which is `diverged` if the trial is done but a seed diverged."""
    diverged = any(seed.state == "diverged" for seed in details.seeds)
    return "diverged" if diverged and details.trial.state == "done" else details.trial.state


def _time(at: datetime) -> str:
    """Writes a time to the second, in UTC."""
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _facts(title: str, texts: Mapping[str, str]) -> None:
    """Draws a table of facts: name -> text. Facts with an empty text are left out."""
    st.markdown(f"**{title}**")
    rows = [{"what": plain(name), "value": plain(value)} for name, value in texts.items() if value]
    if rows:
        st.table(rows, border="horizontal", hide_header=True)
    else:
        st.caption("Nothing is recorded.")


def _header(seed: Seed) -> str:
    """Writes the heading of a seed's column."""
    return f"seed {seed.seed}"


def _ending(seed: Seed) -> str:
    """Writes how a seed ended, and the step at which it diverged, if it did."""
    at = "" if seed.diverged_at is None else f" at step {seed.diverged_at:,}"
    return seed.state + at


def _is_done(seed: Seed, split: str, metric: str) -> bool:
    """Returns whether a seed finished and has the metric on the split."""
    return seed.state == "done" and (split, metric) in seed.finals


def _main_metrics(task: RecordedTask | None) -> list[str]:
    """Returns the metric by which the task is judged, if it is known, and the loss."""
    return list(dict.fromkeys([task.metric, "loss"])) if task else ["loss"]


def _metrics(details: TrialDetails, task: RecordedTask | None) -> list[tuple[str, str]]:
    """Returns each (split, metric) that at least one seed has.

    The metric by which the task is judged comes first, and the split on which the stage is judged comes first within
    each metric.
    """
    judged, split = task.metric if task else None, SPLIT[details.trial.stage]
    pairs = {pair for seed in details.seeds for pair in seed.finals}
    return sorted(pairs, key=lambda pair: (pair[1] != judged, pair[1], pair[0] != split, pair[0]))


def _figure(value: float) -> str:
    """Writes a value with four digits, or a large whole number in full.

    Examples:
        >>> _figure(0.123456), _figure(10240.0)
        ('0.1235', '10,240')
    """
    return f"{value:,.0f}" if value.is_integer() and abs(value) >= 1e3 else f"{value:.4g}"


def _is_tuned(path: str, values: Mapping[str, Any]) -> bool:
    """Returns whether a setting, a part of the setting, or the gate or rule that contains it was tuned or searched.

    Examples:
        >>> _is_tuned("rule.d", {"rule.d.head.init": 1}), _is_tuned("rule.d", {"rule": {}})
        (True, True)
        >>> _is_tuned("train.lr", {"rule": {}})
        False
    """
    return any(f"{path}.".startswith(f"{tuned}.") or f"{tuned}.".startswith(f"{path}.") for tuned in values)


def _presence(path: str, size: int) -> str:
    """Writes whether a file still exists, and its size if that is not the recorded `size` in bytes."""
    if "://" in path:
        return NOT_HERE
    try:
        present_size = Path(path).stat().st_size
    except OSError:
        return "no"
    return "yes" if present_size == size else f"yes, but with {present_size:,} bytes"


if __name__ == "__main__":  # Streamlit runs a page as a script.
    show(page)
