"""What ptxas makes of the kernels, without a GPU: registers, spills, shared memory, products.

    python benchmarks/sass.py comba gla --key-dim 128 --value-dim 128 --length 130

Runs a rule forward and backward on the CPU, where each launch compiles its kernel for an H100 instead.
"""

import argparse
import dataclasses
import re
import subprocess
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
from deltalab.kernels import algebra, assembler
from deltalab.scan import operands

H100 = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclasses.dataclass
class Compiler:
    """In place of `JITFunction.run`: compiles what would be launched, once, and prints what came of it."""

    seen: set[str] = dataclasses.field(default_factory=set)

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
        products = made.asm["ptx"].count("wgmma.mma")
        print(
            f"{kernel.__name__:14} {parsed.num_warps} warps, {parsed.num_stages} stages: {registers} registers, "
            f"{spilled} bytes spilled, {made.metadata.shared / 1024:.0f} KiB shared, {products} WGMMA",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="+")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    for name, default in (("length", 130), ("key-dim", 128), ("value-dim", 128), ("heads", 2), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    assembler.choose()
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


if __name__ == "__main__":
    main()
