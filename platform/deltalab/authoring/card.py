"""A card describes a rule on one page: its equation, knobs and gates, the size of its state and the cost of a token.

`python -m deltalab.authoring.card deltalab_rules > plugins/RULES.md` writes the cards of all rules of a package.
"""

import inspect
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cache, partial

import torch

from deltalab.authoring.inputs import draw
from deltalab.authoring.kernel_line import WIDTH, kernel_line
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.models.layer import RuleLayer, initialize
from deltalab.models.published import differences
from deltalab.ops.scan import operands
from deltalab.own_module import OwnModule
from deltalab.registry import get_rule, list_rules, rule_plugin
from deltalab.rule import UpdateRule
from deltalab.structure import Transition

WIDE = 32
"""The size of keys and values for which the card states the widths of the state."""
LONG = 64
"""The number of tokens that a layer reads before its state is measured. No rule has a window option that long."""

_PER = {
    "token": "token and head",
    "step": "step and head",
    "channel": "token, head and channel",
    "value_channel": "token, head and channel of v",
    "value_pair": "token, head and pair of channels of v",
    "slot": "token, head and slot",
    "head": "head",
    "head_channel": "head and channel",
    "head_value_channel": "head and channel of v",
    "head_value_pair": "head and pair of channels of v",
    "head_value_slot": "head, channel of v and slot",
    "head_value_square": "head, two channels of v and slot",
    "head_matrix": "head, channel of k and channel of v",
    "head_slot": "head and slot",
    "none": "head, fixed",
}


@dataclass(frozen=True)
class KnobCard:
    """A knob of a rule.

    Attributes:
        options: The options of the knob, the default first.
        setting: The option that the rule is set to.
    """

    name: str
    options: tuple[str, ...]
    setting: str


@dataclass(frozen=True)
class GateCard:
    """A gate of a rule.

    Attributes:
        symbol: The symbol of the gate in the equation.
        form: The function that computes the gate.
        per: What the gate has a separate value for, such as "token and head".
        low: The low end of the gate's range; None if the range has no low end.
        high: The high end of the gate's range; None if the range has no high end.
        parameters: The number of the gate's parameters, a formula as in `Card`.
    """

    symbol: str
    form: str
    per: str
    low: float | None
    high: float | None
    parameters: str

    @property
    def range(self) -> str:
        """The interval of the gate's values, such as `[0, inf)`."""
        low = "(-inf" if self.low is None else f"[{self.low:g}"
        return f"{low}, inf)" if self.high is None else f"{low}, {self.high:g}]"


