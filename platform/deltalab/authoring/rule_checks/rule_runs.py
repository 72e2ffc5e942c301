"""Runs a rule for its checks: settings and inputs to try, outputs with their gradients, and differences.

Sizes are tiny, and the arithmetic is fp64 unless a check is about a dtype. So a failure means that a rule computes a
wrong function, and does not come from rounding.
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

from deltalab.authoring.check import NOT_FINITE, Measurement, author_line
from deltalab.authoring.inputs import Inputs, draw, learned, moves, normal, parts
from deltalab.errors import InputError
from deltalab.models.layer import RuleLayer, initialize
from deltalab.ops.backends import lacks_triton
from deltalab.ops.fused.convolution import features
from deltalab.ops.recurrence import Backend
from deltalab.ops.scan import scan
from deltalab.rule import State, UpdateRule

BATCH, LENGTH, HEADS, KEY, VALUE, CHUNK, WIDTH, CONV = 2, 13, 2, 4, 3, 4, 8, 4
PREFIX = 5
"""The number of tokens that make an initial state. It exceeds KEY, so that the state has full rank."""
LONG = 150
"""The number of tokens in a long sequence. It exceeds the chunks of 16 to 128 tokens that parallel forms take."""
SCALE = 0.6
"""The scale of outputs. It differs from KEY ** -0.5, which a rule may take by mistake."""
LONGER = (0, 150, 1100)
"""The numbers of tokens before the usual ones, until an input or a part of the state counts as not read.

