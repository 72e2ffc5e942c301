"""Checks of what an output must not depend on: later tokens, other sequences, other heads, chance, earlier calls."""

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from deltalab.authoring.check import Measured, Note
from deltalab.authoring.form_checks import CUTS, every_gate
from deltalab.authoring.inputs import Inputs, moves, normal
from deltalab.authoring.rule_runs import (
    BATCH,
    LENGTH,
    LONG,
    PREFIX,
    WIDTH,
    backends_of,
    error,
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


def causality_of_values(rule: UpdateRule) -> Iterator[Measured]:
    x, later, layer = inputs(rule), inputs(rule, seed=1), layer_of(rule)
    tokens, later_tokens = (normal(BATCH, LENGTH, WIDTH, seed=seed) for seed in (1, 2))
    for t in CUTS:
        turned = replaced(x, later, t)
        found: list[tuple[str, Tensor, Tensor]] = [
            *((name, outputs(rule, x, name)["o"], outputs(rule, turned, name)["o"]) for name in backends_of(rule)),
            ("layer", layer(tokens), layer(joined(x, tokens, later_tokens, t))),
        ]
        for name, o, turned_o in found:
            what = f"change of outputs before token {t} with other inputs after it, {name},"
            yield Measured(error(turned_o[:, :t], o[:, :t]), what)
    x, later = (inputs(rule, LONG, batch=1, seed=seed) for seed in (0, 1))
    o = outputs(rule, x, "chunked", 64)["o"]
    for t in (41, 100):  # within chunks of 16, 32 and 64 tokens
        turned_o = outputs(rule, replaced(x, later, t), "chunked", 64)["o"]
        what = f"change of outputs before token {t} of {LONG} with other inputs after it, chunked,"
        yield Measured(error(turned_o[:, :t], o[:, :t]), what)


def causality_of_gradients(rule: UpdateRule) -> Iterator[Measured]:
    x = inputs(rule).map(lambda part: part.requires_grad_())
    given = {name: values for name, values in x.named().items() if moves(values)}
    tokens = normal(BATCH, LENGTH, WIDTH, seed=1).requires_grad_()
    found: list[tuple[str, Tensor, dict[str, Tensor]]] = [
        *((backend, run(rule, x, backend)[0], given) for backend in backends_of(rule)),
        ("layer", layer_of(rule)(tokens), {"its input": tokens}),
    ]
    for (name, o, sources), t in itertools.product(found, CUTS):
        early = (o[:, :t] * normal(*o[:, :t].shape, seed=2)).sum()
        for source, gradient in gradients_of(early, sources).items():
            what = f"largest gradient of outputs before token {t} with respect to {source} after it, {name},"
            yield Measured(float(x.rows(gradient, t).abs().max()), what)


def rows_of_the_batch(rule: UpdateRule, batch: int = 3) -> Iterator[Measured]:
    x, other = (started(rule, inputs(rule, PREFIX + LENGTH, batch=batch, seed=seed)) for seed in (0, 1))
    last = batch - 1
    for backend in backends_of(rule):
        want = outputs(rule, x, backend)
        swapped = _mixed(x, other, last, dim=0)
        # Changing one sequence must leave the others as they are, and so must leaving it out.
        for got, rows, what in (
            (outputs(rule, swapped, backend), [*range(last)], "with another last sequence in the batch"),
            (outputs(rule, selected(x, [1], 0), backend), [1], "of a sequence by itself"),
        ):
            kept = got if len(got["o"]) == 1 else {n: y[: len(rows)] for n, y in got.items()}
            for name, value in want.items():
                yield Measured(error(kept[name], value[rows]), f"change of {name} {what}, {backend},")


def heads(rule: UpdateRule, many: int = 8) -> Iterator[Measured | Note]:
    """One head must not see another, and the number of heads and their order must not matter.

    What a rule fixes for each head, like the slopes of a decay, is passed as a value here, and the order goes with it.
    """
    x, other = (inputs(rule, PREFIX + 7, heads=many, seed=seed) for seed in (0, 1))
    x, other = (started(rule, dataclasses.replace(y, gates=every_gate(rule, y))) for y in (x, other))
    for backend in backends_of(rule):
        want = outputs(rule, x, backend)
        for head in (0, many - 1):
            rest = [h for h in range(many) if h != head]
            got = outputs(rule, _mixed(x, other, head, dim=2), backend)
            for name, value in want.items():
                y, z = (_heads(name, one, rest) for one in (got[name], value))
                yield Measured(error(y, z), f"change of {name} of the other heads with another head {head}, {backend},")
    groups = _groups(rule, x, many)
    if len(set(groups)) == many:
        yield Note(
            "each head computes a function of its own even with equal inputs, so that their order is not checked"
        )
        return
    what = f"number of functions that {many} heads with equal inputs and gates compute, beyond one,"
    yield Measured(float(len(set(groups)) - 1), what, f"the code treats heads differently: they fall into {groups}")
    chosen = [5, 0, 2]
    for backend in backends_of(rule):
        few, want = outputs(rule, selected(x, chosen, 2), backend), outputs(rule, x, backend)
        for name, value in want.items():
            what = f"change of {name} of heads {chosen} of {many} when they are alone and in this order, {backend},"
            yield Measured(error(few[name], _heads(name, value, chosen)), what)


def _heads(name: str, value: Tensor, index: list[int]) -> Tensor:
    return value.index_select(2 if name == "o" else 1, torch.tensor(index))


def _groups(rule: UpdateRule, x: Inputs, many: int) -> list[int]:
    """For each head the first head that has the same output where all have the inputs and the state of head 0."""
    o = outputs(rule, selected(x, [0] * many, 2), "chunked")["o"]
    return [next(j for j in range(many) if error(o[:, :, i], o[:, :, j]) < 1e-9) for i in range(many)]


def _mixed(x: Inputs, other: Inputs, index: int, dim: int) -> Inputs:
    """x with one sequence (dim 0) or one head (dim 2) of another."""

    def of(a: Tensor, b: Tensor, at: int) -> Tensor:
        mixed = a.clone()
        mixed.select(at, index).copy_(b.select(at, index))
        return mixed

    def place(value: Tensor) -> int | None:
        return dim if moves(value) else 0 if dim else None

    pairs = {name: (value, other.gates[name], place(value)) for name, value in x.gates.items()}
    gates = {name: a if at is None else of(a, b, at) for name, (a, b, at) in pairs.items()}
    assert x.state is not None
    assert other.state is not None
    state = tuple(of(a, b, min(dim, 1)) if a.shape == b.shape else a for a, b in zip(x.state, other.state, strict=True))
    return Inputs(of(x.q, other.q, dim), of(x.k, other.k, dim), of(x.v, other.v, dim), gates, state)


def repetition(rule: UpdateRule) -> Iterator[Measured]:
    """The same call gives the same bits, whatever was drawn or called before, and leaves its arguments as they were."""
    for dtype in (torch.float64, torch.float32):
        x = started(rule, inputs(rule, PREFIX + LENGTH)).map(lambda part, d=dtype: part.to(d))  # type: ignore[misc]
        for backend, given in itertools.product(backends_of(rule), (x, x.span(0))):
            yield from _repeated(rule, given, backend)


def _repeated(rule: UpdateRule, x: Inputs, backend: Backend) -> Iterator[Measured]:
    before = x.map(Tensor.clone)
    with torch.random.fork_rng(devices=[]):
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append({name: y.clone() for name, y in outputs(rule, x, backend).items()})
    named = before.named()
    for name, value in x.named().items():
        cause = "the code writes into its argument: copy it first, or use operations without a trailing `_`"
        same = torch.equal(value, named[name])
        yield Measured(float(not same), f"change of {name} itself by a call, {backend},", cause)
    for other, when in ((found[1], "a second call"), (found[2], "a call after torch.manual_seed(2)")):
        for name, y in found[0].items():
            same = torch.equal(torch.nan_to_num(other[name]), torch.nan_to_num(y))
            yield Measured(float(not same), f"difference of {name} between a call and {when}, {backend},")
