"""Shows what the compilers make of the kernels, without a GPU: registers, spills, shared memory, and lost operands.

    python benchmarks/sass.py comba gla --key-dim 128 --value-dim 128 --length 130 --arch 86

Runs a rule forward and backward on the CPU, where each launch only compiles its kernel, for an H100 unless --arch names
another GPU: 75 (T4), 80 (A100), 86 (RTX 30), 89 (RTX 40, L4), 100 (B200), 120 (RTX 50), gfx942 (AMD MI300). Where
shared memory is short, fewer stages are tried, as a launch does.

Exits with 1 if a kernel does not compile or does not fit, and if a WGMMA in a loop takes its left operand from
registers that the loop does not fill before it and overwrites after it: the result is wrong from the second iteration
on. ptxas 12.8 and 12.9 do that; `kernels.chunk.held` prevents it. Works with Triton 3.6 (ptxas 12.9) and Triton 3.7
(ptxas 13.1).
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
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

import deltalab
from deltalab import elementwise, nonlinear, ridge
from deltalab.authoring.inputs import draw
from deltalab.kernels import chunk, dispatch, ptxas
from deltalab.kernels import launch as kernel_launch
from deltalab.kernels.compilations import Launcher
from deltalab.kernels.scalar import launch as scalar_launch
from deltalab.ops.scan import operands
from deltalab.ops.triton_kernels import KERNELS

SHARED = {"75": 64, "80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "120": 99, "gfx942": 64}
"""KiB of shared memory that a program may have, by compute capability (CUDA's programming guide, technical
specifications), or by AMD's architecture (CDNA 3 instruction set, local data share)."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


WIDTHS = {".64": 2, ".128": 4}
NO_REGISTER = ("ST", "BRA", "BAR", "SYNCS", "UTMA", "RED", "EXIT", "WARP", "FENCE", "MEMBAR", "ATOM")


