"""Checks of numbers: gradients, dtypes, long sequences, zeros, and the ranges of gates and eigenvalues."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from deltalab.authoring.check import Measurement, Note
from deltalab.authoring.inputs import Inputs, corners, draw_corners, learned, moves, normal, parts
from deltalab.authoring.rule_checks.form_checks import SIZES
from deltalab.authoring.rule_checks.rule_runs import (
    BATCH,
    KEY,
    LENGTH,
    LONG,
    PREFIX,
    VALUE,
    WIDTH,
    backends_of,
    broken,
    errors,
    evaluate,
    floats,
    gradients_of,
    inputs,
    layer_of,
    layered,
    outputs,
    run,
    square,
    started,
    weighted,
)
from deltalab.ops.recurrence import Backend
from deltalab.ops.scan import operands
from deltalab.rule import UpdateRule

# --- gradients ----------------------------------------------------------------------------------------------

GRADIENTS = 1e-4
STEPS = (1e-5, 1e-6, 1e-7)
"""Steps of finite differences. The first step at which two differences agree is taken."""


def gradients(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Measures gradients of outputs and states against finite differences, along a random direction of all inputs."""
    x = started(rule, inputs(rule, PREFIX + LENGTH))
    measurements = list(differences(rule, x, f"at T={LENGTH}"))
    yield from measurements
    # Measure a layer, too, whose input x reaches the output through q, k and v as well as through gates.
    if any(isinstance(measurement, Note) for measurement in measurements):
        return
    layer, tokens = layer_of(rule), normal(BATCH, LENGTH, WIDTH, seed=1)

    def output(leaves: Mapping[str, Tensor]) -> Tensor:
        values = {name: value for name, value in leaves.items() if name != "x"}
        y: Tensor = torch.func.functional_call(layer, values, (leaves["x"],))
        return (y * normal(*y.shape, seed=3)).sum()

    parameters = {name: value.detach() for name, value in layer.named_parameters() if name.startswith("gates.")}
    yield from _compared(output, {"x": tokens, **parameters}, "of a layer with respect to {}")


