"""Checks the arguments of a scan, and the operands that a rule makes of them; each message names a tensor's shape."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule
from deltalab.structure import Transition

MOST = 256
"""Rules, and forms of arguments of each, that are remembered. With more, all are forgotten."""


class _Known:
    """What is known of a rule: its gates, and the forms of arguments that passed a check."""

    def __init__(self, rule: UpdateRule) -> None:
        self.rule, self.gates = rule, rule.gates
        self.passed: set[tuple[Any, ...]] = set()


_known: dict[int, _Known] = {}
"""By the id of the rule, as its hash takes longer than a check. `_Known` keeps the rule, and so the id its meaning."""


def _of(rule: UpdateRule) -> _Known:
    found = _known.get(id(rule))
    if found is None:
        if len(_known) >= MOST:
            _known.clear()
        found = _known[id(rule)] = _Known(rule)
    return found


def gates_of(rule: UpdateRule) -> dict[str, Gate]:
    """`rule.gates`, which makes them anew each time."""
    return rule.gates if torch.compiler.is_compiling() else _of(rule).gates


def once_for(rule: UpdateRule, what: str, given: Iterable[object], check: Callable[[], None]) -> None:
    """Calls `check`, but only once for a rule and arguments of the same shapes, dtypes and devices.

    what: names the check. A check takes as long as launching a kernel.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # where sizes may be symbols
        check()
        return
    passed = _of(rule).passed
    form = (what, *[(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x) for x in given])
    if form not in passed:
        check()
        if len(passed) >= MOST:
            passed.clear()
        passed.add(form)


def parts(x: Operands) -> Iterable[object]:
    """The fields of operands, and those of their fit."""
    yield from vars(x).values()
    if x.fit is not None:
        yield from vars(x.fit).values()


