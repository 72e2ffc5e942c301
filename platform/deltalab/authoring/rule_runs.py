"""Runs of a rule for its checks: settings and inputs to try, outputs with their gradients, and differences.

Sizes are tiny and the arithmetic is fp64 unless a check is about a dtype, so that a failure is a wrong function and not
rounding.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deltalab.authoring.check import NOT_FINITE, Measured, author_line
from deltalab.authoring.inputs import Inputs, draw, learned, moves, normal, parts
from deltalab.errors import InputError
from deltalab.models.layer import RuleLayer, initialize
from deltalab.ops.backends import lacks_triton
from deltalab.ops.convolution import features
from deltalab.ops.recurrence import Backend
from deltalab.ops.scan import scan
from deltalab.rule import State, UpdateRule

BATCH, LENGTH, HEADS, KEY, VALUE, CHUNK, WIDTH, CONV = 2, 13, 2, 4, 3, 4, 8, 4
PREFIX = 5  # tokens that make an initial state: more than KEY, so that the state has full rank
LONG = 150  # longer than the chunks of 16, 32, 64 and 128 tokens that parallel forms take
SCALE = 0.6  # of outputs; unlike KEY ** -0.5, which a rule may take by mistake
EXACT = 1e-10
MOST_COMBINATIONS = 24

# --- settings -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def combinations(rule: UpdateRule) -> list[UpdateRule]:
    """The rule and all combinations of its options, or settings in which each pair of options occurs.

    Combinations that the rule refuses with an `InputError` are left out.
    """
    options = rule.options()
    if math.prod(len(values) for values in options.values()) > MOST_COMBINATIONS:
        return _pairs(rule)
    every = (_turned(rule, zip(options, chosen, strict=True)) for chosen in itertools.product(*options.values()))
    return [rule, *(setting for setting in every if setting is not None and setting != rule)]


def _turned(rule: UpdateRule, chosen: Any) -> UpdateRule | None:
    with suppress(InputError):
        return dataclasses.replace(rule, **dict(chosen))
    return None


def _pairs(rule: UpdateRule) -> list[UpdateRule]:
    """Greedily: each setting begins with a pair that none has yet, and takes what adds the most new pairs."""
    options, chance = rule.options(), random.Random(0)
    names = list(options)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(options[a])), range(len(options[b])))
    }
    settings = [rule]

    place = {name: i for i, name in enumerate(names)}

    def pairs(chosen: Mapping[str, int]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
        placed = sorted(chosen.items(), key=lambda item: place[item[0]])
        return set(itertools.combinations(placed, 2))

    def adds(chosen: Mapping[str, int], name: str, i: int) -> int:
        """How many of the missing pairs one more choice brings."""
        one = (name, i)
        return sum(
            ((one, other) if place[name] < place[other[0]] else (other, one)) in missing for other in chosen.items()
        )

    def filled(start: Mapping[str, int], greedy: bool) -> dict[str, int]:
        chosen = dict(start)
        for name in chance.sample(names, len(names)):
            if name not in chosen:
                # A rule may refuse most combinations of several turned knobs: leave the others as they are then.
                places = chance.sample(range(len(options[name])), len(options[name])) if greedy else [0]
                chosen[name] = max(places, key=lambda i, n=name: adds(chosen, n, i))  # type: ignore[misc]
        return chosen

    for pair in sorted(missing):
        if pair not in missing:
            continue
        missing.discard(pair)  # also where the rule refuses it
        for greedy in (True, True, True, True, False):
            chosen = filled(dict(pair), greedy)
            setting = _turned(rule, ((name, options[name][i]) for name, i in chosen.items()))
            if setting is not None:
                missing -= pairs(chosen)
                settings.append(setting)
                break
    return list(dict.fromkeys(settings))


# --- inputs -------------------------------------------------------------------------------------------------


def inputs(
    rule: UpdateRule,
    length: int = LENGTH,
    *,
    batch: int = BATCH,
    heads: int = HEADS,
    key_dim: int = KEY,
    value_dim: int | None = None,
    seed: int = 0,
) -> Inputs:
    """Inputs as `draw` makes them. value_dim: `VALUE` where None, or K if the rule takes K = V alone."""
    value_dim = value_dim or (key_dim if square(rule) else VALUE)
    return draw(rule, batch=batch, length=length, heads=heads, key_dim=key_dim, value_dim=value_dim, seed=seed)


def started(rule: UpdateRule, x: Inputs) -> Inputs:
    """The inputs from token `PREFIX` on, and the state that the tokens before it make."""
    return x.span(PREFIX, state=run(rule, x.span(0, PREFIX), "recurrent")[1])


@lru_cache(maxsize=1024)
def square(rule: UpdateRule) -> str:
    """The error by which a rule refuses K != V, if it takes K = V; else nothing."""
    sizes: dict[str, Any] = {"batch": 1, "length": 1, "heads": 1, "key_dim": KEY}
    try:
        run(rule, draw(rule, value_dim=VALUE, **sizes), "recurrent")
    except Exception as error:
        if not refuses(rule, error):
            return ""
        with suppress(Exception):
            run(rule, draw(rule, value_dim=KEY, **sizes), "recurrent")
            return f"{type(error).__name__}: {error}"
    return ""


def refuses(rule: UpdateRule, error: Exception) -> bool:
    """Whether an error says that a rule does not take some sizes, rather than that the rule is wrong."""
    meant = isinstance(error, InputError | ValueError | NotImplementedError | AssertionError) and author_line(error)
    return bool(meant) or rule.transition is None


def layer_of(rule: UpdateRule, *, width: int = WIDTH, heads: int = HEADS, key_dim: int = KEY) -> RuleLayer:
    value_dim = key_dim if square(rule) else VALUE
    layer = RuleLayer(rule, width, heads, key_dim=key_dim, value_dim=value_dim, conv=CONV, chunk_size=CHUNK).double()
    initialize(layer, seed=0)
    return layer


def layered(rule: UpdateRule, length: int, *, batch: int = 1, heads: int = HEADS, key_dim: int = 8) -> Inputs:
    """Inputs as an untrained layer makes them of normal x, with the rule's `features` and gates near their start."""
    layer = layer_of(rule, width=32, heads=heads, key_dim=key_dim)
    with torch.no_grad():
        x = normal(batch, length, 32, seed=1)
        q, k, v, _ = features(layer.qkv(x), layer.conv, None, layer.channels)
        gates = {**layer.gates(x), **({} if layer.vectors is None else layer.vectors(x, None)[0])}
    return Inputs(q, k, v, {name: gates[name] for name in learned(rule)})