@dataclass(frozen=True)
class Card:
    """The facts about a rule that `card` collects.

    Counts are formulas in the sizes K and V of a head's key and value.

    Attributes:
        paper: Where the rule was published; empty if it was not.
        equation: The first paragraph of the docstring of the rule's class.
        notes: The rest of that docstring.
        knobs: The knobs.
        gates: The gates.
        transition: The fields of the rule's `Transition`; None for a rule outside the algebra.
        second_state: Whether a second state learns from the error of the first.
        eigenvalues: The declared interval of the transition's eigenvalues; None if the rule declares none.
        state: The number of elements that a head keeps after many tokens.
        growth: The number of elements that the state gains; "0" for a recurrent rule.
        every: The number of tokens that bring this growth.
        cost: The multiply-adds of the recurrence for one head and token. Maps each part, such as "erase", and "all"
            to a formula. Empty for a rule outside the algebra.
        widths: The widths K' and V' of the state, if they differ from K and V; else empty.
        parameters: The number of parameters of all gates, a formula in the width d of the model, the number H of heads
            and K.
        kernels: Whether the rule has Triton kernels, and what hinders them, in one line.
        published: What `rule: NAME@published` says: `source`, `sets`, `lacks`, and what the default has that differs
            from it, `apart`. Empty if the rule has no such preset.
    """

    name: str
    paper: str
    equation: str
    notes: str
    knobs: tuple[KnobCard, ...]
    gates: tuple[GateCard, ...]
    transition: dict[str, str | int] | None
    second_state: bool
    eigenvalues: tuple[float, float] | None
    state: str
    growth: str
    every: int
    cost: dict[str, str]
    widths: str
    parameters: str
    kernels: str
    published: dict[str, str]

    @property
    def tokens(self) -> str:
        """Says how many tokens bring the growth of the state."""
        return "token" if self.every == 1 else f"{self.every} tokens"

    def to_json(self) -> str:
        """Returns the card as JSON."""
        return json.dumps(asdict(self), indent=2)

    def to_markdown(self) -> str:
        """Returns the card as a page in Markdown."""
        lines = [f"# {self.name}", "", *self._first(), "", "```text", self.equation, "```", "", self.notes, ""]
        if self.published:
            facts = {name: fact for name, fact in self.published.items() if name != "apart" and fact}
            lines += [f"## As published: `rule: {self.name}@published`", "", "| | |", "| --- | --- |"]
            lines += [*(f"| {name} | {fact} |" for name, fact in facts.items()), ""]
        if self.knobs:
            lines += ["## Knobs", "", "| knob | default | other options | set to |", "| --- " * 4 + "|"]
            lines += [
                f"| {knob.name} | `{knob.options[0]}` | {', '.join(f'`{option}`' for option in knob.options[1:])} | "
                f"{'the default' if knob.setting == knob.options[0] else f'`{knob.setting}`'} |"
                for knob in self.knobs
            ]
            lines += [""]
        if self.gates:
            lines += ["## Gates", "", "| gate | form | one value per | range | parameters |", "| --- " * 5 + "|"]
            lines += [
                f"| {gate.symbol} | `{gate.form}` | {gate.per} | {gate.range} | {gate.parameters} |"
                for gate in self.gates
            ]
            pairs = ", P pairs of channels of v" if " P" in self.parameters else ""
            sizes = f"width d, H heads of size K{pairs}"
            lines += ["", f"The gates of a layer have {self.parameters} parameters ({sizes}).", ""]
        lines += ["## Structure and cost", "", "| | |", "| --- | --- |"]
        lines += [f"| {name} | {fact} |" for name, fact in self._facts().items()]
        return "\n".join(lines) + "\n"

    def _first(self) -> list[str]:
        """Returns the line below the title: the paper, and in what the default differs from the published form."""
        if not self.published:
            return [_linked(self.paper)]
        apart = self.published["apart"]
        which = (
            f"The default differs from the published form in {apart}."
            if apart
            else ("The default is the published form.")
        )
        return [f"{_linked(self.paper)}. {which}"]

    def _facts(self) -> dict[str, str]:
        """Returns the rows of the table of structure and cost."""
        facts = {"transition": "none: the rule has its own `mix`, or passes of the algebra"}
        if self.transition is not None:
            defaults = {"name": self.transition["name"], "output": "after"}
            fields = (f"{field} {value}" for field, value in self.transition.items() if defaults.get(field) != value)
            facts = {"transition": f"`{self.transition['name']}`: {', '.join(fields)}"}
        if self.second_state:
            facts["second state"] = "learns from the error of the first, with the same transition"
        if self.eigenvalues is not None:
            facts["eigenvalues"] = f"[{self.eigenvalues[0]:g}, {self.eigenvalues[1]:g}]"
        grows = f"grows by {self.growth} elements with every {self.tokens}"
        facts["state of a head"] = f"{self.state} elements" if self.growth == "0" else grows
        if self.cost:
            parts = ", ".join(f"{part} {count}" for part, count in self.cost.items() if part != "all")
            facts["multiply-adds per head and token"] = f"{self.cost['all']} ({parts})"
        if self.widths:
            facts["widths of the state"] = self.widths
        facts[f"Triton kernels at K = V = {WIDTH}, bf16"] = self.kernels
        return facts


def card(rule: str | UpdateRule) -> Card:
    """Returns the card of a rule.

    Args:
        rule: A rule with its settings, or the name of a rule.

    Raises:
        InputError: No rule has this name, or it is that of a module.

    Examples:
        >>> comba = card("comba")
        >>> comba.state, comba.growth, comba.cost["all"]
        ('K V', '0', '4 K V + 2 V')
    """
    if isinstance(rule, str):
        rule = get_rule(rule)
    if isinstance(rule, OwnModule):
        raise InputError(f"'{rule.name}' is a module, which declares no card: deltalab module check {rule.name}")
    elements = cache(partial(_state, rule))
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
                per=_PER[gate.per],
                low=gate.low if math.isfinite(gate.low) else None,
                high=gate.high if math.isfinite(gate.high) else None,
                parameters=f"those of {gate.of}" if gate.of else _sum(_parameters(gate, rule.steps)),
            )
            for symbol, gate in rule.gates.items()
        ),
        transition=None if rule.transition is None else asdict(rule.transition),
        second_state=rule.second_state,
        eigenvalues=_eigenvalues(rule),
        state=_elements(rule, elements),
        growth=_formula(lambda k, v: elements(k, v)[1], "K", "V"),
        every=elements(8, 8)[2],
        cost={} if rule.transition is None else _cost(rule, rule.transition),
        widths="" if rule.transition is None else _widths(rule),
        parameters=_sum(_total(_parameters(gate, rule.steps) for gate in rule.gates.values() if not gate.of)),
        kernels=kernel_line(rule),
        published=_published(type(rule)),
    )


