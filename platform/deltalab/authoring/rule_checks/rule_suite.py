"""All checks of a rule. Each check catches a defect that published code of rules has had, or that is easy to write.

A check measures a rule in one setting of its knobs and yields figures. The table `CHECKS` at the end gives each check
its limit. The measurements are in the other modules of this package.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from zlib import crc32

import torch

from deltalab.authoring.check import Check, CheckResult, Measurement, Note, run_checks, told_once
from deltalab.authoring.inputs import learned
from deltalab.authoring.rule_checks import (
    form_checks,
    independence_checks,
    number_checks,
    stability_checks,
    use_checks,
    wide_checks,
)
from deltalab.authoring.rule_checks.rule_runs import EXACT, combinations
from deltalab.gates import Gate
from deltalab.ops.backends import lacks_triton
from deltalab.registry import get_rule
from deltalab.rule import UpdateRule
from deltalab.structure import Transition

MOST_SECONDS = 4
"""A check that has run for so long tries no further settings. So all checks take at most a minute on two cores."""


@dataclass(frozen=True)
class RuleCheck(Check[UpdateRule]):
    """A check of a rule.

    Attributes:
        settings: Returns the settings to measure: the rule, and the rule with other options of its knobs.
        only: Returns whether the check applies to a setting.
        slow: Whether a quick run leaves the check out.
    """

    settings: Callable[[UpdateRule], list[UpdateRule]] = lambda rule: rule.variants()
    only: Callable[[UpdateRule], bool] = lambda rule: True
    slow: bool = False


def check_rule(rule: UpdateRule | str, *, forked: bool = False, quick: bool = False) -> list[CheckResult]:
    """Checks a rule in all its variants. Checks that do not apply to the rule are left out.

    Args:
        rule: The rule, or the name of one.
        forked: Whether each check runs in a process of its own, so that a crash fails one check instead of ending this
            process.
        quick: Whether to check the rule as it stands, without turning its knobs, and to leave the slow checks out.

    Returns:
        A result for each check that applies.

    Raises:
        InputError: No rule has this name.

    Examples:
        >>> all(result.passed for result in check_rule("linear_attention", quick=True))
        True
    """
    rule = rule if isinstance(rule, UpdateRule) else get_rule(rule)
    if not quick and _wants_interpreter(rule) and (results := _interpreted(rule, forked)) is not None:
        return results
    threads = torch.get_num_threads()
    # With tensors this small, several threads only wait for each other. Beside a busy process, several threads took
    # 29 s and one took 2 s.
    torch.set_num_threads(1)
    checks = [check for check in CHECKS if not (quick and check.slow)]
    if forked and not quick:
        with suppress(Exception):  # the checks report the errors of a rule
            combinations(rule)  # the processes that are forked below share the cached result
    try:
        with torch.enable_grad():
            results = run_checks(checks, partial(_run, rule, quick), where=rule.name, forked=forked)
            return told_once(_noise_named(results))
    finally:
        torch.set_num_threads(threads)


NOISE = "the rule computes other numbers in each call, as the check 'repetition' says: mend this first"


def _noise_named(results: list[CheckResult]) -> list[CheckResult]:
    """Returns the results of a rule, with noise as the cause of all failures if equal calls give different numbers."""
    if not any(r.name == "repetition" and not r.passed and "a call and" in r.message for r in results):
        return results
    return [
        result
        if result.passed or result.name == "repetition"
        else replace(result, message=re.sub("; likely cause: .*", f"; likely cause: {NOISE}", result.message))
        for result in results
    ]


def _run(rule: UpdateRule, quick: bool, check: RuleCheck) -> CheckResult | None:
    """Runs one check in all its settings and returns its worst result, or None if the check does not apply."""
    measurements: list[tuple[UpdateRule, Measurement]] = []
    notes: dict[str, None] = {}
    setting, settings = rule, []
    began, tried = time.process_time(), 0
    try:
        settings = [rule] if quick else _turned_around(check.settings(rule), check.name)
        for setting in settings:
            if tried and time.process_time() - began > MOST_SECONDS:
                notes[f"tried the first {tried} of {len(settings)} settings, which took {MOST_SECONDS} s"] = None
                break
            tried += 1
            if check.only(setting):
                for measurement in check.measure(setting):
                    if isinstance(measurement, Note):
                        notes[measurement.text] = None
                    else:
                        measurements.append((setting, measurement))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # even SystemExit, which would end the command as if all checks had passed
        return check.raised(error, _where(rule, setting))
    note = "".join(f"; note: {text}" for text in notes)
    if not measurements:
        return CheckResult(check.name, True, None, f"{rule.name}: {'; '.join(notes)}") if notes else None
    setting, worst = min(measurements, key=lambda pair: _badness(check, pair[1]))
    number = math.prod(len(options) for options in rule.options().values())
    if check.settings is combinations and not quick and len(settings) < number // 2:
        note = f"; tried {len(settings)} of {number} settings, with each pair of options in one of them{note}"
    return check.judge(worst, _where(rule, setting), note)


def _turned_around(settings: list[UpdateRule], name: str) -> list[UpdateRule]:
    """Returns the first setting, then the others from a place on that depends on the check.

    A slow rule runs out of time in each check. So each check begins with other settings, and together they try most.
    """
    first, others = settings[:1], settings[1:]
    place = crc32(name.encode()) % max(1, len(others))
    return first + others[place:] + others[:place]


def _badness(check: RuleCheck, measurement: Measurement) -> tuple[bool, float]:
    """Returns a key that sorts measurements: failures first, then by the distance from the limit."""
    slack = check.slack(measurement.figure, measurement.limit)
    return slack >= 0, slack


def _where(rule: UpdateRule, setting: UpdateRule) -> str:
    """Returns the name of the rule and its setting."""
    try:
        return f"{rule.name} [{rule.turned(setting)}]"
    except Exception:  # the error to report may be in the very methods that describe a setting
        return rule.name


# --- kernels where there is no GPU --------------------------------------------------------------------------


def _wants_interpreter(rule: UpdateRule) -> bool:
    """Returns whether the rule brings a kernel that needs Triton's interpreter, which this process does not run.

    A process runs the interpreter only if TRITON_INTERPRET=1 was set before the process imported Triton.
    """
    return rule.brings_kernel and not torch.cuda.is_available() and lacks_triton("cpu") is not None


_CHECK = """
import dataclasses, importlib, json, sys
from pathlib import Path
from deltalab import registry
from deltalab.authoring.rule_checks.rule_suite import check_rule
request = json.loads(sys.stdin.read())
try:
    module = importlib.import_module(request["module"])