def lost(sass: str) -> list[str]:
    """The WGMMA in loops whose left operand's registers hold something else in the next iteration."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(instructions)
        elif match := re.search(r"/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(match.group(1).strip())

    def target(at: int) -> int:
        to = re.search(r"BRA.*?(\.L_x_\d+)", instructions[at])
        return labels[to.group(1)] if to else at + 1

    def leaves(at: int) -> bool:
        """Whether the program ends here or jumps back, so that the next instruction is not reached from here."""
        return bool(re.match(r"EXIT|RET|BRA", instructions[at])) and target(at) <= at + 1

    lines = []
    for end in range(len(instructions)):
        begin = target(end)
        # Skip loops that wait for a barrier: they stand behind the program's end.
        if begin >= end or any(map(leaves, range(begin, end))):
            continue
        loop = instructions[begin : end + 1]
        for i, instruction in enumerate(loop):
            if product := re.search(r"HGMMA\S*\s+R\d+,\s*R(\d+),\s*gdesc", instruction):
                first = int(product.group(1))
                before, after = (set[int]().union(*map(_written, part)) for part in (loop[:i], loop[i + 1 :]))
                if set(range(first, first + 4)) - before & after:
                    lines.append(instruction)
    return lines


def _written(instruction: str) -> set[int]:
    """The registers that an instruction writes."""
    operation, _, rest = re.sub(r"^@!?U?P\d+\s+", "", instruction).partition(" ")
    target = re.match(r"(?:U?P[\dT]+,\s*)*R(\d+)\b", rest)
    if target is None or operation.startswith(NO_REGISTER):
        return set()
    count = max([1, *(width for name, width in WIDTHS.items() if name in operation)])
    if tile := re.match(r"HGMMA\.(\d+)x(\d+)x", operation):
        count = int(tile.group(1)) * int(tile.group(2)) // 128
    elif matrices := re.match(r"LDSM.*88(?:\.(\d))?$", operation):
        count = int(matrices.group(1) or 1)
    elif operation.startswith("HMMA"):
        count = 4
    elif "WIDE" in operation:
        count = 2
    return set(range(int(target.group(1)), int(target.group(1)) + count))


def _of_nvidia(asm: Any) -> tuple[str, list[str]]:
    """What a kernel takes, in words, and the WGMMA that lose their left operand."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        command = [TOOLS / "nvdisasm", file.name]
        bad = lost(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    registers, spilled = re.findall(r"REG:(\d+).*?STACK:(\d+)", usage)[0]
    return f"{registers} registers, {spilled} bytes spilled, {asm['ptx'].count('wgmma.mma')} WGMMA", bad


def _of_amd(assembly: str) -> tuple[str, list[str]]:
    """What a kernel takes, in words. No product loses an operand."""
    counts = [int(re.findall(rf"\.{name}:\s*(\d+)", assembly)[0]) for name in ("vgpr_count", "vgpr_spill_count")]
    return f"{counts[0]} registers, {counts[1]} spilled, {assembly.count('v_mfma')} MFMA", []


@dataclasses.dataclass
class Compiler:
    """Stands in for `JITFunction.run`: compiles each kernel that would be launched, once, and prints what it takes."""

    arch: str = "90"
    seen: set[str] = dataclasses.field(default_factory=set)
    bad: int = 0

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        is_amd = self.arch.startswith("gfx")
        target = GPUTarget("hip", self.arch, 64) if is_amd else GPUTarget("cuda", int(self.arch), 32)
        backend = make_backend(target)
        if is_amd:  # As in `kernels.launch`, which PyTorch tells.
            options.pop("maxnreg", None)
        binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, rest = binder(*args, **options)
        parsed, signature, constants, attrs = kernel._pack_args(backend, options, bound, specialization, rest)
        key = f"{kernel.__name__} {specialization} {parsed}"
        if key in self.seen:
            return
        self.seen.add(key)
        try:
            made = triton.compile(
                ASTSource(kernel, signature, constants, attrs), target=target, options=parsed.__dict__
            )
        except Exception as error:  # whatever a compiler raises
            self.bad += 1
            print(
                f"{kernel.__name__:14} DOES NOT COMPILE: {type(error).__name__}: {str(error).strip():.300}", flush=True
            )
            return
        usage, bad = _of_amd(made.asm["amdgcn"]) if is_amd else _of_nvidia(made.asm)
        over = made.metadata.shared > SHARED[self.arch] * 1024
        again = over and parsed.num_stages > 1
        self.bad += len(bad) + (over and not again)
        print(
            f"{kernel.__name__:14} {parsed.num_warps} warps, {parsed.num_stages} stages: "
            f"{usage}, {made.metadata.shared / 1024:.0f} KiB shared"
            + (f"; {len(bad)} WGMMA LOSE A LEFT OPERAND" if bad else "")
            + (f"; MORE THAN {SHARED[self.arch]} KiB" if over else ""),
            flush=True,
        )
        if again:
            self.run(kernel, *args, grid=grid, warmup=warmup, **{**options, "num_stages": parsed.num_stages - 1})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="+")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    for name, default in (("length", 130), ("key-dim", 128), ("value-dim", 128), ("heads", 2), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--arch", choices=SHARED, default="90")
    options = parser.parse_args()
    ptxas.choose()
    compiler = Compiler(options.arch)
    scalar_launch.has_tensor_memory = lambda: options.arch == "100"
    kernel_launch.is_a100 = lambda: options.arch == "80"
    chunk.PTX = tl.constexpr(not options.arch.startswith("gfx"))
    for module in (elementwise, nonlinear, ridge):  # CPU tensors stand for those of a GPU.
        module.available = lambda device: KERNELS  # type: ignore[attr-defined]
    jit.JITFunction.run = lambda kernel, *args, **options: compiler.run(kernel, *args, **options)  # type: ignore[method-assign]
    Launcher.__call__ = Launcher._by_triton  # type: ignore[method-assign]  # Its own way asks for a GPU.
    for name in options.rules:
        rule = deltalab.get_rule(name)
        shape = {
            "length": options.length,
            "heads": options.heads,
            "key_dim": options.key_dim,
            "value_dim": options.value_dim,
        }
        x = draw(rule, batch=options.batch, **shape).map(lambda part: part.float())
        dtype = DTYPES[options.dtype]
        narrow = {gate: x.gates[gate].to(dtype) for gate in x.gates if rule.gates[gate].per == "channel"}
        x = dataclasses.replace(x, q=x.q.to(dtype), k=x.k.to(dtype), v=x.v.to(dtype), gates={**x.gates, **narrow})
        x = x.map(lambda part: part.requires_grad_())
        print(f"--- {name}")
        if rule.transition is not None:
            o, _ = dispatch.scan(
                rule.transition, operands(rule, x.q, x.k, x.v, x.gates), dtype=dtype, scale=1.0, state=None
            )
        else:
            o, _ = rule.fused(x.q, x.k, x.v, x.gates, scale=1.0, state=rule.initial_state(x.k, x.v))
        o.sum().backward()
    sys.exit(1 if compiler.bad else 0)


if __name__ == "__main__":
    main()
