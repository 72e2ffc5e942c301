"""deltalab: does my change to a recurrent update rule help, by how much, and at what cost?"""

from typing import TYPE_CHECKING, Any

from deltalab.errors import InputError
from deltalab.models.model import build_model
from deltalab.ops.scan import scan
from deltalab.registry import get_rule, get_task, list_rules

if TYPE_CHECKING:
    from deltalab.authoring.rule_checks import check_rule
    from deltalab.authoring.task_checks import check_task
    from deltalab.study.run import run_study

__version__ = "0.1.0"
__all__ = [
    "InputError",
    "build_model",
    "check_rule",
    "check_task",
    "get_rule",
    "get_task",
    "list_rules",
    "run_study",
    "scan",
]


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
