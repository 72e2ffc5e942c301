"""How far a running study is: trials by stage, the time it will take, the stacks that train, and the devices."""

import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store, Study
from deltalab.store.progress import Progress, duration, progress
from deltalab_dashboard.frame import REFRESH_SECONDS
from deltalab_dashboard.text import plain

STACKS = 16  # that the page lists, of those that run


def shown(store: Store, study: Study) -> None:
    """Draws how far a running study is, again every `REFRESH_SECONDS`; nothing of a study that does not run."""
    if study.state == "running":
        st.fragment(_now, run_every=REFRESH_SECONDS)(store, study.id)


def _now(store: Store, study_id: int) -> None:
    try:
        found = progress(store, [study_id]).get(study_id)
    except InputError as error:
        st.error(plain(str(error)))
        return
    if found is None:  # the study has just ended: the page notices
        return
    with st.container(border=True):
        st.markdown(f"**{plain(found.line)}**")
        for stage, (ended, total) in found.stages.items():
            st.progress(ended / total if total else 1.0, text=f"{stage}: {ended} of {total} trials")
        if found.drivers:
            st.caption(plain(_places(found)))
        _stacks(found)
        _devices(found)


def _places(found: Progress) -> str:
    """How many places have a stack, and what share of their time they had one."""
    taken, places = sum(len(one.stacks) for one in found.drivers), sum(one.places for one in found.drivers)
    offered = sum(one.places * one.seconds for one in found.drivers)
    used = sum(one.busy * one.places * one.seconds for one in found.drivers)
    drivers = f" of {len(found.drivers)} drivers" if len(found.drivers) > 1 else ""
    since = duration(max(one.seconds for one in found.drivers))
    share = f"{used / offered:.0%} of the time since the start, {since} ago"
    return f"{taken} of {places} places{drivers} have a stack, and had one {share}."


def _stacks(found: Progress) -> None:
    stacks = [stack for one in found.drivers for stack in one.stacks]
    if not stacks:
        return
    st.table(
        [
            {
                "running": plain(stack.name),
                "stage": stack.stage,
                "step": f"{stack.step:,} of {stack.steps:,}",
                "for": duration(stack.seconds),
                "on": plain(stack.device or "not known yet"),
            }
            for stack in stacks[:STACKS]
        ],
        border="horizontal",
    )
    if len(stacks) > STACKS:
        st.caption(f"and {len(stacks) - STACKS} more")


def _devices(found: Progress) -> None:
    devices = [device for one in found.drivers for device in one.devices]
    if devices:
        st.table(
            [
                {"device": plain(device.name), "stacks now": str(device.stacks), "busy": f"{device.busy:.0%}"}
                for device in devices
            ],
            border="horizontal",
        )