def catalogue(package: str) -> str:
    """Returns the cards of all rules of a package as one page."""
    cards = [card(name) for name in list_rules() if rule_plugin(name).kind.__module__.startswith(f"{package}.")]
    lines = [
        f"# The rules of `{package}`",
        "",
        f"Written by `python -m deltalab.authoring.card {package} > plugins/RULES.md`; a test compares the two.",
        "K and V are the sizes of a head's key and value.",
        "",
        "| rule | elements of a head's state | multiply-adds per head and token | parameters of the gates |",
        "| --- " * 4 + "|",
        *(
            f"| [{page.name}](#{page.name}) | "
            f"{page.state if page.growth == '0' else f'{page.growth} per {page.tokens}'} | "
            f"{page.cost.get('all', 'its own')} | {page.parameters} |"
            for page in cards
        ),
    ]
    pages = (re.sub(r"^#", "##", page.to_markdown(), flags=re.M) for page in cards)
    return "\n".join([*lines, "", *pages])


def _published(kind: type[UpdateRule]) -> dict[str, str]:
    """Returns what a card says of a rule's preset; nothing for a rule without one."""
    if not kind.published:
        return {}
    given = {"rule": get_rule(kind.name).spec(), "model": {"vocab_size": 1, "d_model": 64}}
    apart = [name.removeprefix("model.") for name in differences(given) or ()]
    settings = {**kind.published.get("knobs", {}), **kind.published.get("layer", {})}
    return {
        "source": kind.published["source"],
        "sets": ", ".join(f"`{name}: {json.dumps(value)}`".replace('"', "") for name, value in settings.items()),
        "lacks": kind.published.get("lacks", ""),
        "apart": ", ".join(f"`{name}`" for name in apart),
    }


def _doc(kind: type[UpdateRule]) -> str:
    """Returns the docstring of a rule's class."""
    doc = inspect.getdoc(kind) or ""
    # A dataclass without a docstring gets its signature as its docstring.
    return "the class has no docstring" if doc.startswith(f"{kind.__name__}(") else doc


def _linked(paper: str) -> str:
    """Returns the name of a paper in Markdown, linked if it is on arXiv."""
    number = paper.removeprefix("arXiv:")
    return paper if number == paper else f"[{paper}](https://arxiv.org/abs/{number})"


def _eigenvalues(rule: UpdateRule) -> tuple[float, float] | None:
    """Returns the declared interval of eigenvalues, or None if the rule declares none."""
    try:
        return rule.eigenvalues
    except NotImplementedError:
        return None


def _cost(rule: UpdateRule, transition: Transition) -> dict[str, str]:
    """Returns the multiply-adds of each term of the recurrence for a token, over all steps and states.

    The cost of computing the operands does not count.
    """
    # Each part costs the first number times the size of the state, plus the second times the width of its values.
    step = {"decay": (1, 0)} if transition.decay != "none" else {}
    if transition.low_rank != "none":
        # A tied erase is written together with the value; a free erase is written along its own direction.
        step["erase"] = (1, 1) if transition.low_rank == "tied" else (2, 0)
    step["write"] = (1, 0)
    times = transition.steps * rule.states
    parts = {part: (times * size, times * width) for part, (size, width) in step.items()}
    if rule.second_state:
        parts["fit"] = (1, 1)
    parts["read"] = (rule.states, 1)
    if transition.output == "before" and _has_bonus(rule):
        parts["bonus"] = (0, 1)
    parts["all"] = (sum(size for size, _ in parts.values()), sum(width for _, width in parts.values()))

    keys, values = _names(rule)
    return {part: _sum({f"{keys} {values}": size, values: width}) for part, (size, width) in parts.items()}


def _has_bonus(rule: UpdateRule) -> bool:
    """Returns whether the rule has a bonus: an output that reads the state before the write also reads the token."""
    x = draw(rule, batch=1, length=1, heads=1, key_dim=2, value_dim=2)
    return operands(rule, x.q, x.k, x.v, x.gates).bonus is not None


def _names(rule: UpdateRule) -> tuple[str, str]:
    """Returns the names of the state's widths: K or K', and V or V'. A prime marks a width that differs from K or V."""
    return "K" + "'" * (rule.key_width(WIDE) != WIDE), "V" + "'" * (rule.value_width(WIDE) != WIDE)


def _elements(rule: UpdateRule, elements: Callable[[int, int], tuple[int, int, int]]) -> str:
    """Returns a formula for the number of elements that a head keeps: those of its states and those of its carry."""
    if rule.transition is None:
        return _formula(lambda k, v: elements(k, v)[0], "K", "V")
    carried = _formula(lambda k, v: elements(k, v)[0] - rule.states * rule.key_width(k) * rule.value_width(v), "K", "V")
    states = _sum({" ".join(_names(rule)): rule.states})
    return states if carried == "0" else f"{states} + {carried}"


