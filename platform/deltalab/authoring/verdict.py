"""A rule's verdict: whether it passed its checks. It is kept by the rule's source, so that studies check it once."""

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from uuid import uuid4

from deltalab.authoring.check import CheckResult
from deltalab.errors import WrongRules
from deltalab.registry import get_rule, list_rules, rule_plugin
from deltalab.training.train import NUMERICS

SHIPPED = "checked.json"
"""A file beside the rules of a package: rule -> SHA-256 of its file as it passed, so that no user checks it again."""
NOT_CHECKED = "not checked"
FORKED = hasattr(os, "fork")
"""Whether each check runs in a process of its own: compiled code that crashes then fails the check alone."""

_log = logging.getLogger("deltalab")


@dataclass(frozen=True)
class Verdict:
    """The failed checks of a rule, as (check, message); none if it passed."""

    rule: str
    failed: tuple[tuple[str, str], ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failed


def known(rule: str) -> Verdict | None:
    """The verdict that the rule's package ships or that is kept on this machine; None if there is none."""
    plugin = rule_plugin(rule)
    shipped = plugin.file.with_name(SHIPPED)
    if shipped.is_file() and json.loads(shipped.read_text(encoding="utf-8")).get(rule) == plugin.hash:
        return Verdict(rule)
    try:
        found = json.loads(_file(rule).read_text(encoding="utf-8"))
        return Verdict(rule, tuple((check, message) for check, message in found["failed"]))
    except (OSError, ValueError, KeyError):  # none yet, or a file that was cut off
        return None


def keep(rule: str, results: Sequence[CheckResult]) -> Verdict:
    """Keeps the verdict of all checks of a rule, and returns it."""
    found = Verdict(rule, tuple((result.name, result.message) for result in results if not result.passed))
    file = _file(rule)
    partial = file.with_suffix(f".{uuid4().hex[:8]}")
    about = {"rule": rule, "file": str(rule_plugin(rule).file), "deltalab": version("deltalab"), "failed": found.failed}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(about), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        _log.warning("%s: the verdict on '%s' cannot be kept: %s", file, rule, error.strerror or error)
    return found


def unchecked(rules: Sequence[str]) -> dict[str, str]:
    """Rule -> why it does not count as checked, for those of `rules` that have not passed."""
    found = {rule: known(rule) for rule in rules}
    return {
        rule: NOT_CHECKED if verdict is None else f"fails {', '.join(check for check, _ in verdict.failed)}"
        for rule, verdict in found.items()
        if verdict is None or not verdict.passed
    }


def demand(rules: Sequence[str], *, quiet: bool = False) -> None:
    """Checks those of `rules` that have no verdict yet. quiet: say nothing on stderr.

    Raises `WrongRules`, with a line for each rule that fails.
    """
    verdicts = {rule: known(rule) for rule in rules}
    missing = [rule for rule, verdict in verdicts.items() if verdict is None]
    for number, rule in enumerate(missing, start=1):
        if not quiet:
            which = f"checking rule '{rule}', {number} of {len(missing)}"
            print(f"{which}: up to a minute, once for each version of its file", file=sys.stderr)
        verdicts[rule] = keep(rule, checked(rule))
    wrong = []
    for rule, verdict in verdicts.items():
        assert verdict is not None
        if not verdict.passed:
            check, message = verdict.failed[0]
            message = re.sub(r"; \d+ checks raised it: .*", "", message)
            more = f", and {others} other check{'s' * (others > 1)}" if (others := len(verdict.failed) - 1) else ""
            wrong.append(
                f"rule '{rule}' ({rule_plugin(rule).file}) fails the check '{check}'{more}: {message}; "
                f"`platform rule check {rule}` says more, --unchecked runs the study all the same"
            )
    if wrong:
        raise WrongRules(wrong)


def checked(rule: str, *, quick: bool = False) -> list[CheckResult]:
    """The results of all checks of a rule; of those that take seconds, where `quick`."""
    from deltalab.authoring.rule_checks import check_rule  # late: a study of checked rules does not need it

    return check_rule(get_rule(rule), forked=FORKED, quick=quick)


def _file(rule: str) -> Path:
    """The file of a verdict: $XDG_CACHE_HOME/deltalab/verdicts/KEY.json, in ~/.cache by default.

    The key holds what a verdict depends on: the rule's file and options, the checks, and the version of deltalab.
    """
    kind = get_rule(rule)
    options = {name: [str(option) for option in options] for name, options in kind.options().items()}
    checks = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))))
    rested_on = [rule, rule_plugin(rule).hash, options, checks.hexdigest(), version("deltalab"), NUMERICS]
    key = hashlib.sha256(json.dumps(rested_on, sort_keys=True).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "deltalab" / "verdicts" / f"{key}.json"


def ship(package: str) -> list[str]:
    """Writes `SHIPPED` beside the rules of a package, and returns the rules that fail and are left out.

    It checks the rules that the file does not have, and those whose files have changed. Delete the file first to check
    all rules, as after a change of the checks. For the rules of deltalab:
    python -c "from deltalab.authoring.verdict import ship; print(ship('deltalab_rules'))"
    """
    rules = [rule for rule in list_rules() if rule_plugin(rule).kind.__module__.startswith(f"{package}.")]
    verdicts = {rule: known(rule) or keep(rule, checked(rule)) for rule in rules}
    for folder in {rule_plugin(rule).file.parent for rule in rules}:
        passed = {
            rule: rule_plugin(rule).hash
            for rule, verdict in verdicts.items()
            if verdict.passed and rule_plugin(rule).file.parent == folder
        }
        (folder / SHIPPED).write_text(json.dumps(passed, indent=2) + "\n", encoding="utf-8")
    return [rule for rule, verdict in verdicts.items() if not verdict.passed]
