"""`benchmarks/sass.py` sees the operand that ptxas may lose, and our kernels keep none."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("sass", ROOT / "benchmarks" / "sass.py")
assert SPEC
sass = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sass)

LOOP = """
$L__BB0_1:
	{inside}
	wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {{%r1,%r2}}, {{%r3,%r4,%r5,%r6}}, %rd1, 1, 1, 1, 1;
	@%p1 bra 	$L__BB0_1;
"""
DEFINED = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3, %r4, %r5, %r6}, [%r9];"


@pytest.mark.parametrize(("before", "inside", "found"), [(DEFINED, "", 1), ("", DEFINED, 0)])
def test_an_operand_from_before_the_loop_is_found(before, inside, found):
    assert len(sass.kept(before + LOOP.format(inside=inside))) == found


def test_what_only_stands_in_a_loop_is_none():
    stores = LOOP.format(inside="st.shared.v4.b32 [%r9], {%r3, %r4, %r5, %r6};\n\tmov.b32 \t%r3, %r7;")
    assert len(sass.kept(stores)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rules", [["linear_attention", "deltanet"], ["gla"]])
def test_no_kernel_keeps_an_operand(rules):
    """Compiled for an H100; linear attention's d q was 1.2 off there, from this alone."""
    command = [sys.executable, "benchmarks/sass.py", *rules, "--length", "65", "--key-dim", "64", "--value-dim", "64"]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("gradients") == len(rules)
