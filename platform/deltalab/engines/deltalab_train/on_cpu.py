"""Runs `torchtitan.train` on CPUs, with gloo between processes, although torchtitan asks for an accelerator."""

import os
import resource
import runpy
import types
from typing import Any

import torch
import torch.distributed as dist


class Cpu(types.ModuleType):
    """A stand-in for a module such as `torch.cuda`, with the functions that torchtitan calls."""

    set_device = synchronize = reset_peak_memory_stats = empty_cache = staticmethod(lambda *_: None)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda *_: "CPU")
    get_device_properties = staticmethod(
        lambda *_: types.SimpleNamespace(total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    )

    @staticmethod
    def memory_stats(*_: Any) -> dict[str, int]:
        """Returns the peak of the process's memory in bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}


def main() -> None:
    """Makes torchtitan take the CPU as its device, and runs it."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: Cpu("cpu")  # type: ignore[assignment]
    os.environ["LOCAL_RANK"] = "0"  # there is one device "cpu:0"
    barrier = dist.barrier

    def without_devices(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return barrier(*args, **kwargs)  # gloo takes no device_ids

    dist.barrier = without_devices
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
