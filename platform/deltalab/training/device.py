"""The device that a training runs on: which one, its name, its clock, and its memory."""

import contextlib
import ctypes
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from deltalab.errors import InputError


def chosen(wanted: str) -> str:
    """`cpu` or `cuda` for `TrainSpec.device`. Raises `InputError` for `cuda` where torch finds no GPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("train.device is cuda, and this machine has no GPU that torch can use")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def hardware(device: torch.device) -> dict[str, str]:
    """The hardware and software that figures are measured on; gpu: the GPU's UUID, as `nvidia-smi -L` prints it."""
    machine = {"torch": torch.__version__, "host": os.uname().nodename}
    if device.type != "cuda":
        return {"device": f"CPU, {torch.get_num_threads()} thread(s)", **machine}
    found = torch.cuda.get_device_properties(device)
    return {"device": found.name, "gpu": f"GPU-{found.uuid}", **machine}


def named(device: torch.device) -> str:
    """A device's name and its machine's, for people; the first digits of a GPU's UUID tell it from its like."""
    on = f"on {os.uname().nodename}"
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name} {str(found.uuid)[:8]} {on}"
    with contextlib.suppress(OSError):  # Linux has this file
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} {on}"
    return f"CPU {on}"


def moment(device: torch.device) -> float | torch.cuda.Event:
    """Marks the time at which the device has done all its work so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds from one `moment` of a device to another, which the device has reached."""
    seconds: float = begin.elapsed_time(end) / 1e3 if isinstance(begin, torch.cuda.Event) else end - begin
    return seconds


@cache
def keep_freed_memory() -> None:
    """Tells glibc, for the whole process, to reuse freed memory and not to return it to the system.

    A training allocates the same large tensors at every step. Returned and allocated again, their pages fault: 500 to
    1300 faults and 10 to 25% of a step's time in a stack of 5 (Comba, B T d = 2^15). Call it in a process that is there
    to train, as the workers of a study do. Does nothing with another C library than glibc.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)
