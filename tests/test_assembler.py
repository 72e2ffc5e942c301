"""Kernels are never assembled by a ptxas that is known to get them wrong."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import deltalab
from deltalab.errors import InputError
from deltalab.inputs import draw
from deltalab.kernels import assembler
from deltalab.scan import scan

ROOT = Path(__file__).parents[1]
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
def test_the_first_that_is_new_enough(own, blackwell, chosen, lacking, monkeypatch):
    tools = SimpleNamespace(ptxas=own) if blackwell is None else SimpleNamespace(ptxas=own, ptxas_blackwell=blackwell)
    monkeypatch.setattr(assembler, "knobs", SimpleNamespace(nvidia=tools))
    assert assembler.choose() == lacking
    assert tools.ptxas == chosen


def test_without_one_kernels_are_refused(monkeypatch):
    importlib.import_module("deltalab.kernels.algebra")  # while Triton is still told to interpret
    module = sys.modules["deltalab.scan"]
    monkeypatch.setattr(module, "lacks_triton", module.lacks_triton.__wrapped__)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(assembler, "choose", lambda: "ptxas 12.9 or later, not 12.8, in TRITON_PTXAS_PATH")
    assert module.lacks_triton("cuda") == "ptxas 12.9 or later, not 12.8, in TRITON_PTXAS_PATH"
    monkeypatch.setattr(module, "lacks_triton", lambda device: "ptxas 12.9")
    rule = deltalab.get_rule("linear_attention")
    x = draw(rule, batch=1, length=4, heads=1, key_dim=16, value_dim=16).map(torch.Tensor.float)
    with pytest.raises(InputError, match=r"backend 'triton' needs ptxas 12\.9"):
        scan(rule, x.q, x.k, x.v, x.gates, backend="triton")


@pytest.mark.slow
@pytest.mark.parametrize("rules", [["linear_attention", "deltanet"], ["gla"]])
def test_what_ptxas_makes_of_kernels(rules):
    """As `choose` leaves it, for an H100."""
    command = [sys.executable, "benchmarks/sass.py", *rules, "--length", "65", "--key-dim", "64", "--value-dim", "64"]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("gradients") == len(rules)
