"""The rule `algebra`: every published rule of the algebra is one of its points, and its other points are sound."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import deltalab
from deltalab.authoring.inputs import Inputs, draw, parts
from deltalab.models.layer import RuleLayer, initialize
from deltalab.rule import UpdateRule
from deltalab_rules.algebra import POINTS

EXACT = 1e-10
SYMBOLS: Mapping[str, Mapping[str, str]] = {
    "gated_deltanet2": {"w": "value"},
    "rwkv6": {"u": "bonus"},
    "rwkv7": {"a": "b"},
}
"""Where a published rule has another symbol for a gate."""
PARAMETERS = {"dt.dt_bias": "dt.bias"}
"""Where a published gate has another name for a parameter."""


def near(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=EXACT, atol=EXACT, msg=lambda text, name=name: f"{name}: {text}"
        )


def evaluated(rule: UpdateRule, x: Inputs, backend: Any) -> dict[str, Tensor]:
    """The output, the states, and the gradients of all inputs."""
    x = x.map(lambda part: part.detach().requires_grad_())
    o, state = deltalab.scan(rule, x.q, x.k, x.v, x.gates, state=x.state, backend=backend, chunk_size=4)
    results = {"o": o, **parts(state)}
    total = torch.stack([(y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in results.values()]).sum()
    given = x.named()
    found = torch.autograd.grad(total, list(given.values()), materialize_grads=True)
    return results | {f"gradient of {name}": y for name, y in zip(given, found, strict=True)}


def renamed(name: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {SYMBOLS.get(name, {}).get(symbol, symbol): value for symbol, value in values.items()}


class TestPoints:
    @pytest.mark.parametrize("backend", ["recurrent", "chunked"])
    # The beta of metala is a gate that shares g's projection: only a layer makes it 1 - alpha, as it is here.
    @pytest.mark.parametrize("name", [name for name in POINTS if name != "metala"])
    def test_is_its_published_rule_on_drawn_inputs(self, name: str, backend: str) -> None:
        """Outputs, states and gradients, after a state that other tokens left."""
        theirs, ours = deltalab.get_rule(name), deltalab.get_rule("algebra", **POINTS[name])
        x = draw(theirs, batch=2, length=11, heads=2, key_dim=4, value_dim=3)
        first = x.span(0, 5)
        x = x.span(5, state=deltalab.scan(theirs, first.q, first.k, first.v, first.gates)[1])
        y = Inputs(x.q, x.k, x.v, renamed(name, x.gates), x.state)
        want, got = evaluated(theirs, x, backend), evaluated(ours, y, backend)
        symbols = {f"gradient of {old}": f"gradient of {new}" for old, new in SYMBOLS.get(name, {}).items()}
        near(got, {symbols.get(key, key): value for key, value in want.items()})

    @pytest.mark.parametrize("name", POINTS)
    def test_is_its_published_rule_as_a_layer(self, name: str) -> None:
        """The same parameters give the same outputs, states and gradients, whatever gates share a projection."""
        theirs, ours = (
            RuleLayer(rule, 8, 2, key_dim=4, value_dim=3).double()
            for rule in (deltalab.get_rule(name), deltalab.get_rule("algebra", **POINTS[name]))
        )
        initialize(theirs, seed=0)
        names = {n: _ours(name, n) for n, _ in theirs.named_parameters()}
        ours.load_state_dict({names[n]: value for n, value in theirs.state_dict().items()})
        results = []
        for layer in (theirs, ours):
            x = torch.randn(
                2, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
            )
            y, cache = layer.advance(x)
            found = {"y": y, **{f"state[{i}]": part for i, part in enumerate(cache.state)}}
            weights = dict(layer.named_parameters())
            gradients = torch.autograd.grad(y.square().sum(), [x, *weights.values()])
            results.append(found | dict(zip(["x", *weights], gradients, strict=True)))
        near(results[1], {names.get(key, key): value for key, value in results[0].items()})


def _ours(rule: str, parameter: str) -> str:
    """The name that a parameter of a published rule's layer has in that of its point."""
    for old, new in PARAMETERS.items():
        parameter = parameter.replace(old, new)
    parts = parameter.split(".")
    if parts[0] == "gates":
        parts[2] = SYMBOLS.get(rule, {}).get(parts[2], parts[2])
    return ".".join(parts)
