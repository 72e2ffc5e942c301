"""Refuses, while a study is planned, what its engine cannot train."""

from deltalab.errors import InputError
from deltalab.study.planning.plan import Plan
from deltalab.tasks import Task
from deltalab.tasks.text import Text
from deltalab.training.recipe_keys import CHOICES, micro_batch, with_defaults


def refuse_what_no_engine_trains(plan: Plan) -> None:
    """Raises `InputError` if the study's engine cannot train one of its arms on one of its tasks."""
    engine = plan.spec.engine
    if engine is None:
        return
    for name, task in plan.tasks.items():
        _require_packed(engine.name, name, task)
    if any(objective.name == "decode_us" for objective in plan.objectives):
        raise InputError("search.objectives: decode_us is not measured in a study with an engine")
    processes = int(plan.spec.resources.gpu) or engine.processes
    for arm in plan.arms:
        where = "base" if arm.is_base else f"arms.{arm.name}"
        train = arm.config["train"]
        if train["optimizer"] not in CHOICES["optimizer.name"]:
            raise InputError(f"{where}: train.optimizer: {engine.name} has no {train['optimizer']}")
        batch = {"sequences": train["batch_size"], "length": plan.tasks[arm.task].length}
        micro = {"micro": engine.settings["batch.micro"]} if "batch.micro" in engine.settings else {}
        try:
            micro_batch(with_defaults({"batch": batch | micro}), processes)
        except ValueError as error:
            text = str(error).replace("batch.sequences", "train.batch_size")
            raise InputError(f"{where}: {text.replace('batch.micro', 'engine.settings.batch.micro')}") from None


def _require_packed(engine: str, name: str, task: Task) -> None:
    """Raises `InputError` if a task is not language modelling on packed data."""
    if not isinstance(task, Text):
        raise InputError(f"engine: {engine} trains language models: task '{name}' is {task.name}, and must be text")
    if task.packed is None:
        raise InputError(
            f"engine: {engine} trains on packed data: task.{name}.corpus must be a folder that `platform data pack` "
            f"wrote, not {task.corpus or 'the text that comes with deltalab'}"
        )
