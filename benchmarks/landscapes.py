"""Landscapes of scores that are computed, not trained, on which `search.py` measures a search.

A landscape has layouts, which are the combinations of its choices, and a learning rate beside them. Its objectives are
the score, the operations per token and the state. Settings are tuned on `plain`, `product` and `waves`;
`conditional`, `needle` and `noise` judge.
"""

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deltalab.statistics.pareto import hypervolume
from deltalab.study.specs.sections.budget import Searching

Layout = dict[str, Any]
Point = tuple[float, float, float]
LR = "train.lr"


@dataclass(frozen=True)
class Landscape:
    """A space with a formula for the result of each of its candidates.

    Attributes:
        choices: The settings of the layouts, as the section `search` of a study has them.
        score: The score of a layout at its best learning rate.
        best_lr: The best learning rate of a layout.
        costs: The operations per token and the state of a layout.
        width: The decades of the learning rate over which a score falls to 1/e of its best.
        is_needle: Whether a layout is the needle, if there is one.
    """

    choices: dict[str, Any]
    score: Callable[[Layout], float]
    best_lr: Callable[[Layout], float]
    costs: Callable[[Layout], tuple[float, float]]
    width: float = 1.5
    is_needle: Callable[[Layout], bool] = lambda layout: False

    @property
    def space(self) -> dict[str, Any]:
        """The settings that are searched."""
        return {**self.choices, LR: {"log_uniform": [1e-3, 1e-1]}}

    @cached_property
    def layouts(self) -> list[Layout]:
        """All layouts."""
        return [*Searching.model_validate({**self.choices, "trials": 9}).combinations()]

    def evaluate(self, candidate: Layout) -> Point:
        """Returns minus the score, the operations per token and the state."""
        layout = _layout(candidate)
        off = math.log10(candidate[LR] / self.best_lr(layout)) / self.width
        return -self.score(layout) * math.exp(-(off**2)), *self.costs(layout)

    def needle(self, candidate: Layout) -> bool:
        """Returns whether a candidate has the layout of the needle."""
        return self.is_needle(_layout(candidate))

    def at_best(self, layout: Layout) -> Point:
        """Returns the point of a layout at its best learning rate."""
        return self.evaluate({**layout, LR: self.best_lr(layout)})

    @cached_property
    def reference(self) -> Point:
        """The point up to which hypervolume counts: no score, and a tenth beyond the dearest layout."""
        columns = [*zip(*map(self.at_best, self.layouts), strict=True)][1:]
        flops, state = (1.1 * max(column) - 0.1 * min(column) for column in columns)
        return 0.0, flops, state

    @cached_property
    def whole(self) -> float:
        """The hypervolume of the best learning rate of each layout."""
        return hypervolume([self.at_best(layout) for layout in self.layouts], self.reference)

    def regret(self, points: Sequence[Point]) -> float:
        """Returns the share of the whole hypervolume that points miss."""
        return 1 - hypervolume(points, self.reference) / self.whole


def _layout(candidate: Layout) -> Layout:
    """A candidate without its learning rate."""
    return {path: value for path, value in candidate.items() if path != LR}


def _plain() -> Landscape:
    """192 layouts without conditions, the landscape on which the search was tuned first."""
    rules = {"linear": (0.55, 1.0), "gated": (0.7, 1.35), "delta": (0.8, 1.7), "comba": (0.9, 2.6)}

    def sizes(layout: Layout) -> tuple[int, int, int]:
        return layout["model.layers"], layout["model.key_dim"], layout["model.d_model"]

    def score(layout: Layout) -> float:
        gain, (layers, keys, width) = rules[layout["rule"]][0], sizes(layout)
        memory = 1 - math.exp(-gain * (layers * keys) ** 0.5 / 2)
        return memory * (1 - math.exp(-gain * layers**0.5 * width / 64))

    def costs(layout: Layout) -> tuple[float, float]:
        price, (layers, keys, width) = rules[layout["rule"]][1], sizes(layout)
        return float(2 * layers * width * (2 * width + price * keys)), float(layers * keys * width)

    def best_lr(layout: Layout) -> float:
        return float(1e-2 * (64 / layout["model.d_model"]) ** 0.5 / layout["model.layers"] ** 0.25)

    choices = {
        "rule": {"choice": [*rules]},
        "model.layers": {"choice": [1, 2, 4]},
        "model.key_dim": {"choice": [16, 32, 64, 128]},
        "model.d_model": {"choice": [32, 64, 128, 256]},
    }
    return Landscape(choices, score, best_lr, costs)


