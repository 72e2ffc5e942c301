"""Times the kernels and their peers at the shapes that have targets, and against sequence length.

    python benchmarks/kernels.py --part ours --out out      # then the peers, each in a process of its own
    python benchmarks/kernels.py --part fla_comba --out out

It needs a GPU, PyTorch and Triton; a peer needs its own package too. The figures are saved in OUT/kernels.json after
each contestant, beside those of earlier parts. Run one part at a time: the autotuning of a peer takes minutes. After
--seconds N, no further rule and shape begins; the end of the output lists those left out.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from deltalab.authoring.inputs import Inputs
from deltalab.bench.measure import Bench
from deltalab.bench.peers import Call, Contestant, Peer, installed
from deltalab.bench.results import GPU_SHAPE, Results, Shape
from deltalab.ops.peers.scans import imported
from deltalab.ops.scan import Backend
from deltalab.registry import get_rule, list_rules
from deltalab.rule import UpdateRule
from deltalab_rules import comba, deltanet, gated_deltanet, gka, gla, rdn, rla, sgla

OTHER_SHAPES = (Shape(64, 256, 2, 64, 64), Shape(1, 32768, 16, 128, 128))
LONG = Shape(1, 65536, 16, 128, 128)
QUADRATIC = {"based", "rebased"}
"""The rules whose features are K^2 / 2 channels."""
NARROW = Shape(8, 4096, 16, 16, 128)
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


@dataclass
class Run:
    """The run of one part. until: the time after which nothing further begins. only: the rules; all if empty."""

    bench: Bench
    until: float = math.inf
    only: Sequence[str] = ()
    left_out: list[str] = field(default_factory=list)

    def add(
        self, name: str, shape: Shape, *peers: str | Peer, backend: Backend = "triton", parts: bool = False
    ) -> None:
        start = time.perf_counter()
        if self.only and name not in self.only:
            return
        if start > self.until:
            self.left_out.append(f"left out: {name} at {shape}")
            return
        rule = RULES[name] if name in RULES else get_rule(name)
        self.bench.add(rule, shape, backends=(backend,), against=peers, label=name, parts=parts)
        print(f"{name} at {shape}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def ours(run: Run) -> None:
    """All our kernels at the shape of the targets."""
    for name in RULES:
        run.add(name, GPU_SHAPE)


def shapes(run: Run) -> None:
    """All our kernels at the other two shapes."""
    for shape in OTHER_SHAPES:
        for name in RULES:
            run.add(name, shape)


def lengths(run: Run) -> None:
    """Our kernels on the same number of tokens, from 64 short sequences to one long."""
    for name in ("comba", "gated_deltanet", "gla", "rdn", "gka_10"):
        for length in LENGTHS:
            run.add(name, LONG.at(length))


def chunked(run: Run) -> None:
    """The PyTorch form that the kernels replace."""
    for name in RULES:
        run.add(name, GPU_SHAPE, backend="chunked")


def beside(peer: str | Peer, name: str) -> Callable[[Run], None]:
    """Our kernel and a peer at the shape of the targets, in one run."""
    return lambda run: run.add(name, GPU_SHAPE, peer)


def alone(run: Run) -> None:
    """Every rule of the algebra beside its recurrence alone."""
    for name in list_rules():
        if get_rule(name).transition is not None:
            run.add(name, NARROW if name in QUADRATIC else GPU_SHAPE, parts=True)


def mesa_net(rule: UpdateRule, x: Inputs, now: Inputs) -> Contestant:
    """FLA's MesaNet, the nearest published kernel to GKA: a ridge regression by as many steps of conjugate gradient.

    It is another function, whose lambda is a constant for each channel.
    """
    installed("fla")
    chunk = imported("fla.ops.mesa_net", where="--against fla").chunk_mesa_net
    heads, key_dim = x.k.shape[2:]
    lamb = torch.ones(heads, key_dim, device=x.k.device)
    g = x.gates["g"].contiguous()
    arguments = {"q": x.q, "k": x.k, "v": x.v, "g": g, "beta": torch.ones_like(g), "lamb": lamb}
    call = Call(partial(chunk, max_CG_iteration=rule.knobs()["iterations"]), arguments)
    return Contestant("fla", call, same=False)


def sdpa(run: Run) -> None:
    """PyTorch's attention at the shape of the targets and at those of `lengths`."""
    for shape in (GPU_SHAPE, *map(LONG.at, LENGTHS)):
        run.add("comba", shape, "sdpa")


