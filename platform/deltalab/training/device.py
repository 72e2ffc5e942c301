"""The device that a training runs on: its choice, its name, its clock and its memory."""

import contextlib
import ctypes
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from deltalab.errors import InputError
from deltalab.ops.backends import OLDEST_GPU


def device_type(setting: str) -> str:
    """Returns `cpu` or `cuda` for `TrainSpec.device`.

    Raises:
        InputError: `setting` is `cuda`, and torch finds no GPU.
    """
    if setting == "cuda" and not torch.cuda.is_available():
        raise InputError("train.device is cuda, and this machine has no GPU that torch can use")
    return ("cuda" if torch.cuda.is_available() else "cpu") if setting == "auto" else setting


def multiplies_bf16(device: torch.device) -> bool:
    """Returns whether a device multiplies matrices in bf16 faster than in fp32. A T4 does so by way of fp32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= OLDEST_GPU


def hardware(device: torch.device) -> dict[str, str]:
    """Returns the hardware and software that figures are measured on, by name.

    The entry `gpu` is the UUID of the GPU, as `nvidia-smi -L` prints it.
    """
    machine = {"torch": torch.__version__, "host": os.uname().nodename}
    if device.type != "cuda":
        return {"device": f"CPU, {torch.get_num_threads()} thread(s)", **machine}
    properties = torch.cuda.get_device_properties(device)
    return {"device": properties.name, "gpu": f"GPU-{properties.uuid}", **machine}


def device_name(device: torch.device) -> str:
    """Returns the names of a device and its machine, for people.

    The first digits of a GPU's UUID tell it apart from GPUs of the same kind.
    """
    host = f"on {os.uname().nodename}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name} {str(properties.uuid)[:8]} {host}"
    with contextlib.suppress(OSError):  # only Linux has this file
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} {host}"
    return f"CPU {host}"


def moment(device: torch.device) -> float | torch.cuda.Event:
    """Marks the time at which a device has done all its work so far.

    The time of a CPU is that of this thread, which stands still while another process has the core. It takes part in
    all that the other threads of a training compute.
    """
    if device.type != "cuda":
        return time.thread_time()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Returns the seconds from one `moment` of a device to another, both of which the device has reached."""
    seconds: float = begin.elapsed_time(end) / 1e3 if isinstance(begin, torch.cuda.Event) else end - begin
    return seconds


@cache
def keep_freed_memory() -> None:
    """Tells glibc to reuse the freed memory of this process and not to return it to the system.

    A training allocates the same large tensors at every step. If their memory is returned and allocated again, the
    pages fault: 500 to 1300 faults, and 10 to 25% of a step's time, in a stack of 5 (Comba, B T d = 2^15). Call this
    function in a process that is there to train, such as the worker of a study. With another C library than glibc, the
    function does nothing.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)
