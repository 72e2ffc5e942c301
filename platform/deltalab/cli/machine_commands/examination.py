"""Examines this machine: which parts of deltalab work, which do not, and how to mend them."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.ops.backends import OLDEST_GPU, lacks_triton
from deltalab.ops.scan import scan
from deltalab.registry import get_rule, list_rules, list_tasks
from deltalab.store import Store
from deltalab.store.database import address, display_url

COMMANDS = ("deltalab", "platform")
"""The names of the command."""

PACKAGES = ("torch", "ray", "optuna", "sqlalchemy", "streamlit")
EXTRAS = {
    "train": ("torchtitan", "transformers", "accelerate"),
    "eval": ("lm-eval", "transformers", "datasets"),
    "data": ("tokenizers", "pyarrow", "datasets"),
    "postgres": ("psycopg",),
    "mcp": ("mcp",),
    "slurm": ("submitit",),
}
"""The packages that each extra of deltalab brings."""

CUDA_WHEELS = "https://download.pytorch.org/whl/cu130"
RAY_SECONDS = 90
TOLERANCE = 2e-2
"""The largest relative error that a kernel in bf16 may have against the parallel form in fp32."""

RAY = """
import logging, ray
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
print(ray.get(ray.remote(lambda: 6 * 7).remote()))
"""


@dataclass(frozen=True)
class Finding:
    """The state of one part of the installation.

    Attributes:
        part: The name of the part.
        state: "works"; "broken" if studies need it and it does not work; "absent" if only some commands need it.
        found: A text about what was found.
        mend: A text that says how to mend the part; empty if there is nothing to do.
    """

    part: str
    state: Literal["works", "broken", "absent"]
    found: str
    mend: str = ""


def examine(db: str | Path | None = None) -> Iterator[Finding]:
    """Examines every part in turn. Starting Ray takes some seconds.

    Args:
        db: The database to look at; None for ./deltalab.db.
    """
    folder = Path(__file__).parents[2]
    yield Finding("deltalab", "works", f"{version('deltalab')} in {folder}, Python {sys.version.split()[0]}")
    yield from map(_command, COMMANDS)
    yield from map(_package, PACKAGES)
    yield _gpu()
    yield _kernels()
    yield Finding("plugins", "works", f"{len(list_rules())} rules, {len(list_tasks())} tasks")
    yield _ray()
    yield _database(db)
    yield _space()
    yield from (_extra(name, packages) for name, packages in EXTRAS.items())


def kernel_error(device: str) -> float:
    """Returns the largest relative error, by norm, of a kernel in bf16 against the parallel form in fp32.

    The outputs and the gradients are compared.
    """
    rule, generator = get_rule("gated_deltanet"), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 128, 2, 64, generator=generator) for _ in range(3))
    q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    g, beta = -torch.rand(1, 128, 2, generator=generator), torch.rand(1, 128, 2, generator=generator)
    gates = {"g": g.to(device), "beta": beta.to(device)}

    def run(backend: Literal["triton", "chunked"], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
        o, _ = scan(rule, leaves[0], leaves[1], leaves[2], gates, backend=backend)
        return [o.detach(), *torch.autograd.grad(o.float().square().sum(), leaves)]

    pairs = zip(run("triton", torch.bfloat16), run("chunked", torch.float32), strict=True)
    return max(float((got.float() - want).norm() / want.norm()) for got, want in pairs)


def _command(name: str) -> Finding:
    """Says which program a shell runs by a name of the command. Another vendor has a `platform`, too."""
    part, path = f"command {name}", shutil.which(name)
    if path is None:
        return Finding(part, "absent", "not on the PATH", f"{sys.executable} -m deltalab is the same")
    with open(path, "rb") as program:
        text = program.read(4096)
    if b"deltalab.cli.app" not in text:
        other = next(other for other in COMMANDS if other != name)
        return Finding(part, "absent", f"{path} is another program", f"type {other} in its place")
    beside = Path(path).resolve().parent.samefile(Path(sys.executable).parent)
    if beside or os.fsencode(sys.executable) in text:
        return Finding(part, "works", path)
    mend = f"{sys.executable} -m deltalab runs this one"
    return Finding(part, "absent", f"{path} is of another installation of deltalab", mend)


def _package(name: str) -> Finding:
    """Looks for a package that studies need."""
    if number := _version(name):
        return Finding(name, "works", number)
    requirement = next((line for line in requires("deltalab") or () if line.startswith(name)), name)
    return Finding(name, "broken", "not installed", f"pip install '{requirement}'")


def _version(package: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu() -> Finding:
    """Looks for GPUs."""
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return Finding("gpu", "works", ", ".join(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus))
    driver = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if driver is None:
        return Finding("gpu", "absent", "none: studies train on the CPU")
    if torch.version.cuda is None:
        mend = f"pip install --force-reinstall torch --index-url {CUDA_WHEELS}"
        return Finding("gpu", "broken", f"{driver}; this torch is built for CPUs", mend)
    text = f"{driver}; torch, built for CUDA {torch.version.cuda}, does not see it"
    return Finding("gpu", "broken", text, "take a newer driver or a torch for an older CUDA; see CUDA_VISIBLE_DEVICES")


def _output(*command: str) -> str | None:
    """Returns what a command prints, or None if it is missing or fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(process.stdout.split("\n")[:-1])


