"""Checks that an output does not depend on later tokens, other sequences, other heads, chance or earlier calls."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deltalab.authoring.check import Measurement, Note
from deltalab.authoring.inputs import Inputs, moves, normal
from deltalab.authoring.rule_checks.form_checks import CUTS, every_gate
from deltalab.authoring.rule_checks.rule_runs import (
    BATCH,
    LENGTH,
    LONG,
    PREFIX,
    WIDTH,
    backends_of,
    error,
    evaluate,
    gradients_of,
    inputs,
    joined,
    layer_of,
    outputs,
    replaced,
    run,
    selected,
    started,
)
from deltalab.ops.recurrence import Backend
from deltalab.rule import UpdateRule

ROUNDING = 1e-10
"""The largest relative difference in fp64 of two paths that compute the same function."""


def causality_of_values(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures the change of earlier outputs when later tokens change."""
    x, later, layer = inputs(rule), inputs(rule, seed=1), layer_of(rule)
    tokens, later_tokens = (normal(BATCH, LENGTH, WIDTH, seed=seed) for seed in (1, 2))
    plain = {name: outputs(rule, x, name)["o"] for name in backends_of(rule)}
    with torch.no_grad():
        y = layer(tokens)
    for t in CUTS:
        changed = replaced(x, later, t)
        with torch.no_grad():
            changed_y = layer(joined(x, tokens, later_tokens, t))
        outputs_of: list[tuple[str, Tensor, Tensor]] = [
            *((name, o, outputs(rule, changed, name)["o"]) for name, o in plain.items()),
            ("layer", y, changed_y),
        ]
        for name, o, changed_o in outputs_of:
            what = f"change of outputs before token {t} with other inputs after it, {name},"
            yield Measurement(error(changed_o[:, :t], o[:, :t]), what)
    x, later = (inputs(rule, LONG, batch=1, seed=seed) for seed in (0, 1))
    o = outputs(rule, x, "chunked", 64)["o"]
    for t in (41, 100):  # inside a chunk, whether chunks have 16, 32 or 64 tokens
        changed_o = outputs(rule, replaced(x, later, t), "chunked", 64)["o"]
        what = f"change of outputs before token {t} of {LONG} with other inputs after it, chunked,"
        yield Measurement(error(changed_o[:, :t], o[:, :t]), what)


