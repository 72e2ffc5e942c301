"""Rules that were published in 2026, written again from their sources, one head and one token at a time.

A state is [K, V], as ours are. Sources that write it the other way are transposed.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.paper_loops import K, Loop, rule_equals, step_equals_scan
from torch import Tensor, outer

import deltalab
from deltalab.rule import UpdateRule

Step = Callable[[Any, SimpleNamespace], tuple[Any, Tensor]]
EYE = torch.eye(K, dtype=torch.float64)


def one_state(step: Step) -> Loop:
    """The loop of a step whose state is one matrix."""

    def loop(tokens: list[SimpleNamespace], state: tuple[Tensor, ...]) -> Any:
        (S,), outputs = state, []
        for t in tokens:
            S, o = step(S, t)
            outputs.append(o)
        return outputs, (S,)

    loop.__name__ = step.__name__
    return loop


def erase_then_delta(S: Tensor, t: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """arXiv:2606.26560: S = (I - beta k k^T) (I - gamma e e^T) D S + beta k v^T, its factors formed."""
    decay = torch.diag(t.g.exp().expand(K))
    S = (EYE - t.beta * outer(t.k, t.k)) @ (EYE - t.gamma * outer(t.e, t.e)) @ decay @ S + t.beta * outer(t.k, t.v)
    return S, t.q @ S


PAPERS: list[tuple[str, dict[str, Any], Loop]] = [
    ("erase_then_delta", {}, one_state(erase_then_delta)),
    ("erase_then_delta", {"transition": "scalar", "gamma": 1}, one_state(erase_then_delta)),
]


@pytest.mark.parametrize("split", [None, 6], ids=lambda split: f"split-{split}")
@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize(("name", "knobs", "loop"), PAPERS, ids=lambda part: "" if callable(part) else str(part))
def test_rule_equals_its_paper(name: str, knobs: dict[str, Any], loop: Loop, backend: Any, split: int | None) -> None:
    rule_equals(name, knobs, loop, backend, split)


SETTINGS = [rule for name in sorted({name for name, *_ in PAPERS}) for rule in deltalab.get_rule(name).variants()]


@pytest.mark.parametrize("rule", SETTINGS, ids=lambda rule: f"{rule.name} [{type(rule)().turned(rule)}]")
def test_step_says_the_same_as_scan(rule: UpdateRule) -> None:
    step_equals_scan(rule)
