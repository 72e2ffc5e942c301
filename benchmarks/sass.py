"""What ptxas makes of the kernels, without a GPU: registers, spills, shared memory, and operands that it overwrites.

    python benchmarks/sass.py comba gla --key-dim 128 --value-dim 128 --length 130

Runs a rule forward and backward on the CPU, where each launch compiles its kernel for an H100 instead. Exits with 1 where
a WGMMA's left operand is in registers that live through a loop which writes them: ptxas 12.8, of Triton 3.6, does that,
and from the second iteration on the result is wrong. No kernel of ours may have one.
"""

import argparse
import dataclasses
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

import deltalab
from deltalab.inputs import draw
from deltalab.kernels import algebra
from deltalab.scan import operands

H100 = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Code = list[str]


def code(listing: str) -> tuple[Code, dict[str, int]]:
    """The instructions of nvdisasm's listing, and where its labels are among them."""
    found: Code = []
    labels = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(found)
        elif instruction := re.search(r"/\*[0-9a-f]+\*/\s+(.*?);", line):
            found.append(instruction.group(1).strip())
    return found, labels


def written(instruction: str) -> set[int]:
    """The general registers that an instruction writes."""
    name, _, rest = re.sub(r"^@!?U?P\d+\s+", "", instruction).partition(" ")
    first = re.match(r"(?:U?P[\dT]+,\s*)*R(\d+)\b", rest)
    if first is None or name.startswith(("ST", "RED", "SYNCS", "UTMA", "BAR", "BRA")):
        return set()
    if tile := re.match(r"HGMMA\.(\d+)x(\d+)x", name):
        count = int(tile.group(1)) * int(tile.group(2)) // 128
    elif name.startswith("LDSM"):
        count = int(name[-1])
    elif name.startswith("HMMA") or ".128" in name:
        count = 4
    else:
        count = 2 if ".64" in name or "WIDE" in name else 1
    return set(range(int(first.group(1)), int(first.group(1)) + count))


def overwritten(listing: str) -> list[str]:
    """The WGMMA whose left operand comes into a loop in registers that the loop writes after it has used them."""
    instructions, labels = code(listing)
    found = []
    for end, branch in enumerate(instructions):
        target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", branch)
        begin = labels.get(target.group(1), end) if target else end
        # What waits for a barrier jumps back too, from behind the end of the kernel.
        if begin >= end or any(one.startswith(("EXIT", "RET")) for one in instructions[begin:end]):
            continue
        loop = instructions[begin : end + 1]
        for i, one in enumerate(loop):
            operand = re.search(r"HGMMA\S*\s+R\d+,\s*R(\d+),\s*gdesc", one)
            if operand is None:
                continue
            registers = set(range(int(operand.group(1)), int(operand.group(1)) + 4))
            coming = registers.difference(*map(written, loop[:i]))
            if coming & set().union(*map(written, loop[i + 1 :])):
                found.append(one)
    return found


@dataclasses.dataclass
class Compiler:
    """In place of `JITFunction.run`: compiles what would be launched, once, and prints what came of it."""

    seen: set[str] = dataclasses.field(default_factory=set)
    bad: int = 0

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        backend = make_backend(H100)
        binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, rest = binder(*args, **options)
        parsed, signature, constants, attrs = kernel._pack_args(backend, options, bound, specialization, rest)
        key = f"{kernel.__name__} {specialization} {parsed}"
        if key in self.seen:
            return
        self.seen.add(key)
        made = triton.compile(ASTSource(kernel, signature, constants, attrs), target=H100, options=parsed.__dict__)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            usage, listing = (
                subprocess.run([TOOLS / tool, *flags, file.name], capture_output=True, text=True, check=True).stdout
                for tool, flags in (("cuobjdump", ["-res-usage"]), ("nvdisasm", []))
            )
        registers, spilled = re.findall(r"REG:(\d+).*?STACK:(\d+)", usage)[0]
        lost = overwritten(listing)
        self.bad += len(lost)
        print(
            f"{kernel.__name__:14} {parsed.num_warps} warps, {parsed.num_stages} stages: {registers} registers, "
            f"{spilled} bytes spilled, {made.metadata.shared / 1024:.0f} KiB shared, {listing.count('HGMMA')} WGMMA"
            + (f"; OVERWRITTEN {lost[0]} and {len(lost) - 1} more" if lost else ""),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="+")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    for name, default in (("length", 130), ("key-dim", 128), ("value-dim", 128), ("heads", 2), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    compiler = Compiler()
    jit.JITFunction.run = lambda kernel, *args, **options: compiler.run(kernel, *args, **options)  # type: ignore[method-assign]
    for name in given.rules:
        rule = deltalab.get_rule(name)
        shape = {"length": given.length, "heads": given.heads, "key_dim": given.key_dim, "value_dim": given.value_dim}
        x = draw(rule, batch=given.batch, **shape).map(lambda part: part.float())
        dtype = DTYPES[given.dtype]
        narrow = {gate: x.gates[gate].to(dtype) for gate in x.gates if rule.gates[gate].per == "channel"}
        x = dataclasses.replace(x, q=x.q.to(dtype), k=x.k.to(dtype), v=x.v.to(dtype), gates={**x.gates, **narrow})
        x = x.map(lambda part: part.requires_grad_())
        print(f"--- {name}")
        if rule.transition is not None:
            o, _ = algebra.scan(
                rule.transition, operands(rule, x.q, x.k, x.v, x.gates), dtype=dtype, scale=1.0, state=None
            )
        else:
            o, _ = rule.fused(x.q, x.k, x.v, x.gates, scale=1.0, state=rule.initial_state(x.k, x.v))
        o.sum().backward()
    sys.exit(1 if compiler.bad else 0)


if __name__ == "__main__":
    main()
