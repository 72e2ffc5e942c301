"""Refuses, while a study is planned, what its engine cannot train."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from deltalab.data.text_tokenizers import load_tokenizer
from deltalab.data.token_shards import Packed
from deltalab.errors import InputError
from deltalab.evaluation.harness import find_tasks
from deltalab.evaluation.loss import too_short
from deltalab.evaluation.metric_names import Evaluated, metric_names
from deltalab.evaluation.needle import metric_names as needle_metrics
from deltalab.evaluation.needle import no_room
from deltalab.evaluation.needle_questions import KINDS
from deltalab.evaluation.results import OWN
from deltalab.evaluation.suites.measure import require_data
from deltalab.evaluation.suites.suite import chosen, lengths_of, suites_among
from deltalab.export.recipe import no_context, no_graphs_of
from deltalab.models.spec import ModelSpec
from deltalab.study.planning.plan import Plan
from deltalab.study.specs.sections.engine import Engine
from deltalab.tasks import Task
from deltalab.tasks.text import Text
from deltalab.training.recipe_keys import CHOICES, micro_batch, with_defaults


def refuse_missing_data(engine: Engine | None, name: str, corpus: object) -> None:
    """Raises `InputError` with the command that makes packed data, if an engine's task names data that are not there.

    Args:
        engine: The study's engine; None without one.
        name: The name of the task.
        corpus: The task's parameter `corpus`, whatever the study gives.
    """
    if engine is not None and isinstance(corpus, str) and not Path(corpus).expanduser().exists():
        raise InputError(
            f"task.{name}.corpus: {corpus}: no such folder, and {engine.name} trains on packed data: "
            f"`deltalab data pack TEXT --out {corpus}` makes it"
        )


def refuse_what_no_engine_measures(engine: Engine | None, tasks: Mapping[str, Task]) -> None:
    """Raises `InputError` if an engine trains on one of the tasks no model, or one that `evaluate` cannot measure."""
    if engine is None:
        return
    for name, task in tasks.items():
        _require_room(engine.evaluate, packed_of(engine.name, name, task), task.length)
    _require_known(engine.evaluate, engine.lengths, engine.files)
    for name, task in tasks.items():
        try:
            metric_names(evaluated_on(engine, name, task))
        except InputError as error:
            text = str(error).replace("--lengths", "engine.lengths").replace("--files DIR", "engine.files")
            raise InputError(f"engine.evaluate: {text}") from None


def evaluated_on(engine: Engine, name: str, task: Task) -> Evaluated:
    """Returns what an engine evaluates on a task. Raises `InputError` as `packed_of` does."""
    files = None if engine.files is None else Path(engine.files)
    data = packed_of(engine.name, name, task)
    return Evaluated(engine.evaluate, data, "test", task.length, engine.lengths, engine.limit, files)


def refuse_what_no_engine_trains(plan: Plan) -> None:
    """Raises `InputError` if the study's engine cannot train one of its arms."""
    engine = plan.spec.engine
    if engine is None:
        return
    if any(objective.name == "decode_us" for objective in plan.objectives):
        raise InputError("search.objectives: decode_us is not measured in a study with an engine")
    processes = int(plan.spec.resources.gpu) or engine.processes
    for arm in plan.arms:
        where = "base" if arm.is_base else f"arms.{arm.name}"
        train = arm.config["train"]
        if (every := engine.evaluate_every) is not None and every >= train["steps"]:
            raise InputError(f"{where}: engine.evaluate_every {every} must be below train.steps {train['steps']}")
        if train["optimizer"] not in CHOICES["optimizer.name"]:
            raise InputError(f"{where}: train.optimizer: {engine.name} has no {train['optimizer']}")
        batch = {"sequences": train["batch_size"], "length": plan.tasks[arm.task].length}
        micro = {"micro": engine.settings["batch.micro"]} if "batch.micro" in engine.settings else {}
        context = {"context_parallel": engine.settings.get("context_parallel", 1)}
        try:
            micro_batch(with_defaults({"batch": batch | micro, **context}), processes)
        except ValueError as error:
            text = (
                str(error).replace("batch.sequences", "train.batch_size").replace("batch.length", "the task's length")
            )
            for key in ("batch.micro", "context_parallel"):
                text = text.replace(key, f"engine.settings.{key}")
            raise InputError(f"{where}: {text}") from None
        model = ModelSpec.of({**arm.config["model"], "rule": arm.config["rule"]})
        if engine.settings.get("graphs") and (why := no_graphs_of(model)):
            raise InputError(f"{where}: engine.settings.graphs: {why}: leave it out")
        if why := no_context(model, engine.settings, engine.name):
            raise InputError(f"{where}: engine.settings.{why}")


def _require_known(names: Sequence[str], lengths: Sequence[int], files: str | None) -> None:
    """Raises `InputError` if `deltalab eval` cannot ask one of the tasks of a model that an engine trained."""
    of_suites, tasks = suites_among(names)
    if files is not None and not Path(files).is_dir():
        raise InputError(f"engine.files: {files}: no such folder")
    if "proxy" in tasks:
        raise InputError("engine.evaluate: proxy asks the task that a model comes from, which is this study's own")
    try:
        for suite, asked in chosen(of_suites):
            require_data(suite, asked, lengths_of(suite, lengths), None if files is None else Path(files))
        find_tasks([task for task in tasks if task not in OWN], None)
    except InputError as error:
        text = re.sub(r"^--suite: ", "engine.evaluate: ", str(error))
        text = re.sub(r"^--(files|lengths)", r"engine.\1", text)
        raise InputError(text if text.startswith("engine.") else f"engine.evaluate: {text}") from None


def _require_room(names: Sequence[str], data: Packed, length: int) -> None:
    """Raises `InputError` if the test split or the longest texts are too short for a task that `evaluate` names."""
    split = data.split("test")
    if "loss" in names and not split.rows(length):
        raise InputError(f"engine.evaluate: task 'loss': {too_short(split, length)}")
    if not (needles := [name for name in names if name in KINDS]):
        return
    tokenizer, _ = load_tokenizer(str(data.folder))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    for name in needles:
        filler = split if name == "needle_text" else None
        if not needle_metrics(encode, name, length, filler):
            raise InputError(
                f"engine.evaluate: task '{name}': {no_room(length, filler)}".removesuffix(": give a longer --length")
            )


def packed_of(engine: str, name: str, task: Task) -> Packed:
    """Returns the data of a task. Raises `InputError` if the task is not language modelling on packed data."""
    if not isinstance(task, Text):
        raise InputError(f"engine: {engine} trains language models: task '{name}' is {task.name}, and must be text")
    if task.packed is None:
        raise InputError(
            f"engine: {engine} trains on packed data: task.{name}.corpus must be a folder that `deltalab data pack` "
            f"wrote, not {task.corpus or 'the text that comes with deltalab'}"
        )
    return task.packed
