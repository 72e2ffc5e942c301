"""One door to every backend: checks the inputs, fills in constants, and picks the fastest that fits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from deltalab import reference
from deltalab.errors import InputError, unknown
from deltalab.rule import Operands, State, UpdateRule

Backend: TypeAlias = Literal["auto", "recurrent", "chunked", "triton"]


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
) -> tuple[Tensor, State]:
    """Runs a rule over a sequence.

    q, k [B, T, H, K], of unit norm where the rule's `features` say so; v [B, T, H, V]; n T tokens in k and v where
        the rule takes n steps per token.
    gates: the value of each gate by its symbol, [B, T, H] or [H], with channels [B, T, H, K] or [H, K], per step
        [B, n T, H]; constant gates may be left out.
    scale: of the output, K ** -0.5 where None. state: what an earlier call returned, empty where None.
    backend: `recurrent` is the equation, token by token; `chunked` is the parallel form; `triton` is the rule's
        kernel; `auto` takes the kernel on a GPU where there is one, else the parallel form.
    Returns o [B, T, H, V] in v's dtype, and the state after the last token.
    Raises `InputError` for shapes, gates or a backend that do not fit.

    >>> import deltalab, torch
    >>> q = k = torch.nn.functional.normalize(torch.ones(1, 2, 1, 4), dim=-1)
    >>> o, state = deltalab.scan(deltalab.get_rule("linear_attention"), q, k, torch.ones(1, 2, 1, 3), {}, scale=1.0)
    >>> [round(value, 5) for value in o[0, :, 0, 0].tolist()]
    [1.0, 2.0]
    """
    _check(rule, q, k, v, state, backend, chunk_size)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    fused = backend == "triton" or (backend == "auto" and rule.brings_kernel and v.is_cuda)
    if fused and not rule.brings_kernel:
        raise InputError(f"rule '{rule.name}' brings no Triton kernel: use backend 'auto', 'chunked' or 'recurrent'")
    before = rule.initial_state(k, v) if state is None else state
    with torch.autocast(v.device.type, enabled=False):
        if fused:
            o, state = rule.fused(q, k, v, _gates(rule, gates, q), scale=scale, state=before)
        elif rule.transition is None:
            values = _gates(rule, gates, q)
            o, state = _mix(rule, q, k, v, values, scale, before, token_by_token=backend == "recurrent")
        else:
            x = operands(rule, q, k, v, gates)
            if backend == "recurrent" or (backend == "auto" and k.shape[1] == 1):
                o, state = reference.recurrent(rule.transition, x, scale=scale, state=state)
            else:
                o, state = reference.chunked(rule.transition, x, scale=scale, state=state, chunk_size=chunk_size)
    return o.to(v.dtype), state


def _check(
    rule: UpdateRule, q: Tensor, k: Tensor, v: Tensor, state: State | None, backend: str, chunk_size: int
) -> None:
    if backend not in get_args(Backend):
        raise unknown("backend", backend, get_args(Backend))
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise InputError(f"chunk_size must be a whole number of at least 1, not {chunk_size!r}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or not tensor.is_floating_point():
            raise InputError(
                f"{name} must be a floating [B, T, H, ...] tensor, not {tensor.dtype} {list(tensor.shape)}"
            )
    batch, length, heads, key_dim = q.shape
    steps = rule.steps
    fits = k.shape == (batch, steps * length, heads, key_dim) and v.shape[:3] == k.shape[:3]
    if not fits or 0 in q.shape or 0 in v.shape:
        tokens = "T" if steps == 1 else f"{steps} T"
        raise InputError(
            f"q must be [B, T, H, K], k [B, {tokens}, H, K] and v [B, {tokens}, H, V], none of them empty, "
            f"not {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise InputError(f"q, k and v must share dtype and device, not {q.dtype}, {k.dtype}, {v.dtype}")
    expected = (batch, heads, key_dim, v.shape[3])
    count = 2 if rule.second_state else 1
    states = state if count == 2 and isinstance(state, tuple) else (state,)
    fits = len(states) == count and all(
        isinstance(one, Tensor) and one.shape == expected and one.device == v.device for one in states
    )
    if rule.transition is not None and state is not None and not fits:
        raise InputError(
            f"the state of rule '{rule.name}' must be {'a pair of ' * (count == 2)}[B, H, K, V] = {list(expected)} "
            f"on {v.device}, not {', '.join(map(_shown, states))}"
        )


def _gates(rule: UpdateRule, given: Mapping[str, Tensor], q: Tensor) -> dict[str, Tensor]:
    batch, length, heads, key_dim = q.shape
    for name in given:
        if name not in rule.gates:
            raise unknown(f"gate of rule '{rule.name}'", name, rule.gates)
    values = {}
    for name, gate in rule.gates.items():
        if name in given:
            values[name] = given[name]
        elif gate.constant:
            values[name] = gate.value(q.new_zeros(heads), {})
        else:
            raise InputError(f"rule '{rule.name}' needs a value for its gate '{name}'")
        value = values[name]
        learned = gate.shape(heads, key_dim)
        moving = (batch, length * (rule.steps if gate.per == "step" else 1), *learned)
        if not isinstance(value, Tensor) or value.shape not in (moving, learned) or value.device != q.device:
            raise InputError(
                f"gate '{name}', per {gate.per}, must be {list(moving)} or {list(learned)} on {q.device}, "
                f"not {_shown(value)}"
            )
    return values


def _shown(given: object) -> str:
    return f"{list(given.shape)} on {given.device}" if isinstance(given, Tensor) else f"a {type(given).__name__}"


def operands(rule: UpdateRule, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor]) -> Operands:
    """What the references take of a rule of the algebra, for inputs like those of `scan`.

    Constant gates are filled in, and gates of one value a head spread over batch, time and channels that decay.
    """
    assert rule.transition is not None
    x = rule.operands(q, k, v, **_gates(rule, gates, q))
    diagonal = rule.transition.decay == "diagonal"

    def spread(value: Tensor | None, *, decays: bool = False) -> Tensor | None:
        if value is None:
            return None
        if decays and diagonal and value.dim() % 2:  # [B, T, H] or [H]
            value = value.unsqueeze(-1)
        return value.expand(k.shape if decays and diagonal else k.shape[:3])

    fit = x.fit
    if fit is not None:
        strength = fit.strength.expand(k.shape[:3])
        fit = replace(fit, strength=strength, read=spread(fit.read), g=spread(fit.g, decays=True), e=spread(fit.e))
    return replace(
        x,
        g=spread(x.g, decays=True),
        e=spread(x.e),
        beta=spread(x.beta),
        read=None if x.read is None else x.read.expand(x.r.shape[:3]),
        d=spread(x.d),
        fit=fit,
    )


def _mix(
    rule: UpdateRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    scale: float,
    state: State,
    *,
    token_by_token: bool,
) -> tuple[Tensor, State]:
    if not token_by_token:
        return rule.mix(q, k, v, gates, scale=scale, state=state)
    out = []
    for t in range(q.shape[1]):
        one = slice(t, t + 1)
        steps = slice(t * rule.steps, (t + 1) * rule.steps)
        now = {
            name: value if value.dim() < 3 else value[:, steps if rule.gates[name].per == "step" else one]
            for name, value in gates.items()
        }
        o, state = rule.mix(q[:, one], k[:, steps], v[:, steps], now, scale=scale, state=state)
        out.append(o)
    return torch.cat(out, dim=1), state
