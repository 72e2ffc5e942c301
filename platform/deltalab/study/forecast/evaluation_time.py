"""Forecasts how long an engine's trained models are measured on what the section `engine` evaluates."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deltalab.data.text_tokenizers import load_tokenizer
from deltalab.data.token_shards import Packed
from deltalab.evaluation import needle_questions
from deltalab.evaluation.evaluate import LIMIT
from deltalab.evaluation.harness import task_named
from deltalab.evaluation.loss import TIMES, TOKENS_AT_ONCE
from deltalab.evaluation.results import OWN
from deltalab.evaluation.suites import greedy, recall, ruler
from deltalab.evaluation.suites.suite import Suite, SuiteTask, chosen, lengths_of, suites_among
from deltalab.study.forecast.step_time import Training
from deltalab.study.planning.plan import Plan, PlannedArm
from deltalab.study.specs.sections.engine import Engine
from deltalab.tasks.text import Text

SECONDS_A_LAYER = 1.3e-3
"""The seconds in which a layer writes one token of each text of a batch. Launching its operators takes most of them:
1.25 ms on an H200 without CUDA graphs (benchmarks/decode_h200.json), 1.0 to 2.4 ms on a core of a CPU."""


@dataclass(frozen=True)
class Asked:
    """What a model reads and writes when it is measured on a task.

    Attributes:
        read: The tokens that it reads.
        written: The tokens that it writes one after another. A batch writes one of each of its texts at once.
    """

    read: float
    written: float = 0.0


def evaluations(plan: Plan, arm: PlannedArm) -> int:
    """Returns how often each trained model of an arm is measured on what the section `engine` evaluates."""
    engine = plan.spec.engine
    if engine is None or not engine.evaluate:
        return 0
    every = engine.evaluate_every
    return 1 if every is None else 1 + (arm.config["train"]["steps"] - 1) // every


def evaluation_seconds(plan: Plan, arm: PlannedArm, training: Training, step: float) -> float:
    """Returns the seconds for which a trained model of an arm is measured; tasks whose size is not known left out.

    A token is read in a third of the time in which it is trained on.

    Args:
        plan: The study.
        arm: The arm.
        training: Its training.
        step: The seconds of a training step.
    """
    if not (times := evaluations(plan, arm)):
        return 0.0
    of_token = step / (3 * training.spec.batch_size * training.task.length)
    asked = [one for _, one in _asked_of(plan, training.task) if one is not None]
    once = sum(one.read * of_token + one.written * training.model.depth * SECONDS_A_LAYER for one in asked)
    return times * once


def evaluation_notes(plan: Plan) -> list[str]:
    """Returns a note on how often models are measured, and on the tasks whose time is not counted; none without any."""
    engine = plan.spec.engine
    if engine is None or not engine.evaluate:
        return []
    total = sum(plan.confirmed(arm) * evaluations(plan, arm) for arm in plan.arms)
    asked = [pair for task in plan.tasks.values() for pair in _asked_of(plan, task)]
    left_out = [*dict.fromkeys(name for name, one in asked if one is None)]
    counted = [*dict.fromkeys(name for name, one in asked if one is not None and name not in left_out)]
    why = "not in the time, since only their data tell how many examples they have"
    parts = [f"{', '.join(counted)}, in the time"] if counted else []
    parts += [f"{', '.join(left_out)}, {why}"] if left_out else []
    return [f"engine.evaluate: {total} evaluations in all, each of {'; and of '.join(parts)}.", *_unchecked(plan)]


def _unchecked(plan: Plan) -> list[str]:
    """Returns a note on metrics to compare of which a plan knows the task alone; none if there are none."""
    assert plan.spec.engine is not None
    of_harness = {task_named(task) for task in suites_among(plan.spec.engine.evaluate)[1] if task not in OWN}
    metrics = [*dict.fromkeys(of["metric"] for of in plan.further if of["metric"].partition(" ")[0] in of_harness)]
    if not metrics:
        return []
    return [f"compare: {', '.join(metrics)}: only a run tells which metrics lm-evaluation-harness has of such tasks."]


def _asked_of(plan: Plan, task: object) -> Iterator[tuple[str, Asked | None]]:
    """Yields each task that the section `engine` evaluates, and what it asks; None if the plan cannot tell."""
    engine = plan.spec.engine
    assert engine is not None
    assert isinstance(task, Text)  # as a plan demands
    assert task.packed is not None
    of_suites, tasks = suites_among(engine.evaluate)
    examples = engine.limit or LIMIT
    for name in dict.fromkeys(tasks):  # a task that is named twice is asked once
        yield name, _by_us(name, task.packed, task.length, examples)
    at_once = 8 if plan.spec.resources.gpu else 1
    for suite, asked in chosen(of_suites):
        for one in asked:
            if suite.asked_by == "deltalab":
                yield one.name, _by_us(one.name, task.packed, task.length, examples)
            else:
                yield f"{suite.name}/{one.name}", _of_suite(suite, one, engine, at_once)


def _by_us(name: str, data: Packed, length: int, examples: int) -> Asked | None:
    """What one of our tasks asks at all of its lengths; None for a task of the harness."""
    split = data.split("test")
    if name == "loss":
        sizes = [times * length for times in TIMES]
        return Asked(sum(min(split.rows(size), max(1, examples * length // size)) * size for size in sizes))
    return _needles(name, data.folder, length, examples) if name in needle_questions.KINDS else None


@cache
def _needles(name: str, folder: Path, length: int, examples: int) -> Asked:
    """What needles ask: as many questions of each length as there are examples, all as large as the first."""
    tokenizer, _ = load_tokenizer(str(folder))
    split = Packed(folder).split("test") if name == "needle_text" else None

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    read, written = 0, 0.0
    for times in TIMES:
        size = times * length
        for question in needle_questions.questions(encode, size, 1, needle_questions.KINDS[name], filler=split):
            read += examples * len(question.tokens)
            written += question.room * -(-examples // max(1, TOKENS_AT_ONCE // size))
    return Asked(read, written)


def _of_suite(suite: Suite, task: SuiteTask, engine: Engine, at_once: int) -> Asked | None:
    """What a task of a suite asks, at most; None if only its data tell the number or the length of its examples."""
    examples = engine.limit or suite.examples
    if suite.asked_by == "harness" or examples is None:
        return None
    tokens = recall.TOKENS if suite.asked_by == "recall" else ruler.ANSWER_TOKENS[task.settings["texts"]]
    read, written = 0, 0.0
    for length in lengths_of(suite, engine.lengths):
        read += examples * length
        written += tokens * -(-examples // max(1, min(at_once, greedy.TOKENS_AT_ONCE // length)))
    return Asked(read, written)
