"""The file of a small delta rule, with what a test adds to it."""

import os
from textwrap import indent

FILE = '''"""The delta rule, and what a test adds to it."""

import logging
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition

IN_CHILD = os.getpid() != {driver}
calls = 0

{at_import}


@dataclass(frozen=True, kw_only=True)
class Rule(UpdateRule):
    """S_t = (I - beta_t k_t k_t^T) S_{{t-1}} + beta_t k_t v_t^T"""

    name: ClassVar[str] = "{name}"
    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(gates.sigmoid())

    @property
    def eigenvalues(self):
        return 0.0, 1.0

    def operands(self, q, k, v, *, beta):
        global calls
        calls += 1
{at_call}
        return Operands(r=q, k=k, u=beta[..., None] * v, e=beta)
'''


def delta_rule(name: str, at_call: str = "pass", *, at_import: str = "pass") -> str:
    """The text of the rule's file. at_call, at_import: lines that run then, and know `calls`, counted from 1 in each
    process, and `IN_CHILD`: whether this is another process than the one that asks for the text.
    """
    return FILE.format(name=name, at_call=indent(at_call, " " * 8), at_import=at_import, driver=os.getpid())
