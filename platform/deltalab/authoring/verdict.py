"""Keeps the verdict on each rule: whether the rule passed its checks.

A verdict belongs to one version of the rule's file, so that each version is checked once.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from uuid import uuid4

from deltalab import progress
from deltalab.authoring.check import CheckResult
from deltalab.errors import WrongRules
from deltalab.own_module import OwnModule
from deltalab.registry import get_rule, list_rules, rule_plugin
from deltalab.training.train import NUMERICS

SHIPPED = "checked.json"
"""The name of a file in a package of rules. It maps each rule that passed its checks to the SHA-256 of its file."""
NOT_CHECKED = "not checked"
FORKED = hasattr(os, "fork")
"""Whether each check runs in a process of its own. If compiled code then crashes, only the check that ran it fails."""

_log = logging.getLogger("deltalab")


@dataclass(frozen=True)
class Verdict:
    """Whether a rule passed its checks.

    Attributes:
        failed: The failed checks as pairs (check, message); empty if the rule passed.
    """

    rule: str
    failed: tuple[tuple[str, str], ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failed


def known(rule: str) -> Verdict | None:
    """Returns the verdict that the rule's package ships or that this machine has kept, or None if there is neither."""
    plugin = rule_plugin(rule)
    shipped = plugin.file.with_name(SHIPPED)
    if shipped.is_file() and json.loads(shipped.read_text(encoding="utf-8")).get(rule) == plugin.hash:
        return Verdict(rule)
    try:
        kept = json.loads(_file(rule).read_text(encoding="utf-8"))
        return Verdict(rule, tuple((check, message) for check, message in kept["failed"]))
    except (OSError, ValueError, KeyError):  # there is no file, or it was cut off
        return None


def keep(rule: str, results: Sequence[CheckResult]) -> Verdict:
    """Makes the verdict on a rule from the results of all its checks, writes it to a file, and returns it."""
    verdict = Verdict(rule, tuple((result.name, result.message) for result in results if not result.passed))
    file = _file(rule)
    partial = file.with_suffix(f".{uuid4().hex[:8]}")
    content = {
        "rule": rule,
        "file": str(rule_plugin(rule).file),
        "deltalab": version("deltalab"),
        "failed": verdict.failed,
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        _log.warning("%s: the verdict on '%s' cannot be kept: %s", file, rule, error.strerror or error)
    return verdict


def unchecked(rules: Sequence[str]) -> dict[str, str]:
    """Returns a dictionary from each of `rules` that has not passed its checks to the reason."""
    verdicts = {rule: known(rule) for rule in _declared(rules)}
    return {
        rule: NOT_CHECKED if verdict is None else f"fails {', '.join(check for check, _ in verdict.failed)}"
        for rule, verdict in verdicts.items()
        if verdict is None or not verdict.passed
    }


def demand(rules: Sequence[str], *, quiet: bool = False) -> None:
    """Checks those of `rules` that have no verdict yet. Raises an error if any of `rules` fails its checks.

    Args:
        rules: The names of rules.
        quiet: Whether to leave out the line on stderr for each rule that is checked.

    Raises:
        WrongRules: Some rules fail their checks; the error has a line for each of them.
    """
    verdicts = {rule: known(rule) for rule in _declared(rules)}
    missing = [rule for rule, verdict in verdicts.items() if verdict is None]
    for number, rule in enumerate(missing, start=1):
        if not quiet:
            text = (
                f"checking rule '{rule}', {number} of {len(missing)}: up to a minute, once for each version of its file"
            )
            progress.advance(text, done=number - 1, total=len(missing))
        verdicts[rule] = keep(rule, checked(rule))
    wrong = []
    for rule, verdict in verdicts.items():
        assert verdict is not None
        if not verdict.passed:
            check, message = verdict.failed[0]
            message = re.sub(r"; \d+ checks raised it: .*", "", message)
            further = f", and {others} other check{'s' * (others > 1)}" if (others := len(verdict.failed) - 1) else ""
            wrong.append(
                f"rule '{rule}' ({rule_plugin(rule).file}) fails the check '{check}'{further}: {message}; "
                f"`deltalab rule check {rule}` says more, --unchecked runs the study all the same"
            )
    if wrong:
        raise WrongRules(wrong)


def _declared(rules: Sequence[str]) -> list[str]:
    """Returns the rules without the modules of other authors, which `module_checks` holds to less, in each study."""
    return [rule for rule in rules if not issubclass(rule_plugin(rule).kind, OwnModule)]


def checked(rule: str, *, quick: bool = False) -> list[CheckResult]:
    """Runs the checks of a rule and returns their results.

    Args:
        quick: Whether to run only the checks that take seconds.
    """
    # Import here: a study whose rules have verdicts does not need the checks.
    from deltalab.authoring.rule_checks.rule_suite import check_rule

    return check_rule(get_rule(rule), forked=FORKED, quick=quick)


def _file(rule: str) -> Path:
    """Returns the file of a verdict: $XDG_CACHE_HOME/deltalab/verdicts/KEY.json, by default in ~/.cache.

    KEY is a hash of all that the verdict depends on: the rule's file and options, the code of the checks, and the
    version of deltalab.
    """
    kind = get_rule(rule)
    options = {name: [str(option) for option in options] for name, options in kind.options().items()}
    checks = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py"))))
    dependencies = [rule, rule_plugin(rule).hash, options, checks.hexdigest(), version("deltalab"), NUMERICS]
    key = hashlib.sha256(json.dumps(dependencies, sort_keys=True).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "deltalab" / "verdicts" / f"{key}.json"


def ship(package: str) -> list[str]:
    """Writes the file `SHIPPED` beside the rules of a package.

    It checks the rules that the file lacks and the rules whose own files have changed. After a change of the checks,
    delete the file first, so that all rules are checked again. For the rules of deltalab, run `python -c "from
    deltalab.authoring.verdict import ship; print(ship('deltalab_rules'))"`.

    Returns:
        The rules that fail their checks. The file leaves them out.
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
