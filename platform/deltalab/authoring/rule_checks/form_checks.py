"""Checks that all forms of a rule compute one function: by chunks, by tokens, by its own kernel and by its `step`."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from deltalab.authoring.check import Measurement, Note
from deltalab.authoring.inputs import Inputs, moves, normal, parts
from deltalab.authoring.rule_checks.rule_runs import (
    BATCH,
    CHUNK,
    CONV,
    EXACT,
    HEADS,
    KEY,
    LENGTH,
    LONG,
    PREFIX,
    SCALE,
    VALUE,
    WIDTH,
    backends_of,
    error,
    errors,
    evaluate,
    inputs,
    layer_of,
    outputs,
    refuses,
    run,
    square,
    started,
)
from deltalab.models.parts.cache import LayerCache
from deltalab.ops import reference
from deltalab.ops.backends import lacks_triton
from deltalab.ops.scan import operands
from deltalab.rule import UpdateRule

CUTS = (1, 6, LENGTH - 1)
"""Tokens at which sequences are split."""
SIZES = (
    {"heads": 8, "key_dim": 4, "value_dim": 4},
    {"heads": 3, "key_dim": 6, "value_dim": 10},
    {"heads": 1, "key_dim": 16, "value_dim": 8},
    {"heads": 4, "key_dim": 12, "value_dim": 12},
)
"""Sizes that differ from the usual ones: many heads, one head, K = V, V > K, and a K that is not a power of 2."""
WIDE = (64, 128)
"""The usual widths of a head, at which code may take blocks of channels."""


def _cases(rule: UpdateRule) -> Iterator[tuple[Inputs, int, str]]:
    """Yields inputs, a chunk size and their description.

    The inputs have one token, fewer tokens than a chunk, whole chunks, and whole chunks with a rest. Each length comes
    without and with an initial state.
    """
    for length, chunk_size in ((1, CHUNK), (7, 16), (3 * CHUNK, CHUNK), (3 * CHUNK + 1, CHUNK)):
        x = inputs(rule, PREFIX + length)
        yield x.span(PREFIX), chunk_size, f"at T={length}, chunk {chunk_size}"
        yield started(rule, x), chunk_size, f"at T={length}, chunk {chunk_size}, with an initial state"


def backends(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures the chunked form against the recurrent one, with gradients, at several lengths."""
    for x, chunk_size, where in _cases(rule):
        want = evaluate(rule, x, "recurrent")
        yield from errors(evaluate(rule, x, "chunked", chunk_size), want, f"chunked to recurrent {where}")


