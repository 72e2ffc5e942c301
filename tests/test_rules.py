"""The contract, once: every rule conforms, and its parallel form is its recurrence at any shape, in every variant.

That the recurrence is its paper's is in test_papers.py, test_nonlinear.py and test_ridge.py.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import deltalab
from deltalab.authoring.inputs import Inputs, draw, parts
from deltalab.authoring.rule_checks import check_rule
from deltalab.rule import UpdateRule

EXACT = 1e-9
RULES = sorted(deltalab.list_rules())
# Most settings of `algebra` are those of another rule, and test_algebra.py has the others.
VARIANTS = [variant for name in RULES if name != "algebra" for variant in deltalab.get_rule(name).variants()]


def label(rule: UpdateRule) -> str:
    return f"{rule.name} [{type(rule)().turned(rule)}]"


def assert_near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


def inputs(rule: UpdateRule, **sizes: int) -> Inputs:
    return draw(rule, **({"batch": 2, "length": 11, "heads": 2, "key_dim": 4, "value_dim": 3} | sizes))


class TestContract:
    """The law that every rule obeys."""

    @pytest.mark.parametrize("name", RULES)
    def test_conforms(self, name: str) -> None:
        assert [result.message for result in check_rule(deltalab.get_rule(name)) if not result.passed] == []

    @pytest.mark.parametrize("rule", VARIANTS, ids=label)
    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(
        length=st.integers(1, 40),
        chunk_size=st.integers(1, 48),
        batch=st.integers(1, 3),
        heads=st.integers(1, 3),
        key_dim=st.integers(1, 8),
        value_dim=st.integers(1, 8),
        past=st.integers(0, 3),
        seed=st.integers(0, 1000),
    )
    def test_forms_agree_at_any_shape(
        self,
        rule: UpdateRule,
        length: int,
        chunk_size: int,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        past: int,
        seed: int,
    ) -> None:
        """Outputs, states and all gradients; after a state that `past` tokens left, where there are any."""
        sizes = {"batch": batch, "heads": heads, "key_dim": key_dim, "value_dim": value_dim, "seed": seed}
        x = inputs(rule, length=past + length, **sizes)
        if past:
            first = x.span(0, past)
            x = x.span(past, state=deltalab.scan(rule, first.q, first.k, first.v, first.gates)[1])
        results = []
        for backend in ("recurrent", "chunked"):
            leaves = x.map(lambda part: part.detach().requires_grad_())
            o, state = deltalab.scan(
                rule, leaves.q, leaves.k, leaves.v, leaves.gates,
                state=leaves.state, backend=backend, chunk_size=chunk_size,
            )  # fmt: skip
            outputs = [o, *parts(state).values()]
            total = torch.stack([(y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in outputs]).sum()
            gradients = torch.autograd.grad(total, list(leaves.named().values()), materialize_grads=True)
            results.append([*outputs, *gradients])
        for want, got in zip(*results, strict=True):
            assert_near(got, want)
