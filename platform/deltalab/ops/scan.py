"""`scan` runs a rule on any backend: it checks the inputs, fills in constant gates and chooses the fastest form."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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
    gate_values,
    once_for,
    parts,
)
from deltalab.ops.backends import once
from deltalab.ops.call import Call
from deltalab.ops.peers.scans import PACKAGES
from deltalab.ops.peers.table import hindrance
from deltalab.ops.recurrence import Backend, allowed, no_growth, packs, recurrence
from deltalab.rule import Operands, State, UpdateRule

BACKENDS = get_args(Backend)

ALL = slice(None)

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

    Args:
        rule: The rule.
        q: [B, T, H, K], of unit norm where the rule's `features` say so.
        k: As q, with n T rows if the rule takes n steps per token. A rule that is `grouped` takes k and v of fewer
            heads, whose number divides H.
        v: [B, T, H, V], with n T rows if the rule takes n steps per token.
        gates: The value of each gate by its symbol: [B, T, H] or [H], or with channels [B, T, H, K] or [H, K]. Channels
            of the value have V in place of K, and slots have their number. A gate per step has n T in place of T.
            Constant gates may be left out.
        scale: The factor of the output; None for that of the rule, which is K ** -0.5 for nearly all rules.
        state: What an earlier call returned, or None for an empty state.
        backend: `recurrent` is the equation, token by token. `chunked` is the parallel form, in chunks of `chunk_size`.
            `triton` is the kernel of the rule's structure, or the rule's own. `auto` takes a kernel on a GPU where
            there is one, else the parallel form. `fla` and `flash_qla` are the kernels of flash-linear-attention and
            of FlashQLA, where they are installed and have the rule's structure.
        chunk_size: Tokens of a chunk of the parallel form.
        cu_seqlens: Whole numbers [N + 1] from 0 to T, if B = 1 and the tokens are N sequences one after another. States
            are [N, H, K, V] then.

    Returns:
        o [B, T, H, V] in v's dtype, and the state after the last token. The state is a tuple: of one [B, H, K, V] for
        most rules of the algebra, of two where a second state fits the first one's error, and of the rule's carry.

    Raises:
        InputError: Shapes, gates, the state or the backend do not fit.

    Examples:
        >>> import deltalab, torch
        >>> q = k = torch.nn.functional.normalize(torch.ones(1, 2, 1, 4), dim=-1)
        >>> o, (S,) = deltalab.scan(deltalab.get_rule("linear_attention"), q, k, torch.ones(1, 2, 1, 3), {}, scale=1.0)
        >>> [round(value, 5) for value in o[0, :, 0, 0].tolist()], list(S.shape)
        ([1.0, 2.0], [1, 1, 4, 3])
    """
    return _checked(Call(rule, q, k, v, gates, scale, state, backend, chunk_size, cu_seqlens))


def _checked(call: Call) -> tuple[Tensor, State]:
    """Checks a call and computes it."""
    rule, v, size = call.rule, call.v, call.chunk_size
    if call.backend not in BACKENDS:
        raise unknown("backend", call.backend, BACKENDS)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputError(f"chunk_size must be a whole number of at least 1, not {size!r}")
    once_for(rule, "tensors", (call.q, call.k, v, call.cu_seqlens), lambda: check_tensors(call))
    if call.state is not None:
        check_state(call)
    autocast = not v.is_meta and torch.is_autocast_enabled(v.device.type)  # PyTorch knows none of the meta device
    with torch.autocast(v.device.type, enabled=False) if autocast else nullcontext():
        o, state = _computed(call)
    return o.to(v.dtype), state


def _computed(call: Call) -> tuple[Tensor, State]:
    """Computes a call by a kernel if the backend allows kernels and one of them takes the inputs, else by PyTorch."""
    rule, q, k, v, backend = call.rule, call.q, call.k, call.v, call.backend
    if backend in PACKAGES and (why := hindrance(rule)):
        raise InputError(f"backend '{backend}': {why}: use 'auto', 'chunked' or 'recurrent'")
    kernels = allowed(backend, v.device.type)
    lacking = rule.lacks_kernel(k, v)
    fused = kernels.triton and lacking is None
    packed = call.cu_seqlens is not None
    if lacking and kernels.triton and rule.brings_kernel:
        _say(lacking)
    if fused or rule.transition is None:
        if lacking and backend == "triton":
            raise InputError(f"{lacking}: use backend 'auto', 'chunked' or 'recurrent'")
        values = gate_values(call)
        if fused and backend == "triton":
            no_growth(values.get("g"))
        if packed:
            return _one_by_one(call)
        if backend == "recurrent":
            return _token_by_token(call, values)
        return rule.advance(q, k, v, values, scale=call.scale, state=call.state, fused=fused)
    if rule.carries and (packed or backend == "recurrent"):
        values = gate_values(call)
        return _one_by_one(call) if packed else _token_by_token(call, values)
    of_rule = _operands(call, call.carry)
    # Only the kernels of structures take packed sequences.
    if packed and not packs(rule.transition, of_rule, v.dtype, backend):
        return _one_by_one(call)
    return _recurrence(call, of_rule)