Code may keep what is older than hundreds of tokens in a part of its own.
"""
EXACT = 1e-10
MOST_COMBINATIONS = 24

# --- settings -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def combinations(rule: UpdateRule) -> list[UpdateRule]:
    """Returns the rule at all combinations of its options.

    If there are more than `MOST_COMBINATIONS`, returns fewer settings, in which each pair of options still occurs.
    Combinations that the rule refuses with an `InputError` are left out.
    """
    options = rule.options()
    if math.prod(len(values) for values in options.values()) > MOST_COMBINATIONS:
        return _pairs(rule)
    settings = (_turned(rule, zip(options, choice, strict=True)) for choice in itertools.product(*options.values()))
    return [rule, *(setting for setting in settings if setting is not None and setting != rule)]


def _turned(rule: UpdateRule, choice: Any) -> UpdateRule | None:
    """Returns the rule with the options in `choice`, or None if the rule refuses them."""
    with suppress(InputError):
        return dataclasses.replace(rule, **dict(choice))
    return None


def _pairs(rule: UpdateRule) -> list[UpdateRule]:
    """Returns settings in which each pair of options occurs, found greedily.

    Each setting begins with a pair that no setting has yet, and takes the options that add the most new pairs.
    """
    options, random_ = rule.options(), random.Random(0)
    names = list(options)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(options[a])), range(len(options[b])))
    }
    settings = [rule]

    place = {name: i for i, name in enumerate(names)}

    def pairs(choice: Mapping[str, int]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
        placed = sorted(choice.items(), key=lambda item: place[item[0]])
        return set(itertools.combinations(placed, 2))

    def adds(choice: Mapping[str, int], name: str, i: int) -> int:
        """Returns how many missing pairs option `i` of the knob `name` would add to `choice`."""
        option = (name, i)
        return sum(
            ((option, other) if place[name] < place[other[0]] else (other, option)) in missing
            for other in choice.items()
        )

    def filled(start: Mapping[str, int], greedy: bool) -> dict[str, int]:
        choice = dict(start)
        for name in random_.sample(names, len(names)):
            if name not in choice:
                # A rule may refuse most combinations of several turned knobs. So the last attempt leaves the other
                # knobs at their defaults.
                places = random_.sample(range(len(options[name])), len(options[name])) if greedy else [0]
                choice[name] = max(places, key=lambda i, n=name: adds(choice, n, i))  # type: ignore[misc]
        return choice

    for pair in sorted(missing):
        if pair not in missing:
            continue
        missing.discard(pair)  # even if the rule refuses the pair
        for greedy in (True, True, True, True, False):
            choice = filled(dict(pair), greedy)
            setting = _turned(rule, ((name, options[name][i]) for name, i in choice.items()))
            if setting is not None:
                missing -= pairs(choice)
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
    """Draws inputs of a rule as `draw` does.

    Args:
        length: The number of tokens.
        batch: The number of sequences.
        heads: The number of heads.
        key_dim: The size K of keys.
        value_dim: The size V of values; if it is None, `VALUE`, or K for a rule that takes K = V alone.
        seed: The seed of the random numbers.
    """
    value_dim = value_dim or (key_dim if square(rule) else VALUE)
    return draw(rule, batch=batch, length=length, heads=heads, key_dim=key_dim, value_dim=value_dim, seed=seed)


def started(rule: UpdateRule, x: Inputs, prefix: int = PREFIX) -> Inputs:
    """Returns the inputs from token `prefix` on, with the state that the first `prefix` tokens make."""
    return x.span(prefix, state=run(rule, x.span(0, prefix), "recurrent" if prefix == PREFIX else "chunked")[1])


@lru_cache(maxsize=1024)
def square(rule: UpdateRule) -> str:
    """Returns whether a rule takes K = V alone, as text.

    The text is the error by which the rule refuses K != V. It is empty if the rule takes K != V.
    """
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
    """Returns whether an error says that a rule does not take some sizes, rather than that the rule is wrong."""
    deliberate = isinstance(error, InputError | ValueError | NotImplementedError | AssertionError) and author_line(
        error
    )
    return bool(deliberate) or rule.transition is None


def layer_of(rule: UpdateRule, *, width: int = WIDTH, heads: int = HEADS, key_dim: int = KEY) -> RuleLayer:
    """Returns an initialized layer of the rule in fp64."""
    value_dim = key_dim if square(rule) else VALUE
    layer = RuleLayer(rule, width, heads, key_dim=key_dim, value_dim=value_dim, conv=CONV, chunk_size=CHUNK).double()
    initialize(layer, seed=0)
    return layer


def layered(rule: UpdateRule, length: int, *, batch: int = 1, heads: int = HEADS, key_dim: int = 8) -> Inputs:
    """Returns the inputs that an untrained layer makes from a normal random x. Gates are near their initial values."""
    layer = layer_of(rule, width=32, heads=heads, key_dim=key_dim)
    with torch.no_grad():
        x = normal(batch, length, 32, seed=1)
        q, k, v, _ = features(layer.qkv(x), layer.conv, None, layer.channels)
        gates = {**layer.gates(x), **({} if layer.vectors is None else layer.vectors(x, None)[0])}
    return Inputs(q, k, v, {name: gates[name] for name in learned(rule)})


# --- outputs ------------------------------------------------------------------------------------------------


def backends_of(rule: UpdateRule) -> tuple[Backend, ...]:
    """Returns the backends that run the rule here."""
    return ("recurrent", "chunked", "triton") if has_kernel(rule) else ("recurrent", "chunked")


def has_kernel(rule: UpdateRule) -> bool:
    """Returns whether the rule's own kernel takes inputs in fp64 on a CPU and can run here."""
    x = inputs(rule, 1)
    return rule.lacks_kernel(x.k, x.v) is None and lacks_triton("cpu") is None


def slowed(rule: UpdateRule, x: Inputs) -> Inputs:
    """Returns the inputs with every log-decay divided by 100, so that a token still counts after hundreds of others.

    The log-decays are the gates whose range ends at 0. Decays that are drawn from their whole range hide all tokens
    that are older than about 20.
    """
    decays = {name for name, gate in learned(rule).items() if gate.low < 0 == gate.high and gate.features is None}
    return dataclasses.replace(x, gates={n: value / 100 if n in decays else value for n, value in x.gates.items()})


def run(
    rule: UpdateRule, x: Inputs, backend: Backend, chunk_size: int = CHUNK, scale: float = SCALE
) -> tuple[Tensor, State]:
    """Returns the output and the state of a scan."""
    return scan(rule, x.q, x.k, x.v, x.gates, scale=scale, state=x.state, backend=backend, chunk_size=chunk_size)


def outputs(
    rule: UpdateRule, x: Inputs, backend: Backend, chunk_size: int = CHUNK, scale: float = SCALE
) -> dict[str, Tensor]:
    """Runs a scan without gradients. Returns a dictionary of the output `o` and the tensors of the state."""
    with torch.no_grad():
        o, state = run(rule, x, backend, chunk_size, scale)
    return {"o": o, **parts(state)}


def grows(rule: UpdateRule) -> bool:
    """Returns whether the state of a rule has more elements after more tokens, as that of an attention has."""
    short, long = (outputs(rule, inputs(rule, length, batch=1), "chunked") for length in (1, 7))
    return any(part.shape != short[name].shape for name, part in long.items() if name != "o")


