"""How much faster the chunked form is than the recurrent one, at the shape that the demand of 15x is made for.

    python benchmarks/scan.py --out scan.json

Only the ratio of the two is a claim: they take turns in one process, so that other work slows both. Times are the
fastest of the repeats, since noise only ever adds; on one CPU thread they are CPU time, which other processes do not
enter, on several threads or a GPU they are wall time.
"""

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

import deltalab
from deltalab.authoring.inputs import Inputs, draw
from deltalab.ops.scan import Backend
from deltalab.rule import UpdateRule

BATCH, LENGTH, HEADS, KEY, VALUE = 16, 512, 2, 64, 64
DEMAND = 15.0


def synchronized() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def call(rule: UpdateRule, x: Inputs, backend: Backend, chunk_size: int, *, backward: bool) -> Callable[[], None]:
    x = x.map(lambda part: part.detach().requires_grad_(backward))

    def run() -> None:
        o, _ = deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend=backend, chunk_size=chunk_size)
        if backward:
            torch.autograd.grad(o.sum(), list(x.named().values()))

    return run


def fastest(calls: dict[str, Callable[[], None]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of each; a first round is not counted."""
    best = dict.fromkeys(calls, math.inf)
    for repeat in range(-1, repeats):
        for name, run in calls.items():
            start = clock()
            run()
            if repeat >= 0:
                best[name] = min(best[name], clock() - start)
    return best


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].split(": ", 1)[1] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="writes the figures as JSON")
    parser.add_argument("--rules", nargs="*", help="all with a state of the algebra where left out")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chunk-size", type=int, default=32)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    on_cpu = options.device == "cpu"
    clock = synchronized if not on_cpu else time.process_time if options.threads == 1 else time.perf_counter

    figures = []
    for name in options.rules or deltalab.list_rules():
        rule = deltalab.get_rule(name)
        if rule.transition is None:
            continue
        x = draw(rule, batch=BATCH, length=LENGTH, heads=HEADS, key_dim=KEY, value_dim=VALUE)
        x = x.map(lambda part: part.float().to(options.device))
        for backward in (False, True):
            backends: tuple[Backend, ...] = ("recurrent", "chunked")
            calls: dict[str, Callable[[], None]] = {
                b: call(rule, x, b, options.chunk_size, backward=backward) for b in backends
            }
            seconds = fastest(calls, options.repeats, clock)
            ratio = seconds["recurrent"] / seconds["chunked"]
            direction = "forward and backward" if backward else "forward"
            shown = "   ".join(f"{backend} {1e3 * value:7.1f} ms" for backend, value in seconds.items())
            print(
                f"{name:18} {direction:21} {shown}   {ratio:5.1f}x{'' if ratio >= DEMAND else '   below 15x'}",
                flush=True,
            )
            figures.append({"rule": name, "what": direction, "seconds": seconds, "ratio": ratio})

    if options.out:
        report = {
            "shape": {"B": BATCH, "T": LENGTH, "H": HEADS, "K": KEY, "V": VALUE, "dtype": "float32"},
            "chunk_size": options.chunk_size,
            "repeats": options.repeats,
            "clock": clock.__name__,
            "machine": {
                "device": processor() if on_cpu else torch.cuda.get_device_name(),
                "cores": os.cpu_count(),
                "system": platform.platform(),
            },
            "threads": options.threads,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "deltalab": deltalab.__version__,
            },
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "figures": figures,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