def _kernels() -> Finding:
    """Tries to run a kernel on the GPU."""
    if not torch.cuda.is_available():
        return Finding("kernels", "absent", "need a GPU; the parallel form in PyTorch runs in their place")
    missing = lacks_triton("cuda")
    if missing and torch.cuda.get_device_capability() < OLDEST_GPU:
        return Finding(
            "kernels", "absent", f"need {missing}; the parallel form in PyTorch runs in their place, in fp32"
        )
    if missing:
        return Finding("kernels", "broken", f"need {missing}", "pip install --upgrade triton")
    start = time.monotonic()
    try:
        error = kernel_error("cuda")
    except Exception as failure:  # whatever a compiler or a driver raises
        return Finding("kernels", "broken", f"{type(failure).__name__}: {str(failure).splitlines()[0]}")
    text = f"Gated DeltaNet: error {error:.1e} beside the parallel form, after {time.monotonic() - start:.0f} s"
    if error < TOLERANCE:
        return Finding("kernels", "works", f"{text}; Triton {_version('triton')}")
    return Finding("kernels", "broken", text, "name another ptxas in TRITON_PTXAS_PATH, and report GPU and Triton")


def _ray() -> Finding:
    """Tries to start Ray."""
    start = time.monotonic()
    mend = "deltalab study run --executor inline runs studies without Ray"
    try:
        command = [sys.executable, "-P", "-c", RAY]
        # Ray's workers import from the folder in which Ray starts.
        process = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=RAY_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding("ray starts", "broken", f"not within {RAY_SECONDS} s", mend)
    if process.returncode == 0:
        return Finding("ray starts", "works", f"in {time.monotonic() - start:.0f} s, on {os.cpu_count()} CPUs")
    reason = (process.stderr.strip().splitlines() or [f"exit {process.returncode}"])[-1]
    return Finding("ray starts", "broken", reason[:200], mend)


def _database(db: str | Path | None) -> Finding:
    """Tries to open the database."""
    try:
        where = display_url(address(db))
        if not Store.exists(db):
            return Finding("database", "absent", f"{where}: made by the first study", "deltalab study run quickstart")
        with Store.open(db, create=False) as store:
            return Finding("database", "works", f"{where}: {len(store.studies())} studies")
    except InputError as error:
        return Finding("database", "broken", str(error))


def _space() -> Finding:
    """Looks at memory and disk."""
    memory, free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), shutil.disk_usage(Path.cwd()).free
    text = f"{memory / 2**30:.0f} GiB of memory, {free / 2**30:.0f} GiB free on this folder's disk"
    if free < 2**30:
        return Finding("space", "broken", text, "free some, or give --storage a folder on another disk")
    return Finding("space", "works", text)


def _extra(name: str, packages: tuple[str, ...]) -> Finding:
    """Looks for the packages of an extra."""
    versions = {package: _version(package) for package in packages}
    if missing := [package for package, number in versions.items() if number is None]:
        return Finding(f"[{name}]", "absent", f"without {', '.join(missing)}", f"pip install 'deltalab[{name}]'")
    return Finding(f"[{name}]", "works", ", ".join(f"{package} {number}" for package, number in versions.items()))
