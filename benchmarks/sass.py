"""What ptxas makes of the kernels, without a GPU: registers, spills, shared memory, and operands that it may lose.

    python benchmarks/sass.py comba gla --key-dim 128 --value-dim 128 --length 130

Runs a rule forward and backward on the CPU, where each launch compiles its kernel for an H100 instead. Exits with 1
where a WGMMA in a loop takes its left operand from registers that stay as they are through the loop: ptxas 12.8, of
Triton 3.6, may write them in between, and from the second iteration on the result is wrong. `kernels.chunk.anew`.
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


def kept(ptx: str) -> list[str]:
    """The WGMMA in a loop whose left operand is in registers that nothing in the loop defines."""
    lines = ptx.splitlines()
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if re.match(r"\$L__BB\d+_\d+:", line)}
    found = []
    for end, line in enumerate(lines):
        jump = re.search(r"\bbra\S*\s+(\$L__BB\d+_\d+);", line)
        if jump is None or labels[jump.group(1)] > end:
            continue
        loop = lines[labels[jump.group(1)] : end]
        defined: set[str] = set()
        for one in loop:
            if target := re.match(
                r"\s*(?:@!?%p\d+\s+)?(?!st|red|bra|wgmma|mbarrier|cp)[a-z]\S*\s+(\{[^}]*\}|%\w+)", one
            ):
                defined.update(re.findall(r"%\w+", target.group(1)))
        for one in loop:
            operands_of = re.search(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*\{([^}]*)\}", one)
            if operands_of and not defined.issuperset(re.findall(r"%\w+", operands_of.group(1))):
                found.append(one.strip())
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
            command = [TOOLS / "cuobjdump", "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, spilled = re.findall(r"REG:(\d+).*?STACK:(\d+)", usage)[0]
        lost = kept(made.asm["ptx"])
        self.bad += len(lost)
        products = made.asm["ptx"].count("wgmma.mma")
        print(
            f"{kernel.__name__:14} {parsed.num_warps} warps, {parsed.num_stages} stages: {registers} registers, "
            f"{spilled} bytes spilled, {made.metadata.shared / 1024:.0f} KiB shared, {products} WGMMA"
            + (f"; {len(lost)} OF THEM KEEP A LEFT OPERAND" if lost else ""),
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
