"""Checks at sizes, lengths and numbers beyond those of the other checks: code may take another path there."""

import json
from collections.abc import Iterator

import torch
from torch import Tensor

from deltalab.authoring.check import Measured, Note
from deltalab.authoring.independence_checks import heads, rows_of_the_batch
from deltalab.authoring.number_checks import GRADIENTS, differences
from deltalab.authoring.rule_runs import LENGTH, PREFIX, error, errors, inputs, outputs, replaced, square, started
from deltalab.authoring.use_checks import channels
from deltalab.errors import InputError
from deltalab.rule import UpdateRule

LONGEST = 600
"""Tokens: more than two chunks of 256, the longest that published code takes."""
WIDTHS = ((5, 7), (12, 40), (40, 12), (40, 40), (5, 5))
"""K and V: odd, not powers of 2, and above 32."""


def long_forms(rule: UpdateRule) -> Iterator[Measured | Note]:
    """Forms, parts, causality and gradients at T = 600."""
    at = f"at T={LONGEST}"
    x = started(rule, inputs(rule, PREFIX + LONGEST, batch=1, heads=1))
    whole = outputs(rule, x, "chunked", 64)
    yield from errors(whole, outputs(rule, x, "recurrent"), f"chunked to recurrent {at}")
    half = LONGEST // 2
    first = outputs(rule, x.span(0, half, state=x.state), "chunked", 64)
    between = tuple(part for name, part in first.items() if name != "o")
    second = outputs(rule, x.span(half, state=between), "chunked", 64)
    both = {**second, "o": torch.cat([first["o"], second["o"]], dim=1)}
    yield from errors(both, whole, f"two parts split at token {half} to one {at}")
    y, later = (inputs(rule, LONGEST, batch=1, heads=1, seed=seed) for seed in (0, 1))
    o = outputs(rule, y, "chunked", 64)["o"]
    for t in (290, 550):
        turned = outputs(rule, replaced(y, later, t), "chunked", 64)["o"]
        what = f"change of outputs before token {t} of {LONGEST} with other inputs after it"
        yield Measured(error(turned[:, :t], o[:, :t]), what, "the output of a token depends on later tokens", 1e-12)
    for measured in differences(rule, x, at):
        if isinstance(measured, Measured):
            cause = "a `detach` or a `no_grad` between chunks, or a backward that is wrong in long sequences"
            yield measured._replace(limit=GRADIENTS, cause=cause)


def wide_channels(rule: UpdateRule) -> Iterator[Measured | Note]:
    """Whether all channels are read at other widths."""
    for key_dim, value_dim in WIDTHS:
        if square(rule) and key_dim != value_dim:
            continue
        try:
            started(rule, inputs(rule, PREFIX + LENGTH, key_dim=key_dim, value_dim=value_dim))
        except Exception:  # "other sizes" says which sizes the rule does not take
            continue
        for measured in channels(rule, key_dim=key_dim, value_dim=value_dim):
            if isinstance(measured, Measured):
                yield measured._replace(what=f"{measured.what} at K={key_dim}, V={value_dim}")


def wide_precision(rule: UpdateRule) -> Iterator[Measured]:
    """fp32 held to fp64 on the same values, at keys and values above 32."""
    try:
        x = started(rule, inputs(rule, PREFIX + LENGTH, key_dim=40, value_dim=40)).map(Tensor.float)
    except Exception:  # "other sizes" says which sizes the rule does not take
        return
    yield from errors(
        outputs(rule, x, "chunked"), outputs(rule, x.map(Tensor.double), "chunked"), "fp32 to fp64 at K=40"
    )


def many_rows_and_heads(rule: UpdateRule) -> Iterator[Measured | Note]:
    """Independence of the sequences of a batch of 9, and of 16 heads."""
    yield from rows_of_the_batch(rule, batch=9)
    yield from heads(rule, many=16)


def other_numbers(rule: UpdateRule) -> Iterator[Measured]:
    """A number knob takes any number above its least option, or refuses it by an `InputError`."""
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
            except Exception as failed:
                cause = f"raised {type(failed).__name__}: {failed}; take any number, or refuse it by an InputError"
                yield Measured(1.0, f"failure with {name}={number}, which a study may set,", cause)
            else:
                yield Measured(0.0, f"failure with {name}={number}, which a study may set,")
