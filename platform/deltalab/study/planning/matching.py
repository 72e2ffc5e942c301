"""Scales dimensions of an arm until the arm has the base's state, parameters or flops."""

import functools
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.gate import MOST_WIDTH
from deltalab.models.block import mlp_width
from deltalab.models.costs import CostCounter
from deltalab.models.settings.limits import MOST, MOST_EXPANDED
from deltalab.models.spec import ModelSpec
from deltalab.own_module import OwnModule, is_path
from deltalab.rule import MOST_KNOB
from deltalab.study.specs.sections.budget import Bound, Match
from deltalab.study.specs.sections.search_space import Search
from deltalab.study.specs.setting_paths import model_part

WITHIN = 0.02
"""The share of the base's quantity by which a matched arm may differ from the base."""

ROUNDS = 8
"""How often each of several dimensions is set at most, while the others stay."""

Config = dict[str, Any]


@dataclass(frozen=True)
class Bounded:
    """A quantity of an arm, and the least and the most that it may be.

    Attributes:
        amount: The quantity that the arm has.
        bound: The bound as the study's file states it.
        least: The smallest amount that the bound allows.
        most: The largest amount that the bound allows.
    """

    amount: float
    bound: Bound
    least: float
    most: float

    @property
    def holds(self) -> bool:
        """Whether the bound allows the amount."""
        return self.least <= self.amount <= self.most

    @property
    def apart(self) -> float:
        """How far the amount is from the nearest one that is allowed.

        Examples:
            >>> Bounded(9, Bound(at_most=4), 0, 4).apart
            5
        """
        return max(0.0, self.least - self.amount, self.amount - self.most)

    def __str__(self) -> str:
        """Says that the bound is broken, for an error.

        Examples:
            >>> str(Bounded(8192, Bound(at_most=4096), 0, 4096))
            '8,192 is not at most 4,096'
        """
        return f"{self.amount:,.0f} is not {self.bound}"


class Matcher:
    """Matches the arms of a study to its base. A model that several arms try is counted once."""

    def __init__(self, tuned: Mapping[str, Search]) -> None:
        """Begins with an empty memory.

        Args:
            tuned: The settings that the study tunes, by path.
        """
        # A setting of the training changes none of the quantities.
        self._tuned = model_part(tuned)
        self._counter = CostCounter()
        self._found: dict[str, dict[str, int]] = {}

    def matched(self, match: Match, base: Config, arm: Config, length: int) -> Config:
        """Sets the dimensions of an arm so that its quantities come nearest to the base's.

        Args:
            match: The quantities to match, and the dimension to scale for each.
            base: The base's configuration, with every default spelled out and the task's `vocab_size` and `readout`
                among the settings of the model.
            arm: The arm's configuration, of the same form.
            length: Tokens after which the state is counted.

        Returns:
            The arm's configuration. It is unchanged if no value of a dimension comes nearer.

        Raises:
            InputError: A dimension does not exist, a quantity does not grow with its dimension, the nearest values miss
                by more than `WITHIN`, tuning changes a quantity, or a model does not run.
        """
        for quantity, path in match.dimensions.items():
            if path not in dimensions(arm):
                raise unknown("dimension", path, dimensions(arm), where="scale" if match.scale else quantity)
        # A search asks again for each task and rung, which differ in the training at the most.
        models = [{part: config[part] for part in ("rule", "model")} for config in (base, arm)]
        key = json.dumps([match.dimensions, length, *models])
        if key not in self._found:
            goals = []
            for quantity, path in match.dimensions.items():
                count = functools.partial(self._count, quantity=quantity, length=length)
                self._require_untuned(quantity, [base, arm], count)
                goals.append(_Goal(quantity, path, count(base), count))
            self._found[key] = _nearest(goals, arm)
        return _all_scaled(arm, self._found[key])

    def bounded(self, bounds: Mapping[str, Bound], base: Config, arm: Config, length: int) -> dict[str, "Bounded"]:
        """Counts the quantities of an arm that a study bounds.

        Args:
            bounds: The bounds by quantity.
            base: The base's configuration, as `matched` takes it.
            arm: The arm's configuration.
            length: Tokens after which the state is counted.

        Raises:
            InputError: A model does not run.
        """
        quantities = {}
        for quantity, bound in bounds.items():
            of_base = self._count(base, quantity, length) if bound.within is not None else 0.0
            quantities[quantity] = Bounded(self._count(arm, quantity, length), bound, *bound.limits(of_base))
        return quantities

    def _require_untuned(self, quantity: str, configs: list[Config], count: Callable[[Config], float]) -> None:
        """Raises `InputError` if a value that tuning may give a setting changes a quantity that is matched."""
        for path, search in self._tuned.items():
            for config, value in itertools.product(configs, search.extremes):
                try:
                    changed = count(_put(config, path, value)) != count(config)
                except (InputError, KeyError, TypeError):
                    continue  # The plan checks what is tuned once all arms are made.
                if changed:
                    raise InputError(f"tune.{path} changes the {quantity}: match or tune, not both")

    def _count(self, config: Config, quantity: str, length: int) -> float:
        """Counts a quantity of a model; raises `InputError` if the model does not run."""
        model = _model(config)
        if isinstance(model.layers, int):
            # A default key_dim and the same number make one model, which is counted once.
            model = replace(model, key_dim=model.head_dims[0])
        try:
            amount = self._counter.costs(model, length).by_quantity()[quantity]
            if math.isnan(amount):
                raise InputError(
                    f"the {quantity} of module '{config['rule']['name']}' is not known: give it a method "
                    "state_size(length), or take parameters or flops"
                )
            return amount
        except InputError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            name = config["rule"]["name"]
            raise InputError(f"a model of rule '{name}' does not run: {type(error).__name__}: {reason}") from error


