"""Checks at sizes, lengths and numbers beyond those of the other checks, where code may take another path."""

import dataclasses
import itertools
import json
import random
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from deltalab.authoring.check import Measurement, Note
from deltalab.authoring.inputs import normal, parts
from deltalab.authoring.rule_checks.independence_checks import crossed, heads, rows_of_the_batch
from deltalab.authoring.rule_checks.number_checks import GRADIENTS, differences
from deltalab.authoring.rule_checks.rule_runs import (
    LENGTH,
    LONG,
    PREFIX,
    SCALE,
    backends_of,
    broken,
    error,
    errors,
    grows,
    inputs,
    outputs,
    replaced,
    selected,
    slowed,
    square,
    started,
)
from deltalab.authoring.rule_checks.use_checks import channels
from deltalab.errors import InputError
from deltalab.ops.scan import scan
from deltalab.rule import UpdateRule

LONGEST = 600
"""The number of tokens in a long sequence: more than two chunks of 256, the longest chunks in published code."""
WIDTHS = ((5, 7), (12, 40), (40, 12), (40, 40), (5, 5))
"""Pairs of K and V that are odd, no powers of 2, or above 32."""
MOST_LENGTH, LENGTH_SECONDS = 130, 1.0
"""Every length up to the first is tried: two chunks of 64 and a rest. A slow rule is tried for the seconds alone."""
FAR, LATE = 2048, (1100, 1500)
"""The tokens of a far sequence, and two places in it: the second half begins before the first of them."""
MANY_ROWS = 33
"""The number of sequences in a large batch. It exceeds the 32 that code may take at a time."""
LARGE = 1000.0
"""The factor of large values. Activations of trained models reach hundreds."""
PACKED = (1, 7, 17, 2)
"""The lengths of packed sequences: a single token, more than a chunk, and a rest."""


