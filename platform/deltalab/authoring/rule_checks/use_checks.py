"""Checks that a rule uses its inputs, gates and knobs, the scale and the state, and that its spec restores it."""

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

from deltalab.authoring.check import Measurement, Note
from deltalab.authoring.inputs import Inputs, learned, moves, normal, within
from deltalab.authoring.rule_checks.rule_runs import (
    BATCH,
    LENGTH,
    LONGER,
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
    slowed,
    started,
    weighted,
)
from deltalab.errors import InputError
from deltalab.models.layer import RuleLayer
from deltalab.models.rule_inputs.gates import Gates, Vectors
from deltalab.ops.recurrence import Backend
from deltalab.ops.scan import operands
from deltalab.rule import Option, UpdateRule

FORMS: tuple[Backend, ...] = ("recurrent", "chunked")
FAINT = 1e-9
"""A share of the largest gradient. An input counts as not read if it moves the results by less than this share."""
LIVE = 5e-6
"""The least effect of a gate. The weakest of the built-in rules has 6e-3; one that a norm cancels has at most 1e-6."""
TRAINED = 3
"""The steps of training after which a gate must have an effect."""


def channels(rule: UpdateRule, **sizes: int) -> Iterator[Measurement | Note]:
    """Measures how much each channel of q, k and v, and each head of each gate, moves outputs and states.

    The figure is the largest gradient of a channel or head, relative to the largest gradient of all.
    """
    read: dict[str, Tensor] = {}
    for longer in LONGER:
        x, gradients = _gradients(rule, longer, sizes)
        largest = max(max(float(gradient.abs().max()) for gradient in gradients.values()), 1e-300)
        for name, gradient in gradients.items():
            # Reduce [B, T, H, ..] to the largest value of each head and channel. Learned gates have no B and T.
            reduced = (gradient.abs().amax((0, 1)) if moves(gradient) else gradient.abs()) / largest
            read[name] = torch.maximum(read[name], reduced) if name in read else reduced
        if all(float(effect.min()) >= FAINT for name, effect in read.items() if name not in unread(rule)):
            break
        if not longer:
            x_short = x
    for name, effects in read.items():
        if name in unread(rule):
            yield Note(f"{name} is not read, as the rule declares")
            continue
        weakest = [int(i) for i in (effects == effects.min()).nonzero()[0]]
        effect = float(effects.min())
        if effect < FAINT:  # a step function has no gradient, so try other values
            effect = _moved(rule, x_short, name, weakest)
        where = f"head {weakest[0]}" + (f", channel {weakest[1]}" if len(weakest) > 1 else "")
        cause = f"the code does not read {where} of {name}"
        if effect < FAINT and float(effects.max()) < FAINT:
            cause = f"the code does not read {name}"
        mend = f"; to mend it: read it, or declare `ignores = frozenset({{'{name}'}})` in the rule"
        yield Measurement(effect, f"effect of {where} of {name} on outputs and states", cause + mend)


def _gradients(rule: UpdateRule, longer: int, sizes: dict[str, int]) -> tuple[Inputs, dict[str, Tensor]]:
    """Returns inputs after `longer` tokens more, and the gradients of outputs and states with respect to them."""
    x = inputs(rule, longer + PREFIX + LENGTH, **sizes)
    x = started(rule, slowed(rule, x) if longer else x, longer + PREFIX)
    x = x.map(lambda part: part.detach().requires_grad_())
    tensors = {name: value for name, value in floats(x).items() if not name.startswith("state")}
    o, state = run(rule, x, "chunked")
    return x, gradients_of(weighted({"o": o, **{f"state[{i}]": s for i, s in enumerate(state)}}), tensors)


def _moved(rule: UpdateRule, x: Inputs, name: str, place: list[int]) -> float:
    """Changes one head and channel of the input `name`. Returns the relative change of outputs and states."""
    value = x.named()[name].detach()
    # Larger values, too, since a maximum over tokens may pass by the smaller ones.
    new = within(rule.gates[name], tuple(value.shape), seed=9) if name in rule.gates else -4 * value
    head, *channel = place
    mask = torch.zeros(value.shape, dtype=torch.bool)
    by_head = mask.movedim(2 if moves(value) else 0, 0)[head]
    by_head[(..., channel[0]) if channel else ...] = True
    other = torch.where(mask, new, value)
    gates = {**x.gates, name: other} if name in x.gates else x.gates
    q, k, v = (other if name == symbol else getattr(x, symbol) for symbol in ("q", "k", "v"))
    before, after = outputs(rule, x, "chunked"), outputs(rule, Inputs(q, k, v, gates, x.state), "chunked")
    return max(error(after[n], y) for n, y in before.items())


