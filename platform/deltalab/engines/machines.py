"""The engines of this machine, the machines of a training, and the command that starts an engine on them."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch

from deltalab.engines.torchtitan import PACKAGE
from deltalab.errors import InputError, NotInstalled

ENGINES = {"torchtitan": ("torchtitan",), "accelerate": ("accelerate", "transformers")}
"""The engines, each with the packages that it needs."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a training.

    Attributes:
        count: The number of machines.
        rank: The number of this machine, from 0.
        address: HOST:PORT of machine 0; None if there is one machine.
    """

    count: int = 1
    rank: int = 0
    address: str | None = None


ONE_MACHINE = Nodes()


def check_nodes(nodes: Nodes) -> None:
    """Raises `InputError` for machines that would wait for each other without end."""
    if not 0 <= nodes.rank < nodes.count:
        raise InputError(f"--node-rank {nodes.rank}: must be in 0..{nodes.count - 1}, as --nodes is {nodes.count}")
    if nodes.address is None:
        if nodes.count > 1:
            raise InputError("--nodes: give --address HOST:PORT of the first machine, the same on every machine")
        return
    host, port = _host_and_port(nodes.address)
    # A host may be a name, an IPv4 address, or an IPv6 address in brackets.
    if not re.fullmatch(r"[\w.-]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\w+)?", host) or not re.fullmatch(r"\d{1,5}", port):
        raise InputError(f"--address {nodes.address}: must be HOST:PORT of the first machine, such as host0:29500")
    if not 0 < int(port) < 2**16:
        raise InputError(f"--address {nodes.address}: the port must be in 1..65535")


def _host_and_port(address: str) -> tuple[str, str]:
    """Splits HOST:PORT or [IPV6]:PORT; a part that is missing is empty."""
    if address.startswith("["):
        host, _, port = address[1:].partition("]:")
    else:
        host, _, port = address.partition(":")
    return host, port


def version_of(engine: str) -> str:
    """Returns the version of the engine. Raises `InputError` if the engine is not installed or does not fit torch."""
    for name in ENGINES[engine]:
        if importlib.util.find_spec(name) is None:
            raise NotInstalled(f"engine {engine} is not installed", "'deltalab[train]'")
    version = importlib.metadata.version(ENGINES[engine][0])
    if engine == "torchtitan" and not version.startswith("0.2."):
        torch_version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        if torch_version <= (2, 11):
            raise InputError(
                f"torchtitan {version} needs torch above 2.11, not {torch.__version__}; for older torch, install "
                "torchtitan 0.2.2"
            )
    return version


def versions(engine: str) -> dict[str, str]:
    """Returns the versions that `run.json` records."""
    packages = {name: importlib.metadata.version(name) for name in ("deltalab", "torch", *ENGINES[engine])}
    return {"python": platform.python_version(), **packages}


def hardware(gpus: int) -> dict[str, Any]:
    """Returns the hardware that `run.json` records."""
    names = [torch.cuda.get_device_name(index) for index in range(gpus)]
    return {"host": platform.node(), "gpus": names, "cpus": os.cpu_count()}


def command(engine: str, version: str, nodes: Nodes, *, gpus: int, processes: int) -> list[str]:
    """Returns the command that starts this version of the engine."""
    here = gpus or processes
    host, port = _host_and_port(nodes.address or "")
    if engine == "accelerate" and gpus:
        multi_gpu = ["--multi_gpu"] if here * nodes.count > 1 else []
        place = ["--num_machines", str(nodes.count), "--machine_rank", str(nodes.rank)]
        place += ["--main_process_ip", host, "--main_process_port", port] if nodes.count > 1 else []
        options = [
            "--num_processes",
            str(here * nodes.count),
            *place,
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
        ]
        launcher = [sys.executable, "-m", "accelerate.commands.launch", *multi_gpu, *options]
        return [*launcher, "-m", f"{PACKAGE}.with_trainer"]
    place = [
        "--nnodes",
        str(nodes.count),
        "--node-rank",
        str(nodes.rank),
        "--master-addr",
        host,
        "--master-port",
        port,
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(here)]
    torchrun += place if nodes.count > 1 else ["--standalone"]
    if engine == "accelerate":
        return [*torchrun, "-m", f"{PACKAGE}.with_trainer"]  # on CPUs, `accelerate launch` asks for MPI
    config = (
        ["--job.custom_config_module", f"{PACKAGE}.titan_02"]
        if version.startswith("0.2.")
        else ["--module", f"{PACKAGE}.titan_03", "--config", "pretrain"]
    )
    return [*torchrun, "-m", "torchtitan.train" if gpus else f"{PACKAGE}.on_cpu", *config]