def gradients_at_other_sizes(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Measures gradients against finite differences at other sizes of H, K and V, and in long sequences."""
    for sizes in SIZES:
        if not square(rule) or sizes["key_dim"] == sizes["value_dim"]:
            size_text = ", ".join(f"{name}={size}" for name, size in zip("HKV", sizes.values(), strict=True))
            try:
                x = started(rule, inputs(rule, PREFIX + 6, batch=1, **sizes))
            except Exception:  # "other sizes" says which sizes the rule does not take
                continue
            yield from differences(rule, x, f"at {size_text}")
    x = started(rule, inputs(rule, PREFIX + LONG, batch=1))
    yield from differences(rule, x, f"at T={LONG}")


def differences(rule: UpdateRule, x: Inputs, where: str) -> Iterator[Measurement | Note]:
    """Measures the gradients of a chunked run against finite differences."""

    def output(leaves: Mapping[str, Tensor]) -> Tensor:
        assert x.state is not None
        state = tuple(leaves.get(name, part) for name, part in parts(x.state).items())
        gates = {name: leaves[name] for name in x.gates}
        o, after = run(rule, Inputs(leaves["q"], leaves["k"], leaves["v"], gates, state), "chunked", 16)
        return weighted({"o": o, **parts(after)})

    tensors = {name: value.detach() for name, value in floats(x).items() if value.numel()}
    yield from _compared(output, tensors, "with respect to {} " + where)


def _compared(
    function: Callable[[Mapping[str, Tensor]], Tensor], inputs: dict[str, Tensor], where: str
) -> Iterator[Measurement | Note]:
    """Measures the gradients of a function against finite differences.

    The gradient of all inputs together is measured first. If it is wrong, each input is measured by itself.
    """
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    result = function(leaves)
    if approximation := _approximate(result):
        yield Note(f"gradients are not held to finite differences: {approximation} says `approximate = True`")
        return
    gradients = {name: y.where(inputs[name].isfinite(), 0.0) for name, y in gradients_of(result, leaves).items()}
    sizes = {name: float(y.norm()) for name, y in gradients.items()}
    largest = max(max(sizes.values()), 1e-3)
    # Scale the direction so that each input has the same weight, whatever the size of its gradient.
    direction = {
        name: normal(*value.shape, seed=50).where(value.isfinite(), 0.0)
        * (1e-3 * largest / max(sizes[name], 1e-3 * largest))
        for name, value in inputs.items()
    }
    joint_error = _slope_error(function, inputs, direction, gradients, list(inputs))
    if joint_error is None or joint_error <= GRADIENTS:
        if joint_error is not None:
            yield Measurement(
                joint_error, f"relative difference of the gradient {where.format('all inputs')} from finite differences"
            )
        return
    for name in inputs:
        one_direction = {name: normal(*inputs[name].shape, seed=51).where(inputs[name].isfinite(), 0.0)}
        figure = _slope_error(function, inputs, one_direction, gradients, [name], floor=largest / 10)
        what = f"relative difference of the gradient {where.format(name)} from finite differences"
        if figure == math.inf:
            yield Note(f"{name} moves nothing by small steps but has a gradient: taken as a straight-through estimate")
        elif figure is not None:
            yield Measurement(figure, what)


def _slope_error(
    function: Callable[[Mapping[str, Tensor]], Tensor],
    inputs: dict[str, Tensor],
    direction: dict[str, Tensor],
    gradients: dict[str, Tensor],
    names: list[str],
    floor: float = 0.0,
) -> float | None:
    """Returns the relative error of the slope that gradients predict in a direction.

    Returns None if the function is too steep to tell, and inf if the function does not
    change at all although the gradient is not 0.
    """
    expected = sum(float((gradients[name] * direction[name]).sum()) for name in names)
    for step in STEPS:
        near, far = (_slope(function, inputs, direction, size) for size in (step, 2 * step))
        size = max(abs(near), abs(expected), 1e-3 * floor, 1e-6)
        # near - far is three times the error of near. At a kink, it is the size of the jump.
        if abs(near - far) <= 1e-2 * size:
            return (
                math.inf
                if near == far == 0 < abs(expected) and floor
                else max(abs(expected - near) - abs(near - far), 0.0) / size
            )
    return math.nan if math.isnan(expected) or math.isnan(near) else None


def _slope(
    function: Callable[[Mapping[str, Tensor]], Tensor],
    inputs: dict[str, Tensor],
    direction: dict[str, Tensor],
    step: float,
) -> float:
    """Returns the slope of a function in a direction, by a central difference."""

    def moved(by: float) -> Tensor:
        return function({**inputs, **{name: inputs[name] + by * change for name, change in direction.items()}})

    with torch.no_grad():
        return float((moved(step) - moved(-step)) / (2 * step))


def _approximate(result: Tensor) -> str:
    """Returns the name of an autograd.Function that says `approximate = True` and that took part in a result.

    Returns an empty string if there is none.
    """
    seen, nodes = set(), [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = getattr(node, "_forward_cls", None)
        if getattr(kind, "approximate", False):
            return str(kind.__name__)  # type: ignore[union-attr]
        nodes += [before for before, _ in node.next_functions]
    return ""


# --- dtypes -------------------------------------------------------------------------------------------------

FP32, BF16, BF16_STATE = 1e-3, 3e-2, 4e-3


def precision(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures runs on inputs in fp32 and bf16 against runs in fp64 on the same values."""
    yield from _rounded(rule, inputs(rule, PREFIX + LONG, batch=1), torch.float32, "chunked", FP32)
    # Take many tokens, since sums over many tokens go wrong in bf16.
    for backend in backends_of(rule):
        yield from _rounded(rule, inputs(rule, PREFIX + 48), torch.bfloat16, backend, BF16)
    x = _in(layered(rule, LONG, heads=MANY), torch.bfloat16)
    exact = x.map(Tensor.double)

    def states(y: Inputs) -> dict[str, Tensor]:
        return {name: part for name, part in outputs(rule, y, "recurrent").items() if name != "o"}

    where = f"recurrent in bf16 to fp64 at T={LONG}, from a layer"
    yield from _precision_errors(states(x), states(exact), where, BF16_STATE, lambda: states(_noisy(exact)))


def _rounded(rule: UpdateRule, x: Inputs, dtype: torch.dtype, backend: Backend, limit: float) -> Iterator[Measurement]:
    """Measures a run of one backend on inputs in `dtype` against the same run in fp64."""
    x = started(rule, _in(x, dtype))
    exact = x.map(Tensor.double)
    got, want = (evaluate(rule, y, backend, 16) for y in (x, exact))
    where = f"{backend} in {'bf16' if dtype == torch.bfloat16 else 'fp32'} to fp64"
    yield from _precision_errors(got, want, where, limit, lambda: evaluate(rule, _noisy(exact), backend, 16))


def _precision_errors(
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    where: str,
    limit: float,
    run_rounded: Callable[[], dict[str, Tensor]],
) -> Iterator[Measurement]:
    """Yields the errors of results in a low precision.

    A steep function enlarges any error. So if a figure exceeds `limit`, the limits rise to 30 times the errors of
    `run_rounded`, which runs in fp64 on rounded inputs.
    """
    measurements = list(errors(got, want, where, limit))
    if any(not measurement.figure <= limit for measurement in measurements):
        noise = errors(run_rounded(), want, where)
        measurements = [m._replace(limit=max(limit, 30 * n.figure)) for m, n in zip(measurements, noise, strict=True)]
    yield from measurements


def _noisy(x: Inputs) -> Inputs:
    """Returns `x` with random errors as large as those of rounding to fp32."""
    return x.map(lambda part: part * (1 + 2**-23 * normal(*part.shape, seed=7).sign()))


def _in(x: Inputs, dtype: torch.dtype) -> Inputs:
    """Returns `x` with q, k and v in `dtype`, with gates in fp32 or wider, and without a state."""
    wide = torch.promote_types(dtype, torch.float32)
    return Inputs(x.q.to(dtype), x.k.to(dtype), x.v.to(dtype), {name: gate.to(wide) for name, gate in x.gates.items()})


# --- long sequences -----------------------------------------------------------------------------------------

LONGEST = 2048
MANY = 8
"""The number of heads. Among so many heads, a decay that starts at random is slow in some."""
MOST_GROWTH = 16.0
"""The largest growth of a state while the sequence doubles. A sum over tokens grows by 2, a sum of sums by 4."""


def long_sequences(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures overflow and exponential growth in fp32 on 2048 tokens of the inputs that an untrained layer makes."""
    x = _in(layered(rule, LONGEST, heads=MANY), torch.float32)
    whole = outputs(rule, x, "chunked", 64)
    count = sum(broken(name, value) for name, value in whole.items())
    cause = "a sum or a product over many tokens overflows, as exp(-g.cumsum(1)) does, or the state explodes"
    yield Measurement(float(count), f"number of values that are not finite at T={LONGEST} in fp32, in a layer,", cause)
    if count:
        return
    sizes, state = [], None
    for start, stop in ((0, LONGEST // 4), (LONGEST // 4, LONGEST // 2)):
        results = outputs(rule, x.span(start, stop, state=state), "chunked", 64)
        state = tuple(part for name, part in results.items() if name != "o")
        sizes.append([_size(part) for part in state])
    sizes.append([_size(part) for name, part in whole.items() if name != "o"])
    for i, (first, second, third) in enumerate(zip(*sizes, strict=True)):
        # Growth that slows down is no explosion: a state that was almost empty grows like this.
        before, growth = (b / max(a, 1e-3) for a, b in ((first, second), (second, third)))
        growth = growth if growth >= before or not math.isfinite(growth) else 0.0
        what = f"growth of part {i} of the state while T doubles to {LONGEST}, in a layer,"
        yield Measurement(growth, what, "the state grows exponentially", MOST_GROWTH)


def _size(part: Tensor) -> float:
    """Returns the norm of a part of the state, or 0 for whole numbers."""
    return float(part.double().where(part != -math.inf, 0.0).norm()) if part.is_floating_point() else 0.0


def zeros(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures whether results and gradients are finite if tokens are all zeros, as they are in padding."""
    x = inputs(rule, PREFIX + LENGTH)
    # First one token is zero, then all tokens are.
    tokens = (slice(3 * rule.steps, 4 * rule.steps), slice(None))
    cases = [*itertools.product((("q",), ("k",), ("v",), ("k", "v"), ("q", "k", "v")), tokens)]
    zeroed = [_zeroed(x, *case) for case in cases]
    q, k, v = (torch.cat([getattr(y, name) for y in zeroed]) for name in ("q", "k", "v"))
    gates = {name: torch.cat([gate] * len(cases)) if moves(gate) else gate for name, gate in x.gates.items()}
    together = Inputs(q, k, v, gates)
    # All cases as one batch take a tenth of the time. Each by itself tells which one fails.
    if not any(broken(name, value) for name, value in evaluate(rule, together, "chunked").items()):
        yield Measurement(0.0, "number of results that are not finite where q, k or v of one token or of all are 0,")
        return
    for (names, at), y in zip(cases, zeroed, strict=True):
        not_finite = [name for name, value in evaluate(rule, y, "chunked").items() if broken(name, value)]
        case = f"{' and '.join(names)} of {'one token' if at.stop else 'all tokens'} are 0"
        names_of_results = f"{': ' * bool(not_finite)}{', '.join(not_finite)}"
        what = f"number of results that are not finite where {case}{names_of_results},"
        cause = "a division by a norm of 0, or the root or logarithm of 0: add an eps, as F.normalize does"
        yield Measurement(float(len(not_finite)), what, cause)


def _zeroed(x: Inputs, names: tuple[str, ...], tokens: slice) -> Inputs:
    """Returns `x` with zeros at some tokens of q, k or v."""
    zeroed = {name: getattr(x, name).clone() for name in names}
    for value in zeroed.values():
        value[:, tokens] = 0.0
    return dataclasses.replace(x, **zeroed)


# --- ranges -------------------------------------------------------------------------------------------------


LARGE = (30.0, 200.0, 1000.0)
"""The sizes of inputs at which gates saturate. exp overflows at 89 in fp32, where `where` hides inf but not 0 * inf."""
HUGE = 1e6
"""The size of a gate's value from which its gradients may be infinite, too."""
BEYOND = 1.1
"""The largest part of a declared range of eigenvalues beyond the measured ones: (-1, 1) may stand for (0, 1)."""


def extreme_gates(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures whether results are finite with gates at the ends of their ranges."""
    for dtype, backend in itertools.product((torch.float32, torch.float64), backends_of(rule)):
        value_dim = KEY if square(rule) else VALUE
        x = draw_corners(rule, batch=BATCH, length=PREFIX + LENGTH, key_dim=KEY, value_dim=value_dim)
        x = x.map(lambda part, dtype=dtype: part.to(dtype))  # type: ignore[misc]
        results = evaluate(rule, started(rule, x), backend)
        count = sum(broken(name, value) for name, value in results.items())
        corner, cause = _corner(rule, results) if count else ("", "")
        cause = (_growth(rule, x) if count else "") or cause
        yield Measurement(float(count), f"number of values that are not finite{corner}, {backend}, {dtype},", cause)


def _corner(rule: UpdateRule, results: Mapping[str, Tensor]) -> tuple[str, str]:
    """Returns the gate values of the first head whose results are not finite, and the likely cause.

    Each head has one of `corners`. A gate is blamed for the values that all broken heads have and no other head has.
    """
    heads = [
        v.movedim(2 if moves(v) else 0, 0).flatten(1) if v.dim() > 1 else v[:, None]
        for n, v in results.items()
        if "state" not in n
    ]
    gate_values = corners(rule)
    is_finite = torch.cat(heads, dim=1).isfinite().all(1).tolist()
    wrong, right = ([c for c, finite in zip(gate_values, is_finite, strict=True) if finite == kept] for kept in (0, 1))
    if not wrong:
        return "", ""
    cause = "the code is not finite at some ends of the gates' ranges: look for a division, a root, a logarithm or exp"
    for name, gate in learned(rule).items():
        blamed, fine = ({corner[name] for corner in group} for group in (wrong, right))
        if not blamed & fine and right:
            ends = " or ".join(f"{value:g}" for value in sorted(blamed))
            cause = f"the code is not finite at {name} = {ends}: look for a division, a root, a logarithm or an exp"
            if gate.high == 0 and blamed == {-math.inf}:
                cause = f"the code computes -inf - -inf or 0 * inf where the log-decay {name} is -inf: clamp it first"
            elif gate.high == 0 and -1000.0 in blamed:
                cause = f"the code divides by the decay exp({name}), or takes exp of -{name}, which overflows"
    return " at " + ", ".join(f"{name}={value:g}" for name, value in wrong[0].items()), cause


def _growth(rule: UpdateRule, x: Inputs) -> str:
    """Returns the likely cause if `operands` gives a log-decay above 0, else an empty string."""
    g = None if rule.transition is None else operands(rule, x.q, x.k, x.v, x.gates).g
    if g is None or not (g > 0).any():
        return ""
    return f"`operands` gives a log-decay g of up to {g.max():.3g}; above 0 it makes the state grow"


def gate_ranges(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures how far gates leave their declared ranges, with parameters and inputs of several sizes."""
    for spread in (0, 3, 30):
        gates = layer_of(rule).gates
        with torch.no_grad():
            for i, parameter in enumerate(gates.parameters()):
                parameter.add_(spread * normal(*parameter.shape, seed=i))
            for scale in (1, 10, 100):
                for name, value in gates(scale * normal(BATCH, 8 * LENGTH, WIDTH, seed=1)).items():
                    low, high = rule.gates[name].low, rule.gates[name].high
                    outside = value[~((value >= low) & (value <= high))]
                    distance = (outside - outside.clamp(low, high)).abs().max() if outside.numel() else torch.zeros(())
                    interval = f"{value.min():.3g} to {value.max():.3g}"
                    what = f"distance of '{name}', measured {interval}, from its declared {low:g} to {high:g},"
                    yield Measurement(float(distance), what)


def gate_gradients(rule: UpdateRule) -> Iterator[Measurement]:
    """Counts values and gradients of gates that are not finite in fp32 where arguments are large.

    Gradients count where values are finite, and values where those in fp64 are finite.
    """
    exact, gates = layer_of(rule).gates, layer_of(rule).gates.float()
    parameters = dict(gates.named_parameters())
    for size in LARGE:
        x = (size * normal(BATCH, LENGTH, WIDTH, seed=1)).float().requires_grad_()
        with torch.no_grad():
            wanted = exact(x.double())
        for name, value in gates(x).items():
            lost = ~value.isfinite() & (wanted[name].abs() < HUGE)
            what = f"number of values of '{name}' that are finite in fp64 and not in fp32 at inputs of {size:g},"
            yield Measurement(float(lost.sum()), what)
            # A gate without an end, such as an exp, has gradients without one.
            if not value.detach().abs().max() < HUGE:
                continue
            gradients = gradients_of(weighted({name: value}), {"the input": x, **parameters})
            wrong = {source: broken(source, gradient) for source, gradient in gradients.items()}
            count, source = sum(wrong.values()), max(wrong, key=lambda source: wrong[source])
            what = f"number of gradients of '{name}' that are not finite in fp32 at inputs of {size:g}"
            yield Measurement(float(count), f"{what}, first with respect to {source}," if count else f"{what},")


def transitions(rule: UpdateRule, x: Inputs) -> Iterator[Tensor]:
    """Yields the transition of each state [B, H, K, K], as the recurrence of one token applies it.

    Args:
        rule: A rule of the algebra.
        x: The inputs of one token, with the state before it, or None for the rule's start. V is at least the width K of
            the state's keys.
    """
    states = x.state or rule.start(x.k, x.v)
    width = states[0].shape[2]
    basis = torch.eye(width, states[0].shape[3], dtype=torch.float64).expand(*states[0].shape)
    for i in range(rule.states):
        after, offset = (
            run(rule, x.span(0, state=(*states[:i], start, *states[i + 1 :])), "recurrent")[1][i]
            for start in (basis, torch.zeros_like(basis))
        )
        yield (after - offset)[..., :width]


def turns(rule: UpdateRule) -> bool:
    """Returns whether a token may rotate the state: by a free low rank, or by several steps together."""
    return rule.transition is not None and (rule.transition.steps > 1 or rule.transition.low_rank == "free")


def outside(rule: UpdateRule, spectrum: Tensor) -> Tensor:
    """Returns how far each eigenvalue of a spectrum lies outside of the rule's declared range.

    Where a token may rotate the state, eigenvalues may be complex, but may not stretch the state.
    """
    low, high = rule.eigenvalues
    excess = spectrum.abs() - max(abs(low), abs(high)) if turns(rule) else spectrum.imag.abs()
    distance: Tensor = excess.clamp_min(0) + (low - spectrum.real).clamp_min(0) + (spectrum.real - high).clamp_min(0)
    return distance


def eigenvalues(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures how far the eigenvalues of one token's transition leave the declared range.

    Also measures how much of the declared range lies beyond all of them.

    The keys have the norms that the rule's default features produce. A rule whose default features have unit norm is
    measured with unit norms in every setting, even if a knob removes the norm.
    """
    low, high = rule.eigenvalues
    width = rule.key_width(KEY)
    value_dim = max(width, KEY)  # wide enough for the columns of a basis
    extreme = draw_corners(rule, batch=BATCH, length=1, key_dim=KEY, value_dim=value_dim)
    many = inputs(rule, 1, heads=128, value_dim=value_dim)
    longer = dataclasses.replace(many, q=2 * many.q, k=2 * many.k)
    unbounded = f"keys need unit norm here, and features '{rule.features}' leave them longer: normalize in `operands`"
    longer_keys = [(longer, unbounded)] if type(rule)().features != "unit" else []
    lowest, highest = math.inf, -math.inf
    for x, cause in [(extreme, ""), (many, ""), *longer_keys]:
        x = dataclasses.replace(x, v=torch.zeros_like(x.v))
        for i, transition in enumerate(transitions(rule, x)):
            state_name = " of the second state" * i
            wrong = int((~transition.isfinite()).sum())
            if wrong:  # LAPACK may crash the process on values that are not finite
                reason = _growth(rule, x) or "an operand is not finite: a division by 0, an overflow, or 0 * inf"
                yield Measurement(
                    float(wrong), f"number of elements of the transition{state_name} that are not finite", reason, 0.0
                )
                continue
            spectrum = torch.linalg.eigvals(transition)
            real, distance, may_turn = spectrum.real, outside(rule, spectrum), turns(rule)
            modulus = float(spectrum.abs().max()) if may_turn else 0.0
            lowest, highest = min(lowest, float(real.min()), -modulus), max(highest, float(real.max()), modulus)
            interval = f"{real.min():.3g} to {real.max():.3g}"
            what = (
                f"distance of the eigenvalues{state_name}, measured {interval}, from the declared {low:g} to {high:g},"
            )
            yield Measurement(float(distance.max()), what, cause)
    beyond = max(lowest - low, high - highest)
    declared_here = type(rule).eigenvalues is not UpdateRule.eigenvalues
    if math.isfinite(beyond) and declared_here and not rule.carries:
        what = f"part of the declared range {low:g} to {high:g} beyond the eigenvalues, measured {lowest:.3g} to"
        cause = "`eigenvalues` declares more than the gates' ranges allow: compute it from them"
        yield Measurement(beyond, f"{what} {highest:.3g},", cause, BEYOND)