@dataclass(frozen=True)
class _Goal:
    """A quantity that an arm is to have, and the dimension that is scaled for it."""

    quantity: str
    path: str
    target: float
    count: Callable[[Config], float]

    def miss(self, config: Config) -> float:
        """By which share of the target a configuration misses it; infinite if it makes no model."""
        try:
            return abs(self.count(config) - self.target) / max(self.target, 1.0)
        except InputError:
            return math.inf

    def nearest(self, config: Config) -> Config:
        """The configuration with the value of the dimension that comes nearest; itself if no value comes nearer."""
        start = _value(config, self.path)
        amounts = _amounts_near(
            self.target, start, _most(config, self.path), lambda value: self.count(_scaled(config, self.path, value))
        )
        counted = [amounts[value] for value in sorted(amounts)]
        if counted[0] == counted[-1] or any(a > b for a, b in itertools.pairwise(counted)):
            does = "does" if self.quantity in ("state", "cache") else "do"
            raise InputError(
                f"the arm's {self.quantity} {does} not grow with {self.path}; scale another: "
                f"{_others(config, [self.path])}"
            )
        best = min(amounts, key=lambda value: (abs(amounts[value] - self.target), value))
        is_nearer = abs(amounts[best] - self.target) < abs(self.count(config) - self.target)
        return _scaled(config, self.path, best) if is_nearer else config


