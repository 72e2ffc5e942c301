"""A card agrees with the tensors and the arithmetic of its rule."""

import json
import math
import re
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from tests.support.folders import ROOT
from torch.utils._python_dispatch import TorchDispatchMode

from deltalab import get_rule, list_rules
from deltalab.authoring.card import card, catalogue
from deltalab.authoring.inputs import draw
from deltalab.errors import InputError
from deltalab.models.layer import RuleLayer
from deltalab.ops import reference
from deltalab.ops.scan import operands
from deltalab.rule import Operands, UpdateRule
from deltalab.structure import HOUSEHOLDER, Transition

torch.set_num_threads(1)
VARIANTS = [variant for name in list_rules() for variant in get_rule(name).variants()]


def number(formula: str, **sizes: int) -> Fraction | int:
    """The value of `2 d H + 1/2 H`."""
    return sum(
        math.prod(Fraction(factor) if factor[0].isdigit() else sizes[factor] for factor in term.split())
        for term in formula.split(" + ")
    )


class MultiplyAdds(TorchDispatchMode):
    """Counts the multiplications of elementwise and matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mul:
            self.count += out.numel()
        elif func.overloadpacket is torch.ops.aten.bmm:
            self.count += out.numel() * args[0].shape[-1]
        return out


@pytest.mark.slow
@pytest.mark.parametrize("rule", VARIANTS, ids=lambda rule: f"{rule.name}-{get_rule(rule.name).turned(rule)}")
def test_sizes_and_costs_are_those_of_the_tensors(rule):
    found = card(rule)
    d, heads, k, v = 10, 3, 5, 8
    try:
        RuleLayer(rule, d, heads, key_dim=k, value_dim=v).advance(torch.randn(1, 1, d))
    except InputError:  # the rule takes K = V or an even K alone
        k = v
    pairs = v // 2
    sizes = {"K": k, "V": v, "K'": rule.key_width(k), "V'": rule.value_width(v)}
    layer = RuleLayer(rule, d, heads, key_dim=k, value_dim=v, conv=0)
    vectors = [] if layer.vectors is None else layer.vectors.named_parameters()
    parameters = [*layer.gates.named_parameters(), *vectors]
    assert number(found.parameters, d=d, H=heads, K=k, V=v, P=pairs) == sum(p.numel() for _, p in parameters)
    for gate in found.gates:
        own = [p.numel() for name, p in parameters if name.split(".")[1] == gate.symbol]
        assert gate.parameters.startswith("those of") or number(
            gate.parameters, d=d, H=heads, K=k, V=v, P=pairs
        ) == sum(own)

    def held(tokens: int) -> int:
        return layer.advance(torch.randn(1, tokens, d))[1].numel()

    most = held(200)
    assert most - held(200 - found.every) == heads * number(found.growth, K=k, V=v)
    if found.growth == "0":
        assert most == heads * number(found.state, **sizes)
    if rule.transition is None:
        assert found.cost == {}
        return
    x = draw(rule, batch=1, length=1, heads=1, key_dim=k, value_dim=v)
    given, state = operands(rule, x.q, x.k, x.v, x.gates).resolved(), rule.start(x.k, x.v)[: rule.states]
    with MultiplyAdds() as counted:
        reference.recurrent(rule.transition, given, scale=0.5, state=state)
    assert number(found.cost["all"], **sizes) == counted.count
    assert counted.count == sum(number(count, **sizes) for part, count in found.cost.items() if part != "all")


def test_a_growing_state_is_told_from_a_windows():
    assert card("attention").growth == "K + V"
    assert card(get_rule("attention", window=8)).state == "7 K + 7 V"
    assert "grows by K + V elements with every token" in card("attention").to_markdown()
    assert "7 K + 7 V elements" in card(get_rule("attention", window=8)).to_markdown()
    assert "grows by K V + K elements with every 4 tokens" in card(get_rule("memory_caching", segment=4)).to_markdown()


def test_a_card_shows_the_settings_of_knobs_and_gates():
    found = card(get_rule("comba", d=0, transition="iplr"))
    knobs = {knob.name: knob for knob in found.knobs}
    assert knobs["d"].options == ("head(init=0.02)", "head(init=1)", "const(value=0)")
    assert (knobs["d"].setting, knobs["b"].setting) == ("const(value=0)", knobs["b"].options[0])
    gates = {gate.symbol: gate for gate in found.gates}
    assert [gates[symbol].range for symbol in ("g", "b", "d")] == ["(-inf, 0]", "[0, 1]", "[0, 0]"]
    assert [gates[symbol].per for symbol in ("g", "b", "d")] == ["token and head", "head", "head, fixed"]
    assert found.transition == {
        "name": "iplr", "decay": "scalar", "low_rank": "tied", "reads": "decayed_state", "steps": 1,
        "output": "after",
    }  # fmt: skip
    assert found.eigenvalues == (-1.0, 1.0)
    assert card("mamba2").gates[1].parameters == "those of g"


@pytest.mark.parametrize("name", list_rules())
def test_json_and_markdown_are_complete(name):
    found = card(name)

    def no_constant(value: str):
        raise AssertionError(f"{value} is not JSON")

    data = json.loads(found.to_json(), parse_constant=no_constant)
    assert data["name"] == name
    assert len(data["gates"]) == len(get_rule(name).gates)
    text = found.to_markdown()
    number = found.paper.removeprefix("arXiv:")
    link = found.paper if number == found.paper else f"[{found.paper}](https://arxiv.org/abs/{number})"
    for said in (found.equation, found.notes, link):
        assert said in text
    for knob in found.knobs:
        assert all(f"`{option}`" in text for option in knob.options)
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.M)
    assert tables
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_the_card_of_a_rule_without_docstring_and_eigenvalues():
    @dataclass(frozen=True, kw_only=True)
    class Mute(UpdateRule):
        name = "mute"
        transition: Transition = HOUSEHOLDER

        def operands(self, q, k, v):
            return Operands(r=q, k=k, u=v, e=v.new_ones(1))

    found = card(Mute())
    assert found.equation == "the class has no docstring"
    assert (found.paper, found.eigenvalues, found.knobs, found.parameters) == ("", None, (), "0")
    assert "eigenvalues" not in found.to_markdown()


def test_a_state_that_is_no_bilinear_form_is_counted():
    @dataclass(frozen=True, kw_only=True)
    class Squares(UpdateRule):
        """A state that sums (k k^T) v^T and is never read."""

        name = "squares"

        def initial_state(self, k, v):
            return v.new_zeros(v.shape[0], v.shape[2], k.shape[-1] ** 2, v.shape[-1])

        def mix(self, q, k, v, gates, *, scale, state):
            return v, state + torch.einsum("bthi,bthj,bthv->bhijv", k, k, v).flatten(2, 3)

    assert card(Squares()).state == "32,768 where K = 32 and V = 32"


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (get_rule("rla"), ["| state of a head | 2 K V elements |", "second state", "fit K V + V, read 2 K V + V"]),
        (
            get_rule("delta_product", n_h=3),
            ["erase 3 K V + 3 V, write 3 K V, read K V + V", "step and head", "| 3 d H |"],
        ),
        (get_rule("rwkv7"), ["low_rank free", "erase 2 K V, write K V", "16 d + 17 H K", "token, head and channel"]),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_second_states_steps_and_channels_are_counted(rule, said):
    text = card(rule).to_markdown()
    for part in said:
        assert part in text


@pytest.mark.slow
def test_the_written_cards_are_up_to_date():
    assert (ROOT / "plugins" / "RULES.md").read_text(encoding="utf-8") == catalogue("deltalab_rules")


def test_an_unknown_rule_is_refused():
    with pytest.raises(InputError, match="did you mean 'comba'"):
        card("comb")


def test_a_card_says_what_the_preset_sets_and_in_what_the_default_differs():
    page = card("mamba2").to_markdown().splitlines()
    assert page[2].endswith(
        "The default differs from the published form in `qk_heads`, `output_norm`, `output_gate`, `conv_bias`, `skip`."
    )
    assert "## As published: `rule: mamba2@published`" in page
    assert "| source | mamba_ssm/modules/mamba2.py of state-spaces/mamba |" in page
    assert any(line.startswith("| sets | ") and "`skip: true`" in line for line in page)
    assert "tanh inside the decay's projection" in card("rwkv7").published["lacks"]
    assert card("sgla").published == {}
