"""Checks the arguments of a scan, and the operands that a rule makes of them; each message names a tensor's shape."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from deltalab.errors import InputError, unknown
from deltalab.gates import Gate
from deltalab.ops.call import Call
from deltalab.rule import Operands, UpdateRule, fields_of
from deltalab.structure import Transition

MOST = 256
"""How many rules are remembered, and how many forms of arguments for each. When there are more, all are forgotten."""


class _Checks:
    """A rule with its gates, and the forms of arguments that passed a check."""

    def __init__(self, rule: UpdateRule) -> None:
        self.rule, self.gates = rule, rule.gates
        self.passed: set[tuple[Any, ...]] = set()


_checks: dict[int, _Checks] = {}
"""The checks of each rule, by the rule's id, because its hash takes longer than a check.

`_Checks` holds the rule, so that no other rule gets the id.
"""


def _checks_of(rule: UpdateRule) -> _Checks:
    """The checks of a rule."""
    checks = _checks.get(id(rule))
    if checks is None:
        if len(_checks) >= MOST:
            _checks.clear()
        checks = _checks[id(rule)] = _Checks(rule)
    return checks


def gates_of(rule: UpdateRule) -> dict[str, Gate]:
    """Returns `rule.gates`, remembered because the property makes the gates anew each time."""
    return rule.gates if torch.compiler.is_compiling() else _checks_of(rule).gates


def once_for(rule: UpdateRule, name: str, values: Iterable[object], check: Callable[[], None]) -> None:
    """Calls `check`, but only once for a rule and values of the same shapes, dtypes and devices.

    A check takes as long as launching a kernel.

    Args:
        rule: The rule.
        name: The name of the check.
        values: What the check depends on.
        check: The check.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # where sizes may be symbols
        check()
        return
    passed = _checks_of(rule).passed
    form = (name, *[(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x) for x in values])
    if form not in passed:
        check()
        if len(passed) >= MOST:
            passed.clear()
        passed.add(form)


def parts(operands: Operands) -> Iterable[object]:
    """The fields of operands, and those of their fit."""
    yield from fields_of(operands).values()
    if operands.fit is not None:
        yield from fields_of(operands.fit).values()


