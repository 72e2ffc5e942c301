"""Measures the time of the host to launch a forward and a backward of `scan`, a layer, a block, a model, and FLA's op.

    python benchmarks/host.py --out host.json                 # the GPU is idle before each call, and is not waited for
    python benchmarks/host.py --only comba --profile          # the functions that take the time

A figure is the median of --repeats calls. Each call is timed from its start, after a synchronization, to its return.
This is the time of Python and PyTorch without that of the device, unless a call launches more kernels than the queue
holds (about a thousand). `model` launches that many. `model, short` runs the same model on 1 x 256 tokens, where the
device keeps up.

Without a GPU, Triton compiles for an H100, and a stub launches nothing. The figures are then those of Python alone, on
small shapes, as the output says. They show which parts take time, and cannot be compared with those of a GPU.
"""

import argparse
import cProfile
import importlib
import json
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deltalab
from deltalab.models.block import Block
from deltalab.models.layer import RuleLayer, initialize
from deltalab.models.model import Model
from deltalab.models.spec import ModelSpec
from deltalab.ops import backends

RULES = ("comba", "gated_deltanet")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SIZES = (8, 2048, 8, 128) if ON_GPU else (1, 128, 2, 64)
LAYERS, VOCABULARY = (24, 32000) if ON_GPU else (2, 64)

Call = Callable[[], Any]


def stub() -> None:
    """Makes Triton compile for an H100 and launch nothing, and makes the platform take its kernels on the CPU."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import driver

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    class Driver:
        launcher_cls = nvidia.CudaLauncher
        utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132},
            load_binary=lambda *args: (object(), 1, 64, 0, 1024),
            launch=nothing,
            build_signature_metadata=nothing,
            fill_tma_descriptor=nothing,
            fill_tma_descriptor_tiled=nothing,
        )

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    nvidia.PyKernelArg = nothing
    nvidia.compile_module_from_src = lambda *args, **kwargs: SimpleNamespace(launch=lambda *args: None)
    nvidia.library_dirs = nothing
    driver.set_active(Driver())
    backends._unasked = lambda device: True  # type: ignore[assignment]
    backends.lacks_triton = lambda device: None  # type: ignore[assignment]
    backends._loaded = importlib.import_module(backends.ENTRIES).KERNELS


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def host_ms(run: Call, repeats: int) -> dict[str, float]:
    """Measures the median and the least time of a call in ms."""
    for _ in range(10):
        run()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    synchronize()
    return {"median": 1e3 * statistics.median(times), "least": 1e3 * min(times)}


def pair(function: Callable[..., Any], leaves: list[Tensor]) -> tuple[Call, Call]:
    """Returns a forward that keeps the inputs of backward, and the forward with a backward to all leaves."""
    with torch.no_grad():
        upstream = torch.randn_like(function())

    def both() -> Any:
        return torch.autograd.grad(function(), leaves, upstream)

    return function, both


def tensors(rule: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Returns random q, k and v in bf16, and the gates of a rule."""
    batch, length, heads, _ = SIZES
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (F.normalize(normal(*SIZES), dim=-1) for _ in range(2))
    gates = {"g": -normal(batch, length, heads).abs(), "beta": normal(batch, length, heads).sigmoid()}
    if rule == "comba":
        gates |= {"b": torch.full((heads,), 0.5), "d": torch.full((heads,), 0.02)}
    gates = {name: gate.to(DEVICE).requires_grad_() for name, gate in gates.items()}
    q, k, v = (x.to(DEVICE, torch.bfloat16).requires_grad_() for x in (q, k, normal(*SIZES)))
    return q, k, v, gates


def of_scan(name: str) -> tuple[Call, Call]:
    """Returns the calls of `scan` with a rule."""
    q, k, v, gates = tensors(name)
    rule = deltalab.get_rule(name)
    return pair(lambda: deltalab.scan(rule, q, k, v, gates)[0], [q, k, v, *gates.values()])


def fla() -> tuple[Call, Call]:
    """Returns the calls of FLA's op of the gated delta rule."""
    function = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    q, k, v, gates = tensors("gated_deltanet")
    call = partial(function, q, k, v, gates["g"], gates["beta"], scale=SIZES[-1] ** -0.5)
    return pair(lambda: call()[0], [q, k, v, *gates.values()])


def spec(rule: str) -> ModelSpec:
    """Returns the model of a rule."""
    heads, width = SIZES[2:]
    return ModelSpec(vocab_size=VOCABULARY, rule=rule, d_model=heads * width, layers=LAYERS, heads=heads)


