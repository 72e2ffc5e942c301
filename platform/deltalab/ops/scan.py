"""One door to every backend: checks the inputs, fills in constants, and picks the fastest that fits."""

import itertools
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from deltalab.errors import InputError, unknown
from deltalab.ops import reference
from deltalab.ops.backends import lacks_triton, may_launch, once
from deltalab.rule import Operands, State, UpdateRule

Backend: TypeAlias = Literal["auto", "recurrent", "chunked", "triton"]

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

    q, k [B, T, H, K], of unit norm where the rule's `features` say so; v [B, T, H, V]; n T tokens in k and v where
        the rule takes n steps per token.
    gates: the value of each gate by its symbol, [B, T, H] or [H], with channels [B, T, H, K] or [H, K], per step
        [B, n T, H]; constant gates may be left out.
    scale: of the output, K ** -0.5 where None. state: what an earlier call returned, empty where None.
    backend: `recurrent` is the equation, token by token; `chunked` is the parallel form, in chunks of `chunk_size`;
        `triton` is the kernel of the rule's structure, or the rule's own; `auto` takes that on a GPU where there is
        one, else the parallel form.
    cu_seqlens: [N + 1] whole numbers from 0 to T, where B = 1 and the tokens are N sequences one after another; states
        are [N, H, K, V] then.
    Returns o [B, T, H, V] in v's dtype, and the state after the last token.
    Raises `InputError` for shapes, gates or a backend that do not fit.

    >>> import deltalab, torch
    >>> q = k = torch.nn.functional.normalize(torch.ones(1, 2, 1, 4), dim=-1)
    >>> o, state = deltalab.scan(deltalab.get_rule("linear_attention"), q, k, torch.ones(1, 2, 1, 3), {}, scale=1.0)
    >>> [round(value, 5) for value in o[0, :, 0, 0].tolist()]
    [1.0, 2.0]
    """
    _check(rule, q, k, v, state, backend, chunk_size, cu_seqlens)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    if backend == "triton" and (missing := lacks_triton(v.device.type)):
        raise InputError(f"backend 'triton' needs {missing}: use 'auto', 'chunked' or 'recurrent'")
    may_fuse = backend == "triton" or (backend == "auto" and may_launch(v.device.type))
    with torch.autocast(v.device.type, enabled=False):
        lacking = rule.lacks_kernel(k, v)
        if rule.transition is not None and lacking:
            x = operands(rule, q, k, v, gates)
            if may_fuse:
                # By name: an exported model carries this file without the kernels. torch.compile takes no import here.
                algebra = sys.modules["deltalab.kernels.dispatch"]
                if backend == "triton":
                    _no_growth(x.g)
                if backend == "triton" or algebra.takes(rule.transition, x, v.dtype):
                    o, state = algebra.scan(
                        rule.transition, x, dtype=v.dtype, scale=scale, state=state, cu_seqlens=cu_seqlens
                    )
                    return o.to(v.dtype), state
        if cu_seqlens is not None:
            return _one_by_one(rule, q, k, v, gates, scale, state, backend, chunk_size, cu_seqlens)
        before = rule.initial_state(k, v) if state is None else state
        if backend == "triton" and lacking:
            raise InputError(f"{lacking}: use backend 'auto', 'chunked' or 'recurrent'")
        if may_fuse and lacking and rule.brings_kernel:
            _say(lacking)
        if may_fuse and not lacking:
            values = _gates(rule, gates, q)
            if backend == "triton":
                _no_growth(values.get("g"))
            o, state = rule.fused(q, k, v, values, scale=scale, state=before)
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


@once
def _say(lacking: str) -> None:
    _log.info("backend 'auto' takes 'chunked': %s", lacking)


def _no_growth(g: Tensor | None) -> None:
    """A look at the device, hence only where the kernel was asked for by name, and where one can look: not under vmap,
    nor while a CUDA graph is being captured."""
    if g is None or torch._C._functorch.is_batchedtensor(g):
        return
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if not capturing and bool((g > 0).any()):
        raise InputError("g is a log-decay and at most 0: the Triton kernels do not take a state that grows")


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
    cu_seqlens: Tensor,
) -> tuple[Tensor, State]:
    """Packed sequences, each for itself."""
    out, states = [], []
    bounds = cu_seqlens.tolist()
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        tokens, steps = slice(start, stop), slice(start * rule.steps, stop * rule.steps)
        here = {
            name: value if value.dim() < 3 else value[:, steps if rule.gates[name].per == "step" else tokens]
            for name, value in gates.items()
        }
        parts = state if isinstance(state, tuple) else (state,)
        before = tuple(None if part is None else part[n : n + 1] for part in parts)
        o, after = scan(
            rule, q[:, tokens], k[:, steps], v[:, steps], here, scale=scale, backend=backend, chunk_size=chunk_size,
            state=None if state is None else before if isinstance(state, tuple) else before[0],  # type: ignore[arg-type]
        )  # fmt: skip
        out.append(o)
        states.append(after if isinstance(after, tuple) else (after,))
    joined = tuple(torch.cat(parts) for parts in zip(*states, strict=True))
    return torch.cat(out, dim=1), joined if len(joined) > 1 else joined[0]


def _check(
    rule: UpdateRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None,
    backend: str,
    chunk_size: int,
    cu_seqlens: Tensor | None,
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
    if cu_seqlens is not None:
        whole = cu_seqlens.dim() == 1 and cu_seqlens.dtype in (torch.int32, torch.int64)
        if not whole or cu_seqlens.numel() < 2 or batch != 1 or cu_seqlens.device != v.device:
            raise InputError(
                f"cu_seqlens must be whole numbers [N + 1] on {v.device} beside a batch of 1, "
                f"not {cu_seqlens.dtype} {list(cu_seqlens.shape)} on {cu_seqlens.device} beside a batch of {batch}"
            )
    expected = (batch if cu_seqlens is None else cu_seqlens.numel() - 1, heads, key_dim, v.shape[3])
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
