"""Holds one back end to the recurrence in fp64: our Triton kernels, or published ones, on the GPU that they need."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from deltalab.authoring.check import Check, CheckResult, Measurement, run_checks
from deltalab.authoring.inputs import Inputs, draw, normal, parts
from deltalab.authoring.rule_checks.rule_runs import SCALE, errors, evaluate, outputs, run, slowed
from deltalab.errors import InputError, unknown
from deltalab.kernel_limits import MOST_KEYS
from deltalab.ops.peers.scans import DTYPES, PACKAGES
from deltalab.ops.recurrence import Backend
from deltalab.ops.scan import scan
from deltalab.rule import UpdateRule

HELD: tuple[Backend, ...] = ("chunked", "triton", "fla", "flash_qla")
"""The back ends that can be held to the recurrence."""

WIDTH, NARROW, BEFORE = 128, 16, 16
"""K and V, K where the features of 128 channels are wider than a kernel takes, and the tokens behind a given state."""

LENGTHS = (1, 15, 64, 65, 200)

BOUNDS = (0, 3, 20, 84, 148, 149, 200)
"""The bounds of packed sequences, with one of a single token."""

LIMITS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}
"""The largest relative error of each dtype, about three times the spacing of its numbers in 16 bits."""

ROUNDINGS = 4
"""The limit rises to so many times the change that rounding q, k and v alone makes. Sums that cancel enlarge it."""


def check_backend(rule: UpdateRule, name: str) -> list[CheckResult]:
    """Compares a back end's outputs, states and gradients with those of the recurrence in fp64.

    Lengths lie on both sides of a chunk. Decays come from their whole range, and once more 100 times as slow. States
    are empty and given. Sequences are single and packed.

    Args:
        rule: The rule.
        name: A back end, one of `HELD`.

    Returns:
        Results for each dtype that the back end takes.

    Raises:
        InputError: The back end is unknown, cannot run here, or does not have the rule.
    """
    if name not in HELD:
        raise unknown("backend", name, HELD, where="--backend")
    backend = HELD[HELD.index(name)]
    dtypes = DTYPES if backend in PACKAGES else tuple(LIMITS)
    run(rule, _inputs(rule, 1, dtypes[0]), backend)  # a refusal is the command's error, and no failed check
    checks = [
        Check[UpdateRule](
            f"{kind}, {str(dtype).removeprefix('torch.')}",
            partial(measure, backend=backend, dtype=dtype),
            LIMITS[dtype],
            f"backend '{backend}' computes another function, or loses precision",
        )
        for dtype in dtypes
        for kind, measure in (("sequences", _sequences), ("packed", _packed))
    ]
    return run_checks(checks, partial(_run, rule), where=rule.name, forked=False)


def _run(rule: UpdateRule, check: Check[UpdateRule]) -> CheckResult:
    """Runs one check, and returns the result of its worst figure."""
    try:
        measured: list[Measurement] = list(check.measure(rule))
    except InputError:
        raise
    except Exception as error:
        return check.raised(error, rule.name)
    worst = min(measured, key=lambda one: check.slack(one.figure, one.limit))
    return check.judge(worst, rule.name)


def _inputs(rule: UpdateRule, length: int, dtype: torch.dtype, *, batch: int = 2, slow: bool = False) -> Inputs:
    """Returns inputs on the device, with q, k and v in `dtype` and gates in fp32."""
    key_dim = WIDTH if rule.key_width(WIDTH) <= MOST_KEYS else NARROW
    x = draw(rule, batch=batch, length=length, heads=2, key_dim=key_dim, value_dim=key_dim)
    x = (slowed(rule, x) if slow else x).map(lambda part: part.to(_device(), torch.float32))
    return Inputs(x.q.to(dtype), x.k.to(dtype), x.v.to(dtype), x.gates)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _sequences(rule: UpdateRule, *, backend: Backend, dtype: torch.dtype) -> Iterator[Measurement]:
    """Measures single sequences, with gradients, from an empty and from a given state."""
    for length in LENGTHS:
        for slow in (False, True):
            x = _inputs(rule, BEFORE + length, dtype, slow=slow)
            _, state = run(rule, x.span(0, BEFORE).map(Tensor.double), "recurrent")
            for start, given in ((None, "an empty"), (tuple(part.float() for part in state), "a given")):
                now = x.span(BEFORE, state=start)
                exact = now.map(Tensor.double)
                got, want = evaluate(rule, now, backend, 64), evaluate(rule, exact, "recurrent")
                measured = list(
                    errors(got, want, f"{backend} to fp64 at T={length} from {given} state{', slow decays' * slow}")
                )
                measured = [_beside_its_terms(name, one, got, want) for name, one in zip(want, measured, strict=True)]
                if any(not one.figure <= LIMITS[dtype] for one in measured):
                    moved = errors(evaluate(rule, _rounded(exact, dtype), "recurrent"), want, "")
                    limits = (max(LIMITS[dtype], ROUNDINGS * one.figure) for one in moved)
                    measured = [one._replace(limit=limit) for one, limit in zip(measured, limits, strict=True)]
                yield from measured


def _beside_its_terms(name: str, measured: Measurement, got: dict[str, Tensor], want: dict[str, Tensor]) -> Measurement:
    """Returns the error of a gradient that is 0 relative to that of q, whose products with q it sums.

    After an empty state, the decay of the first token has no effect: its gradient is a sum that cancels.
    """
    terms = want.get("gradient of q")
    if not name.startswith("gradient") or terms is None or float(want[name].norm()) > 1e-12 * float(terms.norm()):
        return measured
    return measured._replace(figure=float(got[name].norm()) / max(float(terms.norm()), 1e-3))


def _rounded(x: Inputs, dtype: torch.dtype) -> Inputs:
    """Returns inputs in which q, k and v have random errors as large as those of rounding to `dtype`."""
    size = torch.finfo(dtype).eps / 2
    q, k, v = (
        part * (1 + size * normal(*part.shape, seed=seed).sign().to(part)) for seed, part in enumerate((x.q, x.k, x.v))
    )
    return Inputs(q, k, v, x.gates, x.state)


def _packed(rule: UpdateRule, *, backend: Backend, dtype: torch.dtype) -> Iterator[Measurement]:
    """Measures packed sequences, each with a state of its own."""
    x = _inputs(rule, BOUNDS[-1], dtype, batch=1, slow=True)
    before = _inputs(rule, BEFORE, dtype, batch=len(BOUNDS) - 1)
    _, state = run(rule, before.map(Tensor.double), "recurrent")
    bounds = torch.tensor(BOUNDS, device=_device())
    given = tuple(part.float() for part in state)
    with torch.no_grad():
        o, after = scan(rule, x.q, x.k, x.v, x.gates, scale=SCALE, state=given, backend=backend, cu_seqlens=bounds)
    wanted = []
    for i, (start, stop) in enumerate(pairwise(BOUNDS)):
        own = tuple(part[i : i + 1].double() for part in given)
        wanted.append(outputs(rule, x.map(Tensor.double).span(start, stop, state=own), "recurrent"))
    want = {name: torch.cat([one[name] for one in wanted], dim=int(name == "o")) for name in wanted[0]}
    yield from errors({"o": o, **parts(after)}, want, f"{backend} to fp64 of packed sequences")
