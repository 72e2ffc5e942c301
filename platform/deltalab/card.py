"""A rule on one page: its equation, its knobs and gates, and what its state and each of its tokens cost."""

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial

import torch

from deltalab.layer import Gates, RuleLayer, initialize
from deltalab.registry import get_rule
from deltalab.rule import UpdateRule
from deltalab.structure import Transition

LONG = 64
"""Tokens after which a state is measured: more than a window that a rule lists as an option."""


@dataclass(frozen=True)
class KnobCard:
    """A knob: its options, the default first, and what it is set to."""

    name: str
    options: tuple[str, ...]
    setting: str


@dataclass(frozen=True)
class GateCard:
    """A gate as set. low, high: its range, None where unbounded. parameters: their number for width d and H heads."""

    symbol: str
    form: str
    per: str
    low: float | None
    high: float | None
    parameters: str

    @property
    def range(self) -> str:
        low = "(-inf" if self.low is None else f"[{self.low:g}"
        return f"{low}, inf)" if self.high is None else f"{low}, {self.high:g}]"


@dataclass(frozen=True)
class Card:
    """What `card` found out about a rule.

    equation, notes: the first paragraph of the class's docstring, and the rest.
    transition: the fields of its `Transition`; None outside the algebra.
    eigenvalues: the declared interval; None where the rule declares none.
    state: numbers that one head holds after many tokens; growth: how many more with every token, "0" for a
        recurrent rule. cost: multiply-adds of the recurrence per head and token, part by part and in "all"; empty
        outside the algebra. All of them in the key size K and the value size V of a head.
    parameters: of all gates together, for width d and H heads.
    """

    name: str
    paper: str
    equation: str
    notes: str
    knobs: tuple[KnobCard, ...]
    gates: tuple[GateCard, ...]
    transition: dict[str, str] | None
    eigenvalues: tuple[float, float] | None
    state: str
    growth: str
    cost: dict[str, str]
    parameters: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def to_markdown(self) -> str:
        lines = [f"# {self.name}", "", _linked(self.paper), "", "```text", self.equation, "```", "", self.notes, ""]
        if self.knobs:
            lines += ["## Knobs", "", "| knob | default | other options | set to |", "| --- " * 4 + "|"]
            lines += [
                f"| {knob.name} | `{knob.options[0]}` | {', '.join(f'`{option}`' for option in knob.options[1:])} | "
                f"{'the default' if knob.setting == knob.options[0] else f'`{knob.setting}`'} |"
                for knob in self.knobs
            ]
            lines += [""]
        if self.gates:
            lines += ["## Gates", "", "| gate | form | a value for each | range | parameters |", "| --- " * 5 + "|"]
            lines += [
                f"| {gate.symbol} | `{gate.form}` | {gate.per} | {gate.range} | {gate.parameters} |"
                for gate in self.gates
            ]
            lines += ["", f"All gates of a layer: {self.parameters} parameters, for width d and H heads.", ""]
        lines += ["## Structure and cost", "", "| | |", "| --- | --- |"]
        lines += [f"| {what} | {said} |" for what, said in self._facts().items()]
        return "\n".join(lines) + "\n"

    def _facts(self) -> dict[str, str]:
        facts = {"transition": "outside the algebra: the rule brings its own `mix`"}
        if self.transition is not None:
            said = (f"{field} {value}" for field, value in self.transition.items() if field != "name")
            facts = {"transition": f"`{self.transition['name']}`: {', '.join(said)}"}
        if self.eigenvalues is not None:
            facts["eigenvalues"] = f"[{self.eigenvalues[0]:g}, {self.eigenvalues[1]:g}]"
        facts["state of a head"] = (
            f"{self.state} numbers" if self.growth == "0" else f"grows by {self.growth} numbers with every token"
        )
        if self.cost:
            parts = ", ".join(f"{part} {count}" for part, count in self.cost.items() if part != "all")
            facts["multiply-adds per head and token"] = f"{self.cost['all']} ({parts})"
        return facts