def unread(rule: UpdateRule) -> set[str]:
    """Returns the names of the inputs and gates that the rule declares not to read.

    It declares them in `ignores`, or by words such as "k is not read" in its docstring.
    """
    stated = re.findall(r"\b(\w+) is not read\b", type(rule).__doc__ or "")
    return {*getattr(rule, "ignores", ()), *stated}


def gate_liveness(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Measures whether each gate and each of its parameters moves the output of a layer.

    What does not move it at the start of training may do so after some steps: a product of two parameters that both
    start at 0, for example, where one of them has a gradient elsewhere. So a layer is trained for `TRAINED` steps, and
    takes longer sequences, before a gate counts as dead.
    """
    layer, x = layer_of(rule), normal(BATCH, LENGTH, WIDTH, seed=1)
    live = [name for name in learned(rule) if name not in unread(rule)]
    effects = _effects(rule, layer, x, live)
    asleep = [key for key, effect in effects.items() if not effect >= LIVE]
    for _ in range(TRAINED if asleep else 0):
        y = layer(x)
        parameters = dict(layer.named_parameters())
        for name, gradient in gradients_of((y * normal(*y.shape, seed=2)).sum(), parameters).items():
            parameters[name].data.add_(0.1 * gradient.sign())
    for longer in LONGER:
        asleep = [key for key in asleep if not effects[key] >= LIVE]
        if asleep:
            tokens = normal(BATCH, longer + LENGTH, WIDTH, seed=1)
            later = _effects(rule, layer, tokens, live)
            for key in asleep:
                effects[key] = max(effects[key], later[key])
                if effects[key] >= LIVE:
                    when = f"after {TRAINED} steps and in {longer + LENGTH} tokens"
                    yield Note(f"{key[1]} is below {LIVE:g} at the start of training, and {later[key]:.3g} {when}")
    for (name, what), effect in effects.items():
        yield Measurement(effect, what, _sign_alone(rule, name) if not effect >= LIVE else "")


def _effects(rule: UpdateRule, layer: RuleLayer, x: Tensor, live: list[str]) -> dict[tuple[str, str], float]:
    """Returns how much each of the gates `live`, and each of their parameters, moves the output of a layer.

    The keys are the name of the gate and the name of the figure.
    """
    gate_values: dict[str, Tensor] = {}
    replacements: dict[str, Tensor] = {}

    def hold(module: Gates, inputs: tuple[Tensor, ...], values: dict[str, Tensor]) -> dict[str, Tensor]:
        gate_values.update(values)
        return {**values, **{name: value for name, value in replacements.items() if name in values}}

    def hold_vectors(module: Vectors, inputs: tuple[Tensor, ...], values: tuple[dict[str, Tensor], Tensor]) -> Any:
        gate_values.update(values[0])
        return {**values[0], **{name: value for name, value in replacements.items() if name in values[0]}}, values[1]

    hooks = [layer.gates.register_forward_hook(hold)]
    if layer.vectors is not None:
        hooks.append(layer.vectors.register_forward_hook(hold_vectors))
    y = layer(x)
    sources = {(name, f"the value of '{name}'"): gate_values[name] for name in live}
    for path, parameter in layer.gates.named_parameters():
        names = [name for name, gate in rule.gates.items() if path.split(".")[1] in (name, gate.of) and name in live]
        if names:
            sources[names[0], f"parameter {path}"] = parameter
    size, effects = y.detach().norm().clamp_min(1e-3), {}
    gradients = gradients_of((y * normal(*y.shape, seed=2)).sum(), {source: x for (_, source), x in sources.items()})
    for name, source in sources:
        what = f"gradient of the layer's output with respect to {source}, relative to the output,"
        effects[name, what] = float(gradients[source].norm() / size)
    for i, name in enumerate(live):
        replacements.clear()
        replacements[name] = within(rule.gates[name], tuple(gate_values[name].shape), seed=i)
        with torch.no_grad():
            effects[name, f"change of the layer's output with other values of '{name}'"] = error(layer(x), y)
    for hook in hooks:
        hook.remove()
    return effects


def _sign_alone(rule: UpdateRule, name: str) -> str:
    """Returns the cause if a gate reaches the output by `Operands.sign`, which passes no gradient, else ""."""
    if rule.transition is None or name not in rule.gates:
        return ""
    x = inputs(rule).map(lambda part: part.requires_grad_())
    sign = operands(rule, x.q, x.k, x.v, x.gates).sign
    if sign is None or not sign.requires_grad or name not in x.gates:
        return ""
    reaches = torch.autograd.grad(sign.sum(), x.gates[name], allow_unused=True)[0] is not None
    cause = f"`Operands.sign` passes no gradient to '{name}': use '{name}' in g or beta, too, as signed_gla does"
    return cause if reaches else ""


# --- knobs --------------------------------------------------------------------------------------------------

SAME = 1e-6
"""A relative difference. Options whose outputs differ by less compute the same function."""


def knob_options(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Measures the difference between each two options of a knob, with at most one other knob turned."""
    for name, options in rule.options().items():
        differences: dict[tuple[Option, Option], float] = {}
        accepted: dict[Option, list[UpdateRule]] = {option: [] for option in options}
        for setting in rule.variants():
            if differences and min(differences.values()) > SAME:
                break
            if getattr(setting, name) != getattr(rule, name):
                continue
            outputs_of = [(option, y) for option in options if (y := _answer(setting, name, option)) is not None]
            for option, _ in outputs_of:
                accepted[option].append(setting)
            for (a, y), (b, z) in itertools.combinations(outputs_of, 2):
                differences[a, b] = max(differences.get((a, b), 0.0), error(z, y))
        numbers = all(type(option) in (int, float) for option in options)
        for (a, b), difference in differences.items():
            what = f"difference of the layer's output between {name}={a} and {name}={b}"
            if difference <= SAME and numbers and _counts(rule, name, differences):
                yield Note(
                    f"{name}={a} and {name}={b} differ by {difference:.1g}: it has converged before, or does not bind"
                )
            elif 0 < difference <= SAME and accepted[a] != accepted[b]:
                yield Note(
                    f"{name}={a} and {name}={b} differ by {difference:.1g}, but take other options of other knobs"
                )
            else:
                yield Measurement(
                    difference, what, "" if max(differences.values()) <= SAME else "both options run the same code"
                )


def twin_options(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures the difference between the options of two knobs: each turned by itself, from equal inputs and gates.

    Left out are options that enter the layer alone, such as gates that are learned in both options.
    """
    x = inputs(rule, PREFIX + LENGTH)
    plain = outputs(rule, x, "chunked")["o"]
    turned: list[tuple[str, str, Tensor]] = []
    for setting in rule.variants()[1:]:
        names = [n for n in rule.options() if getattr(setting, n) != getattr(rule, n)]
        per = {n: (gate.per, gate.slots) for n, gate in learned(rule).items()}
        same_inputs = all(per.get(n) == (gate.per, gate.slots) for n, gate in learned(setting).items())
        if len(names) != 1 or not same_inputs or setting.steps != rule.steps:
            continue
        [name] = names
        gates = {n: value for n, value in x.gates.items() if n in learned(setting)}
        o = outputs(setting, dataclasses.replace(x, gates=gates), "chunked")["o"]
        if error(o, plain) <= SAME:
            continue
        for other, text, other_o in turned:
            if other != name:
                what = f"difference of the output between {rule.turned(setting)} and {text}"
                yield Measurement(error(o, other_o), what)
        turned.append((name, rule.turned(setting), o))


def _counts(rule: UpdateRule, name: str, differences: dict[tuple[Option, Option], float]) -> bool:
    """Returns whether a knob of numbers has an effect somewhere.

    The effect may be between other options of the knob, or at numbers that are no options.
    """
    if max(differences.values()) > SAME:
        return True
    smallest = min(option for option in rule.options()[name] if isinstance(option, int | float))
    numbers = [1, 2] if isinstance(smallest, int) else [smallest / 1000, smallest * 1000]
    y = _answer(rule, name, getattr(rule, name))
    outputs_of = [z for z in (_answer(rule, name, number) for number in numbers) if z is not None]
    return y is not None and any(error(z, y) > SAME for z in outputs_of)


def _answer(rule: UpdateRule, name: str, option: Option) -> Tensor | None:
    """Returns the output of a layer of the rule with one option of a knob, or None if the rule refuses the option."""
    # A window or a mini-batch has an effect only in sequences that are longer than it is.
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


def spec(rule: UpdateRule) -> Iterator[Measurement]:
    """Checks that a rule's spec, written as JSON and read again, makes the same rule. Trials are stored by spec."""
    written = rule.spec()
    knobs = json.loads(json.dumps({name: value for name, value in written.items() if name != "name"}))
    try:
        restored: object = type(rule).configured(knobs)
    except InputError as error:
        yield Measurement(
            1.0, f"mismatch of the rule with the one of its spec {written}", f"the spec is refused: {error}"
        )
        return
    assert isinstance(restored, UpdateRule)
    changed = [name for name in rule.options() if getattr(restored, name) != getattr(rule, name)]
    cause = f"`__post_init__` changes {', '.join(changed)}, or two of its options have the same text" if changed else ""
    what = f"mismatch of the rule with the one that its spec {written} makes"
    yield Measurement(float(restored != rule or restored.spec() != written), what, cause)


# --- scale and state ----------------------------------------------------------------------------------------


def scale(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Checks that `mix` applies the scale once. In a rule of the algebra the platform applies it."""
    x = started(rule, inputs(rule, PREFIX + LENGTH))
    for form in FORMS:
        o, double, fourth = (outputs(rule, x, form, scale=SCALE * times)["o"] for times in (1, 2, 4))
        change = error(double, o)
        if change <= SAME and (cancels := _cancels(rule, x)):
            yield Note(f"the scale has no effect: {cancels}")
            continue
        yield Measurement(change, f"change of the output at twice the scale, {form},", "", SAME)
        # If the output grows as a power of the scale, the exponent must be 1: it is 2 if the scale is applied twice.
        # The output of a softmax is no power of the scale.
        factor = float((double * o).sum() / o.square().sum().clamp_min(1e-300))
        power = error(double, factor * o) < SAME and error(fourth, factor**2 * o) < SAME and factor > 0
        for times, how in ((4.0, "twice"), (2**0.5, "by its root")):  # a softmax takes the scale on q
            scaled = outputs(rule, Inputs(times * x.q, x.k, x.v, x.gates, x.state), form, scale=SCALE)["o"]
            if not power and error(scaled, o) > SAME and error(double, scaled) < SAME:
                what = f"1 minus the change by a scale that is applied {how}, {form},"
                yield Measurement(0.0, what, f"the scale is applied {how}", 1 - SAME)
        if power and change > SAME:
            exponent = math.log2(factor)
            what = f"1 minus the distance of the power of the scale in the output, {exponent:.3g}, from 1, {form},"
            yield Measurement(
                1 - abs(exponent - 1), what, "the scale is applied more than once, or by its root", 1 - SAME
            )


def _cancels(rule: UpdateRule, x: Inputs) -> str:
    """Returns why a scale may have no effect, or an empty string if it must have an effect.

    A normalization may cancel the scale. A softmax, which takes the scale inside, may not.
    """
    o = outputs(rule, x, "chunked")["o"]
    for name in ("q", "v"):
        longer = dataclasses.replace(x, q=2 * x.q) if name == "q" else dataclasses.replace(x, v=2 * x.v)
        if error(outputs(rule, longer, "chunked")["o"], o) <= SAME:
            return f"a normalization makes the output the same for {name} of any length"
    ones = inputs(rule, 2)
    ones = dataclasses.replace(ones, v=torch.ones_like(ones.v))
    if error(outputs(rule, ones, "chunked")["o"], torch.ones_like(ones.v[:, : ones.q.shape[1]])) > 1e-3:
        return ""
    # The weight of the second of two tokens: in a softmax, its logit is linear in q.
    second = ones.v.clone()
    second[:, : rule.steps] = 0.0
    weights = [
        outputs(rule, dataclasses.replace(ones, q=n * ones.q, v=second), "chunked")["o"][:, 1] for n in (1, 2, 3)
    ]
    first, second_, third = (weight.logit() for weight in weights)
    softmax = error(third - second_, second_ - first) < 1e-6
    return "" if softmax else "the output is a mean of values, with weights that sum to 1"


def initial_state(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures whether each part of a given state moves outputs or states.

    Also measures whether a call with None as its state begins with `initial_state`.
    """
    effects: dict[tuple[Backend, int], float] = {}
    for setting in rule.variants():
        x = started(setting, inputs(setting, PREFIX + LENGTH))
        _read_parts(setting, x, effects)
        for form in FORMS:
            empty, explicit = (outputs(setting, x.span(0, state=s), form) for s in (None, setting.start(x.k, x.v)))
            difference = max(error(explicit[name], value) for name, value in empty.items())
            cause = "a call without a state does not begin with `initial_state`: override neither or both"
            what = f"1 minus the difference of a call without a state from one with that of `initial_state`, {form},"
            yield Measurement(1 - difference, what, cause, 1 - FAINT)
    for longer in LONGER[1:]:
        if min(effects.values(), default=1.0) < FAINT:
            x = slowed(rule, inputs(rule, longer + PREFIX + LENGTH))
            _read_parts(rule, started(rule, x, longer + PREFIX), effects)
    for (form, i), effect in effects.items():
        cause = f"the code does not read part {i} of the given state"
        yield Measurement(effect, f"effect of part {i} of the initial state on outputs and states, {form},", cause)


def _read_parts(rule: UpdateRule, x: Inputs, effects: dict[tuple[Backend, int], float]) -> None:
    """Changes each part of the state that has had no effect in a form yet, and enters its effect into `effects`."""
    assert x.state is not None
    for form in FORMS:
        want = outputs(rule, x, form)
        for i, part in enumerate(x.state):
            if effects.get((form, i), 0.0) < FAINT and part.is_floating_point() and part.numel():
                size = 0.1 * float(part.where(part.isfinite(), 0.0).square().mean().sqrt()) + 1e-3
                changed = part + size * normal(*part.shape, seed=i)
                got = outputs(rule, x.span(0, state=(*x.state[:i], changed, *x.state[i + 1 :])), form)
                effects[form, i] = max(error(got[name], value) for name, value in want.items())
