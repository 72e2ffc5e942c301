"""Checks that a rule uses what it declares and is given: inputs, gates, knobs, the scale, the state, its spec."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from deltalab.authoring.check import Measured, Note
from deltalab.authoring.inputs import Inputs, learned, moves, normal, within
from deltalab.authoring.rule_runs import (
    BATCH,
    LENGTH,
    PREFIX,
    SCALE,
    WIDTH,
    error,
    floats,
    gradients_of,
    inputs,
    layer_of,
    outputs,
    run,
    started,
    weighted,
)
from deltalab.errors import InputError
from deltalab.models.layer import Gates, Vectors
from deltalab.ops.recurrence import Backend
from deltalab.rule import Option, UpdateRule

FORMS: tuple[Backend, ...] = ("recurrent", "chunked")
FAINT = 1e-9  # of the largest gradient: what moves results by less is not read


def channels(rule: UpdateRule, **sizes: int) -> Iterator[Measured | Note]:
    """The largest gradient of outputs and states in each channel of q, k and v, and in each head of each gate."""
    x = started(rule, inputs(rule, PREFIX + LENGTH, **sizes)).map(lambda part: part.detach().requires_grad_())
    given = {name: value for name, value in floats(x).items() if not name.startswith("state")}
    o, state = run(rule, x, "chunked")
    found = gradients_of(weighted({"o": o, **{f"state[{i}]": s for i, s in enumerate(state)}}), given)
    largest = max(float(gradient.abs().max()) for gradient in found.values())
    for name, gradient in found.items():
        if name in unread(rule):
            yield Note(f"{name} is not read, as the rule declares")
            continue
        # [B, T, H, ..] to the largest of each head and channel; learned gates have no B and T.
        each = gradient.abs().amax((0, 1)) if moves(gradient) else gradient.abs()
        at = [int(i) for i in (each == each.min()).nonzero()[0]]
        moved = float(each.min()) / max(largest, 1e-300)
        if moved < FAINT:  # a step function has no gradient: try other values
            moved = _moved(rule, x, name, at)
        where = f"head {at[0]}" + (f", channel {at[1]}" if len(at) > 1 else "")
        cause = f"the code does not read {where} of {name}"
        if moved < FAINT and float(each.max()) < FAINT * largest:
            cause = f"the code does not read {name}"
        mend = f"; to mend it: read it, or declare `ignores = frozenset({{'{name}'}})` in the rule"
        yield Measured(moved, f"effect of {where} of {name} on outputs and states", cause + mend)


def _moved(rule: UpdateRule, x: Inputs, name: str, at: list[int]) -> float:
    """The relative change of outputs and states with other values of one head and channel of an input."""
    value = x.named()[name].detach()
    new = within(rule.gates[name], tuple(value.shape), seed=9) if name in rule.gates else -value
    head, *channel = at
    where = torch.zeros(value.shape, dtype=torch.bool)
    by_head = where.movedim(2 if moves(value) else 0, 0)[head]
    by_head[(..., channel[0]) if channel else ...] = True
    other = torch.where(where, new, value)
    gates = {**x.gates, name: other} if name in x.gates else x.gates
    q, k, v = (other if name == given else getattr(x, given) for given in ("q", "k", "v"))
    before, after = outputs(rule, x, "chunked"), outputs(rule, Inputs(q, k, v, gates, x.state), "chunked")
    return max(error(after[n], y) for n, y in before.items())


def unread(rule: UpdateRule) -> set[str]:
    """The inputs and gates that the rule declares not to read: in `ignores`, or in its docstring, "k is not read"."""
    said = re.findall(r"\b(\w+) is not read\b", type(rule).__doc__ or "")
    return {*getattr(rule, "ignores", ()), *said}


def gate_liveness(rule: UpdateRule) -> Iterator[Measured]:
    layer, x = layer_of(rule), normal(BATCH, LENGTH, WIDTH, seed=1)
    held: dict[str, Tensor] = {}
    turned: dict[str, Tensor] = {}

    def hold(module: Gates, inputs: tuple[Tensor, ...], values: dict[str, Tensor]) -> dict[str, Tensor]:
        held.update(values)
        return {**values, **{name: value for name, value in turned.items() if name in values}}

    def hold_vectors(module: Vectors, inputs: tuple[Tensor, ...], values: tuple[dict[str, Tensor], Tensor]) -> Any:
        held.update(values[0])
        return {**values[0], **{name: value for name, value in turned.items() if name in values[0]}}, values[1]

    layer.gates.register_forward_hook(hold)
    if layer.vectors is not None:
        layer.vectors.register_forward_hook(hold_vectors)
    y = layer(x)
    live = [name for name in learned(rule) if name not in unread(rule)]
    sources = {f"the value of '{name}'": held[name] for name in live}
    for path, parameter in layer.gates.named_parameters():
        if any(name in live for name, gate in rule.gates.items() if path.split(".")[1] in (name, gate.of)):
            sources[f"parameter {path}"] = parameter
    if not live:
        return
    for source, gradient in gradients_of((y * normal(*y.shape, seed=2)).sum(), sources).items():
        what = f"gradient of the layer's output with respect to {source}, relative to the output,"
        yield Measured(float(gradient.norm() / y.detach().norm()), what)
    for i, name in enumerate(live):
        turned.clear()
        turned[name] = within(rule.gates[name], tuple(held[name].shape), seed=i)
        with torch.no_grad():
            yield Measured(error(layer(x), y), f"change of the layer's output with other values of '{name}'")


# --- knobs --------------------------------------------------------------------------------------------------

SAME = 1e-6  # relative: options that differ by less compute the same function


def knob_options(rule: UpdateRule) -> Iterator[Measured | Note]:
    """The difference between each two options of a knob, at the defaults of the others or where another is turned."""
    for name, options in rule.options().items():
        found: dict[tuple[Option, Option], float] = {}
        accepted: dict[Option, list[UpdateRule]] = {option: [] for option in options}
        for setting in rule.variants():
            if found and min(found.values()) > SAME:
                break
            if getattr(setting, name) != getattr(rule, name):
                continue
            made = [(option, y) for option in options if (y := _answer(setting, name, option)) is not None]
            for option, _ in made:
                accepted[option].append(setting)
            for (a, y), (b, z) in itertools.combinations(made, 2):
                found[a, b] = max(found.get((a, b), 0.0), error(z, y))
        numbers = all(type(option) in (int, float) for option in options)
        for (a, b), difference in found.items():
            what = f"difference of the layer's output between {name}={a} and {name}={b}"
            if difference <= SAME and numbers and _counts(rule, name, found):
                yield Note(
                    f"{name}={a} and {name}={b} differ by {difference:.1g}: it has converged before, or does not bind"
                )
            elif 0 < difference <= SAME and accepted[a] != accepted[b]:
                yield Note(
                    f"{name}={a} and {name}={b} differ by {difference:.1g}, but take other options of other knobs"
                )
            else:
                yield Measured(
                    difference, what, "" if max(found.values()) <= SAME else "both options run the same code"
                )


def _counts(rule: UpdateRule, name: str, found: dict[tuple[Option, Option], float]) -> bool:
    """Whether a number matters somewhere: between other options, or below the smallest option."""
    if max(found.values()) > SAME:
        return True
    smallest = min(option for option in rule.options()[name] if isinstance(option, int | float))
    least = [1, 2] if isinstance(smallest, int) else [smallest / 1000, smallest * 1000]
    y = _answer(rule, name, getattr(rule, name))
    made = [z for z in (_answer(rule, name, number) for number in least) if z is not None]
    return y is not None and any(error(z, y) > SAME for z in made)


def _answer(rule: UpdateRule, name: str, option: Option) -> Tensor | None:
    """The output of a layer of the rule with one option of a knob; None if the rule refuses it."""
    # A window or a mini-batch has an effect only in longer sequences.
    longest = max((o for o in rule.options()[name] if isinstance(o, int)), default=0)
    x = normal(BATCH, LENGTH + longest, WIDTH, seed=1)
    changed: dict[str, Any] = {name: option}
    with suppress(InputError), torch.no_grad():
        layer = layer_of(dataclasses.replace(rule, **changed))
        # Two gates may start with equal values and differ once they are trained.
        for i, parameter in enumerate(layer.gates.parameters()):
            parameter.add_(0.1 * normal(*parameter.shape, seed=i))
        y: Tensor = layer(x)
        return y
    return None


def spec(rule: UpdateRule) -> Iterator[Measured]:
    """A spec, written as JSON and read again, must make the same rule: trials are stored by it."""
    said = rule.spec()
    knobs = json.loads(json.dumps({name: value for name, value in said.items() if name != "name"}))
    try:
        again: object = type(rule).configured(knobs)
    except InputError as refused:
        yield Measured(1.0, f"mismatch of the rule with the one of its spec {said}", f"the spec is refused: {refused}")
        return
    assert isinstance(again, UpdateRule)
    lost = [name for name in rule.options() if getattr(again, name) != getattr(rule, name)]
    cause = f"`__post_init__` changes {', '.join(lost)}, or two of its options have the same text" if lost else ""
    what = f"mismatch of the rule with the one that its spec {said} makes"
    yield Measured(float(again != rule or again.spec() != said), what, cause)


# --- scale and state ----------------------------------------------------------------------------------------


def scale(rule: UpdateRule) -> Iterator[Measured | Note]:
    """`mix` must apply the scale, once. In a rule of the algebra the platform does."""
    x = started(rule, inputs(rule, PREFIX + LENGTH))
    for form in FORMS:
        o, double, fourth = (outputs(rule, x, form, scale=SCALE * times)["o"] for times in (1, 2, 4))
        change = error(double, o)
        if change <= SAME and (cancels := _cancels(rule, x)):
            yield Note(f"the scale has no effect: {cancels}")
            continue
        yield Measured(change, f"change of the output at twice the scale, {form},", "", SAME)
        # A power of the scale other than 1 is a scale that is applied twice. A softmax of it is no power.
        factor = float((double * o).sum() / o.square().sum().clamp_min(1e-300))
        power = error(double, factor * o) < SAME and error(fourth, factor**2 * o) < SAME and factor > 0
        for times, how in ((4.0, "twice"), (2**0.5, "by its root")):  # inside a softmax, where it acts on q
            scaled = outputs(rule, Inputs(times * x.q, x.k, x.v, x.gates, x.state), form, scale=SCALE)["o"]
            if not power and error(scaled, o) > SAME and error(double, scaled) < SAME:
                what = f"1 minus the change by a scale that is applied {how}, {form},"
                yield Measured(0.0, what, f"the scale is applied {how}", 1 - SAME)
        if power and change > SAME:
            exponent = math.log2(factor)
            what = f"1 minus the distance of the power of the scale in the output, {exponent:.3g}, from 1, {form},"
            yield Measured(1 - abs(exponent - 1), what, "the scale is applied more than once, or by its root", 1 - SAME)


def _cancels(rule: UpdateRule, x: Inputs) -> str:
    """Why a scale may have no effect: a normalization that cancels it, but not a softmax, which takes it inside."""
    o = outputs(rule, x, "chunked")["o"]
    for name in ("q", "v"):
        longer = dataclasses.replace(x, q=2 * x.q) if name == "q" else dataclasses.replace(x, v=2 * x.v)
        if error(outputs(rule, longer, "chunked")["o"], o) <= SAME:
            return f"a normalization makes the output the same for {name} of any length"
    ones = inputs(rule, 2)
    ones = dataclasses.replace(ones, v=torch.ones_like(ones.v))
    if error(outputs(rule, ones, "chunked")["o"], torch.ones_like(ones.v[:, : ones.q.shape[1]])) > 1e-3:
        return ""
    # The weight of the second of two tokens. Of a softmax, its logit is linear in q.
    second = ones.v.clone()
    second[:, : rule.steps] = 0.0
    weights = [
        outputs(rule, dataclasses.replace(ones, q=n * ones.q, v=second), "chunked")["o"][:, 1] for n in (1, 2, 3)
    ]
    one, two, three = (weight.logit() for weight in weights)
    softmax = error(three - two, two - one) < 1e-6
    return "" if softmax else "the output is a mean of values, with weights that sum to 1"


def initial_state(rule: UpdateRule) -> Iterator[Measured]:
    """Each part of a given state must move something in some setting; no state must be that of `initial_state`."""
    effects: dict[tuple[Backend, int], float] = {}
    for setting in rule.variants():
        x = started(setting, inputs(setting, PREFIX + LENGTH))
        assert x.state is not None
        for form in FORMS:
            want = outputs(setting, x, form)
            for i, part in enumerate(x.state):
                if effects.get((form, i), 0.0) < FAINT and part.is_floating_point() and part.numel():
                    size = 0.1 * float(part.where(part.isfinite(), 0.0).square().mean().sqrt()) + 1e-3
                    turned = part + size * normal(*part.shape, seed=i)
                    got = outputs(setting, x.span(0, state=(*x.state[:i], turned, *x.state[i + 1 :])), form)
                    effects[form, i] = max(error(got[name], value) for name, value in want.items())
            empty, made = (outputs(setting, x.span(0, state=s), form) for s in (None, setting.start(x.k, x.v)))
            differ = max(error(made[name], value) for name, value in empty.items())
            cause = "a call without a state does not begin with `initial_state`: override neither or both"
            what = f"1 minus the difference of a call without a state from one with that of `initial_state`, {form},"
            yield Measured(1 - differ, what, cause, 1 - FAINT)
    for (form, i), moved in effects.items():
        cause = f"the code does not read part {i} of the given state"
        yield Measured(moved, f"effect of part {i} of the initial state on outputs and states, {form},", cause)
