"""Everything about one trial. The URL names it, `?study=...&trial=KEY`; the beginning of its key is enough."""

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store, Study
from deltalab.store.database import without_password
from deltalab.store.trials import Holder, Point, Recorded, Seed, curves_of, recorded
from deltalab.study.answers.answer import SPLIT
from deltalab.study.planning.config_difference import difference
from deltalab.study.planning.tuning_candidates import recorded_as
from deltalab_dashboard.colors import BETTER, WORSE
from deltalab_dashboard.downloads import chart, table
from deltalab_dashboard.frame import DATABASE, LISTED, STUDY, show
from deltalab_dashboard.text import label, plain, setting

KEY = "trial"  # of the trial's key, or its beginning, in the URL and in the session
SHORT = 12  # characters of a key in the name of a file
STATES = {"done": "green", "diverged": "orange", "failed": "red", "infeasible": "gray"}
POINTS = 300  # per curve; a screen shows no more
NOT_HERE = "remote, not looked for"


def page(store: Store, study: Study) -> None:
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
        found = recorded(store, key)
    except InputError as error:
        st.error(plain(str(error)))
        return
    studies = {one.id: one for one in store.studies()}
    holders = [holder for holder in found.holders if holder.study_id in studies]
    own = [holder for holder in holders if holder.study_id == study.id]
    if holders and not own:
        others = ", ".join(dict.fromkeys(label(studies[holder.study_id]) for holder in holders))
        st.warning(plain(f"{study.name} does not have this trial. It belongs to: {others}."))
    home = next(iter(own or holders), None)
    of = studies[home.study_id] if home else None
    heading(found, home, of)
    failure(found)
    facts(found, of)
    finals(found, of)
    curves(store, found, of)
    configuration(store, found, home)
    held(found, holders, studies)
    weights(found)
    if home and of:
        commands(store, found, home, of)
    rule(found)


def heading(found: Recorded, home: Holder | None, study: Study | None) -> None:
    trial = found.trial
    state = _state(found)
    name = recorded_as(study.spec, home.arm, trial.stage, home.number) if home and study else trial.stage
    st.subheader(plain(f"{name} on {trial.task}"), anchor=False)
    st.markdown(f":{STATES[state]}-badge[{state}] &nbsp; `{trial.key}`")


def failure(found: Recorded) -> None:
    """Why the trial has no result: the traceback, or the reason for which its values make no model."""
    error = found.trial.error
    if error is None:
        return
    st.error(plain(error.strip().rpartition("\n")[2]))
    if "\n" in error.strip():
        st.code(error, language=None)


