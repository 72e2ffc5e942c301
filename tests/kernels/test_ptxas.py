"""Kernels are never compiled by a ptxas that is known to compile them wrongly."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton
from tests.support.folders import ROOT

import deltalab
from deltalab.authoring.inputs import draw
from deltalab.errors import InputError
from deltalab.kernels import ptxas
from deltalab.ops.backends import lacks_triton
from deltalab.ops.scan import scan

SPEC = importlib.util.spec_from_file_location("sass", ROOT / "benchmarks" / "sass.py")
assert SPEC
assert SPEC.loader
sass = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sass)
OLD, NEW = (SimpleNamespace(path=f"/{version}/ptxas", version=version) for version in ("12.8", "12.9"))


@pytest.mark.parametrize(
    ("own", "blackwell", "chosen", "lacking"),
    [
        (NEW, OLD, NEW, None),
        (OLD, NEW, NEW.path, None),
        (OLD, OLD, OLD, "ptxas 12.9 or later, not 12.8, in TRITON_PTXAS_PATH"),
        (OLD, None, OLD, "ptxas 12.9 or later, not 12.8, in TRITON_PTXAS_PATH"),
        (SimpleNamespace(path="/ptxas", version="13.0"), None, SimpleNamespace(path="/ptxas", version="13.0"), None),
    ],
)
def test_the_first_that_is_new_enough_is_taken(own, blackwell, chosen, lacking, monkeypatch):
    tools = SimpleNamespace(ptxas=own) if blackwell is None else SimpleNamespace(ptxas=own, ptxas_blackwell=blackwell)
    monkeypatch.setattr(ptxas, "knobs", SimpleNamespace(nvidia=tools))
    assert ptxas.choose() == lacking
    assert tools.ptxas == chosen


BROUGHT = {"3.6": ("12.8", "12.9"), "3.7": ("12.8", "13.1")}
"""By Triton's version, the ptxas that it uses on Hopper GPUs and the one that it uses on Blackwell GPUs."""

CHOSEN = """
from triton import knobs
from deltalab.kernels import ptxas

print(knobs.nvidia.ptxas.version, knobs.nvidia.ptxas_blackwell.version, ptxas.choose(), knobs.nvidia.ptxas.version)
"""


def test_the_installed_triton_brings_one_that_is_new_enough():
    version = ".".join(triton.__version__.split(".")[:2])
    assert version in BROUGHT, "check the kernels with its ptxas, then add it here and to docs/kernels.md"
    hopper, blackwell = BROUGHT[version]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_PTXAS_PATH"}
    command = [sys.executable, "-c", CHOSEN]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [hopper, blackwell, "None", blackwell]


def test_without_one_kernels_are_refused(monkeypatch):
    importlib.import_module("deltalab.ops.triton_kernels")  # Load it while TRITON_INTERPRET is still 1.
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(ptxas, "choose", lambda: "ptxas 12.9 or later, not 12.8, in TRITON_PTXAS_PATH")
    assert lacks_triton.__wrapped__("cuda") == "ptxas 12.9 or later, not 12.8, in TRITON_PTXAS_PATH"
    monkeypatch.setattr("deltalab.ops.recurrence.lacks_triton", lambda device: "ptxas 12.9")
    rule = deltalab.get_rule("linear_attention")
    x = draw(rule, batch=1, length=4, heads=1, key_dim=16, value_dim=16).map(torch.Tensor.float)
    with pytest.raises(InputError, match=r"backend 'triton' needs ptxas 12\.9"):
        scan(rule, x.q, x.k, x.v, x.gates, backend="triton")


PRODUCT = "HGMMA.64x32x16.F32.BF16 R24, R56, gdesc[UR44].tnspB, R24, gsb0"
LOAD = "LDSM.16.M88.4 R56, [R7+UR8]"


@pytest.mark.parametrize(
    ("loop", "count"),
    [
        ([PRODUCT, LOAD], 1),
        ([PRODUCT, "LDSM.16.MT88.4 R52, [R7]"], 0),
        ([PRODUCT, "F2FP.BF16.F32.PACK_AB R59, R37, R36"], 1),
        ([PRODUCT, "STS.128 [R16], R56", "HGMMA.64x64x16.F32.BF16 R88, R64, gdesc[UR4], RZ"], 0),
        ([LOAD, PRODUCT, LOAD], 0),
        (["LDSM.16.M88.2 R56, [R7]", PRODUCT, LOAD], 1),
        (["@P1 MOV R58, R59", PRODUCT, "IMAD.WIDE R58, R1, R2, R3"], 1),
    ],
)
def test_an_operand_that_a_loop_loses_is_seen(loop, count):
    lines = [".L_x_1:", *(f"  /*0010*/   {instruction} ;" for instruction in [*loop, "@P1 BRA `(.L_x_1)", "EXIT"])]
    assert len(sass.lost("\n".join(lines))) == count


def compiled(*arguments: str) -> str:
    """Returns what `benchmarks/sass.py` prints about kernels that it compiles for an H100."""
    command = [sys.executable, "benchmarks/sass.py", *arguments, "--length", "65"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("rules", [["linear_attention", "deltanet"], ["gla"]])
def test_no_kernel_loses_an_operand(rules):
    """On an H100, such a loss alone put linear attention's d q off by 1.2."""
    assert compiled(*rules, "--key-dim", "64", "--value-dim", "64").count("gradients") == len(rules)


@pytest.mark.slow
def test_a_loop_over_values_takes_no_shape_from_keys():
    """The compiler lets no name change its shape in a loop, as a mask does if blocks are full; the interpreter does."""
    assert "gradients" in compiled("gka", "--dtype", "fp32", "--key-dim", "48", "--value-dim", "80")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["100", "gfx942"])
def test_kernels_compile_for_gpus_that_we_have_not(arch):
    """Triton fails on a B200 if a loop that stores states loads ahead, and AMD's compiler knows no PTX."""
    said = compiled("linear_attention", "--arch", arch, "--key-dim", "64", "--value-dim", "64")
    assert "gradients" in said
    assert ("MFMA" if arch == "gfx942" else "WGMMA") in said