def check_tensors(rule: UpdateRule, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raises `InputError` for q, k, v or cu_seqlens that `scan` does not take."""
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


def check_state(rule: UpdateRule, state: State, k: Tensor, v: Tensor, sequences: int) -> None:
    """Raises `InputError` for a state that is not one of the rule for so many sequences like k and v."""
    fits = isinstance(state, tuple) and all(isinstance(one, Tensor) and one.device == v.device for one in state)
    what = "of tensors, as an earlier call returned it,"
    if rule.transition is not None:
        heads = k.shape[2]
        expected: list[tuple[int, ...]]
        expected = [(sequences, heads, rule.key_width(k.shape[-1]), rule.value_width(v.shape[-1]))] * rule.states
        what = f"of {'two' if len(expected) == 2 else 'one'} [B, H, K, V] = {list(expected[0])}"
        if rule.carries:
            one_k, one_v = (x[:1, :1].expand(sequences, -1, -1, -1) for x in (k, v))
            expected += [tuple(one.shape) for one in rule.carried(one_k, one_v)]
            what += f" and of the carry {[list(shape) for shape in expected[rule.states :]]}"
        fits = fits and [tuple(one.shape) for one in state] == expected
    if not fits:
        given = f"({', '.join(map(shown, state))})" if isinstance(state, tuple) else f"a {type(state).__name__}"
        raise InputError(f"the state of rule '{rule.name}' must be a tuple {what} on {v.device}, not {given}")


def shown(given: object) -> str:
    return f"{list(given.shape)} on {given.device}" if isinstance(given, Tensor) else f"a {type(given).__name__}"


def check_operands(
    where: str, transition: Transition, x: Operands, sizes: tuple[int, int, int, int, int], *, second_state: bool
) -> None:
    """Raises `InputError` for operands that do not fit a transition, or whose shapes are wrong.

    where: what the message begins with. sizes: B, T, H, and the widths K and V of the state.
    """
    if not isinstance(x, Operands):
        raise InputError(f"{where} must return Operands(r=..., k=..., u=...), not {shown(x)}")
    decays, fit, n = transition.decay != "none", x.fit, "" if transition.steps == 1 else f"{transition.steps} "
    due = {
        "g": (x.g, decays, f"a transition with decay '{transition.decay}'"),
        "e": (x.e, transition.low_rank == "tied", f"a transition with low_rank '{transition.low_rank}'"),
        "a": (x.a, transition.low_rank == "free", f"a transition with low_rank '{transition.low_rank}'"),
        "b": (x.b, transition.low_rank == "free", f"a transition with low_rank '{transition.low_rank}'"),
        "fit": (fit, second_state, f"second_state {second_state}"),
    }
    for name, (value, needed, what) in due.items():
        if needed and value is None:
            raise InputError(f"{where}: {name} is None, but {what} needs it")
        if not needed and value is not None:
            raise InputError(f"{where}: {name} is given, but {what} has no use for it")
    for name, value, fits, what in (
        ("d", x.d, transition.steps == 1, "one step per token"),
        ("bonus", x.bonus, transition.output == "before", "a transition with output 'before'"),
        ("sign", x.sign, decays and fit is None, "a transition that decays, and no fit"),
        ("fit", fit, transition.output == "after" and transition.steps == 1, "output 'after' and one step per token"),
    ):
        if value is not None and not fits:
            raise InputError(f"{where}: {name} takes {what}")

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
    _check_shapes(where, {f.name: getattr(x, f.name) for f in fields(x)}, named)
    if fit is not None:
        of_fit = {"r": named["r"], "v": named["u"], "strength": named["e"]}
        of_fit |= {name: named[name] for name in ("read", "g", "e")}
        _check_shapes(f"{where}: fit", {f.name: getattr(fit, f.name) for f in fields(fit)}, of_fit)


def check_carry(rule: UpdateRule, x: Operands, q: Tensor, v: Tensor) -> None:
    """Raises `InputError` for a carry in operands that is not like the rule's first one."""
    where = f"rule '{rule.name}': operands"
    if x.carry and not rule.carries:
        raise InputError(f"{where}: a carry is given: the rule needs a method `carried` for the first one")
    if rule.carries:
        empty = rule.carried(q, v)
        got = [tuple(one.shape) if isinstance(one, Tensor) else None for one in x.carry]
        if got != [tuple(one.shape) for one in empty]:
            raise InputError(
                f"{where}: carry is {[*map(shown, x.carry)]}, must be like `carried`: {[*map(shown, empty)]}"
            )


def _check_shapes(
    where: str, given: Mapping[str, object], named: Mapping[str, tuple[str, list[tuple[int, ...]]]]
) -> None:
    for name, (form, shapes) in named.items():
        value = given[name]
        if value is None and name not in ("r", "k", "u", "v", "strength"):
            continue
        if not isinstance(value, Tensor) or tuple(value.shape) not in shapes:
            got = list(value.shape) if isinstance(value, Tensor) else shown(value)
            raise InputError(f"{where}: {name} is {got}, must be {form}: {' or '.join(str(list(s)) for s in shapes)}")
        if not value.is_floating_point():
            raise InputError(f"{where}: {name} has dtype {value.dtype}, must be floating")


def filled(transition: Transition, x: Operands) -> Operands:
    """The operands with strengths and decays of one value for each head expanded over batch and time.

    A decay is expanded over channels too where the transition is diagonal.
    """
    rows, diagonal = x.k.shape, transition.decay == "diagonal"

    def spread(value: Tensor | None, *, decays: bool = False) -> Tensor | None:
        shape = rows if decays and diagonal else rows[:3]
        if value is None or value.shape == shape:
            return value
        if decays and diagonal and value.dim() % 2:  # [B, T, H] or [H]
            value = value.unsqueeze(-1)
        return value.expand(shape)

    fit = x.fit
    if fit is not None:
        strength = fit.strength.expand(rows[:3])
        fit = replace(fit, strength=strength, read=spread(fit.read), g=spread(fit.g, decays=True), e=spread(fit.e))
    full = {
        "g": spread(x.g, decays=True),
        "e": spread(x.e),
        "beta": spread(x.beta),
        "read": x.read if x.read is None or x.read.dim() > 1 else x.read.expand(x.r.shape[:3]),
        "d": spread(x.d),
        "sign": spread(x.sign, decays=True),
        "fit": fit,
    }
    changes = {name: value for name, value in full.items() if value is not getattr(x, name)}
    return x.changed(**changes) if changes else x
