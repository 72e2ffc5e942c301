"""The checks of a rule. Each catches a defect that published code of such rules has had.

A check measures a rule in one setting of its knobs and yields figures; the table `CHECKS` at the end gives each its
limit. Sizes are tiny and the arithmetic is fp64, so that a failure is a wrong function and not rounding.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from deltalab.authoring.check import Check, CheckResult, Measured, run_checks
from deltalab.authoring.inputs import Inputs, corners, draw, draw_corners, learned, moves, normal, parts, within
from deltalab.errors import InputError
from deltalab.models.layer import Gates, LayerCache, RuleLayer, Vectors, initialize
from deltalab.ops import reference
from deltalab.ops.recurrence import Backend
from deltalab.ops.scan import operands, scan
from deltalab.rule import State, UpdateRule

BATCH, LENGTH, HEADS, KEY, VALUE, CHUNK, WIDTH, CONV = 2, 13, 2, 4, 3, 4, 8, 4
PREFIX = 5  # tokens that make an initial state: more than KEY, so that the state has full rank
CUTS = (1, 6, LENGTH - 1)  # tokens at which sequences are split
MOST_SETTINGS = 96
EXACT = 1e-10


@dataclass(frozen=True)
class RuleCheck(Check[UpdateRule]):
    """A check of a rule.

    settings: the settings of the rule to measure. only: returns whether the check applies to a setting.
    """

    settings: Callable[[UpdateRule], list[UpdateRule]] = lambda rule: rule.variants()
    only: Callable[[UpdateRule], bool] = lambda rule: True


def check_rule(rule: UpdateRule, *, forked: bool = False) -> list[CheckResult]:
    """Checks a rule in all its variants. Checks that do not apply to the rule are left out.

    forked: run each check in a process of its own, so that a crash fails one check instead of ending this process.

    >>> from deltalab.registry import get_rule
    >>> all(result.passed for result in check_rule(get_rule("linear_attention")))
    True
    """
    threads = torch.get_num_threads()
    # On tensors this small, threads only wait for each other: 29 s instead of 2 s beside another busy process.
    torch.set_num_threads(1)
    try:
        with torch.enable_grad():
            return run_checks(CHECKS, partial(_run, rule), where=rule.name, forked=forked)
    finally:
        torch.set_num_threads(threads)


def _run(rule: UpdateRule, check: RuleCheck) -> CheckResult | None:
    found: list[tuple[UpdateRule, Measured]] = []
    setting = rule
    try:
        settings = [s for s in check.settings(rule) if check.only(s)]
        for setting in settings:
            found += [(setting, measured) for measured in check.measure(setting)]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: it would end the command as if all checks had passed
        return check.raised(error, _where(rule, setting))
    if not found:
        return None
    setting, worst = min(found, key=lambda pair: check.slack(pair[1].figure))
    combinations = math.prod(len(options) for options in rule.options().values())
    some = check.settings is _combinations and combinations > MOST_SETTINGS
    note = f"; tried {MOST_SETTINGS} of {combinations} settings" if some else ""
    return check.judge(worst, _where(rule, setting), note)


def _where(rule: UpdateRule, setting: UpdateRule) -> str:
    try:
        return f"{rule.name} [{rule.turned(setting)}]"
    except Exception:  # the error to report may be in the very methods that describe a setting
        return rule.name


def _combinations(rule: UpdateRule) -> list[UpdateRule]:
    """The rule, and all combinations of options that it accepts or a sample of `MOST_SETTINGS` of them."""
    options = rule.options()
    count = math.prod(len(values) for values in options.values())
    settings = [rule]
    for index in random.Random(0).sample(range(count), min(count, MOST_SETTINGS)):
        chosen: dict[str, Any] = {}
        for name, values in options.items():
            index, position = divmod(index, len(values))
            chosen[name] = values[position]
        with suppress(InputError):
            settings.append(dataclasses.replace(rule, **chosen))
    return settings


# --- inputs and outputs -------------------------------------------------------------------------------------


def _inputs(
    rule: UpdateRule, length: int = LENGTH, *, heads: int = HEADS, value_dim: int = VALUE, seed: int = 0
) -> Inputs:
    return draw(rule, batch=BATCH, length=length, heads=heads, key_dim=KEY, value_dim=value_dim, seed=seed)


def _started(rule: UpdateRule, x: Inputs) -> Inputs:
    """The inputs from token `PREFIX` on, and the state that the tokens before it make."""
    return x.span(PREFIX, state=_scan(rule, x.span(0, PREFIX), "recurrent")[1])


def _backends(rule: UpdateRule) -> tuple[Backend, ...]:
    return ("recurrent", "chunked", "triton") if _has_kernel(rule) else ("recurrent", "chunked")


def _scan(rule: UpdateRule, x: Inputs, backend: Backend, chunk_size: int = CHUNK) -> tuple[Tensor, State]:
    return scan(rule, x.q, x.k, x.v, x.gates, state=x.state, backend=backend, chunk_size=chunk_size)


def _evaluate(rule: UpdateRule, x: Inputs, backend: Backend, chunk_size: int = CHUNK) -> dict[str, Tensor]:
    """The output, the states, and the gradients of a fixed weighted sum of both with respect to every input."""
    x = x.map(lambda part: part.detach().requires_grad_())
    o, state = _scan(rule, x, backend, chunk_size)
    results = {"o": o, **parts(state)}
    # The weights are signs, which are the same in every dtype.
    weighted = [(y * normal(*y.shape, seed=i).sign().to(y)).sum() for i, y in enumerate(results.values())]
    gradients = {
        f"gradient of {name}": value for name, value in _gradients(torch.stack(weighted).sum(), x.named()).items()
    }
    return {name: y.detach() for name, y in results.items()} | gradients


def _gradients(of: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    given = torch.autograd.grad(of, list(inputs.values()), retain_graph=True, allow_unused=True, materialize_grads=True)
    return dict(zip(inputs, given, strict=True))


def _error(got: Tensor, want: Tensor) -> float:
    """The difference in the Frobenius norm, relative to `want` or to 1e-3, whichever is larger.

    Without the 1e-3, rounding would count where `want` is near 0, like the gradient of a decay of an empty state.
    """
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-3)) if got.shape == want.shape else math.inf


def _errors(got: Mapping[str, Tensor], want: Mapping[str, Tensor], where: str) -> Iterator[Measured]:
    for name, value in want.items():
        cause = "" if value.isfinite().all() else "the rule computes values that are not finite"
        yield Measured(_error(got[name], value), f"relative difference of {name}, {where},", cause)


def _layer(rule: UpdateRule) -> RuleLayer:
    layer = RuleLayer(rule, WIDTH, HEADS, key_dim=KEY, value_dim=VALUE, conv=CONV, chunk_size=CHUNK).double()
    initialize(layer, seed=0)
    return layer


# --- measurements -------------------------------------------------------------------------------------------


def _cases(rule: UpdateRule) -> Iterator[tuple[Inputs, int, str]]:
    """One token, less than a chunk, whole chunks, and chunks with a rest; each without and with an initial state."""
    for length, chunk_size in ((1, CHUNK), (7, 16), (3 * CHUNK, CHUNK), (3 * CHUNK + 1, CHUNK)):
        x = _inputs(rule, PREFIX + length)
        yield x.span(PREFIX), chunk_size, f"at T={length}, chunk {chunk_size}"
        yield _started(rule, x), chunk_size, f"at T={length}, chunk {chunk_size}, with an initial state"


def backends(rule: UpdateRule) -> Iterator[Measured]:
    for x, chunk_size, where in _cases(rule):
        want = _evaluate(rule, x, "recurrent")
        yield from _errors(_evaluate(rule, x, "chunked", chunk_size), want, f"chunked to recurrent {where}")


def kernel(rule: UpdateRule) -> Iterator[Measured]:
    for x, chunk_size, where in _cases(rule):
        got = _evaluate(rule, x, "triton", chunk_size)
        cause = _reads_the_other(rule, x, got["o"])
        for measured in _errors(got, _evaluate(rule, x, "recurrent"), f"kernel to recurrent {where}"):
            yield measured._replace(cause=cause or measured.cause)


def _reads_the_other(rule: UpdateRule, x: Inputs, o: Tensor) -> str:
    """The likely cause if `o` is the output of the equation with the other choice of `reads`, else nothing."""
    if rule.transition is None or rule.transition.low_rank == "none" or rule.transition.decay == "none":
        return ""
    other: Literal["state", "decayed_state"] = "state" if rule.transition.reads == "decayed_state" else "decayed_state"
    flipped = dataclasses.replace(rule.transition, reads=other)
    given = operands(rule, x.q, x.k, x.v, x.gates)
    if _error(o, reference.recurrent(flipped, given, scale=KEY**-0.5, state=x.state)[0]) > EXACT:
        return ""
    words = {"state": "undecayed state", "decayed_state": "decayed state"}
    return f"the kernel reads the {words[other]}, but the rule declares reads='{rule.transition.reads}'"


def state_carry(rule: UpdateRule) -> Iterator[Measured]:
    x = _inputs(rule)
    for backend in _backends(rule):
        o, state = _scan(rule, x, backend)
        whole = {"o": o, **parts(state)}
        for split in CUTS:
            first, between = _scan(rule, x.span(0, split), backend)
            second, after = _scan(rule, x.span(split, state=between), backend)
            joined = {"o": torch.cat([first, second], dim=1), **parts(after)}
            yield from _errors(joined, whole, f"{backend}, two parts split at token {split} to one")


def causality_of_values(rule: UpdateRule) -> Iterator[Measured]:
    x, later, layer = _inputs(rule), _inputs(rule, seed=1), _layer(rule)
    tokens, later_tokens = (normal(BATCH, LENGTH, WIDTH, seed=seed) for seed in (1, 2))
    for t in CUTS:
        gates = {name: _joined(x, gate, later.gates[name], t) for name, gate in x.gates.items()}
        q, k, v = (_joined(x, old, new, t) for old, new in ((x.q, later.q), (x.k, later.k), (x.v, later.v)))
        turned = Inputs(q, k, v, gates)
        outputs: list[tuple[str, Tensor, Tensor]] = [
            *((name, _scan(rule, x, name)[0], _scan(rule, turned, name)[0]) for name in _backends(rule)),
            ("layer", layer(tokens)[0], layer(_joined(x, tokens, later_tokens, t))[0]),
        ]
        for name, o, turned_o in outputs:
            what = f"change of outputs before token {t} with other inputs after it, {name},"
            yield Measured(_error(turned_o[:, :t], o[:, :t]), what)


def _joined(x: Inputs, before: Tensor, after: Tensor, t: int) -> Tensor:
    return torch.cat([x.rows(before, 0, t), x.rows(after, t)], dim=1) if moves(before) else before


def causality_of_gradients(rule: UpdateRule) -> Iterator[Measured]:
    x = _inputs(rule).map(lambda part: part.requires_grad_())
    inputs = {name: values for name, values in x.named().items() if moves(values)}
    tokens = normal(BATCH, LENGTH, WIDTH, seed=1).requires_grad_()
    outputs: list[tuple[str, Tensor, dict[str, Tensor]]] = [
        *((backend, _scan(rule, x, backend)[0], inputs) for backend in _backends(rule)),
        ("layer", _layer(rule)(tokens)[0], {"its input": tokens}),
    ]
    for (name, o, sources), t in itertools.product(outputs, CUTS):
        early = (o[:, :t] * normal(*o[:, :t].shape, seed=2)).sum()
        for source, gradient in _gradients(early, sources).items():
            what = f"largest gradient of outputs before token {t} with respect to {source} after it, {name},"
            yield Measured(float(x.rows(gradient, t).abs().max()), what)


def extreme_gates(rule: UpdateRule) -> Iterator[Measured]:
    for dtype, backend in itertools.product((torch.float32, torch.float64), _backends(rule)):
        x = draw_corners(rule, batch=BATCH, length=PREFIX + LENGTH, key_dim=KEY, value_dim=VALUE)
        x = x.map(lambda part, dtype=dtype: part.to(dtype))  # type: ignore[misc]
        results = _evaluate(rule, _started(rule, x), backend)
        count = sum(int((~value.isfinite()).sum()) for value in results.values())
        at, cause = (_broken(rule, results), _growth(rule, x)) if count else ("", "")
        yield Measured(float(count), f"number of values that are not finite{at}, {backend}, {dtype},", cause)


def _broken(rule: UpdateRule, results: Mapping[str, Tensor]) -> str:
    """The gates of the first head with values that are not finite: each head has one of `corners`."""
    heads = [
        v.movedim(2 if moves(v) else 0, 0).flatten(1) if v.dim() > 1 else v[:, None]
        for n, v in results.items()
        if "state" not in n
    ]
    for corner, head in zip(corners(rule), torch.cat(heads, dim=1), strict=True):
        if not head.isfinite().all():
            return " at " + ", ".join(f"{name}={value:g}" for name, value in corner.items())
    return ""


def _growth(rule: UpdateRule, x: Inputs) -> str:
    """The likely cause if `operands` gives a log-decay above 0, else nothing."""
    g = None if rule.transition is None else operands(rule, x.q, x.k, x.v, x.gates).g
    if g is None or not (g > 0).any():
        return ""
    return f"`operands` gives a log-decay g of up to {g.max():.3g}; above 0 it makes the state grow"


def gate_ranges(rule: UpdateRule) -> Iterator[Measured]:
    for spread in (0, 3, 30):
        gates = Gates(rule.gates, WIDTH, HEADS, KEY, VALUE, rule.steps).double()
        initialize(gates, seed=0)
        with torch.no_grad():
            for i, parameter in enumerate(gates.parameters()):
                parameter.add_(spread * normal(*parameter.shape, seed=i))
            for scale in (1, 10, 100):
                for name, value in gates(scale * normal(BATCH, 8 * LENGTH, WIDTH, seed=1)).items():
                    low, high = rule.gates[name].low, rule.gates[name].high
                    outside = value[~((value >= low) & (value <= high))]
                    past = (outside - outside.clamp(low, high)).abs().max() if outside.numel() else torch.zeros(())
                    measured = f"{value.min():.3g} to {value.max():.3g}"
                    what = f"distance of '{name}', measured {measured}, from its declared {low:g} to {high:g},"
                    yield Measured(float(past), what)


def eigenvalues(rule: UpdateRule) -> Iterator[Measured]:
    low, high = rule.eigenvalues
    extreme = draw_corners(rule, batch=BATCH, length=1, key_dim=KEY, value_dim=KEY)
    for x in (extreme, _inputs(rule, 1, heads=128, value_dim=KEY)):
        x = dataclasses.replace(x, v=torch.zeros_like(x.v))
        basis = torch.eye(KEY, dtype=torch.float64).expand(BATCH, x.q.shape[2], KEY, KEY)
        empty = [torch.zeros_like(basis)] * (2 if rule.second_state else 1)
        for i in range(len(empty)):
            after, offset = (_after(rule, x, [*empty[:i], s, *empty[i + 1 :]], i) for s in (basis, empty[i]))
            transition, which = after - offset, " of the second state" * i
            if not transition.isfinite().all():  # LAPACK may crash the process on such values
                cause = _growth(rule, x) or "the transition is not finite"
                yield Measured(math.inf, f"largest of the eigenvalues{which}", cause)
                continue
            measured = torch.linalg.eigvals(transition)
            real = measured.real
            # The product of several steps may rotate, though no single step does, but it must not stretch.
            turning = measured.imag.abs() if rule.steps == 1 else measured.abs() - max(abs(low), abs(high))
            past = turning.clamp_min(0) + (low - real).clamp_min(0) + (real - high).clamp_min(0)
            shown = f"{real.min():.3g} to {real.max():.3g}"
            what = f"distance of the eigenvalues{which}, measured {shown}, from the declared {low:g} to {high:g},"
            yield Measured(float(past.max()), what)


def _after(rule: UpdateRule, x: Inputs, states: list[Tensor], which: int) -> Tensor:
    """One of the states after the tokens of x, given the states before them."""
    return _scan(rule, x.span(0, state=tuple(states)), "recurrent")[1][which]


def gate_liveness(rule: UpdateRule) -> Iterator[Measured]:
    layer, x = _layer(rule), normal(BATCH, LENGTH, WIDTH, seed=1)
    held: dict[str, Tensor] = {}
    turned: dict[str, Tensor] = {}

    def hold(module: Gates, inputs: tuple[Tensor, ...], values: dict[str, Tensor]) -> dict[str, Tensor]:
        held.update(values)
        return {name: turned.get(name, value) for name, value in values.items()}

    def hold_vectors(module: Vectors, inputs: object, output: tuple[dict[str, Tensor], Tensor]) -> object:
        held.update(output[0])
        return {name: turned.get(name, value) for name, value in output[0].items()}, output[1]

    layer.gates.register_forward_hook(hold)
    if layer.vectors is not None:
        layer.vectors.register_forward_hook(hold_vectors)
    y = layer(x)[0]
    sources = {f"the value of '{name}'": held[name] for name in learned(rule)}
    for path, parameter in layer.gates.named_parameters():
        sources[f"parameter {path}"] = parameter
    for source, gradient in _gradients((y * normal(*y.shape, seed=2)).sum(), sources).items():
        what = f"gradient of the layer's output with respect to {source}, relative to the output,"
        yield Measured(float(gradient.norm() / y.detach().norm()), what)
    for i, (name, gate) in enumerate(learned(rule).items()):
        turned.clear()
        turned[name] = within(gate, tuple(held[name].shape), seed=i)
        with torch.no_grad():
            yield Measured(_error(layer(x)[0], y), f"change of the layer's output with other values of '{name}'")


def knob_options(rule: UpdateRule) -> Iterator[Measured]:
    for name, options in rule.options().items():
        # A window or a mini-batch has an effect only in longer sequences.
        length = LENGTH + max((option for option in options if isinstance(option, int)), default=0)
        x = normal(BATCH, length, WIDTH, seed=1)
        outputs = []
        for option in options:
            with suppress(InputError), torch.no_grad():
                changed: dict[str, Any] = {name: option}
                layer = _layer(dataclasses.replace(rule, **changed))
                # Two gates may start with equal values and differ once they are trained.
                for i, parameter in enumerate(layer.gates.parameters()):
                    parameter.add_(0.1 * normal(*parameter.shape, seed=i))
                outputs.append((option, layer(x)[0]))
        # Compare with the default only, as ablations do: two other options may compute the same.
        (a, y), *others = outputs
        for b, z in others:
            yield Measured(_error(z, y), f"difference of the layer's output between {name}={a} and {name}={b}")


def bf16(rule: UpdateRule) -> Iterator[Measured]:
    # Longer than in the other checks: bf16 goes wrong in sums over many tokens.
    x = _inputs(rule, PREFIX + 48)
    x = Inputs(x.q.bfloat16(), x.k.bfloat16(), x.v.bfloat16(), {name: gate.float() for name, gate in x.gates.items()})
    x = _started(rule, x)
    for backend in _backends(rule):
        want = _evaluate(rule, x.map(Tensor.double), backend)
        yield from _errors(_evaluate(rule, x, backend), want, f"{backend} in bf16 to fp64")


def sizes(rule: UpdateRule) -> Iterator[Measured]:
    layer = _layer(rule)
    cache: LayerCache = layer(normal(BATCH, LENGTH, WIDTH, seed=1))[1]
    of_gates = 0
    for gate in layer.gates.gates.values():
        if gate.of is None:
            each = math.prod(gate.shape(HEADS, KEY, VALUE))
            values = each * (rule.steps if gate.per == "step" else 1)
            of_gates += len(gate.parameters) * each
            of_gates += gate.projected * (WIDTH * values if gate.rank is None else (WIDTH + values) * gate.rank)
    found: list[tuple[str, object, object]] = [
        ("number of the gates' parameters", sum(p.numel() for p in layer.gates.parameters()), of_gates)
    ]
    if rule.transition is not None:
        shape = (BATCH, HEADS, rule.key_width(KEY), rule.value_width(VALUE))
        x = _inputs(rule)
        carry = rule.carried(x.k, x.v)
        convolved = layer.channels.total + (0 if layer.vectors is None else sum(layer.vectors.widths))
        held = BATCH * (CONV - 1) * convolved + rule.states * math.prod(shape) + sum(one.numel() for one in carry)
        found.append(("number of elements in the layer's cache", cache.numel(), held))
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            x = _inputs(rule).map(lambda part, dtype=dtype: part.to(dtype))  # type: ignore[misc]
            states = {"initial_state": rule.start(x.k, x.v)}
            states |= {f"state from {backend}": _scan(rule, x, backend)[1] for backend in _backends(rule)}
            want = rule.states * [(shape, torch.promote_types(dtype, torch.float32))]
            for source, state in states.items():
                real = [(tuple(part.shape), part.dtype) for part in parts(state).values()][: rule.states]
                found.append((f"shape and dtype of {source} for {dtype}", real, want))
    for what, got, declared in found:
        yield Measured(float(got != declared), f"mismatch between the {what} ({got}) and the declared one ({declared})")


def token_by_token(rule: UpdateRule) -> Iterator[Measured]:
    layer, x = _layer(rule), normal(BATCH, LENGTH, WIDTH, seed=1)
    cache, outputs = None, []
    with torch.no_grad():
        whole, after = layer(x)
        for token in x.split(1, dim=1):
            y, cache = layer(token, cache)
            outputs.append(y)
    assert cache is not None
    want = {"y": whole, **parts(after.state)}
    got = {"y": torch.cat(outputs, dim=1), **parts(cache.state)}
    yield from _errors(got, want, "layer fed by tokens to layer fed at once")


def _declared(rule: UpdateRule) -> list[UpdateRule]:
    return [type(rule)()]


def _has_gates(rule: UpdateRule) -> bool:
    return bool(learned(rule))


def _has_kernel(rule: UpdateRule) -> bool:
    """Whether the rule's own kernel takes the inputs of these checks."""
    x = _inputs(rule, 1)
    return rule.lacks_kernel(x.k, x.v) is None