def weighted(results: Mapping[str, Tensor]) -> Tensor:
    """Returns the sum of all elements of all results, with fixed random signs that are the same in every dtype.

    Elements that are -inf, the logarithm of a state that is 0, do not count.
    """
    sums = []
    for i, y in enumerate(results.values()):
        if y.is_floating_point():
            signed = (y * normal(*y.shape, seed=i).sign().to(y)).where(y != -math.inf, 0.0).sum()
            sums.append(signed.to(torch.promote_types(y.dtype, torch.float32)))
    return torch.stack([part.double() if sums[0].dtype == torch.float64 else part for part in sums]).sum()


def evaluate(rule: UpdateRule, x: Inputs, backend: Backend, chunk_size: int = CHUNK) -> dict[str, Tensor]:
    """Returns the output, the states, and the gradients of their `weighted` sum with respect to every input."""
    x = x.map(lambda part: part.detach().requires_grad_())
    o, state = run(rule, x, backend, chunk_size)
    results = {"o": o, **parts(state)}
    gradients = gradients_of(weighted(results), floats(x))
    return {name: y.detach() for name, y in results.items()} | {f"gradient of {n}": y for n, y in gradients.items()}


def floats(x: Inputs) -> dict[str, Tensor]:
    """Returns all inputs that are not whole numbers."""
    return {name: value for name, value in x.named().items() if value.is_floating_point()}


def gradients_of(result: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the gradient of a number with respect to each input, 0 if the number does not depend on the input."""
    if not inputs or not result.requires_grad:
        return {name: torch.zeros_like(value) for name, value in inputs.items()}
    gradients = torch.autograd.grad(
        result, list(inputs.values()), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(inputs, gradients, strict=True))


def joined(x: Inputs, before: Tensor, after: Tensor, t: int) -> Tensor:
    """Returns the tokens of `before` up to `t`, followed by the tokens of `after` from `t` on.

    `before` and `after` are two values of one input of `x`. Without a time axis, the result is `before`.
    """
    return torch.cat([x.rows(before, 0, t), x.rows(after, t)], dim=1) if moves(before) else before


def replaced(x: Inputs, other: Inputs, t: int) -> Inputs:
    """Returns `x` in which the tokens from `t` on come from `other`."""
    q, k, v = (joined(x, old, new, t) for old, new in ((x.q, other.q), (x.k, other.k), (x.v, other.v)))
    return Inputs(q, k, v, {name: joined(x, gate, other.gates[name], t) for name, gate in x.gates.items()}, x.state)


# --- differences --------------------------------------------------------------------------------------------


def error(got: Tensor, want: Tensor) -> float:
    """Returns the norm of `got - want` relative to the norm of `want`, or to 1e-3 if that norm is smaller.

    Without the 1e-3, rounding would count where `want` is near 0, like the gradient of a decay of an empty state.
    Norms are Frobenius norms. Infinities are equal if their signs are equal.
    """
    got, want = got.detach().double(), want.detach().double()
    if got.shape != want.shape:
        return math.inf
    difference = torch.where((got == want) & want.isinf(), 0.0, got - want)
    return float(difference.norm() / want.where(want != -math.inf, 0.0).norm().clamp_min(1e-3))


def errors(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], where: str, limit: float | None = None
) -> Iterator[Measurement]:
    """Yields the `error` of each result that `want` has.

    Args:
        got: The results to measure.
        want: The right results.
        where: Says in the message what is compared.
        limit: The limit of these figures; None for the limit of the check.
    """
    for name, value in want.items():
        what = f"relative difference of {name}, {where},"
        yield Measurement(error(got[name], value), what, NOT_FINITE if broken(name, value) else "", limit)


def broken(name: str, value: Tensor) -> int:
    """Returns the number of elements that are not finite. In a state, -inf is finite: the logarithm of 0."""
    wrong = ~value.isfinite()
    return int((wrong & (value != -math.inf) if name.startswith("state") else wrong).sum())


def selected(x: Inputs, index: list[int], dim: int) -> Inputs:
    """Returns some sequences or some heads of the inputs.

    Args:
        index: The sequences or heads to keep.
        dim: 0 for sequences, 2 for heads. The head is dimension 2 of inputs with a time axis, 1 of states and 0 of
            learned gates.
    """

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