# --- outputs ------------------------------------------------------------------------------------------------


def backends_of(rule: UpdateRule) -> tuple[Backend, ...]:
    return ("recurrent", "chunked", "triton") if has_kernel(rule) else ("recurrent", "chunked")


def has_kernel(rule: UpdateRule) -> bool:
    """Whether the rule's own kernel takes inputs in fp64 on a CPU, and can run here."""
    x = inputs(rule, 1)
    return rule.lacks_kernel(x.k, x.v) is None and lacks_triton("cpu") is None


def run(
    rule: UpdateRule, x: Inputs, backend: Backend, chunk_size: int = CHUNK, scale: float = SCALE
) -> tuple[Tensor, State]:
    return scan(rule, x.q, x.k, x.v, x.gates, scale=scale, state=x.state, backend=backend, chunk_size=chunk_size)


def outputs(
    rule: UpdateRule, x: Inputs, backend: Backend, chunk_size: int = CHUNK, scale: float = SCALE
) -> dict[str, Tensor]:
    """The output and the parts of the state, without gradients."""
    with torch.no_grad():
        o, state = run(rule, x, backend, chunk_size, scale)
    return {"o": o, **parts(state)}


def weighted(results: Mapping[str, Tensor]) -> Tensor:
    """A fixed sum of all results with random signs, which are the same in every dtype.

    -inf, which is 0 in a state of logarithms, does not count.
    """
    total = []
    for i, y in enumerate(results.values()):
        if y.is_floating_point():
            sum_ = (y * normal(*y.shape, seed=i).sign().to(y)).where(y != -math.inf, 0.0).sum()
            total.append(sum_.to(torch.promote_types(y.dtype, torch.float32)))
    return torch.stack([one.double() if total[0].dtype == torch.float64 else one for one in total]).sum()