def slow_decays(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures the chunked form against the recurrent one at T = 150 with decays close to 1."""
    x = started(rule, slowed(rule, inputs(rule, PREFIX + LONG, batch=1)))
    where = f"chunked to recurrent at T={LONG} with log-decays a hundredth of those of other checks"
    yield from errors(outputs(rule, x, "chunked", 64), outputs(rule, x, "recurrent"), where)


def every_length(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Measures the chunked form against the recurrent one at every length from 1 to 130."""
    x = slowed(rule, inputs(rule, MOST_LENGTH, batch=1, heads=1))
    wanted, state, o = [], None, x.v[:, :0]
    for t in range(MOST_LENGTH):
        token = outputs(rule, x.span(t, t + 1, state=state), "recurrent")
        state = tuple(part for name, part in token.items() if name != "o")
        o = torch.cat([o, token["o"]], dim=1)
        wanted.append({**token, "o": o})
    began, order = time.process_time(), random.Random(0).sample(range(1, MOST_LENGTH + 1), MOST_LENGTH)
    for tried, length in enumerate(order):
        if time.process_time() - began > LENGTH_SECONDS:
            yield Note(f"tried {tried} of the lengths from 1 to {MOST_LENGTH}")
            break
        got = outputs(rule, x.span(0, length), "chunked", 64)
        yield from errors(got, wanted[length - 1], f"chunked to recurrent at T={length}")


def large_values(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Measures the chunked form against the recurrent one with values a thousand times as large, and slow decays."""
    x = slowed(rule, inputs(rule, PREFIX + 70, batch=1))
    x = started(rule, dataclasses.replace(x, v=LARGE * x.v))
    want = outputs(rule, x, "recurrent")
    if any(broken(name, value) for name, value in want.items()):
        yield Note(f"the rule overflows with values of {LARGE:g}")
        return
    got = list(errors(outputs(rule, x, "chunked", 64), want, f"chunked to recurrent with values of {LARGE:g}", 1e-8))
    # A rule that is not linear in v may be steep here, and enlarge rounding.
    nearby = x.map(lambda part: part * (1 + 2**-45 * normal(*part.shape, seed=7).sign()))
    noise = errors(outputs(rule, nearby, "recurrent"), want, "")
    yield from (m._replace(limit=max(1e-8, 30 * n.figure)) for m, n in zip(got, noise, strict=True))


def uneven_sequences(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures a sequence with slow decays beside one with fast decays and large values, and before such tokens."""
    usual = inputs(rule, PREFIX + LENGTH)
    mild, strong = slowed(rule, usual), dataclasses.replace(usual, v=LARGE * usual.v)
    x = crossed(started(rule, mild), started(rule, strong), 1, dim=0)
    for backend in backends_of(rule):
        want = outputs(rule, x, backend)
        for i, kind in enumerate(("slow decays", "fast decays and large values")):
            for name, value in outputs(rule, selected(x, [i], 0), backend).items():
                what = f"change of {name} of a sequence with {kind}, beside one of the other kind, {backend},"
                yield Measurement(error(want[name][i : i + 1], value), what)
        t = LENGTH // 2
        alone, before = (outputs(rule, y, backend)["o"][:, :t] for y in (mild, replaced(mild, strong, t)))
        what = f"change of outputs with slow decays before token {t}, and others after it, {backend},"
        yield Measurement(error(before, alone), what)


def far_tokens(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures the change of earlier outputs in 2048 tokens if later tokens change, or if they are left out."""
    x, later = (slowed(rule, inputs(rule, FAR, batch=1, heads=1, seed=seed)) for seed in (0, 1))
    o = outputs(rule, x, "chunked", 64)["o"]
    few, t = LATE
    changed = outputs(rule, replaced(x, later, t), "chunked", 64)["o"]
    yield Measurement(
        error(changed[:, :t], o[:, :t]),
        f"change of outputs before token {t} of {FAR} with other inputs after it",
        "the output of a token depends on later tokens",
        1e-12,
    )
    alone = outputs(rule, x.span(0, few), "chunked", 64)["o"]
    yield Measurement(error(o[:, :few], alone), f"change of the first {few} outputs with {FAR - few} more tokens")


def packed(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Measures packed sequences, which `cu_seqlens` tells apart, against each sequence by itself."""
    lengths: tuple[int, ...] = PACKED
    if grows(rule):
        yield Note("the state grows with the sequence, so that packed sequences have one length")
        lengths = PACKED[1:2] * 3
    x = inputs(rule, sum(lengths), batch=1)
    bounds = [0, *itertools.accumulate(lengths)]
    before = started(rule, inputs(rule, PREFIX + 1, batch=len(lengths), seed=1))
    for backend, given in itertools.product(backends_of(rule), (None, before.state)):
        alone = []
        for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
            own = None if given is None else selected(before, [i], 0).state
            alone.append(outputs(rule, x.span(start, stop, state=own), backend))
        want = {name: torch.cat([each[name] for each in alone], dim=int(name == "o")) for name in alone[0]}
        with torch.no_grad():
            o, after = scan(
                rule, x.q, x.k, x.v, x.gates, scale=SCALE, state=given, backend=backend, cu_seqlens=torch.tensor(bounds)
            )
        states = "from given states" if given else "from empty states"
        yield from errors({"o": o, **parts(after)}, want, f"packed sequences to each by itself, {backend}, {states}")


def long_forms(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Repeats checks at T = 600.

    Compares the chunked form with the recurrent one, two parts with the whole sequence, and gradients with finite
    differences. Also measures how outputs change with later tokens.
    """
    at = f"at T={LONGEST}"
    x = started(rule, inputs(rule, PREFIX + LONGEST, batch=1, heads=1))
    whole = outputs(rule, x, "chunked", 64)
    yield from errors(whole, outputs(rule, x, "recurrent"), f"chunked to recurrent {at}")
    half = LONGEST // 2
    first = outputs(rule, x.span(0, half, state=x.state), "chunked", 64)
    state = tuple(part for name, part in first.items() if name != "o")
    second = outputs(rule, x.span(half, state=state), "chunked", 64)
    joined = {**second, "o": torch.cat([first["o"], second["o"]], dim=1)}
    yield from errors(joined, whole, f"two parts split at token {half} to one {at}")
    other, later = (inputs(rule, LONGEST, batch=1, heads=1, seed=seed) for seed in (0, 1))
    o = outputs(rule, other, "chunked", 64)["o"]
    for t in (290, 550):
        changed = outputs(rule, replaced(other, later, t), "chunked", 64)["o"]
        what = f"change of outputs before token {t} of {LONGEST} with other inputs after it"
        yield Measurement(error(changed[:, :t], o[:, :t]), what, "the output of a token depends on later tokens", 1e-12)
    for measurement in differences(rule, x, at):
        if isinstance(measurement, Measurement):
            cause = "a `detach` or a `no_grad` between chunks, or a backward that is wrong in long sequences"
            yield measurement._replace(limit=GRADIENTS, cause=cause)


def wide_channels(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Measures whether the rule reads all channels of its inputs if K and V are those of `WIDTHS`."""
    for key_dim, value_dim in WIDTHS:
        if square(rule) and key_dim != value_dim:
            continue
        try:
            started(rule, inputs(rule, PREFIX + LENGTH, key_dim=key_dim, value_dim=value_dim))
        except Exception:  # "other sizes" says which sizes the rule does not take
            continue
        for measurement in channels(rule, key_dim=key_dim, value_dim=value_dim):
            if isinstance(measurement, Measurement):
                yield measurement._replace(what=f"{measurement.what} at K={key_dim}, V={value_dim}")


def wide_precision(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures a run in fp32 against a run in fp64 on the same values, with K = V = 40."""
    try:
        x = started(rule, inputs(rule, PREFIX + LENGTH, key_dim=40, value_dim=40)).map(Tensor.float)
    except Exception:  # "other sizes" says which sizes the rule does not take
        return
    yield from errors(
        outputs(rule, x, "chunked"), outputs(rule, x.map(Tensor.double), "chunked"), "fp32 to fp64 at K=40"
    )


def many_rows_and_heads(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Measures the independence of the 33 sequences of a batch, and of 16 heads."""
    yield from rows_of_the_batch(rule, batch=MANY_ROWS)
    yield from heads(rule, many=16)


def other_numbers(rule: UpdateRule) -> Iterator[Measurement]:
    """Checks that a number knob takes any number above its least option, or refuses it by an `InputError`."""
    knobs = json.loads(json.dumps({name: value for name, value in rule.spec().items() if name != "name"}))
    for name, options in rule.options().items():
        numbers = [option for option in options if type(option) in (int, float)]
        for number in {type(n)(1.5 * n + 1) for n in numbers if isinstance(n, int | float)} - set(numbers):
            try:
                other = type(rule).configured({**knobs, name: number})
            except InputError:
                continue
            try:
                outputs(other, inputs(other), "chunked")
            except InputError:
                raise
            except Exception as error:
                cause = f"raised {type(error).__name__}: {error}; take any number, or refuse it by an InputError"
                yield Measurement(1.0, f"failure with {name}={number}, which a study may set,", cause)
            else:
                yield Measurement(0.0, f"failure with {name}={number}, which a study may set,")
