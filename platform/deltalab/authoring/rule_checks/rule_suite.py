"""Runs the checks of a rule: in all their settings, with Triton's interpreter where the rule brings a kernel."""

import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from zlib import crc32

import torch

from deltalab.authoring.check import CheckResult, Measurement, Note, run_checks, told_once
from deltalab.authoring.rule_checks.check_table import CHECKS, RuleCheck
from deltalab.authoring.rule_checks.rule_runs import combinations
from deltalab.ops.backends import lacks_triton
from deltalab.registry import get_rule
from deltalab.rule import UpdateRule

MOST_SECONDS = 0.25
"""A check that has run for so long tries no further settings. So nearly all rules take at most 8 s on a core."""


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
            if tried and time.process_time() - began > (most := max(MOST_SECONDS, check.seconds)):
                notes[f"tried the first {tried} of {len(settings)} settings, which took {most:g} s"] = None
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
    if not rule.brings_kernel or torch.cuda.is_available():
        return False
    # `lacks_triton` imports Triton, after which a fork of this process can no longer turn the interpreter on.
    off = os.environ.get("TRITON_INTERPRET") != "1" and "triton" not in sys.modules
    return off or lacks_triton("cpu") is not None


def _in_a_fork(rule: UpdateRule) -> list[CheckResult] | None:
    """Runs the checks in a fork of this process, which has PyTorch already and imports Triton with the interpreter.

    Returns None if the fork crashes.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def child() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports Ctrl-C
        os.environ["TRITON_INTERPRET"] = "1"
        sender.send(check_rule(rule, forked=True))

    process = fork.Process(target=child)
    process.start()
    sender.close()
    try:
        results: list[CheckResult] = receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()
    return results


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
    if forked and "triton" not in sys.modules:
        return _in_a_fork(rule)
    kind = type(rule)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or "." in kind.__qualname__ or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    knobs = {name: value for name, value in rule.spec().items() if name != "name"}
    request = {"module": kind.__module__, "kind": kind.__name__, "file": file, "knobs": knobs, "forked": forked}
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run(
        [sys.executable, "-P", "-c", _CHECK],
        input=json.dumps(request), capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    if process.returncode:
        return None
    return [CheckResult(**result) for result in json.loads(process.stderr.splitlines()[-1])]