def check_tensors(call: Call) -> None:
    """Checks q, k, v and cu_seqlens.

    Raises:
        InputError: A tensor has a form that `scan` does not take.
    """
    rule, q, k, v, cu_seqlens = call.rule, call.q, call.k, call.v, call.cu_seqlens
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or not tensor.is_floating_point():
            raise InputError(
                f"{name} must be a floating [B, T, H, ...] tensor, not {tensor.dtype} {list(tensor.shape)}"
            )
    batch, length, heads, key_dim = q.shape
    steps = rule.steps
    groups = heads // k.shape[2] if rule.grouped and k.shape[2] and heads % k.shape[2] == 0 else 1
    fits = k.shape == (batch, steps * length, heads // groups, key_dim) and v.shape[:3] == k.shape[:3]
    if not fits or 0 in q.shape or 0 in v.shape:
        tokens = "T" if steps == 1 else f"{steps} T"
        raise InputError(
            f"q must be [B, T, H, K], k [B, {tokens}, H, K] and v [B, {tokens}, H, V], none of them empty, "
            f"not {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise InputError(f"q, k and v must share dtype and device, not {q.dtype}, {k.dtype}, {v.dtype}")
    if cu_seqlens is not None:
        whole = cu_seqlens.dim() == 1 and cu_seqlens.dtype in (torch.int32, torch.int64)
        if not whole or cu_seqlens.numel() < 2 or batch != 1 or cu_seqlens.device != v.device:
            raise InputError(
                f"cu_seqlens must be whole numbers [N + 1] on {v.device} beside a batch of 1, "
                f"not {cu_seqlens.dtype} {list(cu_seqlens.shape)} on {cu_seqlens.device} beside a batch of {batch}"
            )


def check_state(call: Call) -> None:
    """Checks the state.

    Raises:
        InputError: The state does not have the form of the rule's states for these sequences, k and v.
    """
    rule, state, k, v = call.rule, call.state, call.k, call.v
    fits = isinstance(state, tuple) and all(isinstance(x, Tensor) and x.device == v.device for x in state)
    form = "of tensors, as an earlier call returned it,"
    if rule.transition is not None:
        heads, sequences = k.shape[2], call.sequences
        expected: list[tuple[int, ...]]
        expected = [(sequences, heads, rule.key_width(k.shape[-1]), rule.value_width(v.shape[-1]))] * rule.states
        form = f"of {'two' if len(expected) == 2 else 'one'} [B, H, K, V] = {list(expected[0])}"
        if rule.carries:
            one_k, one_v = (x[:1, :1].expand(sequences, -1, -1, -1) for x in (k, v))
            expected += [tuple(x.shape) for x in rule.carried(one_k, one_v)]
            form += f" and of the carry {[list(shape) for shape in expected[rule.states :]]}"
        fits = isinstance(state, tuple) and fits and [tuple(x.shape) for x in state] == expected
    if not fits:
        text = f"({', '.join(map(shown, state))})" if isinstance(state, tuple) else f"a {type(state).__name__}"
        raise InputError(f"the state of rule '{rule.name}' must be a tuple {form} on {v.device}, not {text}")


def gate_values(call: Call) -> dict[str, Tensor]:
    """The value of each gate of the rule; constant gates are filled in.

    Raises:
        InputError: A gate is unknown, missing or of another shape.
    """
    rule, q, v = call.rule, call.q, call.v
    declared = gates_of(rule)
    for name in call.gates:
        if name not in declared:
            raise unknown("gate", name, declared, where=f"rule '{rule.name}'")
    values = {}
    for name, gate in declared.items():
        if name in call.gates:
            values[name] = call.gates[name]
        elif gate.constant:
            values[name] = gate.value(q.new_zeros(q.shape[2]), {})
        else:
            raise InputError(f"rule '{rule.name}' needs a value for its gate '{name}'")
    once_for(rule, "gates", (q, v, *values.values()), lambda: _check_gates(rule, values, q, v))
    return values


def _check_gates(rule: UpdateRule, values: Mapping[str, Tensor], q: Tensor, v: Tensor) -> None:
    """Raises `InputError` for a gate's value of another shape, or on another device."""
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


def shown(value: object) -> str:
    """A tensor's shape and device, or the type of another value, for a message."""
    return f"{list(value.shape)} on {value.device}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_operands(
    where: str, transition: Transition, operands: Operands, sizes: tuple[int, int, int, int, int], *, second_state: bool
) -> None:
    """Checks operands.

    Args:
        where: What the message begins with.
        transition: The transition of the state.
        operands: The operands.
        sizes: B, T, H, and the widths K and V of the state.
        second_state: Whether there must be a fit.

    Raises:
        InputError: The operands do not fit the transition, or their shapes are wrong.
    """
    if not isinstance(operands, Operands):
        raise InputError(f"{where} must return Operands(r=..., k=..., u=...), not {shown(operands)}")
    decays, fit, n = transition.decay != "none", operands.fit, "" if transition.steps == 1 else f"{transition.steps} "
    due = {
        "g": (operands.g, decays, f"a transition with decay '{transition.decay}'"),
        "e": (operands.e, transition.low_rank == "tied", f"a transition with low_rank '{transition.low_rank}'"),
        "a": (operands.a, transition.low_rank == "free", f"a transition with low_rank '{transition.low_rank}'"),
        "b": (operands.b, transition.low_rank == "free", f"a transition with low_rank '{transition.low_rank}'"),
        "fit": (fit, second_state, f"second_state {second_state}"),
    }
    for name, (value, needed, reason) in due.items():
        if needed and value is None:
            raise InputError(f"{where}: {name} is None, but {reason} needs it")
        if not needed and value is not None:
            raise InputError(f"{where}: {name} is given, but {reason} has no use for it")
    for name, value, fits, condition in (
        ("d", operands.d, transition.steps == 1, "one step per token"),
        ("bonus", operands.bonus, transition.output == "before", "a transition with output 'before'"),
        ("sign", operands.sign, decays and fit is None, "a transition that decays, and no fit"),
        ("fit", fit, transition.output == "after" and transition.steps == 1, "output 'after' and one step per token"),
    ):
        if value is not None and not fits:
            raise InputError(f"{where}: {name} takes {condition}")

    batch, length, heads, key, value_dim = sizes
    rows = transition.steps * length
    keys, values = (batch, rows, heads, key), (batch, rows, heads, value_dim)
    reads, writes = (batch, length, heads), (batch, rows, heads)
    per_row, per_token = f"[B, {n}T, H]", "[B, T, H]"
    named: dict[str, tuple[str, list[tuple[int, ...]]]] = {
        "r": ("[B, T, H, K]", [(*reads, key)]),
        "k": (f"[B, {n}T, H, K]", [keys]),
        "u": (f"[B, {n}T, H, V]", [values]),
        "a": (f"[B, {n}T, H, K]", [keys]),
        "b": (f"[B, {n}T, H, K]", [keys]),
        "bonus": (per_token, [reads]),
        "read": (f"{per_token} or [H]", [reads, (heads,)]),
        **dict.fromkeys(("beta", "e", "d"), (f"{per_row} or [H]", [writes, (heads,)])),
        "sign": (f"[B, {n}T, H, K] or {per_row}" if transition.decay == "diagonal" else per_row, [writes]),
        "g": (f"{per_row} or [H]", [writes, (heads,)]),
    }
    if transition.decay == "diagonal":
        named["sign"][1].append(keys)
        named["g"] = (f"[B, {n}T, H, K], [H, K], {per_row} or [H]", [keys, (heads, key), writes, (heads,)])
    _check_shapes(where, {f.name: getattr(operands, f.name) for f in fields(operands)}, named)
    if fit is not None:
        of_fit = {"r": named["r"], "v": named["u"], "strength": named["e"]}
        of_fit |= {name: named[name] for name in ("read", "g", "e")}
        _check_shapes(f"{where}: fit", {f.name: getattr(fit, f.name) for f in fields(fit)}, of_fit)


def check_carry(rule: UpdateRule, operands: Operands, q: Tensor, v: Tensor) -> None:
    """Checks the carry of operands.

    Raises:
        InputError: The carry is not like the rule's first one.
    """
    where = f"rule '{rule.name}': operands"
    if operands.carry and not rule.carries:
        raise InputError(f"{where}: a carry is given: the rule needs a method `carried` for the first one")
    if rule.carries:
        empty = rule.carried(q, v)
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else None for x in operands.carry]
        if shapes != [tuple(x.shape) for x in empty]:
            raise InputError(
                f"{where}: carry is {[*map(shown, operands.carry)]}, must be like `carried`: {[*map(shown, empty)]}"
            )


