"""deltalab: does my change to a recurrent update rule help, by how much, and at what cost?"""

from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deltalab.errors import InputError
from deltalab.models.layer import RuleLayer
from deltalab.models.model import build_model
from deltalab.models.start import initialize
from deltalab.ops.scan import scan as _scan
from deltalab.registry import get_rule, get_task, list_rules
from deltalab.rule import State, UpdateRule

if TYPE_CHECKING:
    from deltalab.authoring.rule_checks import check_rule
    from deltalab.authoring.task_checks import check_task
    from deltalab.study.run import run_study

__version__ = "0.1.0"
__all__ = [
    "InputError",
    "RuleLayer",
    "build_model",
    "check_rule",
    "check_task",
    "get_rule",
    "get_task",
    "initialize",
    "list_rules",
    "run_study",
    "scan",
]


@wraps(_scan)
def scan(rule: UpdateRule | str, *args: Any, **kwargs: Any) -> tuple[Tensor, State]:
    return _scan(rule if isinstance(rule, UpdateRule) else get_rule(rule), *args, **kwargs)


def __getattr__(name: str) -> Any:
    # Import late: a study needs Ray, Optuna and SQL, which a machine that only trains may lack.
    if name == "run_study":
        from deltalab.study.run import run_study

        return run_study
    if name == "check_rule":
        from deltalab.authoring.rule_checks import check_rule

        return check_rule
    if name == "check_task":
        from deltalab.authoring.task_checks import check_task

        return check_task
    raise AttributeError(f"module 'deltalab' has no attribute '{name}'")