def card(rule: str | UpdateRule) -> Card:
    """The card of a rule as it is set, or of a rule by name.

    Raises `InputError` for a name that no plugin has.

    >>> comba = card("comba")
    >>> comba.state, comba.growth, comba.cost["all"]
    ('K V', '0', '4 K V + 2 V')
    """
    if isinstance(rule, str):
        rule = get_rule(rule)
    held = cache(partial(_state, rule))
    equation, _, notes = _doc(type(rule)).partition("\n\n")
    return Card(
        name=rule.name,
        paper=rule.paper,
        equation=equation,
        notes=notes,
        knobs=tuple(
            KnobCard(name, tuple(map(str, options)), str(getattr(rule, name)))
            for name, options in rule.options().items()
        ),
        gates=tuple(
            GateCard(
                symbol=symbol,
                form=str(gate),
                per={"token": "token and head", "head": "head", "none": "nothing: a constant"}[gate.per],
                low=gate.low if math.isfinite(gate.low) else None,
                high=gate.high if math.isfinite(gate.high) else None,
                parameters=f"those of {gate.of}" if gate.of else _parameters(rule, [symbol]),
            )
            for symbol, gate in rule.gates.items()
        ),
        transition=None if rule.transition is None else asdict(rule.transition),
        eigenvalues=_eigenvalues(rule),
        state=_formula(lambda k, v: held(k, v)[0], "K", "V"),
        growth=_formula(lambda k, v: held(k, v)[1] - held(k, v)[0], "K", "V"),
        cost={} if rule.transition is None else _cost(rule.transition),
        parameters=_parameters(rule, list(rule.gates)),
    )


def _doc(kind: type[UpdateRule]) -> str:
    doc = inspect.getdoc(kind) or ""
    # A dataclass without a docstring gets its signature for one.
    return "the class has no docstring" if doc.startswith(f"{kind.__name__}(") else doc


def _linked(paper: str) -> str:
    number = paper.removeprefix("arXiv:")
    return paper if number == paper else f"[{paper}](https://arxiv.org/abs/{number})"


def _eigenvalues(rule: UpdateRule) -> tuple[float, float] | None:
    try:
        return rule.eigenvalues
    except NotImplementedError:
        return None


def _cost(transition: Transition) -> dict[str, str]:
    """What each term of the recurrence multiplies, once for every token."""
    parts = {"decay": (1, 0)} if transition.decay == "scalar" else {}
    if transition.low_rank == "tied":
        parts["erase"] = (1, 1)
    parts |= {"write": (1, 0), "read": (1, 1)}
    parts["all"] = (sum(kv for kv, _ in parts.values()), sum(v for _, v in parts.values()))
    return {part: _sum({"K V": kv, "V": v}) for part, (kv, v) in parts.items()}


def _state(rule: UpdateRule, key_dim: int, value_dim: int) -> tuple[int, int]:
    """Numbers that one head holds after `LONG` tokens and after one more, counted on what a layer hands on."""
    layer = RuleLayer(rule, 8, 1, key_dim=key_dim, value_dim=value_dim, conv=0)
    initialize(layer, 0)
    with torch.no_grad():
        _, before = layer(torch.ones(1, LONG, 8))
        _, after = layer(torch.ones(1, 1, 8), before)
    return before.numel(), after.numel()


def _parameters(rule: UpdateRule, symbols: list[str]) -> str:
    chosen = {symbol: rule.gates[symbol] for symbol in symbols}
    return _formula(lambda d, h: sum(p.numel() for p in Gates(chosen, d, h).parameters()), "d", "H")


def _formula(count: Callable[[int, int], int], x: str, y: str) -> str:
    """A count as a formula in two sizes: a x y + b x + c y + e, fitted to four counts and held to a fifth.

    >>> _formula(lambda k, v: k * v + 2 * v, "K", "V")
    'K V + 2 V'
    >>> _formula(lambda k, v: k * k * v, "K", "V")
    '32,768 where K = 32 and V = 32'
    """
    small, large, gap = 8, 16, 8
    base, more_x, more_y = count(small, small), count(large, small), count(small, large)
    a = (count(large, large) - more_x - more_y + base) // gap**2
    b = (more_x - base) // gap - a * small
    c = (more_y - base) // gap - a * small
    e = base - a * small**2 - (b + c) * small
    if a * 32 * 24 + b * 32 + c * 24 + e != count(32, 24):
        return f"{count(32, 32):,} where {x} = 32 and {y} = 32"
    return _sum({f"{x} {y}": a, x: b, y: c, "": e})


def _sum(terms: dict[str, int]) -> str:
    said = [f"{'' if n == 1 and term else n} {term}".strip() for term, n in terms.items() if n]
    return " + ".join(said) or "0"
