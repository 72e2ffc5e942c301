"""The figures of the kernels against their peers, at the shapes that targets are set for, and against length.

    python benchmarks/kernels.py --part ours --out out      # then, each in a process of its own, the peers
    python benchmarks/kernels.py --part fla_comba --out out

Needs a GPU, and of Python no more than PyTorch, Triton and, for peers, these; figures of later parts join those in
OUT/kernels.json. One part by one, since a peer's autotuning takes minutes: benchmarks/NOTES.md says how long each.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from deltalab.bench import GPU_SHAPE, Bench, Report, Shape
from deltalab.rule import UpdateRule
from deltalab_rules import comba, deltanet, gated_deltanet, gka, gla, rdn, rla, sgla

OTHER_SHAPES = (Shape(64, 256, 2, 64, 64), Shape(1, 32768, 16, 128, 128))
LONG = Shape(1, 65536, 16, 128, 128)
LENGTHS = [1024 * 2**i for i in range(7)]
RULES: dict[str, UpdateRule] = {
    "comba": comba.Comba(),
    "deltanet": deltanet.DeltaNet(),
    "gated_deltanet": gated_deltanet.GatedDeltaNet(),
    "gla": gla.GLA(),
    "sgla": sgla.SGLA(),
    "rla": rla.RLA(),
    "rdn": rdn.RDN(),
    "gka_10": gka.GKA(iterations=10),
}


def ours(bench: Bench) -> None:
    """Everything of ours at the shape of the targets, then at the other two."""
    for shape in (GPU_SHAPE, *OTHER_SHAPES):
        for name, rule in RULES.items():
            say(bench, name, rule, shape)


def lengths(bench: Bench) -> None:
    """As many tokens in all, from 64 sequences to 1."""
    for name in ("comba", "gated_deltanet", "gla", "rdn", "gka_10"):
        for length in LENGTHS:
            say(bench, name, RULES[name], LONG.at(length))


def chunked(bench: Bench) -> None:
    """The pure torch form that the kernels replace."""
    for name, rule in RULES.items():
        bench.add(rule, GPU_SHAPE, backends=("chunked",), label=name)


def beside(peer: str, *names: str) -> Callable[[Bench], None]:
    """Ours and a peer at the shape of the targets, in one run."""

    def run(bench: Bench) -> None:
        for name in names:
            say(bench, name, RULES[name], GPU_SHAPE, peer)

    return run


def sdpa(bench: Bench) -> None:
    """Attention, at the shapes of `lengths` too."""
    for shape in (GPU_SHAPE, *map(LONG.at, LENGTHS)):
        say(bench, "comba", RULES["comba"], shape, "sdpa")


def say(bench: Bench, name: str, rule: UpdateRule, shape: Shape, *peers: str) -> None:
    start = time.perf_counter()
    bench.add(rule, shape, backends=("triton",), against=peers, label=name)
    print(f"{name} at {shape}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


PARTS: dict[str, Callable[[Bench], None]] = {
    "ours": ours,
    "lengths": lengths,
    "chunked": chunked,
    "sdpa": sdpa,
    "fla_comba": beside("fla", "comba"),
    "fla_deltanet": beside("fla", "deltanet"),
    "fla_gdn": beside("fla", "gated_deltanet"),
    "fla_gla": beside("fla", "gla"),
    "fla_mesanet": beside("fla", "gka_10"),
    "flash_qla": beside("flash_qla", "gated_deltanet"),
}

TARGETS = (
    # rule, by, its peer, by, what is compared, at least (times as fast) or at most (times the memory)
    ("comba", "triton", "comba", "fla", "forward", 2.8),
    ("comba", "triton", "comba", "fla", "both", 2.0),
    ("comba", "triton", "comba", "fla", "both_memory", 0.5),
    ("deltanet", "triton", "deltanet", "fla", "forward", 2.8),
    ("deltanet", "triton", "deltanet", "fla", "both", 2.0),
    ("deltanet", "triton", "deltanet", "fla", "both_memory", 0.5),
    ("gated_deltanet", "triton", "gated_deltanet", "fla", "forward", 0.75),
    ("gated_deltanet", "triton", "gated_deltanet", "fla", "both", 0.65),
    ("gated_deltanet", "triton", "gated_deltanet", "fla", "both_memory", 1.5),
    ("gla", "triton", "gla", "fla", "forward", 1.8),
    ("gla", "triton", "gla", "fla", "both", 1.8),
    ("gla", "triton", "gla", "fla", "both_memory", 0.6),
    ("rla", "triton", "sgla", "triton", "forward", 1 / 2.2),
    ("rla", "triton", "sgla", "triton", "both", 1 / 2.2),
    ("rdn", "triton", "gated_deltanet", "triton", "forward", 1 / 2.2),
    ("rdn", "triton", "gated_deltanet", "triton", "both", 1 / 2.2),
    ("gka_10", "triton", "gka_10", "fla", "forward", 1.5),
    ("gka_10", "triton", "gka_10", "fla", "both", 1.5),
    ("comba", "triton", "gated_deltanet", "triton", "forward", None),
)
FIRST_CALL = 10.0


def targets(parts: dict[str, Report]) -> list[str]:
    """A line for each target whose two sides were measured; both sides are of one run where there is one with both."""
    lines = []
    for rule, by, other, peer, what, limit in TARGETS:
        for part, report in parts.items():
            at = {(f.rule, f.by): getattr(f, what) for f in report.figures if f.shape == str(GPU_SHAPE)}
            one, two = at.get((rule, by)), at.get((other, peer))
            if one is None or two is None:
                continue
            memory = what.endswith("memory")
            ratio = one / two if memory else two / one
            held = "" if limit is None else "held" if (ratio <= limit if memory else ratio >= limit) else "MISSED"
            asked = "" if limit is None else f"{'at most' if memory else 'at least'} {limit:.2f}"
            lines.append(f"{held:7} {rule} against {other} by {peer}, {what}: {ratio:.2f}  {asked}  [{part}]")
    for part, report in parts.items():
        for f in report.figures:
            if f.by == "triton" and f.shape == str(GPU_SHAPE) and (f.first_call or 0) > FIRST_CALL:
                lines.append(f"MISSED  {f.rule}: first call {f.first_call:.1f} s  at most {FIRST_CALL:.0f}  [{part}]")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="may be given several times; all where left out")
    parser.add_argument("--out", type=Path, required=True, help="folder of kernels.json and lengths.png")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="kernels.json of earlier runs, to join")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernels.py needs a GPU")
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "kernels.json"
    parts: dict[str, Report] = {}
    for earlier in (*given.merge, file):
        if earlier.exists():
            parts |= {part: Report.from_dict(one) for part, one in json.loads(earlier.read_text()).items()}
    fresh = []
    for part in given.part or PARTS:
        bench = Bench()
        parts[part] = bench.report
        fresh.append(part)
        try:
            PARTS[part](bench)
        finally:
            file.write_text(json.dumps({name: asdict(one) for name, one in parts.items()}, indent=2) + "\n")
    if "lengths" in fresh:
        parts["lengths"].plot(given.out / "lengths.png")
    for part in fresh:
        print(f"--- {part}\n{parts[part].to_text()}")
    print("\n".join(["--- targets", *targets(parts)]))


if __name__ == "__main__":
    main()
