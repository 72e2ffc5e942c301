"""Scales one dimension of an arm until the arm has the base's state, parameters or flops."""

import functools
import itertools
import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.models.spec import ModelSpec
from deltalab.study.planning.model_costs import CostCounter
from deltalab.study.specs.budget import Bound, Match
from deltalab.study.specs.search_space import Search
from deltalab.study.specs.setting_paths import model_part

WITHIN = 0.02
"""The share of the base's quantity by which a matched arm may differ from the base."""

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
        self._best: dict[str, int | None] = {}

    def matched(self, match: Match, base: Config, arm: Config, length: int) -> Config:
        """Sets `match.dimension` of an arm so that its quantity comes nearest to the base's.

        Args:
            match: The quantity to match and the dimension to scale.
            base: The base's configuration, with every default spelled out and the task's `vocab_size` and `readout`
                among the settings of the model.
            arm: The arm's configuration, of the same form.
            length: Tokens after which the state is counted.

        Returns:
            The arm's configuration. It is unchanged if no value of the dimension comes nearer.

        Raises:
            InputError: The dimension does not exist, the quantity does not grow with it, the nearest value misses by
                more than `WITHIN`, tuning changes the quantity, or a model does not run.
        """
        quantity, path = match.quantity, match.dimension
        if path not in dimensions(arm):
            raise unknown("dimension", path, dimensions(arm), where="scale")
        # A search asks again for each task and rung, which differ in the training at the most.
        models = [{part: config[part] for part in ("rule", "model")} for config in (base, arm)]
        key = json.dumps([quantity, path, length, *models])
        if key not in self._best:
            self._best[key] = self._nearest(quantity, path, base, arm, length)
        best = self._best[key]
        return arm if best is None else _scaled(arm, path, best)

    def _nearest(self, quantity: str, path: str, base: Config, arm: Config, length: int) -> int | None:
        """The value of an arm's dimension that `matched` looks for; None if the arm stays as it is."""

        def count(config: Config) -> float:
            return self._count(config, quantity, length)

        target = count(base)
        self._require_untuned(quantity, [base, arm], count)
        amounts = _amounts_near(target, _value(arm, path), lambda value: count(_scaled(arm, path, value)))
        others = ", ".join(other for other in dimensions(arm) if other != path)
        counted = [amounts[value] for value in sorted(amounts)]
        if counted[0] == counted[-1] or any(a > b for a, b in itertools.pairwise(counted)):
            does = "does" if quantity == "state" else "do"
            raise InputError(f"the arm's {quantity} {does} not grow with {path}; scale another: {others}")
        best = min(amounts, key=lambda value: (abs(amounts[value] - target), value))
        if abs(count(arm) - target) <= abs(amounts[best] - target) <= WITHIN * target:
            return None
        if abs(amounts[best] - target) > WITHIN * target:
            nearest = _at(_scaled(arm, path, best), path)
            raise InputError(
                f"no {path} gives the base's {quantity} of {target:,.0f} within {WITHIN:.0%}: "
                f"the nearest is {amounts[best]:,.0f} at {path.rpartition('.')[2]} {nearest}; "
                f"scale another: {others}"
            )
        return best

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
            return self._counter.costs(model, length).by_quantity()[quantity]
        except InputError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            name = config["rule"]["name"]
            raise InputError(f"a model of rule '{name}' does not run: {type(error).__name__}: {reason}") from error


def dimensions(config: Config) -> list[str]:
    """Lists the paths of a configuration's dimensions.

    These are widths of the model, whole numbers of the rule, and ranks of the rule's gates.
    """
    paths = ["model.key_dim", "model.expand_v", "model.d_model"]
    if config["model"]["gate_rank"] is not None:
        paths.append("model.gate_rank")
    for knob, value in config["rule"].items():
        if isinstance(value, dict):
            paths += [f"rule.{knob}.{kind}.rank" for kind, options in value.items() if "rank" in options]
        elif isinstance(value, int) and not isinstance(value, bool):
            paths.append(f"rule.{knob}")
    return paths


def _amounts_near(target: float, start: int, count: Callable[[int], float]) -> dict[int, float]:
    """Counts a quantity at several values of a dimension, one of which comes nearest to the target.

    `count` must grow with the value, and raises `InputError` at a value that makes no model; `start` makes one.
    """
    amounts = {start: count(start)}

    def first_from(value: int, last: int, otherwise: float = math.inf) -> float:
        """Counts at the first value up to `last` that makes a model; returns `otherwise` if no value makes one."""
        for tried in range(value, last + 1):
            try:
                amounts[tried] = amounts[tried] if tried in amounts else count(tried)
            except InputError:
                continue
            return amounts[tried]
        return otherwise

    low, high, below, above = 0, start, 0.0, amounts[start]
    while above < target and below < above:
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
    return amounts


def _value(config: Config, path: str) -> int:
    """A dimension as a whole number; for `model.expand_v`, the width of the values."""
    key_dim, value_dim = _model(config).head_dims
    if path == "model.expand_v":
        return value_dim
    return key_dim if path == "model.key_dim" else max(1, int(_at(config, path)))


def _scaled(config: Config, path: str, value: int) -> Config:
    """Sets a dimension of a configuration; `model.d_model` leaves the widths of keys and values as they are."""
    key_dim, _ = _model(config).head_dims
    config = _with_own_key_dims(config)
    if path == "model.expand_v":
        # Take the shortest decimal that gives this width.
        ratios = (round(value / key_dim, digits) for digits in itertools.count(1))
        return _put(config, path, next(ratio for ratio in ratios if round(key_dim * ratio) == value))
    if path == "model.d_model":
        config = _put(config, "model.key_dim", key_dim)
    return _put(config, path, value)


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
