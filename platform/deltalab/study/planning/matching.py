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
from deltalab.study.planning.model_costs import Sizer
from deltalab.study.specs.budget import Bound, Match
from deltalab.study.specs.search_space import Search

WITHIN = 0.02
"""The share of the base's quantity by which a matched arm may differ."""

Config = dict[str, Any]


@dataclass(frozen=True)
class Bounded:
    """A quantity of an arm, and the least and the most that it may be."""

    size: float
    bound: Bound
    least: float
    most: float

    @property
    def holds(self) -> bool:
        return self.least <= self.size <= self.most

    @property
    def apart(self) -> float:
        """How far it is from what is allowed.

        >>> Bounded(9, Bound(at_most=4), 0, 4).apart
        5
        """
        return max(0.0, self.least - self.size, self.size - self.most)

    def __str__(self) -> str:
        """
        >>> str(Bounded(8192, Bound(at_most=4096), 0, 4096))
        '8,192 is not at most 4,096'
        """
        return f"{self.size:,.0f} is not {self.bound}"


class Matcher:
    """Matches the arms of a study to its base; models that several arms try are counted once.

    tuned: the settings that a study tunes, by path.
    """

    def __init__(self, tuned: Mapping[str, Search]) -> None:
        # A setting of the training changes none of the quantities.
        self._tuned = {path: search for path, search in tuned.items() if not path.startswith("train.")}
        self._sizer = Sizer()
        self._best: dict[str, int | None] = {}

    def matched(self, match: Match, base: Config, arm: Config, length: int) -> Config:
        """The arm's configuration with the value of `match.dimension` that comes nearest to the base's quantity.

        base, arm: configurations with every default spelled out, and the task's `vocab_size` and `readout` among the
        model's settings. length: tokens after which the state is counted. The arm stays as it is where no value of the
        dimension comes nearer.

        Raises `InputError` for a dimension that does not exist or that the quantity does not grow with, where the
        nearest value misses by more than `WITHIN`, where tuning changes the quantity, and where a model does not run.
        """
        what, path = match.quantity, match.dimension
        if path not in dimensions(arm):
            raise unknown("dimension", path, dimensions(arm), where="scale")
        # A search asks again for each task and rung, which differ in the training at the most.
        models = [{part: config[part] for part in ("rule", "model")} for config in (base, arm)]
        asked = json.dumps([what, path, length, *models])
        if asked not in self._best:
            self._best[asked] = self._nearest(what, path, base, arm, length)
        best = self._best[asked]
        return arm if best is None else _scaled(arm, path, best)

    def _nearest(self, what: str, path: str, base: Config, arm: Config, length: int) -> int | None:
        """The value of an arm's dimension that `matched` looks for; None where the arm stays as it is."""

        def count(config: Config) -> float:
            return self._count(config, what, length)

        target = count(base)
        self._holds(what, [base, arm], count)
        sizes = _sizes_near(target, _value(arm, path), lambda value: count(_scaled(arm, path, value)))
        others = ", ".join(other for other in dimensions(arm) if other != path)
        counted = [sizes[value] for value in sorted(sizes)]
        if counted[0] == counted[-1] or any(a > b for a, b in itertools.pairwise(counted)):
            does = "does" if what == "state" else "do"
            raise InputError(f"the arm's {what} {does} not grow with {path}; scale another: {others}")
        best = min(sizes, key=lambda value: (abs(sizes[value] - target), value))
        if abs(count(arm) - target) <= abs(sizes[best] - target) <= WITHIN * target:
            return None
        if abs(sizes[best] - target) > WITHIN * target:
            found = _at(_scaled(arm, path, best), path)
            raise InputError(
                f"no {path} gives the base's {what} of {target:,.0f} within {WITHIN:.0%}: "
                f"the nearest is {sizes[best]:,.0f} at {path.rpartition('.')[2]} {found}; "
                f"scale another: {others}"
            )
        return best

    def bounded(self, bounds: Mapping[str, Bound], base: Config, arm: Config, length: int) -> dict[str, "Bounded"]:
        """The quantities of an arm that are bounded. base, arm, length: as in `matched`.

        Raises `InputError` for a model that does not run.
        """
        found = {}
        for what, bound in bounds.items():
            of_base = self._count(base, what, length) if bound.within is not None else 0.0
            found[what] = Bounded(self._count(arm, what, length), bound, *bound.limits(of_base))
        return found

    def _holds(self, what: str, configs: list[Config], count: Callable[[Config], float]) -> None:
        """Raises `InputError` if a bound or a choice of a tuned setting changes the quantity."""
        for path, search in self._tuned.items():
            for config, value in itertools.product(configs, search.extremes):
                try:
                    changed = count(_put(config, path, value)) != count(config)
                except (InputError, KeyError, TypeError):
                    continue  # The plan checks what is tuned once all arms are made.
                if changed:
                    raise InputError(f"tune.{path} changes the {what}: match or tune, not both")

    def _count(self, config: Config, what: str, length: int) -> float:
        model = _model(config)
        if isinstance(model.layers, int):
            # A default key_dim and the same number make one model, which is counted once.
            model = replace(model, key_dim=model.head_dims[0])
        try:
            return self._sizer.sizes(model, length).named()[what]
        except InputError:
            raise
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0]
            name = config["rule"]["name"]
            raise InputError(f"a model of rule '{name}' does not run: {type(error).__name__}: {said}") from error