PARTS: dict[str, Callable[[Run], None]] = {
    "ours": ours,
    "shapes": shapes,
    "lengths": lengths,
    "chunked": chunked,
    "sdpa": sdpa,
    "alone": alone,
    "fla_comba": beside("fla", "comba"),
    "fla_deltanet": beside("fla", "deltanet"),
    "fla_gdn": beside("fla", "gated_deltanet"),
    "fla_gla": beside("fla", "gla"),
    "fla_mesanet": beside(mesa_net, "gka_10"),
    "flash_qla": beside("flash_qla", "gated_deltanet"),
}

TARGETS = (
    # rule, by, its peer, by, the figure, the limit: at least so many times as fast, or at most so many times the memory
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


def targets(parts: dict[str, Results]) -> list[str]:
    """A line for each target in each part that measured both of its sides."""
    lines = []
    for rule, by, other, peer, figure, limit in TARGETS:
        for part, results in parts.items():
            at = {(f.rule, f.by): getattr(f, figure) for f in results.figures if f.shape == str(GPU_SHAPE)}
            value, peer_value = at.get((rule, by)), at.get((other, peer))
            if value is None or peer_value is None:
                continue
            memory = figure.endswith("memory")
            ratio = value / peer_value if memory else peer_value / value
            held = "" if limit is None else "held" if (ratio <= limit if memory else ratio >= limit) else "MISSED"
            asked = "" if limit is None else f"{'at most' if memory else 'at least'} {limit:.2f}"
            lines.append(f"{held:7} {rule} against {other} by {peer}, {figure}: {ratio:.2f}  {asked}  [{part}]")
    for part, results in parts.items():
        for f in results.figures:
            if f.by == "triton" and f.shape == str(GPU_SHAPE) and (f.first_call or 0) > FIRST_CALL:
                lines.append(f"MISSED  {f.rule}: first call {f.first_call:.1f} s  at most {FIRST_CALL:.0f}  [{part}]")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="may be repeated; all by default")
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels.json and lengths.png")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="kernels.json of earlier runs to join")
    parser.add_argument("--cache", type=Path, help="folder that keeps compiled kernels; no first calls then")
    parser.add_argument("--rule", action="append", default=[], help="may be repeated; all by default")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after so many seconds")
    options = parser.parse_args()
    until = time.perf_counter() + options.seconds
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernels.py needs a GPU")
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "kernels.json"
    parts: dict[str, Results] = {}
    for earlier in (*options.merge, file):
        if earlier.exists():
            parts |= {
                part: Results.from_dict(results_of_part)
                for part, results_of_part in json.loads(earlier.read_text()).items()
            }
    fresh = options.part or list(PARTS)
    left_out = []
    for part in fresh:

        def save(results: Results, part: str = part) -> None:
            parts[part] = results
            file.write_text(
                json.dumps({name: asdict(results_of_part) for name, results_of_part in parts.items()}, indent=2) + "\n"
            )

        run = Run(Bench(after=save, cache=options.cache), until, options.rule)
        save(run.bench.results)
        PARTS[part](run)
        left_out += run.left_out
    if "lengths" in fresh:
        parts["lengths"].plot(options.out / "lengths.png")
    for part in fresh:
        print(f"--- {part}\n{parts[part].to_text()}")
    print("\n".join(["--- targets", *targets(parts), *left_out]))


if __name__ == "__main__":
    main()
