"""`scan` runs a rule on any backend: it checks the inputs, fills in constant gates and chooses the fastest form."""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from deltalab.errors import InputError, unknown
from deltalab.ops.arguments import (
    check_carry,
    check_operands,
    check_state,
    check_tensors,
    filled,
    gates_of,
    once_for,
    parts,
    shown,
)
from deltalab.ops.backends import once
from deltalab.ops.recurrence import Backend, allowed, no_growth, packs, recurrence
from deltalab.rule import Operands, State, UpdateRule
from deltalab.structure import Transition

BACKENDS = get_args(Backend)

_log = logging.getLogger("deltalab")


def scan(
    rule: UpdateRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    *,
    scale: float | None = None,
    state: State | None = None,
    backend: Backend = "auto",
    chunk_size: int = 64,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Runs a rule over a sequence.

    q, k [B, T, H, K], of unit norm where the rule's `features` say so; v [B, T, H, V]. k and v have
        n T rows if the rule takes n steps per token. A rule that is `grouped` takes k and v of fewer heads, whose
        number divides H.
    gates: the value of each gate by its symbol, [B, T, H] or [H], with channels [B, T, H, K] or [H, K], with channels
        of the value V in place of K, with slots their number; per step [B, n T, H]. Constant gates may be left out.
    scale: of the output, K ** -0.5 where None.
    state: what an earlier call returned; None for an empty one.
    backend: `recurrent` is the equation, token by token; `chunked` is the parallel form, in chunks of `chunk_size`;
        `triton` is the kernel of the rule's structure, or the rule's own; `auto` takes a kernel on a GPU where there is
        one, else the parallel form.
    cu_seqlens: [N + 1] whole numbers from 0 to T, where B = 1 and the tokens are N sequences one after another; states
        are [N, H, K, V] then.
    Returns o [B, T, H, V] in v's dtype, and the state after the last token: a tuple, of one [B, H, K, V] for most rules
        of the algebra, of two where a second state fits the first one's error, and of the rule's carry.
    Raises `InputError` for shapes, gates, a state or a backend that do not fit.

    >>> import deltalab, torch
    >>> q = k = torch.nn.functional.normalize(torch.ones(1, 2, 1, 4), dim=-1)
    >>> o, (S,) = deltalab.scan(deltalab.get_rule("linear_attention"), q, k, torch.ones(1, 2, 1, 3), {}, scale=1.0)
    >>> [round(value, 5) for value in o[0, :, 0, 0].tolist()], list(S.shape)
    ([1.0, 2.0], [1, 1, 4, 3])
    """
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise InputError(f"chunk_size must be a whole number of at least 1, not {chunk_size!r}")
    once_for(rule, "tensors", (q, k, v, cu_seqlens), lambda: check_tensors(rule, q, k, v, cu_seqlens))
    if state is not None:
        check_state(rule, state, k, v, q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    autocast = not v.is_meta and torch.is_autocast_enabled(v.device.type)  # PyTorch knows none of the meta device
    with torch.autocast(v.device.type, enabled=False) if autocast else nullcontext():
        run = _choose(rule, q, k, v, gates, scale, state, backend, chunk_size, cu_seqlens)
        o, state = run()
    return o.to(v.dtype), state


def _choose(
    rule: UpdateRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    scale: float,
    state: State | None,
    backend: Backend,
    chunk_size: int,
    cu_seqlens: Tensor | None,
) -> Callable[[], tuple[Tensor, State]]:
    """The call that computes the scan: a kernel if `backend` allows one and one takes these inputs, else PyTorch."""
    kernels = allowed(backend, v.device.type)
    lacking = rule.lacks_kernel(k, v)
    own = kernels.triton and lacking is None
    # Only the kernels of structures, below, take packed sequences.
    packed = partial(_one_by_one, rule, q, k, v, gates, scale, state, backend, chunk_size, cu_seqlens)
    if lacking and kernels.triton and rule.brings_kernel:
        _say(lacking)
    if own or rule.transition is None:
        if lacking and backend == "triton":
            raise InputError(f"{lacking}: use backend 'auto', 'chunked' or 'recurrent'")
        values = _gates(rule, gates, q, v)
        if own and backend == "triton":
            no_growth(values.get("g"))
        advance = _token_by_token if backend == "recurrent" else partial(UpdateRule.advance, fused=own)
        run = partial(advance, rule, q, k, v, values, scale=scale, state=state)
        return run if cu_seqlens is None else packed
    if rule.carries and (cu_seqlens is not None or backend == "recurrent"):
        values = _gates(rule, gates, q, v)
        run = partial(_token_by_token, rule, q, k, v, values, scale=scale, state=state)
        return run if cu_seqlens is None else packed
    x = operands(rule, q, k, v, gates, carry=None if state is None else state[rule.states :])
    if cu_seqlens is not None and not packs(rule.transition, x, v.dtype, backend):
        return packed
    return partial(
        _recurrence, rule.transition, x, dtype=v.dtype, scale=scale,
        state=None if state is None else state[: rule.states],
        backend=backend, chunk_size=chunk_size, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def _recurrence(transition: Transition, x: Operands, **how: Any) -> tuple[Tensor, State]:
    """`recurrence`, with the operands' own output and carry."""
    o, state = recurrence(transition, x, **how)
    return o if x.output is None else x.output(o), state + x.carry


@once
def _say(lacking: str) -> None:
    _log.info("backend 'auto' takes 'chunked': %s", lacking)


def _one_by_one(
    rule: UpdateRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    scale: float,
    state: State | None,
    backend: Backend,
    chunk_size: int,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, State]:
    """`scan` of each of the packed sequences by itself, whose states must be of one size."""
    assert cu_seqlens is not None
    parts = [(slice(None), slice(*bounds)) for bounds in itertools.pairwise(cu_seqlens.tolist())]
    before = [None if state is None else tuple(one[n : n + 1] for one in state) for n in range(len(parts))]
    out, after = apart(rule, q, k, v, gates, parts, before, scale=scale, backend=backend, chunk_size=chunk_size)
    together, unlike = joined(after)
    if unlike:
        raise InputError(
            f"rule '{rule.name}' has states of several sizes after sequences of several lengths: scan them one by one"
        )
    return torch.cat(out, dim=1), together


def apart(
    rule: UpdateRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    parts: Sequence[tuple[slice, slice]],
    states: Sequence[State | None],
    **how: Any,
) -> tuple[list[Tensor], list[State]]:
    """`scan` of several parts of its tensors, each by itself: some rows and some tokens, with a state of their own.

    how: the other arguments of `scan`. Returns what each part gives, so that states may differ in size.
    """
    out, after = [], []
    for (rows, tokens), state in zip(parts, states, strict=True):
        steps = slice(*(None if end is None else end * rule.steps for end in (tokens.start, tokens.stop)))
        here = {name: one if one.dim() < 3 else one[rows] for name, one in _rows(rule, gates, tokens, steps).items()}
        o, state = scan(rule, q[rows, tokens], k[rows, steps], v[rows, steps], here, state=state, **how)
        out.append(o)
        after.append(state)
    return out, after


def joined(states: Sequence[State]) -> tuple[State, tuple[State, ...]]:
    """The states as one state of a batch and (), or () and the states where they differ in size."""
    shapes = {tuple(one.shape for one in state) for state in states}
    return (tuple(map(torch.cat, zip(*states, strict=True))), ()) if len(shapes) == 1 else ((), tuple(states))


def _gates(rule: UpdateRule, given: Mapping[str, Tensor], q: Tensor, v: Tensor) -> dict[str, Tensor]:
    declared = gates_of(rule)
    for name in given:
        if name not in declared:
            raise unknown("gate", name, declared, where=f"rule '{rule.name}'")
    values = {}
    for name, gate in declared.items():
        if name in given:
            values[name] = given[name]
        elif gate.constant:
            values[name] = gate.value(q.new_zeros(q.shape[2]), {})
        else:
            raise InputError(f"rule '{rule.name}' needs a value for its gate '{name}'")
    once_for(rule, "gates", (q, v, *values.values()), lambda: _check_gates(rule, values, q, v))
    return values


def _check_gates(rule: UpdateRule, values: Mapping[str, Tensor], q: Tensor, v: Tensor) -> None:
    batch, length, heads, key_dim = q.shape
    for name, gate in rule.gates.items():
        value = values[name]
        learned = gate.shape(heads, key_dim, v.shape[-1])
        moving = (batch, length * (rule.steps if gate.per == "step" else 1), *learned)
        if not isinstance(value, Tensor) or value.shape not in (moving, learned) or value.device != q.device:
            raise InputError(
                f"gate '{name}', per {gate.per}, must be {list(moving)} or {list(learned)} on {q.device}, "
                f"not {shown(value)}"
            )


def operands(
    rule: UpdateRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    *,
    carry: tuple[Tensor, ...] | None = None,
) -> Operands:
    """The `Operands` of a rule of the algebra, for inputs like those of `scan`, in the shapes that the references take.

    Constant gates are filled in. Gates with one value for each head are expanded over batch and time, and a decay over
    channels too where the transition is diagonal. carry: what an earlier call returned, None for an empty one.

    Raises `InputError` for operands that do not fit the transition.
    """
    assert rule.transition is not None
    values: dict[str, Any] = dict(_gates(rule, gates, q, v))
    if rule.carries:
        values["carry"] = rule.carried(k, v) if carry is None else carry
    x = rule.operands(q, k, v, **values)

    def check() -> None:
        assert rule.transition is not None
        sizes = *q.shape[:3], rule.key_width(q.shape[3]), rule.value_width(v.shape[-1])
        where = f"rule '{rule.name}': operands"
        check_operands(where, rule.transition, x, sizes, second_state=rule.second_state)

    once_for(rule, "operands", (q, v, *parts(x)) if isinstance(x, Operands) else (x,), check)
    if rule.carries or x.carry:
        check_carry(rule, x, q, v)
    return filled(rule.transition, x)


def _token_by_token(
    rule: UpdateRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    *,
    scale: float,
    state: State | None,
) -> tuple[Tensor, State]:
    """Each token by itself, for at least one token: by `mix`, or by operands of that token and the carry alone."""
    out, advance = [], rule.advance if rule.transition is None else partial(_advance, rule)
    for t in range(q.shape[1]):
        one, steps = slice(t, t + 1), slice(t * rule.steps, (t + 1) * rule.steps)
        now = _rows(rule, gates, one, steps)
        o, state = advance(q[:, one], k[:, steps], v[:, steps], now, scale=scale, state=state)
        out.append(o)
    assert state is not None
    return torch.cat(out, dim=1), state


def _advance(
    rule: UpdateRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    *,
    scale: float,
    state: State | None,
) -> tuple[Tensor, State]:
    """One token of a rule of the algebra."""
    assert rule.transition is not None
    x = operands(rule, q, k, v, gates, carry=None if state is None else state[rule.states :])
    before = None if state is None else state[: rule.states]
    return _recurrence(rule.transition, x, dtype=v.dtype, scale=scale, state=before, backend="recurrent", chunk_size=1)


def _rows(rule: UpdateRule, gates: Mapping[str, Tensor], tokens: slice, steps: slice) -> dict[str, Tensor]:
    """The gates sliced to some tokens (or their steps); gates without a time axis are returned unchanged."""
    return {
        name: value if value.dim() < 3 else value[:, steps if rule.gates[name].per == "step" else tokens]
        for name, value in gates.items()
    }