def facts(found: Recorded, study: Study | None) -> None:
    """Times and sizes on the left, the hardware on the right."""
    trial = found.trial
    speed = trial.tokens_per_second
    about = study.provenance["tasks"].get(trial.task, {}) if study else {}
    now = about.get("version")
    version = str(trial.task_version)
    if now is not None and now != trial.task_version:
        version += f"; the study's is {now}"
    told = {
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
        _facts("Times and sizes", told)
    with right:
        _facts("Hardware", {name: setting(value) for name, value in trial.hardware.items()})
    st.caption("Seconds are the trial's share of the time of all runs that were trained as one.")


def finals(found: Recorded, study: Study | None) -> None:
    """Each seed: how it ended, and every metric at its last step."""
    st.subheader("Seeds", anchor=False)
    if not found.seeds:
        st.info("No seed of this trial ran.")
        return
    main: list[dict[str, str]] = []
    others: list[dict[str, str]] = []
    score = _score(found, study)
    for split, metric in _measured(found, study):
        done = [seed.finals[split, metric][1] for seed in found.seeds if _is_done(seed, split, metric)]
        values = {
            _of(seed): _figure(seed.finals[split, metric][1]) if (split, metric) in seed.finals else ""
            for seed in found.seeds
        }
        mean = _figure(math.fsum(done) / len(done)) if done else ""
        row = {"metric": metric, "split": split, "mean": mean, **values}
        (main if metric in (score[1], "loss") else others).append(row)
    state = {"metric": "state", "split": "", "mean": "", **{_of(seed): _ended(seed) for seed in found.seeds}}
    table([state, *main], f"seeds {found.trial.key[:SHORT]}")
    st.caption("Metrics at the last step. Means are over the seeds that finished.")
    if others:
        with st.expander(f"{len(others)} further metrics"):
            table(others, f"further metrics {found.trial.key[:SHORT]}")


def curves(store: Store, found: Recorded, study: Study | None) -> None:
    """A chart for each metric and split that was measured at several steps."""
    points = curves_of(store, found.trial.id, max_points=POINTS)
    measured = pd.DataFrame(points, columns=Point._fields)
    offered = {
        (str(split), str(metric)): rows
        for (split, metric), rows in measured.groupby(["split", "metric"])
        if rows["step"].nunique() > 1
    }
    if not offered:
        return
    st.subheader("Learning curves", anchor=False)
    st.caption("A thin line is a seed, dashed where it diverged. The thick line is the mean of those that finished.")
    score = _score(found, study)
    first = [pair for pair in offered if pair[1] in (score[1], "loss")]
    # The metric of the score comes first, and training before validation.
    _charts({pair: offered[pair] for pair in sorted(first, key=lambda pair: (pair[1] != score[1], pair))}, found)
    if further := {pair: rows for pair, rows in offered.items() if pair not in first}:
        with st.expander(f"{len(further)} further curves"):
            _charts(further, found)


def _charts(offered: Mapping[tuple[str, str], pd.DataFrame], found: Recorded) -> None:
    columns = st.columns(2)
    for at, ((split, metric), rows) in enumerate(offered.items()):
        with columns[at % 2]:
            name = f"{metric} {split} {found.trial.key[:SHORT]}"
            chart(
                drawn(rows, f"{metric}, {split}"), name, rows=rows, about=f"{metric} on {split} by step, a line a seed"
            )


def drawn(points: pd.DataFrame, title: str) -> alt.LayerChart | alt.FacetChart:
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


def configuration(store: Store, found: Recorded, home: Holder | None) -> None:
    """What differs from the base of the study, what tuning chose, and every setting."""
    st.subheader("Configuration", anchor=False)
    trial = found.trial
    if home:
        base = next(arm for arm in store.arms(home.study_id) if arm.is_base)
        changed = difference(base.config.get(trial.task, {}), trial.config)
        rows = [
            {
                "setting": path,
                f"base ({base.name})" if base.name != "base" else "base": setting(before),
                "this trial": setting(after),
                "set by": "tuning" if _tuned(path, home.values) else "the arm",
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


def held(found: Recorded, holders: Sequence[Holder], studies: Mapping[int, Study]) -> None:
    """The studies and arms that share this trial. It was trained once for all of them."""
    st.subheader("Studies that have this trial", anchor=False)
    if not holders:
        st.info("No study has this trial any more.")
        return
    chosen = st.session_state[STUDY]
    rows = [
        {
            "study": label(studies[holder.study_id]),
            "arm": holder.arm + (" (base)" if holder.is_base and holder.arm != "base" else ""),
            "trial": recorded_as(studies[holder.study_id].spec, holder.arm, found.trial.stage, holder.number),
            "values": ", ".join(f"{path}={setting(value)}" for path, value in holder.values.items()),
        }
        for holder in holders
    ]
    table(rows, "studies with this trial")
    with st.container(horizontal=True):
        for study_id in dict.fromkeys(holder.study_id for holder in holders if holder.study_id != chosen):
            name = plain(f"Show it in {label(studies[study_id])}")
            if st.button(name, key=f"to study {study_id}", on_click=_choose, args=(study_id,)):
                st.rerun()


def weights(found: Recorded) -> None:
    st.subheader("Weights", anchor=False)
    files = [(seed, artifact) for seed in found.seeds for artifact in seed.artifacts]
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
            "still there": _there(artifact.path, artifact.bytes),
            "bytes": f"{artifact.bytes:,}",
            "SHA-256": artifact.sha256,
        }
        for seed, artifact in files
    ]
    table(rows, f"weights {found.trial.key[:SHORT]}")


def commands(store: Store, found: Recorded, home: Holder, study: Study) -> None:
    st.subheader("Commands", anchor=False)
    database = os.environ.get(DATABASE, "")
    file = ["--db", database] if database and "://" not in database else []
    latest = store.study(study.name, study.profile).id == study.id
    several = len(study.provenance["tasks"]) > 1
    export = [
        "platform", "export", study.address if latest else str(study.id), "exported", "--arm", home.arm,
        *(["--task", found.trial.task] if several else []), *file,
    ]  # fmt: skip
    st.caption("Export the arm: its best candidate with its best seed, both by validation, for training at scale.")
    st.code(shlex.join(export), language="bash")
    st.caption("Run the study again. It trains nothing that the database already holds.")
    st.code(shlex.join(again(study)), language="bash")
    if "://" in database:
        st.caption(f"Both read the database's address from {DATABASE}.")


def again(study: Study) -> list[str]:
    """The command that ran the study, or one that runs it where it was started from Python."""
    words = [without_password(word) for word in study.provenance.get("command") or []]
    if words[1:] and Path(words[0]).name in ("platform", "__main__.py", "cli.py", "app.py"):
        return ["platform", *words[1:]]
    return ["platform", "study", "run", study.name, *(["--profile", study.profile] if study.profile else [])]


def rule(found: Recorded) -> None:
    st.subheader("Rule", anchor=False)
    st.markdown(plain(found.rule.name))
    st.caption(f"SHA-256 of the source: {found.rule.hash}")
    with st.expander("Source, as it ran"):
        st.code(found.rule.source, language="python", line_numbers=True)


def _choose(study_id: int) -> None:
    st.session_state[STUDY] = study_id


def _state(found: Recorded) -> str:
    diverged = any(seed.state == "diverged" for seed in found.seeds)
    return "diverged" if diverged and found.trial.state == "done" else found.trial.state


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _facts(title: str, told: Mapping[str, str]) -> None:
    st.markdown(f"**{title}**")
    rows = [{"what": plain(name), "value": plain(value)} for name, value in told.items() if value]
    if rows:
        st.table(rows, border="horizontal", hide_header=True)
    else:
        st.caption("Nothing is recorded.")


def _of(seed: Seed) -> str:
    return f"seed {seed.seed}"


def _ended(seed: Seed) -> str:
    at = "" if seed.diverged_at is None else f" at step {seed.diverged_at:,}"
    return seed.state + at


def _is_done(seed: Seed, split: str, metric: str) -> bool:
    return seed.state == "done" and (split, metric) in seed.finals


def _score(found: Recorded, study: Study | None) -> tuple[str, str]:
    """The split and the metric that are judged; "" for a metric that is not known."""
    about = study.provenance["tasks"].get(found.trial.task, {}) if study else {}
    return SPLIT[found.trial.stage], about.get("metric", "")


def _measured(found: Recorded, study: Study | None) -> list[tuple[str, str]]:
    """Each split and metric, those that are judged first."""
    split, metric = _score(found, study)
    pairs = {pair for seed in found.seeds for pair in seed.finals}
    return sorted(pairs, key=lambda pair: (pair[1] != metric, pair[1], pair[0] != split, pair[0]))


def _figure(value: float) -> str:
    """
    >>> _figure(0.123456), _figure(10240.0)
    ('0.1235', '10,240')
    """
    return f"{value:,.0f}" if value.is_integer() and abs(value) >= 1e3 else f"{value:.4g}"


def _tuned(path: str, values: Mapping[str, Any]) -> bool:
    """Whether a setting, or the gate or rule around it, was tuned or searched.

    >>> _tuned("rule.d", {"rule.d.head.init": 1}), _tuned("rule.d", {"rule": {}}), _tuned("train.lr", {"rule": {}})
    (True, True, False)
    """
    return any(f"{path}.".startswith(f"{given}.") or f"{given}.".startswith(f"{path}.") for given in values)


def _there(path: str, size: int) -> str:
    if "://" in path:
        return NOT_HERE
    try:
        found = Path(path).stat().st_size
    except OSError:
        return "no"
    return "yes" if found == size else f"yes, but with {found:,} bytes"


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
