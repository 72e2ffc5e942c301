"""Runs `torchtitan.train` on CPUs, with gloo between processes: torchtitan itself asks for an accelerator."""

import os
import resource
import runpy
import types
from typing import Any

import torch
import torch.distributed as dist


class Cpu(types.ModuleType):
    """What torchtitan asks of the module of a kind of device."""

    set_device = synchronize = reset_peak_memory_stats = empty_cache = staticmethod(lambda *_: None)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda *_: "CPU")
    get_device_properties = staticmethod(
        lambda *_: types.SimpleNamespace(total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    )

    @staticmethod
    def memory_stats(*_: Any) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}


def main() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: Cpu("cpu")  # type: ignore[assignment]
    os.environ["LOCAL_RANK"] = "0"  # there is one device "cpu:0"
    barrier = dist.barrier

    def without_devices(*given: Any, device_ids: Any = None, **more: Any) -> Any:
        return barrier(*given, **more)  # gloo takes none

    dist.barrier = without_devices
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