def _recurrence(call: Call, of_rule: Operands) -> tuple[Tensor, State]:
    """Computes a rule's recurrence, applies `of_rule.output` to o, and appends `of_rule.carry` to the state."""
    assert call.rule.transition is not None
    o, state = recurrence(
        call.rule.transition, of_rule, dtype=call.v.dtype, scale=call.scale, state=call.recurrence_state,
        backend=call.backend, chunk_size=call.chunk_size, cu_seqlens=call.cu_seqlens,
    )  # fmt: skip
    return o if of_rule.output is None else of_rule.output(o), state + of_rule.carry


@once
def _say(lacking: str) -> None:
    """Logs once why no kernel is taken."""
    _log.info("backend 'auto' takes 'chunked': %s", lacking)


def _one_by_one(call: Call) -> tuple[Tensor, State]:
    """Computes each of the packed sequences by itself; their states must be of one size."""
    assert call.cu_seqlens is not None
    sequences = [(ALL, slice(*bounds)) for bounds in itertools.pairwise(call.cu_seqlens.tolist())]
    before = [None if call.state is None else tuple(x[n : n + 1] for x in call.state) for n in range(len(sequences))]
    outputs, after = _apart(call, sequences, before)
    state, unlike = joined(after)
    if unlike:
        raise InputError(
            f"rule '{call.rule.name}' has states of several sizes after sequences of several lengths: "
            "scan them one by one"
        )
    return torch.cat(outputs, dim=1), state


def apart(
    rule: UpdateRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    parts: Sequence[tuple[slice, slice]],
    states: Sequence[State | None],
    **options: Any,
) -> tuple[list[Tensor], list[State]]:
    """Runs `scan` on several parts of its tensors, each by itself.

    Args:
        rule: The rule.
        q: As in `scan`.
        k: As in `scan`.
        v: As in `scan`.
        gates: As in `scan`.
        parts: The rows and the tokens of each part.
        states: The state of each part.
        **options: The options `scale`, `backend` and `chunk_size` of `scan`.

    Returns:
        The outputs and the states of the parts, in two lists, because states may differ in size.
    """
    scale = options.pop("scale", None)
    return _apart(Call(rule, q, k, v, gates, scale, **options), parts, states)


def _apart(
    call: Call, parts: Sequence[tuple[slice, slice]], states: Sequence[State | None]
) -> tuple[list[Tensor], list[State]]:
    """Computes each part of a call from the part's state."""
    outputs, after = [], []
    for (rows, tokens), before in zip(parts, states, strict=True):
        o, state = _checked(call.part(rows, tokens, before))
        outputs.append(o)
        after.append(state)
    return outputs, after


def joined(states: Sequence[State]) -> tuple[State, tuple[State, ...]]:
    """Returns the states joined as one state of a batch, and (). If they differ in size, returns () and the states."""
    shapes = {tuple(x.shape for x in state) for state in states}
    return (tuple(map(torch.cat, zip(*states, strict=True))), ()) if len(shapes) == 1 else ((), tuple(states))


def operands(
    rule: UpdateRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    *,
    carry: tuple[Tensor, ...] | None = None,
) -> Operands:
    """The `Operands` of a rule of the algebra, in the shapes that the references take.

    Constant gates are filled in. Gates with one value for each head are expanded over batch and time, and a decay over
    channels too where the transition is diagonal.

    Args:
        rule: The rule.
        q: As in `scan`.
        k: As in `scan`.
        v: As in `scan`.
        gates: As in `scan`.
        carry: What an earlier call returned, or None for an empty carry.

    Raises:
        InputError: The operands do not fit the transition.
    """
    return _operands(Call(rule, q, k, v, gates), carry)


def _operands(call: Call, carry: tuple[Tensor, ...] | None) -> Operands:
    """The operands of a call, checked."""
    rule, q, k, v = call.rule, call.q, call.k, call.v
    assert rule.transition is not None
    values: dict[str, Any] = dict(gate_values(call))
    if rule.carries:
        values["carry"] = rule.carried(k, v) if carry is None else carry
    of_rule = rule.operands(q, k, v, **values)

    def check() -> None:
        assert rule.transition is not None
        sizes = *q.shape[:3], rule.key_width(q.shape[3]), rule.value_width(v.shape[-1])
        where = f"rule '{rule.name}': operands"
        check_operands(where, rule.transition, of_rule, sizes, second_state=rule.second_state)

    once_for(rule, "operands", (q, v, *parts(of_rule)) if isinstance(of_rule, Operands) else (of_rule,), check)
    if rule.carries or of_rule.carry:
        check_carry(rule, of_rule, q, v)
    return filled(rule.transition, of_rule)


def _token_by_token(call: Call, values: Mapping[str, Tensor]) -> tuple[Tensor, State]:
    """Computes at least one token, one at a time: by `mix`, or by operands from the token and the carry before it."""
    rule, state, outputs = call.rule, call.state, []
    whole = Call(rule, call.q, call.k, call.v, values, call.given_scale, None, "recurrent", 1)
    for t in range(call.q.shape[1]):
        token = whole.part(ALL, slice(t, t + 1), state)
        if rule.transition is None:
            o, state = rule.advance(token.q, token.k, token.v, token.gates, scale=token.scale, state=state)
        else:
            o, state = _recurrence(token, _operands(token, token.carry))
        outputs.append(o)
    assert state is not None
    return torch.cat(outputs, dim=1), state