def _conditional(needle: bool, *, noise: bool = False) -> Landscape:
    """1,404 layouts: rules with knobs of their own, hybrids with attention, and sizes.

    The needle is the widest layout with the smallest state of the rule without knobs, which random search draws once in
    108. All layouts around it are bad. With `noise` each layout has a score that says nothing of any other.
    """
    prices = {"linear": 1.0, "delta": 1.7, "comba": 2.6}

    def parts(layout: Layout) -> tuple[list[str], int, int]:
        return list(layout["model.layers"]), layout["model.key_dim"], layout["model.d_model"]

    def quality(layout: Layout) -> float:
        if layout["rule"] == "linear":
            return 0.3
        if layout["rule"] == "delta":
            beta, norm = layout["rule.beta"], layout["rule.norm"]
            match = {("sigmoid", "l2"): 0.3, ("twice", "l2"): 0.42, ("const", "none"): 0.12}
            return 0.34 + match.get((beta, norm), 0.0)
        on = [layout[f"rule.{knob}"] == "on" for knob in ("decay", "closed_loop", "correction", "output_gate")]
        both = 0.24 * (on[0] and on[1]) - 0.14 * (on[1] and not on[0])
        return 0.4 + both + 0.12 * (on[2] and on[3]) + 0.05 * on[3] - 0.1 * (on[2] and not on[0])

    def is_needle(layout: Layout) -> bool:
        return needle and layout["rule"] == "linear" and parts(layout) == (["rule"], 16, 128)

    def score(layout: Layout) -> float:
        if noise:
            return 0.05 + 0.9 * _uniform(layout) ** 2
        if is_needle(layout):
            return 0.87
        layers, keys, width = parts(layout)
        rules, attention = layers.count("rule"), layers.count("attention")
        order = 1.15 if layers == ["rule", "attention"] else 1.0
        memory = 1 - math.exp(-order * (rules * quality(layout) * (keys / 32) ** 0.7 + 0.9 * attention))
        capacity = 1 - math.exp(-len(layers) * width / 80)
        return memory * capacity

    def costs(layout: Layout) -> tuple[float, float]:
        layers, keys, width = parts(layout)
        rules, attention = layers.count("rule"), layers.count("attention")
        price = prices[layout["rule"]]
        if layout["rule"] == "comba":
            price += 0.4 * sum(layout[f"rule.{knob}"] == "on" for knob in ("decay", "correction", "output_gate"))
        flops = 2 * width * (2 * len(layers) * width + rules * price * keys + attention * 32)
        return float(flops), float(rules * keys * width + attention * 32 * width)

    def best_lr(layout: Layout) -> float:
        layers, keys, width = parts(layout)
        of_rule = {"linear": 2.0, "delta": 1.0, "comba": 0.6}[layout["rule"]]
        return float(1e-2 * of_rule * (64 / width) ** 0.5 * (32 / keys) ** 0.25 / len(layers) ** 0.25)

    onoff = {"choice": ["on", "off"], "when": {"rule": ["comba"]}}
    choices = {
        "rule": {"choice": [*prices]},
        "rule.beta": {"choice": ["sigmoid", "twice", "const"], "when": {"rule": ["delta"]}},
        "rule.norm": {"choice": ["none", "l1", "l2"], "when": {"rule": ["delta"]}},
        **{f"rule.{knob}": onoff for knob in ("decay", "closed_loop", "correction", "output_gate")},
        "model.layers": {"pattern": ["rule", "attention"], "lengths": [1, 2]},
        "model.key_dim": {"choice": [16, 32, 64]},
        "model.d_model": {"choice": [32, 64, 128]},
    }
    return Landscape(choices, score, best_lr, costs, 1.0, is_needle)