def lengths(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures the chunked form in a sequence longer than any internal chunk, where `mix` may take another path."""
    x = started(rule, inputs(rule, PREFIX + LONG, batch=1))
    where = f"chunked to recurrent at T={LONG}, chunk 64, with an initial state"
    yield from errors(outputs(rule, x, "chunked", 64), outputs(rule, x, "recurrent"), where)


def together(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures the chunked form against the recurrent one at one length, with gradients."""
    x = started(rule, inputs(rule, PREFIX + LENGTH))
    want = evaluate(rule, x, "recurrent")
    yield from errors(evaluate(rule, x, "chunked"), want, f"chunked to recurrent at T={LENGTH}")


def other_sizes(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Measures the chunked form against the recurrent one at other sizes of H, K and V."""
    for sizes in SIZES:
        if square(rule) and sizes["key_dim"] != sizes["value_dim"]:
            continue
        size_text = ", ".join(f"{name}={size}" for name, size in zip("HKV", sizes.values(), strict=True))
        try:
            x = inputs(rule, PREFIX + 10, **sizes)
            x = started(rule, x)
        except Exception as refusal:
            if rule.transition is not None and not refuses(rule, refusal):
                raise
            yield Note(f"the rule does not take {size_text}: {type(refusal).__name__}: {refusal}")
            continue
        want = outputs(rule, x, "recurrent")
        yield from errors(outputs(rule, x, "chunked", 8), want, f"chunked to recurrent at {size_text}")
    if square(rule):
        yield Note(f"the rule takes K = V alone: {square(rule)}")


def step(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures all forms against a loop over `UpdateRule.step`, the author's second statement of the equation."""
    cases: list[dict[str, Any]] = [{"length": PREFIX + LENGTH}, {"length": PREFIX + 70, "batch": 1}]
    cases += [{"length": PREFIX + 3, **sizes} for sizes in SIZES if not square(rule) or len(set(sizes.values())) < 3]
    cases += [{"length": PREFIX + 3, "batch": 1, "heads": 1, "key_dim": wide, "value_dim": wide} for wide in WIDE]
    for sizes in cases:
        x = started(rule, inputs(rule, **sizes))
        size_text = f"T={x.q.shape[1]}, H={x.q.shape[2]}, K={x.q.shape[3]}, V={x.v.shape[3]}"
        for start, state in ((x, "a given"), (x.span(0), "an empty")):
            want = _stepped(rule, start)
            for backend in backends_of(rule):
                yield from errors(
                    outputs(rule, start, backend),
                    want,
                    f"{backend} to a loop over `step` at {size_text} from {state} state",
                )


def _stepped(rule: UpdateRule, x: Inputs) -> dict[str, Tensor]:
    """Returns the output and the state of a loop over `step`."""
    gates = every_gate(rule, x)
    state = rule.start(x.k, x.v) if x.state is None else x.state
    out = []
    with torch.no_grad():
        for t in range(x.q.shape[1]):
            token_gates = {
                name: _token(rule, x, gate, t, rule.gates[name].per == "step") for name, gate in gates.items()
            }
            k, v = (_token(rule, x, rows, t, rule.steps > 1) for rows in (x.k, x.v))
            o, after = rule.step(x.q[:, t], k, v, scale=SCALE, state=state, **token_gates)
            state = (after,) if isinstance(after, Tensor) else after
            out.append(o)
    return {"o": torch.stack(out, dim=1), **parts(state)}


def _token(rule: UpdateRule, x: Inputs, rows: Tensor, t: int, per_step: bool) -> Tensor:
    """Returns the value for token t, with an axis for the token's steps if each step has its own value."""
    if not moves(rows):
        return rows
    token_rows = x.rows(rows, t, t + 1)
    return token_rows if per_step else token_rows[:, 0]


def every_gate(rule: UpdateRule, x: Inputs) -> dict[str, Tensor]:
    """Returns the values of all gates, constant ones included."""
    heads = x.q.new_zeros(x.q.shape[2])
    return {name: x.gates[name] if name in x.gates else gate.value(heads, {}) for name, gate in rule.gates.items()}


def has_step(rule: UpdateRule) -> bool:
    """Returns whether the rule has a `step` of its own."""
    return type(rule).step is not UpdateRule.step


def nothing_independent(rule: UpdateRule) -> Iterator[Note]:
    """Yields a note that no forms were compared, since the rule has only one."""
    yield Note(
        "nothing independent was compared: all forms run the same `mix`. Give the rule a `step`, one token as the "
        "equation stands, and every form is held to it"
    )


# --- kernels ------------------------------------------------------------------------------------------------

ALLOWED = {torch.float64: EXACT, torch.float32: 1e-3, torch.bfloat16: 4e-2}
"""The relative error that a kernel may have in each dtype against the equation in fp64 on the same inputs."""


def kernel(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Measures the rule's own kernel against the equation in fp64 on the same inputs."""
    device = "cuda" if lacks_triton("cpu") else "cpu"
    if missing := lacks_triton(device):
        yield Note(f"kernel not tried: it needs {missing}")
        return
    refusals: dict[torch.dtype, str] = {}
    cases: list[tuple[torch.dtype, Inputs]] = []
    for dtype, key_dim in itertools.product(ALLOWED, (KEY, 16)):
        if any(dtype == known for known, _ in cases):
            continue
        wide = torch.promote_types(dtype, torch.float32)
        x = inputs(rule, PREFIX + 2 * CHUNK + 1, batch=1, heads=1, key_dim=key_dim)
        x = x.map(lambda part, d=dtype: part.to(device, d))  # type: ignore[misc]
        refused = rule.lacks_kernel(x.k, x.v)
        if refused:
            refusals[dtype] = refused
        else:
            cases.append((dtype, dataclasses.replace(x, gates={name: gate.to(wide) for name, gate in x.gates.items()})))
    if not cases:
        yield Note(f"kernel not tried: {'; '.join(dict.fromkeys(refusals.values()))}")
    is_default = rule == type(rule)()
    # The interpreter takes half a second for a gradient, so turned knobs run in the first and the last dtype alone.
    for dtype, x in cases if is_default else dict([cases[0], cases[-1]] if cases else []).items():
        x = started(rule, x)
        for start, state in ((x, "with an initial state"), (x.span(0), "from an empty state"))[: 1 + is_default]:
            exact = start.map(Tensor.double)
            got, want = evaluate(rule, start, "triton"), evaluate(rule, exact, "recurrent")
            comparison = f"kernel to recurrent in {str(dtype).removeprefix('torch.')}, {state}"
            cause = _wrong_read(rule, exact, got["o"], ALLOWED[dtype])
            for measurement in errors(got, want, comparison, ALLOWED[dtype]):
                yield measurement._replace(cause=cause or measurement.cause)
            if dtype == torch.bfloat16:
                yield from _rounded(got, want)
    if is_default and cases:
        yield from _wide_kernel(rule, device, torch.float32 if torch.float32 in dict(cases) else cases[-1][0])


def _rounded(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> Iterator[Measurement]:
    """Measures whether a kernel's state has bf16 numbers alone although the state of the equation has others.

    The relative error alone does not show a state that is kept in bf16.
    """
    for name, state in got.items():
        if (
            name.startswith("state")
            and state.is_floating_point()
            and want[name].float().bfloat16().ne(want[name]).any()
        ):
            all_rounded = float(state.bfloat16().eq(state).all())
            cause = "the kernel keeps the state in the dtype of its inputs: keep it in fp32"
            yield Measurement(
                all_rounded,
                f"{name} from bf16 inputs, all rounded to bf16 (1) or not (0),",
                cause * (all_rounded > 0),
                0.0,
            )


WIDE_KEY, WIDE_VALUE = 20, 40
"""Widths at which a kernel needs masks and offsets: no power of 2, and more values than one block of 32."""


def _wide_kernel(rule: UpdateRule, device: str, dtype: torch.dtype) -> Iterator[Measurement]:
    """Measures a kernel on several sequences and heads, with widths that do not fill blocks."""
    value_dim = None if square(rule) else WIDE_VALUE
    x = inputs(rule, PREFIX + 4, batch=2, heads=3, key_dim=WIDE_KEY, value_dim=value_dim)
    x = x.map(lambda part: part.to(device, dtype))
    if rule.lacks_kernel(x.k, x.v):
        return
    wide = torch.promote_types(dtype, torch.float32)
    x = started(rule, dataclasses.replace(x, gates={name: gate.to(wide) for name, gate in x.gates.items()}))
    got, want = evaluate(rule, x, "triton"), evaluate(rule, x.map(Tensor.double), "recurrent")
    yield from errors(got, want, f"kernel to recurrent at H=3, K={WIDE_KEY}, V={x.v.shape[-1]}", ALLOWED[dtype])


def _wrong_read(rule: UpdateRule, x: Inputs, o: Tensor, limit: float) -> str:
    """Returns the likely cause of a wrong output `o` if the kernel reads the wrong state, else an empty string.

    The kernel reads the wrong state if `o` is the output of the equation with the other value of `reads`.
    """
    if rule.transition is None or rule.transition.low_rank == "none" or rule.transition.decay == "none":
        return ""
    other: Literal["state", "decayed_state"] = "state" if rule.transition.reads == "decayed_state" else "decayed_state"
    flipped = dataclasses.replace(rule.transition, reads=other)
    terms = operands(rule, x.q, x.k, x.v, x.gates)
    if error(o, reference.recurrent(flipped, terms, scale=SCALE, state=x.state)[0]) > limit:
        return ""
    words = {"state": "undecayed state", "decayed_state": "decayed state"}
    return f"the kernel reads the {words[other]}, but the rule declares reads='{rule.transition.reads}'"


# --- states -------------------------------------------------------------------------------------------------


def state_carry(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures a sequence that is run in two parts, with the state carried over, against the whole sequence."""
    x = inputs(rule)
    for backend in backends_of(rule):
        whole = outputs(rule, x, backend)
        for split in CUTS:
            first = outputs(rule, x.span(0, split), backend)
            state = tuple(part for name, part in first.items() if name != "o")
            second = outputs(rule, x.span(split, state=state), backend)
            joined = {**second, "o": torch.cat([first["o"], second["o"]], dim=1)}
            yield from errors(joined, whole, f"{backend}, two parts split at token {split} to one")


def token_by_token(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures a layer that is fed one token at a time against a layer that is fed the whole sequence."""
    layer, x = layer_of(rule), normal(BATCH, LENGTH, WIDTH, seed=1)
    cache, out = None, []
    with torch.no_grad():
        whole, after = layer.advance(x)
        for token in x.split(1, dim=1):
            y, cache = layer.advance(token, cache)
            out.append(y)
    assert cache is not None
    want = {"y": whole, **parts(after.state)}
    got = {"y": torch.cat(out, dim=1), **parts(cache.state)}
    yield from errors(got, want, "layer fed by tokens to layer fed at once")


def sizes(rule: UpdateRule) -> Iterator[Measurement]:
    """Checks the number of parameters and the shapes and dtypes of states against what the rule declares."""
    layer = layer_of(rule)
    cache: LayerCache = layer.advance(normal(BATCH, LENGTH, WIDTH, seed=1))[1]
    of_gates = 0
    value_dim = KEY if square(rule) else VALUE
    for gate in layer.gates.gates.values():
        if gate.of is None:
            shape = gate.shape(HEADS, KEY, value_dim)
            values = math.prod(shape[gate.one_projection :]) * (rule.steps if gate.per == "step" else 1)
            rank = gate.rank or value_dim
            of_gates += sum(math.prod(gate.parameter_shape(name, shape)) for name in gate.parameters)
            of_gates += gate.projected * (WIDTH * values if gate.rank is None else (WIDTH + values) * rank)
    comparisons: list[tuple[str, object, object]] = [
        ("number of the gates' parameters", sum(p.numel() for p in layer.gates.parameters()), of_gates)
    ]
    if rule.transition is not None:
        shape = (BATCH, HEADS, rule.key_width(KEY), rule.value_width(value_dim))
        x = inputs(rule)
        carry = rule.carried(x.k, x.v)
        convolved = layer.channels.total + (0 if layer.vectors is None else sum(layer.vectors.widths))
        elements = BATCH * (CONV - 1) * convolved + rule.states * math.prod(shape) + sum(x.numel() for x in carry)
        comparisons.append(("number of elements in the layer's cache", cache.numel(), elements))
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            x = inputs(rule).map(lambda part, dtype=dtype: part.to(dtype))  # type: ignore[misc]
            states = {"initial_state": rule.start(x.k, x.v)}
            states |= {f"state from {backend}": run(rule, x, backend)[1] for backend in backends_of(rule)}
            want = rule.states * [(shape, torch.promote_types(dtype, torch.float32))]
            for source, state in states.items():
                forms = [(tuple(part.shape), part.dtype) for part in parts(state).values()][: rule.states]
                comparisons.append((f"shape and dtype of {source} for {dtype}", forms, want))
    else:
        comparisons += _own_state_forms(rule)
    for what, got, declared in comparisons:
        yield Measurement(
            float(got != declared), f"mismatch between the {what} ({got}) and the declared one ({declared})"
        )


def _own_state_forms(rule: UpdateRule) -> Iterator[tuple[str, object, object]]:
    """Yields comparisons (what, measured value, value of the contract) for the state of a rule outside the algebra.

    By the contract each part of the state is [B, H, ..], and a part that sums over tokens is in fp32. A part that grows
    with the sequence, or that repeats inputs, sums nothing and may have the dtype of the inputs.
    """
    x = inputs(rule).map(Tensor.bfloat16)
    x = dataclasses.replace(x, gates={name: gate.float() for name, gate in x.gates.items()})
    first = rule.start(x.k, x.v)
    short, after = (run(rule, x.span(0, stop), "chunked")[1] for stop in (PREFIX, LENGTH))
    kinds = [[(part.dim() > 2, tuple(part.shape[:2])) for part in state] for state in (first, short, after)]
    yield "number of tensors in the state, and their first sizes", kinds[2], kinds[0]
    yield "first sizes of the state's tensors", [k[1] for k in kinds[2]], [(BATCH, HEADS)] * len(after)
    input_values = torch.cat([part.flatten() for part in (x.q, x.k, x.v)]).unique()
    for i, (before, part) in enumerate(zip(short, after, strict=True)):
        is_narrow = part.is_floating_point() and part.element_size() < 4
        if is_narrow and part.shape == before.shape and not torch.isin(part, input_values).all():
            yield (
                f"dtype of part {i} of the state, which sums over tokens, for inputs in bf16",
                part.dtype,
                torch.float32,
            )