def _nearest(goals: Sequence[_Goal], arm: Config) -> dict[str, int]:
    """The values of an arm's dimensions that come nearest to all goals; none for a dimension that stays as it is.

    Each dimension is set in turn while the others stay, until nothing changes. One round is enough if each dimension
    leaves the quantities of those before it alone.
    """

    def miss(values: Mapping[str, int]) -> float:
        return max(goal.miss(_all_scaled(arm, values)) for goal in goals)

    tried: list[dict[str, int]] = []
    values: dict[str, int] = {}
    while values not in tried and len(tried) < (ROUNDS if len(goals) > 1 else 1):
        tried.append(values)
        for goal in goals:
            before = _all_scaled(arm, values)
            if (after := goal.nearest(before)) is not before:
                values = {**values, goal.path: _value(after, goal.path)}
    best = min([*tried, values], key=miss)
    while len(goals) > 1 and miss(best) > WITHIN:
        # Where quantities pull against each other, a step of several dimensions at once may come nearer.
        now = _all_scaled(arm, best)
        steps = itertools.product((-1, 0, 1), repeat=len(goals))
        around = [
            {goal.path: max(1, _value(now, goal.path) + step) for goal, step in zip(goals, way, strict=True)}
            for way in steps
        ]
        nearer = min(around, key=miss)
        if miss(nearer) >= miss(best):
            break
        best = nearer
    if miss(best) > WITHIN:
        raise _missed(goals, arm, best)
    return best


def _missed(goals: Sequence[_Goal], arm: Config, values: Mapping[str, int]) -> InputError:
    """The error of a match whose nearest values miss."""
    nearest = _all_scaled(arm, values)
    paths = [goal.path for goal in goals]
    wanted = _and(f"{goal.quantity} of {goal.target:,.0f}" for goal in goals)
    found = _and(f"{goal.count(nearest):,.0f}" for goal in goals)
    at = _and(f"{path.rpartition('.')[2]} {_shown(nearest, path)}" for path in paths)
    return InputError(
        f"no {_and(paths)} give{'s' * (len(paths) == 1)} the base's {wanted} within {WITHIN:.0%}: "
        f"the nearest is {found} at {at}; scale another: {_others(arm, paths)}"
    )


def _and(parts: Iterable[str]) -> str:
    """Joins parts of a sentence.

    Examples:
        >>> _and(["1"]), _and(["1", "2", "3"])
        ('1', '1, 2 and 3')
    """
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _others(config: Config, paths: Sequence[str]) -> str:
    """The dimensions of a configuration but those of `paths`, for an error."""
    return ", ".join(path for path in dimensions(config) if path not in paths)


def dimensions(config: Config) -> list[str]:
    """Lists the paths of a configuration's dimensions.

    These are widths of the model, whole numbers of the rule, and ranks of the rule's gates.
    """
    paths = ["model.d_model"]
    if isinstance(config["model"]["layers"], list) or not is_path(config["rule"]["name"]):
        paths = ["model.key_dim", "model.expand_v", *paths]  # a module of another author has no such widths
    if config["model"]["mlp"] and config["model"]["block"] == "transformer":
        paths.append(
            "model.experts.width" if (config["model"].get("experts") or {}).get("width") else "model.mlp_width"
        )
    # A configuration of an older version lacks the later ones.
    paths += [f"model.{name}" for name in ("gate_rank", "q_rank", "kv_rank") if config["model"].get(name)]
    for knob, value in config["rule"].items():
        if isinstance(value, dict):
            paths += [f"rule.{knob}.{kind}.rank" for kind, options in value.items() if options.get("rank")]
        elif isinstance(value, int) and not isinstance(value, bool):
            paths.append(f"rule.{knob}")
    return paths