def _is_algebraic(rule: UpdateRule) -> bool:
    return rule.transition is not None


CHECKS = (
    RuleCheck("backends", backends, EXACT, "the parallel and the token-by-token form compute different functions"),
    RuleCheck("kernel", kernel, EXACT, "`fused` computes another function than the equation", only=_has_kernel),
    RuleCheck(
        "state carry", state_carry, EXACT, "the given state is not used, or it lacks values that later tokens need"
    ),
    RuleCheck("causality of values", causality_of_values, 1e-12, "the output of a token depends on later tokens"),
    RuleCheck("causality of gradients", causality_of_gradients, 0.0, "the output of a token depends on later tokens"),
    RuleCheck("extreme gates", extreme_gates, 0.0, "the code divides by a decay, which overflows", only=_has_gates),
    RuleCheck("gate ranges", gate_ranges, 0.0, "the parameterization computes values outside its declared range"),
    RuleCheck("eigenvalues", eigenvalues, 1e-9, "the erase strength exceeds what the range allows", only=_is_algebraic),
    RuleCheck(
        "gate liveness",
        gate_liveness,
        1e-4,  # the weakest gate of the built-in rules has 6e-3; a gate that a normalization cancels has at most 1e-6
        "a later normalization cancels the gate, or the rule does not use it",
        at_least=True,
        settings=_combinations,
        only=_has_gates,
    ),
    RuleCheck("knob options", knob_options, 1e-6, "the rule does not use the knob", at_least=True, settings=_declared),
    RuleCheck("bf16", bf16, 2e-2, "the rule keeps the state, a decay or a sum over tokens in bf16"),
    RuleCheck("sizes", sizes, 0.0, "a shape or a dtype breaks the contract"),
    RuleCheck("token by token", token_by_token, EXACT, "the state does not carry over, or T = 1 is a special case"),
)