def started(module: nn.Module, function: Callable[..., Tensor]) -> tuple[Call, Call]:
    """Returns the calls of a function under bf16 autocast, with a backward to the module's parameters."""
    initialize(module, 0)
    module.to(DEVICE)

    def run() -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return function()

    return pair(run, list(module.parameters()))


def hidden() -> Tensor:
    """Returns random hidden states."""
    batch, length, heads, width = SIZES
    return torch.randn(batch, length, heads * width, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def of_layer(name: str) -> tuple[Call, Call]:
    """Returns the calls of a layer."""
    heads, width = SIZES[2:]
    layer = RuleLayer(deltalab.get_rule(name), heads * width, heads, key_dim=width, value_dim=width)
    x = hidden()

    def run() -> Tensor:
        y = layer(x)
        return y[0] if isinstance(y, tuple) else y

    return started(layer, run)


def of_block(name: str) -> tuple[Call, Call]:
    """Returns the calls of a block."""
    block, x = Block(spec(name), LAYERS), hidden()

    def run() -> Tensor:
        total, branch, *_ = block(x, x)
        return total + branch

    return started(block, run)


def of_model(name: str, batch: int, length: int) -> tuple[Call, Call]:
    """Returns the calls of a model without its output matrix."""
    model = Model(spec(name))
    tokens = torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return started(model, lambda: model.features(tokens))


def subjects() -> dict[str, Callable[[], tuple[Call, Call]]]:
    """Returns the subjects by name, each as a function that makes its calls."""
    batch, length, *_ = SIZES
    return {
        **{f"scan, {name}": partial(of_scan, name) for name in RULES},
        **{f"layer, {name}": partial(of_layer, name) for name in RULES},
        "block, comba": partial(of_block, "comba"),
        "model, comba": partial(of_model, "comba", batch, length),
        "model, short, comba": partial(of_model, "comba", 1, 256 if ON_GPU else 64),
        "peer, fla's gated_deltanet": fla,
    }


def launches(run: Call) -> int:
    """Counts the kernels and copies that a call launches on a GPU.

    Without a GPU, PyTorch's operators are counted, and those that they call.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if ON_GPU else [])]
    with torch.profiler.profile(activities=kinds) as profile:
        run()
        synchronize()
    prefixes = ("cudaLaunch", "cuLaunch", "cudaMem") if ON_GPU else ("aten::",)
    return sum(event.count for event in profile.key_averages() if event.key.startswith(prefixes))


def profiled(run: Call, calls: int, rows: int) -> None:
    """Prints the functions that take most time by themselves. Backward runs in this thread, so that it is included."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        run()
        for _ in range(calls):
            synchronize()
            profile.enable()
            run()
            profile.disable()
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(rows)


def package(name: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="writes the figures as JSON, after each subject")
    parser.add_argument("--only", nargs="*", help="subjects whose names contain one of these; all where left out")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="prints where forward with backward spends its time")
    options = parser.parse_args()
    if not ON_GPU:
        stub()
    figures: dict[str, Any] = {}
    report = {
        "of": "one GPU" if ON_GPU else "Python alone: no GPU here, a stub launches nothing; small shapes",
        "device": torch.cuda.get_device_name() if ON_GPU else platform.processor(),
        "shape": dict(zip("BTHK", SIZES, strict=True)) | {"V": SIZES[-1], "layers": LAYERS},
        "dtype": "bfloat16",
        "repeats": options.repeats,
        "versions": {
            "python": platform.python_version(),
            **{name: package(name) for name in ("torch", "triton", "flash-linear-attention")},
            "deltalab": deltalab.__version__,
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ms": figures,
    }
    for name, make in subjects().items():
        if options.only and not any(part in name for part in options.only):
            continue
        start = time.perf_counter()
        try:
            forward, both = make()
        except ImportError as error:
            print(f"{name}: left out: {error}", flush=True)
            continue
        both()
        first = time.perf_counter() - start
        repeats = max(10, options.repeats // 10) if name.startswith("model") else options.repeats
        figures[name] = {
            "forward": host_ms(forward, repeats),
            "both": host_ms(both, repeats),
            "launches": {"forward": launches(forward), "both": launches(both)},
        }
        line = "   ".join(
            f"{passes} {figures[name][passes]['median']:.3f} ms (least {figures[name][passes]['least']:.3f}), "
            f"{figures[name]['launches'][passes]} {'launches' if ON_GPU else 'operators'}"
            for passes in ("forward", "both")
        )
        print(f"{name:28} {line}   (start {first:.1f} s)", flush=True)
        if options.profile:
            profiled(both, min(repeats, 100), 40)
        if options.out:
            options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
