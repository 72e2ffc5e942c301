"""Draws the progress of a running study: ended trials per stage, time left, stacks that train, and devices."""

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store, Study
from deltalab.store.studies.driver_status import StudyProgress, duration, study_progress
from deltalab_dashboard.frame import REFRESH_SECONDS
from deltalab_dashboard.text import plain

STACKS = 16
"""The most stacks that the table of running stacks lists."""


def draw_progress(store: Store, study: Study) -> None:
    """Draws the progress of a running study, and draws it anew every `REFRESH_SECONDS`.

    If the study does not run, nothing is drawn.
    """
    if study.state == "running":
        st.fragment(_now, run_every=REFRESH_SECONDS)(store, study.id)


def _now(store: Store, study_id: int) -> None:
    """Draws the present progress of a study."""
    try:
        progress = study_progress(store, [study_id]).get(study_id)
    except InputError as error:
        st.error(plain(str(error)))
        return
    if progress is None:  # The study has just ended. The page notices that by itself, and draws itself again.
        return
    with st.container(border=True):
        st.markdown(f"**{plain(progress.line)}**")
        for stage, (ended, total) in progress.stages.items():
            st.progress(ended / total if total else 1.0, text=f"{stage}: {ended} of {total} trials")
        if progress.drivers:
            st.caption(plain(_places(progress)))
        _stacks(progress)
        _devices(progress)


def _places(progress: StudyProgress) -> str:
    """Writes how many of the drivers' places have a stack now, and for what share of the time places had a stack."""
    statuses = progress.drivers
    taken, places = sum(len(status.stacks) for status in statuses), sum(status.places for status in statuses)
    offered = sum(status.places * status.seconds for status in statuses)
    used = sum(status.busy * status.places * status.seconds for status in statuses)
    drivers = f" of {len(statuses)} drivers" if len(statuses) > 1 else ""
    since = duration(max(status.seconds for status in statuses))
    share = f"{used / offered:.0%} of the time since the start, {since} ago"
    return f"{taken} of {places} places{drivers} have a stack, and had one {share}."


def _stacks(progress: StudyProgress) -> None:
    """Draws a table of the stacks that train."""
    stacks = [stack for status in progress.drivers for stack in status.stacks]
    if not stacks:
        return
    st.table(
        [
            {
                "running": plain(stack.name),
                "stage": stack.stage,
                "at": stack.reached,
                "for": duration(stack.seconds),
                "on": plain(stack.device or "not known yet"),
            }
            for stack in stacks[:STACKS]
        ],
        border="horizontal",
    )
    if len(stacks) > STACKS:
        st.caption(f"and {len(stacks) - STACKS} more")


def _devices(progress: StudyProgress) -> None:
    """Draws a table of the devices on which stacks have trained."""
    devices = [device for status in progress.drivers for device in status.devices]
    if devices:
        st.table(
            [
                {"device": plain(device.name), "stacks now": str(device.stacks), "busy": f"{device.busy:.0%}"}
                for device in devices
            ],
            border="horizontal",
        )