def _check_shapes(
    where: str, operands: Mapping[str, object], named: Mapping[str, tuple[str, list[tuple[int, ...]]]]
) -> None:
    """Raises `InputError` for an operand of another shape than those that its name allows, or that is not floating."""
    for name, (form, shapes) in named.items():
        value = operands[name]
        if value is None and name not in ("r", "k", "u", "v", "strength"):
            continue
        if not isinstance(value, Tensor) or tuple(value.shape) not in shapes:
            shape = list(value.shape) if isinstance(value, Tensor) else shown(value)
            raise InputError(f"{where}: {name} is {shape}, must be {form}: {' or '.join(str(list(s)) for s in shapes)}")
        if not value.is_floating_point():
            raise InputError(f"{where}: {name} has dtype {value.dtype}, must be floating")


def filled(transition: Transition, operands: Operands) -> Operands:
    """The operands, where a number or decay with one value for each head is expanded over batch and time.

    A decay is expanded over channels too where the transition is diagonal.
    """
    rows, diagonal = operands.k.shape, transition.decay == "diagonal"

    def spread(value: Tensor | None, *, decays: bool = False) -> Tensor | None:
        shape = rows if decays and diagonal else rows[:3]
        if value is None or value.shape == shape:
            return value
        if decays and diagonal and value.dim() % 2:  # [B, T, H] or [H]
            value = value.unsqueeze(-1)
        return value.expand(shape)

    fit = operands.fit
    if fit is not None:
        strength = fit.strength.expand(rows[:3])
        fit = replace(fit, strength=strength, read=spread(fit.read), g=spread(fit.g, decays=True), e=spread(fit.e))
    read = operands.read
    full = {
        "g": spread(operands.g, decays=True),
        "e": spread(operands.e),
        "beta": spread(operands.beta),
        "read": read if read is None or read.dim() > 1 else read.expand(operands.r.shape[:3]),
        "d": spread(operands.d),
        "sign": spread(operands.sign, decays=True),
        "fit": fit,
    }
    changes = {name: value for name, value in full.items() if value is not getattr(operands, name)}
    return operands.changed(**changes) if changes else operands
