"""The contract, once: every rule conforms, and its parallel form is its recurrence at any shape, in every variant.

That the recurrence is its paper's is in test_papers.py, test_nonlinear.py and test_ridge.py.
"""

import dataclasses
import random

import pytest
import torch
from torch import Tensor

import deltalab
from deltalab.authoring.inputs import Inputs, draw, parts
from deltalab.authoring.rule_checks import rule_suite
from deltalab.authoring.rule_checks.rule_runs import combinations
from deltalab.authoring.rule_checks.rule_suite import check_rule
from deltalab.errors import InputError
from deltalab.rule import Option, UpdateRule

EXACT = 1e-9
RULES = sorted(deltalab.list_rules())
VARIANTS = [variant for name in RULES for variant in deltalab.get_rule(name).variants()]
SHAPES = 3
MOST = {"batch": 3, "heads": 3, "key_dim": 8, "value_dim": 8, "seed": 1000}


def label(rule: UpdateRule) -> str:
    return f"{rule.name} [{type(rule)().turned(rule)}]"


def each_option(rule: UpdateRule) -> list[UpdateRule]:
    """The rule, and few combinations that have each of its options, with several knobs turned at once."""

    def options(setting: UpdateRule) -> set[tuple[str, Option]]:
        return {(name, getattr(setting, name)) for name in rule.options()}

    settings, choices = [rule], combinations(rule)
    missing = set().union(*map(options, choices)) - options(rule)
    while missing:
        settings.append(max(choices, key=lambda setting: len(options(setting) & missing)))
        missing -= options(settings[-1])
    return settings


def assert_near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


def inputs(rule: UpdateRule, **sizes: int) -> Inputs:
    return draw(rule, **({"batch": 2, "length": 11, "heads": 2, "key_dim": 4, "value_dim": 3} | sizes))


def assert_forms_agree(rule: UpdateRule, length: int, chunk_size: int, past: int, sizes: dict[str, int]) -> None:
    """Outputs, states and all gradients; after a state that `past` tokens left, where there are any."""
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


class TestContract:
    """The law that every rule obeys."""

    @pytest.mark.slow(keep="comba")
    @pytest.mark.parametrize("name", RULES)
    def test_conforms(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each option passes each check, but all combinations of options pass `knobs together` alone.

        All checks tried them before the rule's file was listed in checked.json, to which test_verdict.py holds it.
        """
        checks = [
            dataclasses.replace(check, settings=each_option) if check.settings is combinations else check
            for check in rule_suite.CHECKS
        ]
        monkeypatch.setattr(rule_suite, "CHECKS", checks)
        monkeypatch.setattr(rule_suite, "MOST_SECONDS", 1)
        quick = (
            name == "algebra"
        )  # its 402 combinations take minutes; test_algebra.py has its points and some of the rest
        assert [
            result.message for result in check_rule(deltalab.get_rule(name), quick=quick) if not result.passed
        ] == []

    @pytest.mark.slow(keep="comba")
    @pytest.mark.parametrize("rule", VARIANTS, ids=label)
    def test_forms_agree_at_any_shape(self, rule: UpdateRule) -> None:
        """Each setting has shapes of its own. Those of one token and of whole chunks are in the check `backends`."""
        chance = random.Random(label(rule))
        for _ in range(SHAPES):
            length, chunk_size, past = chance.randint(1, 40), chance.randint(1, 48), chance.randint(0, 3)
            sizes = {name: chance.randint(1, most) for name, most in MOST.items()}
            print(f"{length=}, {chunk_size=}, {past=}, {sizes}")
            try:
                assert_forms_agree(rule, length, chunk_size, past, sizes)
            except InputError:  # the rule takes K = V or an even K alone
                width = 2 * sizes["key_dim"]
                assert_forms_agree(rule, length, chunk_size, past, {**sizes, "key_dim": width, "value_dim": width})