def causality_of_gradients(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures the gradients of earlier outputs with respect to later tokens."""
    x = inputs(rule).map(lambda part: part.requires_grad_())
    tensors = {name: values for name, values in x.named().items() if moves(values)}
    tokens = normal(BATCH, LENGTH, WIDTH, seed=1).requires_grad_()
    runs: list[tuple[str, Tensor, dict[str, Tensor]]] = [
        *((backend, run(rule, x, backend)[0], tensors) for backend in backends_of(rule)),
        ("layer", layer_of(rule)(tokens), {"its input": tokens}),
    ]
    for (name, o, sources), t in itertools.product(runs, CUTS):
        early = (o[:, :t] * normal(*o[:, :t].shape, seed=2)).sum()
        for source, gradient in gradients_of(early, sources).items():
            what = f"largest gradient of outputs before token {t} with respect to {source} after it, {name},"
            yield Measurement(float(x.rows(gradient, t).abs().max()), what)


def rows_of_the_batch(rule: UpdateRule, batch: int = 3) -> Iterator[Measurement]:
    """Measures the change of a sequence's results when another sequence of the batch changes or is left out."""
    x, other = (started(rule, inputs(rule, PREFIX + LENGTH, batch=batch, seed=seed)) for seed in (0, 1))
    last = batch - 1
    for backend in backends_of(rule):
        want = outputs(rule, x, backend)
        swapped, later = crossed(x, other, last, dim=0), [*range(last // 2 + 1, batch)]
        # The results of a sequence must stay the same if another sequence changes, and if others are left out.
        for got, rows, what in (
            (outputs(rule, swapped, backend), [*range(last)], "with another last sequence in the batch"),
            (outputs(rule, selected(x, [1], 0), backend), [1], "of a sequence by itself"),
            (outputs(rule, selected(x, later, 0), backend), later, f"of the last {len(later)} sequences by themselves"),
        ):
            for name, value in want.items():
                change = error(got[name][: len(rows)], value[rows])
                yield Measurement(change, f"change of {name} {what} of a batch of {batch}, {backend},")


def heads(rule: UpdateRule, many: int = 8) -> Iterator[Measurement | Note]:
    """Measures whether the results of a head depend on other heads, on the number of heads or on their order.

    Constant gates, like the slopes of a decay, may have another value in each head. The check passes them as values,
    so that each value moves with its head.
    """
    x, other = (inputs(rule, PREFIX + 7, heads=many, seed=seed) for seed in (0, 1))
    x, other = (started(rule, dataclasses.replace(y, gates=every_gate(rule, y))) for y in (x, other))
    for backend in backends_of(rule):
        want = outputs(rule, x, backend)
        for head in (0, many - 1):
            rest = [h for h in range(many) if h != head]
            got = outputs(rule, crossed(x, other, head, dim=2), backend)
            for name, value in want.items():
                changed, kept = (_heads(name, result, rest) for result in (got[name], value))
                yield Measurement(
                    error(changed, kept), f"change of {name} of the other heads with another head {head}, {backend},"
                )
    groups = _groups(rule, x, many)
    if len(set(groups)) == many:
        yield Note(
            "each head computes a function of its own even with equal inputs, so that their order is not checked"
        )
        return
    what = f"number of functions that {many} heads with equal inputs and gates compute, beyond one,"
    yield Measurement(float(len(set(groups)) - 1), what, f"the code treats heads differently: they fall into {groups}")
    selection = [5, 0, 2]
    for backend in backends_of(rule):
        few, want = outputs(rule, selected(x, selection, 2), backend), outputs(rule, x, backend)
        for name, value in want.items():
            what = f"change of {name} of heads {selection} of {many} when they are alone and in this order, {backend},"
            yield Measurement(error(few[name], _heads(name, value, selection)), what)


def _heads(name: str, value: Tensor, index: list[int]) -> Tensor:
    """Returns the heads `index` of the result `name`: the output, or a part of the state."""
    return value.index_select(2 if name == "o" else 1, torch.tensor(index))


def _groups(rule: UpdateRule, x: Inputs, many: int) -> list[int]:
    """Gives all heads the inputs and the state of head 0. Returns for each head the first head with the same output."""
    o = outputs(rule, selected(x, [0] * many, 2), "chunked")["o"]
    return [next(j for j in range(many) if error(o[:, :, i], o[:, :, j]) < 1e-9) for i in range(many)]


def crossed(x: Inputs, other: Inputs, index: int, dim: int) -> Inputs:
    """Returns a copy of `x` in which one sequence (`dim` 0) or one head (`dim` 2) comes from `other`."""

    def mixed(a: Tensor, b: Tensor, dimension: int) -> Tensor:
        copy = a.clone()
        copy.select(dimension, index).copy_(b.select(dimension, index))
        return copy

    def axis(value: Tensor) -> int | None:
        return dim if moves(value) else 0 if dim else None

    pairs = {name: (value, other.gates[name], axis(value)) for name, value in x.gates.items()}
    gates = {name: a if dimension is None else mixed(a, b, dimension) for name, (a, b, dimension) in pairs.items()}
    assert x.state is not None
    assert other.state is not None
    state = tuple(
        mixed(a, b, min(dim, 1)) if a.shape == b.shape else a for a, b in zip(x.state, other.state, strict=True)
    )
    return Inputs(mixed(x.q, other.q, dim), mixed(x.k, other.k, dim), mixed(x.v, other.v, dim), gates, state)


def repetition(rule: UpdateRule) -> Iterator[Measurement]:
    """Measures whether a call returns the same bits after other calls and random draws, and keeps its arguments.

    With gradients, the gradients must be the same bits as well, and results must be those without gradients, but for
    rounding. What a failed part would only repeat by other random draws is left out.
    """
    x = started(rule, inputs(rule, PREFIX + LENGTH))
    single = x.map(Tensor.float)
    for backend in backends_of(rule):
        plain = [m for start in (x, x.span(0), single) for m in _repeated(rule, start, backend, outputs, "")]
        yield from plain
        if any(measurement.figure for measurement in plain):
            continue
        graded = list(_repeated(rule, x, backend, evaluate, ", with gradients"))
        yield from graded
        if any(measurement.figure for measurement in graded):
            continue
        trained = evaluate(rule, x, backend)
        cause = "the code takes another path where gradients are computed: evaluation would measure another rule"
        for name, y in outputs(rule, x, backend).items():
            what = f"difference of {name} with gradients from {name} without, {backend},"
            yield Measurement(error(y, trained[name]), what, cause, ROUNDING)


def _repeated(
    rule: UpdateRule, x: Inputs, backend: Backend, call: Callable[..., dict[str, Tensor]], how: str
) -> Iterator[Measurement]:
    """Calls one backend twice, after two seeds. Measures changes of the results, and changes of the arguments.

    Where results differ, a third call after the first seed tells whether chance or an earlier call is the cause.
    """
    before = x.map(Tensor.clone)

    def called(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return {name: y.clone() for name, y in call(rule, x, backend).items()}

    with torch.random.fork_rng(devices=[]):
        first, other = called(1), called(2)
        second = other if all(_same(other[name], y) for name, y in first.items()) else called(1)
    named = before.named()
    for name, value in x.named().items():
        cause = "the code writes into its argument: copy it first, or use operations without a trailing `_`"
        same = torch.equal(value, named[name])
        yield Measurement(float(not same), f"change of {name} itself by a call, {backend}{how},", cause)
    for repeated, when in ((second, "a second call"), (other, "a call after torch.manual_seed(2)")):
        for name, y in first.items():
            what = f"difference of {name} between a call and {when}, {backend}{how},"
            yield Measurement(float(not _same(repeated[name], y)), what)


def _same(a: Tensor, b: Tensor) -> bool:
    """Returns whether two results have the same bits, with NaN in the same places."""
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