def evaluate(rule: UpdateRule, x: Inputs, backend: Backend, chunk_size: int = CHUNK) -> dict[str, Tensor]:
    """The output, the states, and the gradients of `weighted` of both with respect to every input."""
    x = x.map(lambda part: part.detach().requires_grad_())
    o, state = run(rule, x, backend, chunk_size)
    results = {"o": o, **parts(state)}
    gradients = gradients_of(weighted(results), floats(x))
    return {name: y.detach() for name, y in results.items()} | {f"gradient of {n}": y for n, y in gradients.items()}


def floats(x: Inputs) -> dict[str, Tensor]:
    """All inputs that are not whole numbers."""
    return {name: value for name, value in x.named().items() if value.is_floating_point()}


def gradients_of(of: Tensor, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of a number, 0 for inputs that it does not depend on."""
    if not of.requires_grad:
        return {name: torch.zeros_like(value) for name, value in given.items()}
    found = torch.autograd.grad(of, list(given.values()), retain_graph=True, allow_unused=True, materialize_grads=True)
    return dict(zip(given, found, strict=True))


def joined(x: Inputs, before: Tensor, after: Tensor, t: int) -> Tensor:
    """An input with the tokens of `before` up to t, and those of `after` from t on."""
    return torch.cat([x.rows(before, 0, t), x.rows(after, t)], dim=1) if moves(before) else before


def replaced(x: Inputs, other: Inputs, t: int) -> Inputs:
    """x with the tokens of `other` from t on."""
    q, k, v = (joined(x, old, new, t) for old, new in ((x.q, other.q), (x.k, other.k), (x.v, other.v)))
    return Inputs(q, k, v, {name: joined(x, gate, other.gates[name], t) for name, gate in x.gates.items()}, x.state)


# --- differences --------------------------------------------------------------------------------------------


def error(got: Tensor, want: Tensor) -> float:
    """The difference in the Frobenius norm, relative to `want` or to 1e-3, whichever is larger.

    Without the 1e-3, rounding would count where `want` is near 0, like the gradient of a decay of an empty state.
    Infinities are equal if their signs are.
    """
    got, want = got.detach().double(), want.detach().double()
    if got.shape != want.shape:
        return math.inf
    difference = torch.where((got == want) & want.isinf(), 0.0, got - want)
    return float(difference.norm() / want.where(want != -math.inf, 0.0).norm().clamp_min(1e-3))


def errors(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], where: str, limit: float | None = None
) -> Iterator[Measured]:
    for name, value in want.items():
        what = f"relative difference of {name}, {where},"
        yield Measured(error(got[name], value), what, NOT_FINITE if broken(name, value) else "", limit)


def broken(name: str, value: Tensor) -> int:
    """The number of elements that are not finite. A state may hold -inf, the logarithm of 0."""
    wrong = ~value.isfinite()
    return int((wrong & (value != -math.inf) if name.startswith("state") else wrong).sum())


def selected(x: Inputs, index: list[int], dim: int) -> Inputs:
    """Some rows of the batch (dim 0) or some heads (dim 2 of inputs with time, 1 of states, 0 of learned gates)."""

    def of(value: Tensor) -> Tensor:
        return (
            value.index_select(dim, torch.tensor(index))
            if moves(value)
            else value.index_select(0, torch.tensor(index))
            if dim
            else value
        )

    gates = {name: of(value) for name, value in x.gates.items()}
    state = None if x.state is None else tuple(s.index_select(min(dim, 1), torch.tensor(index)) for s in x.state)
    return Inputs(of(x.q), of(x.k), of(x.v), gates, state)