def _widths(rule: UpdateRule) -> str:
    """Returns the widths of the state for keys and values of width `WIDE`; empty if the state has this width, too."""
    widths = {"K'": rule.key_width(WIDE), "V'": rule.value_width(WIDE)}
    text = " and ".join(f"{name} = {width}" for name, width in widths.items() if width != WIDE)
    return text and f"{text} where K = V = {WIDE}"


def _state(rule: UpdateRule, key_dim: int, value_dim: int) -> tuple[int, int, int]:
    """Returns how many elements a head keeps in a layer's cache after `LONG` tokens, how many it gains, and by when.

    The gain is that of the first later token that brings one, 0 if `LONG` more tokens bring none.

    A rule that takes K = V alone is measured with V for both, so that its formulas have no K.
    """
    layer = RuleLayer(rule, 8, 1, key_dim=key_dim, value_dim=value_dim, conv=0)
    initialize(layer, 0)
    try:
        with torch.no_grad():
            _, before = layer.advance(torch.ones(1, LONG, 8))
            _, last = layer.advance(torch.ones(1, LONG, 8), before)
            after, tokens = before, 0
            while after.numel() == before.numel() != last.numel():
                _, after = layer.advance(torch.ones(1, 1, 8), after)
                tokens += 1
    except InputError:
        if key_dim == value_dim:
            raise
        return _state(rule, value_dim, value_dim)
    return before.numel(), after.numel() - before.numel(), max(tokens, 1)


def _parameters(gate: Gate, steps: int) -> dict[str, int]:
    """Returns the number of a gate's parameters as terms of a sum.

    They are the weights of the projection from the width d, and the parameters that have the gate's own shape.
    """
    shapes = {
        "channel": "H K",
        "value_channel": "H V",
        "value_pair": "H P",
        "value_slot": "H V",
        "value_square": "H V V",
        "matrix": "H K V",
    }
    shape = shapes.get(gate.per.removeprefix("head_"), "H")
    slots = gate.slots or 1
    constants = {"H": len(gate.by_head)} if gate.by_head else {}
    constants[shape] = constants.get(shape, 0) + slots * (len(gate.parameters) - len(gate.by_head))
    if not gate.projected:
        return constants
    outputs = slots * (steps if gate.per == "step" else 1)
    if gate.rank is None:
        inputs = "d" if gate.one_projection else f"d {shape}"
        return {inputs: outputs, **constants}
    if gate.rank == 0:
        return _total([{"d V": 1, f"{shape} V": outputs}, constants])
    return _total([{"d": gate.rank, shape: outputs * gate.rank}, constants])


def _formula(count: Callable[[int, int], int], x: str, y: str) -> str:
    """Returns `count` as text, a quadratic formula in two sizes.

    The formula is fitted to six values of `count` and checked on a seventh. If it is wrong there, the text has the
    seventh value instead.

    >>> _formula(lambda k, v: k * v + 2 * v, "K", "V")
    'K V + 2 V'
    >>> _formula(lambda k, v: 2 * k * (k + v) + 1, "K", "V")
    '2 K K + 2 K V + 1'
    >>> _formula(lambda k, v: k // 2 * v, "K", "V")
    '1/2 K V'
    >>> _formula(lambda k, v: k * k * v, "K", "V")
    '32,768 where K = 32 and V = 32'
    """
    s = 8
    f = {(i, j): count(i * s, j * s) for i, j in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2))}
    xx = Fraction(f[3, 1] - 2 * f[2, 1] + f[1, 1], 2 * s * s)
    yy = Fraction(f[1, 3] - 2 * f[1, 2] + f[1, 1], 2 * s * s)
    xy = Fraction(f[2, 2] - f[2, 1] - f[1, 2] + f[1, 1], s * s)
    x1 = Fraction(f[2, 1] - f[1, 1], s) - s * (3 * xx + xy)
    y1 = Fraction(f[1, 2] - f[1, 1], s) - s * (3 * yy + xy)
    rest = f[1, 1] - s * s * (xx + xy + yy) - s * (x1 + y1)
    if xx * 32 * 32 + xy * 32 * 24 + yy * 24 * 24 + x1 * 32 + y1 * 24 + rest != count(32, 24):
        return f"{count(32, 32):,} where {x} = 32 and {y} = 32"
    return _sum({f"{x} {x}": xx, f"{x} {y}": xy, f"{y} {y}": yy, x: x1, y: y1, "": rest})


def _total(sums: Iterable[dict[str, int]]) -> dict[str, int]:
    """Adds up several sums of terms. A sum maps each of its terms to a factor."""
    total: Counter[str] = Counter()
    for terms in sums:
        total.update(terms)
    return dict(total)


def _sum(terms: Mapping[str, int | Fraction]) -> str:
    """Returns a sum of terms as text."""
    parts = [f"{'' if n == 1 and term else n} {term}".strip() for term, n in terms.items() if n]
    return " + ".join(parts) or "0"


if __name__ == "__main__":
    print(catalogue(sys.argv[1]), end="")