except ImportError:
    registry.add_plugin(request["file"])
    module = sys.modules[request["module"]]
kind = getattr(module, request["kind"])
rule = kind.configured(request["knobs"])
json.dump([dataclasses.asdict(result) for result in check_rule(rule, forked=request["forked"])], sys.stderr)
"""


def _interpreted(rule: UpdateRule, forked: bool) -> list[CheckResult] | None:
    """Runs the checks in a process with Triton's interpreter.

    Returns None if that process cannot make the rule, for example because its class is local to a function.
    """
    kind = type(rule)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or "." in kind.__qualname__ or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    knobs = {name: value for name, value in rule.spec().items() if name != "name"}
    request = {"module": kind.__module__, "kind": kind.__name__, "file": file, "knobs": knobs, "forked": forked}
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run(
        [sys.executable, "-c", _CHECK],
        input=json.dumps(request), capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    if process.returncode:
        return None
    return [CheckResult(**result) for result in json.loads(process.stderr.splitlines()[-1])]


# --- the table ----------------------------------------------------------------------------------------------


def _declared(rule: UpdateRule) -> list[UpdateRule]:
    """Returns one setting: the rule with the default of every knob."""
    return [type(rule)()]


def _knobs_together(rule: UpdateRule) -> list[UpdateRule]:
    """Returns the settings of `combinations` with more than one knob turned."""
    variants = rule.variants()
    return [setting for setting in combinations(rule) if setting not in variants]


def _recurrences(rule: UpdateRule) -> list[UpdateRule]:
    """Returns the rule's variants, without those that differ by a gate of the same shape and range alone."""

    def recurrence(setting: UpdateRule) -> tuple[object, ...]:
        values = (setting.gates.get(name, value) for name, value in setting.knobs().items())
        return tuple((v.per, v.low, v.high, v.features) if isinstance(v, Gate) else v for v in values)

    return list({recurrence(setting): setting for setting in reversed(rule.variants())}.values())[::-1]


def _gate_ranges(rule: UpdateRule) -> list[UpdateRule]:
    """Returns the settings of `_recurrences` that differ by the range of a gate, or by the transition, if at all."""
    chosen = {name for name, value in rule.knobs().items() if isinstance(value, Gate | Transition)}
    return [
        setting
        for setting in _recurrences(rule)
        if {name for name in rule.options() if getattr(setting, name) != getattr(rule, name)} <= chosen
    ]


def _has_gates(rule: UpdateRule) -> bool:
    """Returns whether the rule has gates that are not constant."""
    return bool(learned(rule))


