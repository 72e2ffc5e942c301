"""The checks of a module in place of a rule: what a study relies on, although the module declares nothing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import torch
from torch.func import functional_call, vmap

from deltalab.authoring.check import Check, CheckResult, Measurement, Note, run_checks, told_once
from deltalab.authoring.module_checks.module_measurements import (
    LONGEST,
    Subject,
    causality,
    decoding,
    gradients,
    packing,
    precisions,
    prefixes,
    reach,
    repetition,
    rows,
    runs,
    starts,
)
from deltalab.errors import InputError, WrongRules
from deltalab.models.spec import ModelSpec
from deltalab.own_module import OwnModule

OPTIONS = {"d_model": 64, "heads": 2}
"""The settings of the model in which `deltalab module check` tries a module, unless the caller gives others."""
PATCHES = (1, LONGEST, 1)
"""The patches of that model for a module that is not causal."""


def tried(rule: OwnModule, settings: Mapping[str, object] = MappingProxyType({})) -> ModelSpec:
    """Returns the model in which a module is tried, with settings in place of `OPTIONS`: of images, if not causal."""
    patches = {} if rule.causal else {"patches": PATCHES}
    return ModelSpec.of({"vocab_size": 2, **OPTIONS, **patches, **settings, "rule": rule.spec()})


def _subject(rule: OwnModule, spec: ModelSpec, device: str) -> Subject:
    length = LONGEST if rule.causal or spec.patches is None else spec.patches[0] * spec.patches[1]
    return Subject(rule, spec.of_module, device, length)


@torch.no_grad()
def unstackable(rule: OwnModule, spec: ModelSpec) -> str | None:
    """Returns why runs of a module cannot train as one stack; None if they can.

    Args:
        rule: The module and its arguments.
        spec: The model in which it stands.
    """
    subject = _subject(rule, spec, "cuda" if torch.cuda.is_available() else "cpu")
    try:
        layer, x = subject.layer(), subject.inputs(17 if rule.causal else None)
        weights = {name: torch.stack([value.detach()] * 2) for name, value in layer.named_parameters()}
        with torch.autocast(subject.device, torch.bfloat16, subject.device != "cpu"):
            vmap(lambda given, x: functional_call(layer, given, (x,)), randomness="same")(weights, torch.stack([x, x]))
    except Exception as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return None


_ROUNDING = 1.0
CHECKS: tuple[Check[Subject], ...] = (
    Check("runs", runs, 0.0, "the module divides by 0, or overflows"),
    Check(
        "repetition",
        repetition,
        _ROUNDING / 2,
        "the module keeps state between calls: return it, or keep it out of `forward`",
    ),
    Check(
        "causality",
        causality,
        _ROUNDING,
        "a token reads later tokens: a mean over time, a padding on both sides, a mask",
    ),
    Check(
        "prefixes",
        prefixes,
        _ROUNDING,
        "the module does otherwise for short or odd lengths, so that decoding differs from training",
    ),
    Check(
        "reach",
        reach,
        _ROUNDING,
        "no output reads a later token, so that the module is causal: leave `causal = False` out",
        at_least=True,
    ),
    Check("rows", rows, _ROUNDING, "a row reads other rows: a norm or a state over the batch"),
    Check("gradients", gradients, 1.0, "a custom backward is wrong, or a part is detached"),
    Check("precisions", precisions, 0.1, "a part needs fp32: compute it in fp32, whatever autocast says"),
    Check("packing", packing, _ROUNDING, "a sequence reads the one before it: `cu_seqlens` is not used everywhere"),
    Check(
        "decoding",
        decoding,
        _ROUNDING,
        "its cache lacks what later tokens need, or its forward does not read it; studies use no cache of a module",
    ),
    Check("starts", starts, _ROUNDING / 2, "the start draws from another generator than torch's"),
)


OF_CAUSAL = ("causality", "prefixes", "packing", "decoding")
"""The checks of causal modules alone: an image is whole, is not packed, and nothing follows it."""
OF_OTHERS = ("reach",)
"""The check of modules that are not causal alone."""
QUICK = ("causality", "reach", "rows", "repetition")
"""The checks that a study needs before it trains, beside `runs`."""


def check_module(
    rule: OwnModule, spec: ModelSpec | None = None, *, forked: bool = False, quick: bool = False
) -> list[CheckResult]:
    """Checks a module.

    Args:
        rule: The module and its arguments.
        spec: The model in which it stands; None for one of `OPTIONS`.
        forked: Whether each check runs in a process of its own.
        quick: Whether to run only the checks that a study needs before it trains.

    Returns:
        A result for each check. If the module does not run at all, only that.
    """
    spec = spec or tried(rule)
    subject = _subject(rule, spec, "cpu")
    first = _run(subject, CHECKS[0])
    if not first.passed:
        if not torch.cuda.is_available():
            return [first]
        subject = subject._replace(device="cuda")
        if not (first := _run(subject, CHECKS[0])).passed:
            return [first]
    with _quiet():
        subject = subject._replace(trains=not subject.draws())
    others = OF_OTHERS if rule.causal else OF_CAUSAL
    wanted = [check for check in CHECKS[1:] if check.name not in others and (not quick or check.name in QUICK)]
    fork = forked and subject.device == "cpu"
    results = [first, *run_checks(wanted, partial(_run, subject), where=rule.name, forked=fork)]
    if not quick:
        reason = unstackable(rule, spec)
        note = "its runs train as one stack" if reason is None else f"its runs train one by one: {reason}"
        results[0] = CheckResult(first.name, True, first.figure, f"{first.message}; {note}")
    return told_once(results)


def demand_modules(specs: list[ModelSpec]) -> None:
    """Checks the modules of models before anything trains.

    Raises:
        WrongRules: Some fail; the error has a line for each.
    """
    wrong, seen = [], set[str]()
    for spec in specs:
        rule = spec.make_rule()
        if not isinstance(rule, OwnModule) or (key := f"{rule.spec()} {spec.of_module}") in seen:
            continue
        seen.add(key)
        failed = [result for result in check_module(rule, spec, quick=True) if not result.passed]
        if failed:
            wrong.append(
                f"module '{rule.name}' fails the check '{failed[0].name}': {failed[0].message}; "
                f"`deltalab module check {rule.name}` says more, --unchecked runs the study all the same"
            )
    if wrong:
        raise WrongRules(wrong)


@contextmanager
def _quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_rng_state(state)
        torch.set_num_threads(threads)


def _run(subject: Subject, check: Check[Subject]) -> CheckResult:
    """Runs one check, and returns its worst result."""
    where, notes, measured = subject.rule.name, list[str](), list[Measurement]()
    try:
        with _quiet():
            for found in check.measure(subject):
                if isinstance(found, Note):
                    notes.append(found.text)
                else:
                    measured.append(found)
    except InputError as error:
        return CheckResult(check.name, False, None, str(error))
    except Exception as error:
        return check.raised(error, where)
    if not measured:
        return CheckResult(check.name, True, None, f"{where}: nothing measured: {'; '.join(notes)}")
    worst = min(measured, key=lambda measurement: check.slack(measurement.figure, measurement.limit))
    return check.judge(worst, where, "".join(f"; {note}" for note in notes))
