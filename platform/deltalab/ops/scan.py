"""`scan` runs a rule on any backend: it checks the inputs, fills in constant gates and chooses the fastest form."""

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from deltalab.errors import InputError, unknown
from deltalab.ops import reference
from deltalab.ops.backends import NONE, Kernels, automatic, available, lacks_triton, once
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

    q, k [B, T, H, K], of unit norm where the rule's `features` say so; v [B, T, H, V]. k and v have
        n T rows if the rule takes n steps per token.
        A rule that is `grouped` takes k and v of fewer heads, whose number divides H.
    gates: the value of each gate by its symbol, [B, T, H] or [H], with channels [B, T, H, K] or [H, K], per step
        [B, n T, H]; constant gates may be left out.
    scale: of the output, K ** -0.5 where None.
    state: what an earlier call returned; None for an empty one.
    backend: `recurrent` is the equation, token by token; `chunked` is the parallel form, in chunks of `chunk_size`;
        `triton` is the kernel of the rule's structure, or the rule's own; `auto` takes a kernel on a GPU where there is
        one, else the parallel form.
    cu_seqlens: [N + 1] whole numbers from 0 to T, where B = 1 and the tokens are N sequences one after another; states
        are [N, H, K, V] then.
    Returns o [B, T, H, V] in v's dtype, and the state after the last token: a tuple, of one [B, H, K, V] for most rules
        of the algebra, of two where a second state fits the first one's error.
    Raises `InputError` for shapes, gates, a state or a backend that do not fit.

    >>> import deltalab, torch
    >>> q = k = torch.nn.functional.normalize(torch.ones(1, 2, 1, 4), dim=-1)
    >>> o, (S,) = deltalab.scan(deltalab.get_rule("linear_attention"), q, k, torch.ones(1, 2, 1, 3), {}, scale=1.0)
    >>> [round(value, 5) for value in o[0, :, 0, 0].tolist()], list(S.shape)
    ([1.0, 2.0], [1, 1, 4, 3])
    """
    _check(rule, q, k, v, state, backend, chunk_size, cu_seqlens)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(v.device.type, enabled=False):
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
    kernels = _allowed(backend, v.device.type)
    lacking = rule.lacks_kernel(k, v)
    own = kernels.triton and lacking is None
    if own or rule.transition is None:
        if lacking and backend == "triton":
            raise InputError(f"{lacking}: use backend 'auto', 'chunked' or 'recurrent'")
        values = _gates(rule, gates, q)
        if own and backend == "triton":
            _no_growth(values.get("g"))
        advance = _token_by_token if backend == "recurrent" else partial(UpdateRule.advance, fused=own)
        run = partial(advance, rule, q, k, v, values, scale=scale, state=state)
    else:
        x = operands(rule, q, k, v, gates)
        if kernels.scan is not None:
            if backend == "triton":
                _no_growth(x.g)
            if backend == "triton" or (kernels.takes is not None and kernels.takes(rule.transition, x, v.dtype)):
                return partial(
                    kernels.scan, rule.transition, x, dtype=v.dtype, scale=scale, state=state, cu_seqlens=cu_seqlens
                )
        token_by_token = backend == "recurrent" or (backend == "auto" and k.shape[1] == 1)
        form = reference.recurrent if token_by_token else partial(reference.chunked, chunk_size=chunk_size)
        run = partial(form, rule.transition, x, scale=scale, state=state)
    if lacking and kernels.triton and rule.brings_kernel:
        _say(lacking)
    if cu_seqlens is None:
        return run
    # Only the kernels of structures, above, take packed sequences.
    return partial(_one_by_one, rule, q, k, v, gates, scale, state, backend, chunk_size, cu_seqlens)


def _allowed(backend: Backend, device: str) -> Kernels:
    """The kernels that a backend may take. Raises `InputError` where it asks for them and there are none."""
    if backend == "auto":
        return automatic(device)
    if backend != "triton":
        return NONE
    if missing := lacks_triton(device):
        raise InputError(f"backend 'triton' needs {missing}: use 'auto', 'chunked' or 'recurrent'")
    return available(device)


@once
def _say(lacking: str) -> None:
    _log.info("backend 'auto' takes 'chunked': %s", lacking)


def _no_growth(g: Tensor | None) -> None:
    """Raises `InputError` if a log-decay is positive.

    Waits for the device, so only for a kernel that was asked for by name; and not under vmap or while a CUDA graph is
    captured, where values cannot be read.
    """
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
    """`scan` of each of the packed sequences by itself."""
    out, states = [], []
    bounds = cu_seqlens.tolist()
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        tokens, steps = slice(start, stop), slice(start * rule.steps, stop * rule.steps)
        here = _rows(rule, gates, tokens, steps)
        before = None if state is None else tuple(part[n : n + 1] for part in state)
        o, after = scan(
            rule, q[:, tokens], k[:, steps], v[:, steps], here,
            scale=scale, state=before, backend=backend, chunk_size=chunk_size,
        )  # fmt: skip
        out.append(o)
        states.append(after)
    return torch.cat(out, dim=1), tuple(torch.cat(parts) for parts in zip(*states, strict=True))


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
    if state is not None:
        expected = (batch if cu_seqlens is None else cu_seqlens.numel() - 1, heads, key_dim, v.shape[3])
        _check_state(rule, state, expected, v.device)


def _check_state(rule: UpdateRule, state: State, expected: tuple[int, ...], device: torch.device) -> None:
    fits = isinstance(state, tuple) and all(isinstance(one, Tensor) and one.device == device for one in state)
    what = "of tensors, as an earlier call returned it,"
    if rule.transition is not None:
        count = 2 if rule.second_state else 1
        fits = fits and [one.shape for one in state] == count * [expected]
        what = f"of {'two' if count == 2 else 'one'} [B, H, K, V] = {list(expected)}"
    if not fits:
        given = f"({', '.join(map(_shown, state))})" if isinstance(state, tuple) else f"a {type(state).__name__}"
        raise InputError(f"the state of rule '{rule.name}' must be a tuple {what} on {device}, not {given}")


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
    """The `Operands` of a rule of the algebra, for inputs like those of `scan`, in the shapes that the references take.

    Constant gates are filled in. Gates with one value for each head are expanded over batch and time, and a decay over
    channels too where the transition is diagonal.
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
    """`UpdateRule.mix` of each token by itself, for at least one token."""
    out = []
    for t in range(q.shape[1]):
        one, steps = slice(t, t + 1), slice(t * rule.steps, (t + 1) * rule.steps)
        now = _rows(rule, gates, one, steps)
        o, state = rule.advance(q[:, one], k[:, steps], v[:, steps], now, scale=scale, state=state)
        out.append(o)
    assert state is not None
    return torch.cat(out, dim=1), state


def _rows(rule: UpdateRule, gates: Mapping[str, Tensor], tokens: slice, steps: slice) -> dict[str, Tensor]:
    """The gates sliced to some tokens (or their steps); gates without a time axis are returned unchanged."""
    return {
        name: value if value.dim() < 3 else value[:, steps if rule.gates[name].per == "step" else tokens]
        for name, value in gates.items()
    }
