"""deltalab: does my change to a recurrent update rule help, by how much, and at what cost?"""

import importlib
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from deltalab.authoring.rule_checks.rule_suite import check_rule
    from deltalab.authoring.task_checks.task_suite import check_task
    from deltalab.errors import InputError
    from deltalab.models.drop_in import layer
    from deltalab.models.layer import RuleLayer
    from deltalab.models.model import build_model
    from deltalab.models.start import initialize
    from deltalab.registry import get_rule, get_task, list_rules
    from deltalab.rule import State, UpdateRule
    from deltalab.study.reports.report import open_report as report
    from deltalab.study.running.run import run_study_file as run_study

    def scan(rule: "UpdateRule | str", *args: Any, **kwargs: Any) -> "tuple[Tensor, State]": ...  # noqa: D103 for type checkers; the real one is below


__version__ = "0.2.0"
__all__ = [
    "InputError",
    "RuleLayer",
    "build_model",
    "check_rule",
    "check_task",
    "get_rule",
    "get_task",
    "initialize",
    "layer",
    "list_rules",
    "report",
    "run_study",
    "scan",
]


_HOMES = {
    "InputError": "errors",
    "RuleLayer": "models.layer",
    "build_model": "models.model",
    "check_rule": "authoring.rule_checks.rule_suite",
    "check_task": "authoring.task_checks.task_suite",
    "get_rule": "registry",
    "get_task": "registry",
    "initialize": "models.start",
    "layer": "models.drop_in",
    "list_rules": "registry",
    "report": "study.reports.report:open_report",
    "run_study": "study.running.run:run_study_file",
}


def _scan() -> "Callable[..., tuple[Tensor, State]]":
    """Returns a `deltalab.ops.scan.scan` that takes a rule or the name of a rule."""
    from deltalab.ops.scan import scan as of_rule
    from deltalab.registry import get_rule
    from deltalab.rule import UpdateRule

    @wraps(of_rule)
    def scan(rule: "UpdateRule | str", *args: Any, **kwargs: Any) -> "tuple[Tensor, State]":
        return of_rule(rule if isinstance(rule, UpdateRule) else get_rule(rule), *args, **kwargs)

    return scan


def __getattr__(name: str) -> Any:
    # Import a name when it is first used. A study needs Ray, Optuna and SQL, which a machine that only trains may lack.
    # A process that only passes on messages need not import torch.
    if name == "scan":
        return globals().setdefault(name, _scan())
    if name in _HOMES:
        module, _, other_name = _HOMES[name].partition(":")
        return getattr(importlib.import_module(f"deltalab.{module}"), other_name or name)
    raise AttributeError(f"module 'deltalab' has no attribute '{name}'")