def _is_algebraic(rule: UpdateRule) -> bool:
    """Returns whether the rule belongs to the algebra: whether it has a transition."""
    return rule.transition is not None


def _has_one_form(rule: UpdateRule) -> bool:
    """Returns whether the rule states its equation only once.

    Such a rule is outside the algebra, and has neither a `step` nor a kernel of its own.
    """
    return rule.transition is None and not form_checks.has_step(rule) and not rule.brings_kernel


CHECKS = (
    RuleCheck(
        "repetition",
        independence_checks.repetition,
        0.0,
        "the code draws random numbers, or keeps something between calls",
        mend="draw fixed numbers from a generator with a seed of its own",
        settings=combinations,
    ),
    RuleCheck(
        "rows of the batch",
        independence_checks.rows_of_the_batch,
        1e-12,
        "a sum, mean, norm or index goes over the batch",
        mend="reduce over channels alone: dimension 0 is the batch",
        settings=combinations,
    ),
    RuleCheck(
        "heads",
        independence_checks.heads,
        1e-12,
        "a value of one head is used for another, or a sum, mean or norm goes over the heads",
        mend="keep dimension 2 of q, k, v and of gates; what differs between heads is a constant gate",
        settings=combinations,
    ),
    RuleCheck(
        "causality of values",
        independence_checks.causality_of_values,
        1e-12,
        "the output of a token depends on later tokens",
        settings=combinations,
    ),
    RuleCheck(
        "causality of gradients",
        independence_checks.causality_of_gradients,
        0.0,
        "the output of a token depends on later tokens",
        settings=combinations,
    ),
    RuleCheck(
        "initial state",
        use_checks.initial_state,
        use_checks.FAINT,
        "the given state is not read",
        at_least=True,
        settings=_declared,
    ),
    RuleCheck(
        "backends",
        form_checks.backends,
        EXACT,
        "the parallel and the token-by-token form compute different functions",
    ),
    RuleCheck(
        "knobs together",
        form_checks.together,
        EXACT,
        "the code is wrong where two knobs are turned together",
        settings=_knobs_together,
        slow=True,
    ),
    RuleCheck(
        "long chunks",
        form_checks.lengths,
        1e-8,
        "the code takes another path in long sequences, or an internal chunk is wrong",
        slow=True,
    ),
    RuleCheck(
        "slow decays",
        wide_checks.slow_decays,
        1e-8,
        "the code drops, or weighs otherwise, what is older than some number of tokens",
        settings=_recurrences,
        slow=True,
    ),
    RuleCheck(
        "every length",
        wide_checks.every_length,
        1e-8,
        "the code pads or cuts some lengths wrongly",
        settings=_declared,
        slow=True,
    ),
    RuleCheck(
        "far tokens",
        wide_checks.far_tokens,
        1e-8,
        "the code takes another path in sequences of so many tokens",
        settings=_declared,
        slow=True,
    ),
    RuleCheck(
        "packed sequences",
        wide_checks.packed,
        1e-9,
        "the rule lets one sequence depend on another, or keeps something between calls",
        settings=_recurrences,
    ),
    RuleCheck(
        "other sizes",
        form_checks.other_sizes,
        1e-9,
        "the code is right at some sizes of H, K and V alone",
    ),
    RuleCheck(
        "kernel",
        form_checks.kernel,
        EXACT,
        "`fused` computes another function than the equation",
        settings=combinations,
        only=lambda rule: rule.brings_kernel,
        slow=True,
    ),
    RuleCheck(
        "step",
        form_checks.step,
        1e-9,
        "this form and `step` are two different equations",
        mend="see which of the two is the equation of the docstring",
        settings=combinations,
        only=form_checks.has_step,
    ),
    RuleCheck("nothing independent", form_checks.nothing_independent, 0.0, "", settings=_declared, only=_has_one_form),
    RuleCheck(
        "state carry",
        form_checks.state_carry,
        EXACT,
        "the given state is not used, or it lacks values that later tokens need",
        settings=combinations,
    ),
    RuleCheck(
        "gradients",
        number_checks.gradients,
        number_checks.GRADIENTS,
        "a `detach`, a `no_grad` or a backward written by hand that misses a term, a factor or a sign",
        mend="compare `backward` with the derivative of `forward`, term by term",
        settings=combinations,
    ),
    RuleCheck(
        "gradients at other sizes",
        number_checks.gradients_at_other_sizes,
        number_checks.GRADIENTS,
        "a backward that is wrong at these sizes or values",
        slow=True,
    ),
    RuleCheck(
        "extreme gates",
        number_checks.extreme_gates,
        0.0,
        "the code divides by a decay, which overflows",
        only=_has_gates,
        settings=combinations,
    ),
    RuleCheck(
        "gate ranges",
        number_checks.gate_ranges,
        0.0,
        "the parameterization computes values outside its declared range",
        only=_has_gates,
    ),
    RuleCheck(
        "gate gradients",
        number_checks.gate_gradients,
        0.0,
        "an exp, a division or a root in the gate overflows, also in a branch that `where` leaves out",
        mend="clamp the argument first, or take softplus and logsigmoid of torch.nn.functional",
        only=_has_gates,
    ),
    RuleCheck(
        "eigenvalues",
        number_checks.eigenvalues,
        1e-9,
        "the erase strength exceeds what the range allows",
        only=_is_algebraic,
        settings=combinations,
    ),
    RuleCheck(
        "channels",
        use_checks.channels,
        use_checks.FAINT,
        "the code does not read all of its inputs",
        at_least=True,
        settings=combinations,
    ),
    RuleCheck(
        "gate liveness",
        use_checks.gate_liveness,
        use_checks.LIVE,
        "a later normalization cancels the gate, or the rule does not use it, or it hardly changes",
        at_least=True,
        mend="use it, or refuse this combination of options with an InputError in `__post_init__`",
        settings=combinations,
        only=_has_gates,
    ),
    RuleCheck(
        "knob options",
        use_checks.knob_options,
        use_checks.SAME,
        "the rule does not use the knob, or both options are one function",
        at_least=True,
        settings=_declared,
    ),
    RuleCheck(
        "twin options",
        use_checks.twin_options,
        use_checks.SAME,
        "two knobs do the same in these options, so that a study compares a rule with itself",
        at_least=True,
        mend="leave one of the options out, or refuse it by an InputError",
        settings=_declared,
    ),
    RuleCheck(
        "spec",
        use_checks.spec,
        0.0,
        "`__post_init__` changes a knob, or two options have the same text",
        settings=combinations,
    ),
    RuleCheck(
        "scale",
        use_checks.scale,
        0.0,
        "`mix` does not use `scale`, or has K ** -0.5 in its place",
        at_least=True,
        only=lambda rule: rule.transition is None,
    ),
    RuleCheck(
        "precision",
        number_checks.precision,
        number_checks.BF16,
        "the rule keeps the state, a decay or a sum over tokens in bf16, or takes another path in this dtype",
        mend="compute in torch.promote_types(v.dtype, torch.float32)",
    ),
    RuleCheck(
        "long sequences",
        number_checks.long_sequences,
        0.0,
        "the state grows without bound",
        mend="subtract sums before you take exp, and keep the transition's eigenvalues in [-1, 1]",
        slow=True,
    ),
    RuleCheck(
        "products of steps",
        stability_checks.products,
        number_checks.MOST_GROWTH,
        "the steps stretch the state in a part of the gates' declared ranges",
        mend="bound the gates: at a momentum eta, for example, a delta rule needs beta <= 2 (1 - eta)^2 / (1 + eta)",
        settings=_gate_ranges,
        slow=True,
    ),
    RuleCheck(
        "zeros",
        number_checks.zeros,
        0.0,
        "a division by a norm of 0, or the root or logarithm of 0",
        mend="add an eps, as F.normalize does",
        settings=combinations,
    ),
    RuleCheck(
        "long forms",
        wide_checks.long_forms,
        1e-8,
        "the code takes another path in long sequences, or an internal chunk is wrong",
        settings=_declared,
        slow=True,
    ),
    RuleCheck(
        "wide channels",
        wide_checks.wide_channels,
        use_checks.FAINT,
        "the code does not read all channels at these widths",
        at_least=True,
        slow=True,
    ),
    RuleCheck(
        "wide precision",
        wide_checks.wide_precision,
        5e-4,
        "the code rounds to another dtype at these widths",
        settings=_declared,
        slow=True,
    ),
    RuleCheck(
        "many rows and heads",
        wide_checks.many_rows_and_heads,
        1e-12,
        "the code takes another path with many sequences or heads, and mixes them there",
        settings=_declared,
        slow=True,
    ),
    RuleCheck("other numbers", wide_checks.other_numbers, 0.0, "the code takes the listed numbers alone"),
    RuleCheck("sizes", form_checks.sizes, 0.0, "a shape or a dtype breaks the contract", settings=combinations),
    RuleCheck(
        "token by token",
        form_checks.token_by_token,
        EXACT,
        "the state does not carry over, or T = 1 is a special case",
    ),
)