def _amounts_near(target: float, start: int, most: int, count: Callable[[int], float]) -> dict[int, float]:
    """Counts a quantity at several values of a dimension, one of which comes nearest to the target.

    `count` must grow with the value, and raises `InputError` at a value that makes no model; `start` makes one, and no
    value over `most` does.
    """
    amounts = {start: count(start)}

    def first_from(value: int, last: int, otherwise: float = math.inf) -> float:
        """Counts at the first value up to `last` that makes a model; returns `otherwise` if no value makes one."""
        for tried in range(value, min(last, most) + 1):
            try:
                amounts[tried] = amounts[tried] if tried in amounts else count(tried)
            except InputError:
                continue
            return amounts[tried]
        return otherwise

    low, high, below, above = 0, start, 0.0, amounts[start]
    # The first value may hold nothing, as a window of 1 does: the first doubling needs no growth before it.
    while above < target and (below < above or high == start):
        low, high, below, above = high, 2 * high, above, first_from(2 * high, 4 * high)
    steps = 0
    while below < target < above and high - low > 1:
        # State and parameters are about quadratic in a width; halving bounds the steps for other quantities.
        steps += 1
        share = 0.5 if steps % 3 == 0 else (target**0.5 - below**0.5) / (above**0.5 - below**0.5)
        guess = min(high - 1, low + max(1, round((high - low) * share)))
        amount = first_from(guess, high, above)
        low, high, below, above = (low, guess, below, amount) if amount >= target else (guess, high, amount, above)
    if len(amounts) == 1:
        first_from(2 * start, 4 * start)  # A second value shows whether the quantity grows.
    if len(amounts) == 1:
        first_from(max(1, start // 2), start - 1)  # The first value lies near the limit.
    return amounts


def _value(config: Config, path: str) -> int:
    """A dimension as a whole number; for `model.expand_v`, the width of the values."""
    key_dim, value_dim = _model(config).head_dims
    if path == "model.expand_v":
        return value_dim
    if path == "model.mlp_width" and config["model"]["mlp_width"] is None:
        return mlp_width(config["model"]["d_model"], config["model"]["mlp"])
    return key_dim if path == "model.key_dim" else max(1, int(_at(config, path)))


def _most(config: Config, path: str) -> int:
    """The limit of a dimension in the form of `_value`."""
    part, *_, name = path.split(".")
    if path == "model.expand_v":
        return MOST_EXPANDED * _model(config).head_dims[0]
    if part == "model":
        return MOST[path.removeprefix("model.")]
    return MOST_WIDTH if name == "rank" else MOST_KNOB


def _shown(config: Config, path: str) -> int | float:
    """The value of a dimension as the study's file writes it."""
    shown: int | float | None = _at(config, path)
    return _value(config, path) if shown is None else shown


def _scaled(config: Config, path: str, value: int) -> Config:
    """Sets a dimension of a configuration; `model.d_model` leaves the widths of keys and values as they are."""
    key_dim, _ = _model(config).head_dims
    config = _with_own_key_dims(config)
    if path == "model.expand_v":
        # Take the shortest decimal that gives this width.
        ratios = (round(value / key_dim, digits) for digits in itertools.count(1))
        return _put(config, path, next(ratio for ratio in ratios if round(key_dim * ratio) == value))
    rule = _model(config).make_rule()
    if path == "model.d_model" and (not isinstance(rule, OwnModule) or "key_dim" in rule.settings):
        config = _put(config, "model.key_dim", key_dim)
    return _put(config, path, value)


def _all_scaled(config: Config, values: Mapping[str, int]) -> Config:
    """Sets dimensions of a configuration, as `_scaled` does."""
    for path in sorted(values, key="model.expand_v".__eq__):  # A value of expand_v is a width at the final key_dim.
        config = _scaled(config, path, values[path])
    return config


def _with_own_key_dims(config: Config) -> Config:
    """Spells out the width of the keys in each layer that has its own number of heads."""
    model = _model(config)
    if isinstance(model.layers, int):
        return config
    listed = []
    for layer, entry in enumerate(model.layers):
        if isinstance(entry, Mapping) and "heads" in entry.get("layer", {}):
            entry = {**entry, "layer": {"key_dim": model.at(layer).head_dims[0], **entry["layer"]}}
        listed.append(entry)
    return _put(config, "model.layers", listed)


def _model(config: Config) -> ModelSpec:
    return ModelSpec.of({**config["model"], "rule": config["rule"]})


def _at(config: Config, path: str) -> Any:
    return functools.reduce(operator.getitem, path.split("."), config)


def _put(config: Config, path: str, value: object) -> Config:
    changed: Config = json.loads(json.dumps(config))
    parents, _, last = path.rpartition(".")
    _at(changed, parents)[last] = value
    return changed