def _product(needle: bool) -> Landscape:
    """1,620 layouts: the score is a product of a factor for each setting, and of one for each pair of settings.

    With a needle, the rule without knobs is poor, but for one of its layouts, which random search draws once in 180.
    """
    own = {"linear": 0, "gated": 1, "delta": 2, "rwkv": 3, "comba": 4}

    def is_needle(layout: Layout) -> bool:
        sizes = layout["model.layers"], layout["model.key_dim"], layout["model.d_model"]
        return needle and layout["rule"] == "linear" and sizes == (1, 16, 128)

    def score(layout: Layout) -> float:
        if is_needle(layout):
            return 0.95
        poor = 0.5 if needle and layout["rule"] == "linear" else 1.0
        values = [(name, value) for name, value in layout.items() if not name.startswith("model.")]
        alone = math.prod(0.6 + 0.4 * _uniform(value) for value in values)
        pairs = math.prod(0.75 + 0.25 * _uniform(pair) for pair in itertools.combinations(values, 2))
        sizes = layout["model.layers"] * layout["model.d_model"] * layout["model.key_dim"] ** 0.5
        return float(poor * (alone * pairs) ** (1 / len(values)) * (1 - math.exp(-sizes / 600)))

    def costs(layout: Layout) -> tuple[float, float]:
        layers, keys, width = layout["model.layers"], layout["model.key_dim"], layout["model.d_model"]
        knobs = own[layout["rule"]]
        return float(layers * width * (2 * width + (1 + 0.5 * knobs) * keys)), float(layers * keys * width)

    def best_lr(layout: Layout) -> float:
        return float(10 ** (-2.6 + 1.2 * _uniform(layout["rule"])) * (64 / layout["model.d_model"]) ** 0.5)

    choices: dict[str, Any] = {"rule": {"choice": [*own]}}
    for knob in range(4):
        rules = [rule for rule, count in own.items() if count > knob]
        choices[f"rule.knob_{knob}"] = {"choice": ["a", "b", "c"][: 2 + (knob == 1)], "when": {"rule": rules}}
    choices |= {
        "model.layers": {"choice": [1, 2, 4]},
        "model.key_dim": {"choice": [16, 32, 64, 128]},
        "model.d_model": {"choice": [32, 64, 128]},
    }
    return Landscape(choices, score, best_lr, costs, 0.8, is_needle)


def _waves(name: str) -> Landscape:
    """1,080 layouts: the score is a draw of a Gaussian process, by 64 random waves over what a layout has."""
    draw = random.Random(name)
    rules = ["linear", "gated", "delta", "comba"]
    choices: dict[str, Any] = {
        "rule": {"choice": rules},
        "rule.decay": {"choice": ["scalar", "vector", "none"], "when": {"rule": rules[1:]}},
        "rule.beta": {"choice": ["sigmoid", "twice"], "when": {"rule": rules[2:]}},
        "rule.low_rank": {"choice": ["tied", "free", "fixed"], "when": {"rule": rules[3:]}},
        "model.conv": {"choice": ["on", "off"]},
        "model.layers": {"choice": [1, 2, 3]},
        "model.heads": {"choice": [1, 2]},
        "model.d_model": {"choice": [32, 64, 128]},
    }
    names = [(path, value) for path, knob in choices.items() for value in knob["choice"]]
    waves = [({each: draw.gauss(0, 0.8) for each in names}, draw.uniform(0, 2 * math.pi)) for _ in range(64)]

    def score(layout: Layout) -> float:
        sums = (sum(map(wave.__getitem__, layout.items()), phase) for wave, phase in waves)
        height = math.fsum(map(math.cos, sums)) * (2 / len(waves)) ** 0.5
        size = layout["model.layers"] * layout["model.heads"] ** 0.5 * layout["model.d_model"]
        return (1 - math.exp(-size / 120)) / (1 + math.exp(0.5 - 1.5 * height))

    def costs(layout: Layout) -> tuple[float, float]:
        layers, heads, width = layout["model.layers"], layout["model.heads"], layout["model.d_model"]
        price = 1 + 0.5 * rules.index(layout["rule"])
        return float(layers * width * (2 * width + 16 * heads * price)), float(16 * layers * heads * width)

    def best_lr(layout: Layout) -> float:
        return float(8e-3 * (64 / layout["model.d_model"]) ** 0.5 * (1 + (layout["model.conv"] == "on")))

    return Landscape(choices, score, best_lr, costs, 0.8)


def _uniform(what: Any) -> float:
    """A number in [0, 1) that follows from what it is given alone."""
    return int.from_bytes(hashlib.sha256(json.dumps(what).encode()).digest()[:4]) / 2**32


LANDSCAPES = {
    "plain": _plain(),
    "product": _product(needle=False),
    "product needle": _product(needle=True),
    "waves": _waves("waves"),
    "conditional": _conditional(needle=False),
    "needle": _conditional(needle=True),
    "noise": _conditional(needle=False, noise=True),
}
