"""Where no GPU is, the checks of a rule with a kernel run in a fork that has Triton's interpreter on."""

import json
import os
import subprocess
import sys

import pytest
import torch

CODE = """
import json, subprocess, sys
from deltalab.authoring.rule_checks import rule_suite
from deltalab.registry import get_rule

subprocess.run = None  # a second Python would import PyTorch again
rule_suite.CHECKS = [check for check in rule_suite.CHECKS if check.name in ("spec", "kernel")]
results = rule_suite.check_rule(get_rule("min_gru"), forked=True)
found = {result.name: (result.passed, result.message) for result in results}
print(json.dumps([found, "triton" in sys.modules]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")
def test_a_kernel_is_checked_in_a_fork_and_the_process_stays_without_the_interpreter() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=True)
    found, has_triton = json.loads(run.stdout)
    assert not has_triton
    assert found["spec"][0]
    assert found["kernel"][0]
    assert "not tried" not in found["kernel"][1]
    assert "[as declared]" in found["kernel"][1]  # what was measured, and no note in its place