def dimensions(config: Config) -> list[str]:
    """The paths of a configuration's dimensions: widths of the model, whole numbers of the rule, ranks of its gates."""
    found = ["model.key_dim", "model.expand_v", "model.d_model"]
    if config["model"]["gate_rank"] is not None:
        found.append("model.gate_rank")
    for knob, value in config["rule"].items():
        if isinstance(value, dict):
            found += [f"rule.{knob}.{kind}.rank" for kind, options in value.items() if "rank" in options]
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append(f"rule.{knob}")
    return found


def _sizes_near(target: float, start: int, count: Callable[[int], float]) -> dict[int, float]:
    """Sizes by value, for the values that were tried. One of them comes nearest to the target.

    count: the size at a value, which must grow with the value. It raises `InputError` at a value that makes no model;
    `start` makes one.
    """
    sizes = {start: count(start)}

    def first_from(value: int, last: int, otherwise: float = math.inf) -> float:
        """The size at the first value from this one that makes a model; `otherwise` where none up to the last does."""
        for tried in range(value, last + 1):
            try:
                sizes[tried] = sizes[tried] if tried in sizes else count(tried)
            except InputError:
                continue
            return sizes[tried]
        return otherwise

    low, high, below, above = 0, start, 0.0, sizes[start]
    while above < target and below < above:
        low, high, below, above = high, 2 * high, above, first_from(2 * high, 4 * high)
    steps = 0
    while below < target < above and high - low > 1:
        # State and parameters are about quadratic in a width; halving bounds the steps for what is not.
        steps += 1
        share = 0.5 if steps % 3 == 0 else (target**0.5 - below**0.5) / (above**0.5 - below**0.5)
        guess = min(high - 1, low + max(1, round((high - low) * share)))
        size = first_from(guess, high, above)
        low, high, below, above = (low, guess, below, size) if size >= target else (guess, high, size, above)
    if len(sizes) == 1:
        first_from(2 * start, 4 * start)  # so that a size that does not grow is seen
    return sizes


def _value(config: Config, path: str) -> int:
    """A dimension as a whole number: for `model.expand_v`, the width of the values."""
    key_dim, value_dim = _model(config).head_dims
    if path == "model.expand_v":
        return value_dim
    return key_dim if path == "model.key_dim" else max(1, int(_at(config, path)))


def _scaled(config: Config, path: str, value: int) -> Config:
    """The configuration with a dimension at another value. `model.d_model` leaves the width of keys and values."""
    key_dim, _ = _model(config).head_dims
    config = _with_own_key_dims(config)
    if path == "model.expand_v":
        # The shortest decimal that gives this width.
        ratios = (round(value / key_dim, digits) for digits in itertools.count(1))
        return _put(config, path, next(ratio for ratio in ratios if round(key_dim * ratio) == value))
    if path == "model.d_model":
        config = _put(config, "model.key_dim", key_dim)
    return _put(config, path, value)


def _with_own_key_dims(config: Config) -> Config:
    """The configuration where each layer with a number of heads of its own says the width of its keys as well."""
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
