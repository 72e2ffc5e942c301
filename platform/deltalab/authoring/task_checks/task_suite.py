"""All checks of a task. A comparison on data that is not what the task declares is worthless.

A check measures a task with its parameters and yields figures. The table `CHECKS` at the end gives each check its
limit. The measurements are here and in the other modules of this package.
"""

import itertools
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

import numpy as np
import torch

from deltalab.authoring.check import Check, CheckResult, Measurement, run_checks, told_once
from deltalab.authoring.task_checks import task_answers, task_shortcuts, task_streams
from deltalab.authoring.task_checks.task_batches import SIZE, batches, drawn, scored_in
from deltalab.registry import get_task
from deltalab.tasks.task import IGNORE, SPLITS, Task

OF_TOKENS = frozenset({"shift", "alike", "near inputs", "one input", "distances", "classes", "facts", "knowable"})
"""The checks that look for answers among the tokens, which images do not have."""


def check_task(task: Task | str, *, forked: bool = False) -> list[CheckResult]:
    """Checks a task. Checks that do not apply to the task are left out.

    Args:
        task: The task, or the name of one whose parameters all have defaults.
        forked: Whether each check runs in a process of its own, so that a crash fails one check instead of ending this
            process.

    Returns:
        A result for each check that applies.

    Raises:
        InputError: No task has this name, or the task needs parameters.

    Examples:
        >>> from deltalab.tasks import MQAR
        >>> all(result.passed for result in check_task(MQAR(length=32, pairs=4, vocab_size=64)))
        True
    """
    task = task if isinstance(task, Task) else get_task(task)
    with _generators_kept():
        return told_once(run_checks(CHECKS, partial(_run, task), where=task.name, forked=forked))


def _run(task: Task, check: Check[Task]) -> CheckResult | None:
    """Runs one check and returns its worst result, or None if the check does not apply."""
    if task.patches is not None and check.name in OF_TOKENS:
        return None
    try:
        measurements = list(check.measure(task))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # even SystemExit, which would end the command as if all checks had passed
        return check.raised(error, task.name)
    if not measurements:
        return None
    return check.judge(min(measurements, key=lambda measurement: check.slack(measurement.figure)), task.name)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restores the global random generators when the context ends, since a check seeds them."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


# --- measurements -------------------------------------------------------------------------------------------


def _mismatches(values: list[tuple[str, object, bool]]) -> Iterator[Measurement]:
    """Yields a figure for each declared value: 0 if the value is right, else 1."""
    for what, value, is_right in values:
        yield Measurement(float(not is_right), f"mismatch between {what} and {value!r}")


def _is_count(value: object) -> bool:
    """Returns whether a value is a whole number of at least 1."""
    return type(value) is int and value >= 1


def declaration(task: Task) -> Iterator[Measurement]:
    """Checks the types and values of what the task declares."""
    chance = isinstance(task.chance, int | float) and math.isfinite(task.chance)
    ceiling = task.ceiling is None or (
        isinstance(task.ceiling, int | float)
        and math.isfinite(task.ceiling)
        and (task.ceiling > task.chance if task.maximize else task.ceiling < task.chance)
    )
    labels = [*task.evaluations()]
    yield from _mismatches(
        [
            ("`version` (a whole number of at least 1)", task.version, _is_count(task.version)),
            ("`metric` (a word)", task.metric, isinstance(task.metric, str) and task.metric.isidentifier()),
            ("`maximize` (True or False)", task.maximize, isinstance(task.maximize, bool)),
            ("`chance` (a finite number)", task.chance, chance),
            ("`ceiling` (a finite number better than `chance`, or None)", task.ceiling, ceiling),
            ("`vocab_size` (a whole number of at least 1)", task.vocab_size, _is_count(task.vocab_size)),
            ("`length` (a whole number of at least 1)", task.length, _is_count(task.length)),
            ("`fingerprint()` (a string)", task.fingerprint(), isinstance(task.fingerprint(), str)),
            (
                "`evaluations()` (at least one, with a string for each label)",
                labels,
                bool(labels) and all(isinstance(label, str) for label in labels),
            ),
        ]
    )
    for label, other in task.evaluations().items():
        size = other.vocab_size
        what = f"mismatch between `vocab_size` at '{label}' ({size}) and the task's ({task.vocab_size})"
        yield Measurement(float(size != task.vocab_size), what)


def parameters(task: Task) -> Iterator[Measurement]:
    """Checks that a worker that restores the task's parameters from JSON gets the same task."""
    fields = asdict(task)
    restored = type(task)(**json.loads(json.dumps(fields)))
    what = f"mismatch between the parameters that a worker restores ({asdict(restored)}) and the given ones ({fields})"
    yield Measurement(float(restored != task), what)


def form(task: Task) -> Iterator[Measurement]:
    """Checks the shapes, dtypes and devices of batches."""
    for split in SPLITS:
        for member, size in itertools.product(drawn(task, split), (1, SIZE)):
            batch = member.batch(split, size, 0, 0)
            for name, tokens in (("inputs", batch.inputs), ("targets", batch.targets)):
                actual = f"{list(tokens.shape)} {tokens.dtype} on {tokens.device}"
                required = f"{[size, member.length]} torch.int64 on cpu"
                if name == "inputs" and member.patches is not None:
                    required = f"{[size, member.length, member.patches[2]]} torch.float32 on cpu"
                what = f"mismatch between the {name} of {split} ({actual}) and the required form ({required})"
                yield Measurement(float(actual != required), what)


def token_range(task: Task) -> Iterator[Measurement]:
    """Counts the tokens that the vocabulary does not hold."""
    for split in SPLITS:
        for _, batch in batches(task, split):
            tokens = {"inputs": batch.inputs, "targets": batch.labels}
            if task.patches is not None:
                pixels = tokens.pop("inputs")
                yield Measurement(
                    float((~pixels.isfinite()).sum()), f"number of pixels of {split} that are not finite,"
                )
            for name, values in tokens.items():
                outside = values[(values < 0) | (values >= task.vocab_size)].unique().tolist()
                what = f"number of {name} outside [0, vocab_size = {task.vocab_size}) in {split}, {outside[:5]},"
                yield Measurement(float(len(outside)), what)


def scored(task: Task) -> Iterator[Measurement]:
    """Measures the least number of scored positions in a batch of each split."""
    for split in SPLITS:
        fewest = min(scored_in(batch) for _, batch in batches(task, split))
        yield Measurement(float(fewest), f"number of scored positions in a batch of {split}")


def most_scored(task: Task) -> Iterator[Measurement]:
    """Measures how far training examples exceed the declared number of scored positions."""
    most = max(int((batch.targets != IGNORE).sum(1).max()) for _, batch in batches(task, "train"))
    yield Measurement(
        float(max(0, most - task.most_scored)),
        f"number of scored positions of a training example above {task.most_scored}",
    )


def shift(task: Task) -> Iterator[Measurement]:
    """Measures the share of targets that equal the input at their own position, or two positions later."""
    causes = {
        0: "a target is the input token at its own position: targets are not shifted",
        2: "targets are shifted twice",
    }
    for split, (ahead, cause) in itertools.product(SPLITS, causes.items()):
        same = total = 0
        for member, batch in batches(task, split):
            if member.readout == "position":
                inputs = batch.inputs[:, ahead:]
                targets = batch.targets[:, : inputs.shape[1]]
                same += int((targets == inputs).sum())
                total += int((targets != IGNORE).sum())
        where = f"{ahead} positions later" if ahead else "at the same position"
        if total:
            yield Measurement(same / total, f"share of targets of {split} that equal the input {where}", cause)


def device(task: Task) -> Iterator[Measurement]:
    """Checks that a batch can be drawn on another device than the CPU, without a read of its values."""
    # Tensors on the meta device have no values. Code that reads a value, and so would wait for a GPU, raises an error.
    for split in SPLITS:
        for member in drawn(task, split):
            try:
                batch = member.batch(split, SIZE, 0, 0, "meta")
                problem = "" if batch.inputs.is_meta and batch.targets.is_meta else "the batch is on another device"
            except Exception as error:
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            yield Measurement(
                float(bool(problem)), f"number of problems in drawing {split} on a device, {problem or 'none'},"
            )


CHECKS: tuple[Check[Task], ...] = (
    Check("declaration", declaration, 0.0, "a declared value is missing or has the wrong type"),
    Check("parameters", parameters, 0.0, "`__post_init__` changes a parameter, or JSON cannot store one"),
    Check("form", form, 0.0, "`length` is not the length of the sequences, or the tokens are not int64"),
    Check("token range", token_range, 0.0, "`vocab_size` does not count all tokens"),
    Check("scored", scored, 1.0, "every target is IGNORE", at_least=True),
    Check("most scored", most_scored, 0.0, "`most_scored` is less than the scored positions of some examples"),
    Check("shift", shift, 0.99, ""),
    Check("repeatability", task_streams.repeatability, 0.0, "`draw` uses randomness other than its argument `random`"),
    Check(
        "processes",
        task_streams.processes,
        0.0,
        "`draw` uses `hash` of a text or the order of a set: sort, or use hashlib",
    ),
    Check("pool", task_streams.pool, 0.0, "`draw` lets a row depend on more than the same row of `random`"),
    Check("addresses", task_streams.addresses, 0.0, "`draw` does not use its argument `random`"),
    Check(
        "streams",
        task_streams.streams,
        0.01,
        "`draw` takes examples from a small number of them: say so by `train_examples`, or draw each anew",
    ),
    Check(
        "own streams",
        task_streams.own_streams,
        0.0,
        "`draw` takes the evaluation's examples from the stream of training, at other seeds or steps",
    ),
    # Two splits of text may share a few short windows, such as a line of dashes.
    Check(
        "splits", task_streams.splits, 0.01, "`draw` treats all splits alike, or there are too few different examples"
    ),
    Check(
        "near copies",
        task_streams.near_copies,
        0.01,
        "`draw` makes the example from one of training by changing a few tokens: draw each anew",
    ),
    Check("vocabulary", task_streams.vocabulary, 0.05, "`draw` uses tokens in one split that it does not in training"),
    Check("alike", task_answers.alike, 0.25, ""),
    Check("metrics", task_answers.metrics, 0.0, "`measure` does not return a pair (total, count) for each metric"),
    Check("sums", task_answers.sums, 1e-6, "`measure` returns a mean instead of a total"),
    Check("loss", task_answers.loss, 1e-4, "`measure` computes another loss: take `surprisal(batch, logits)`"),
    Check("perfect", task_answers.perfect, 1e-6, "`measure` compares logits with the wrong targets"),
    Check("chance", task_answers.chance, 5.0, "`chance` is that of another metric, or assumes other answers"),
    Check(
        "fixed answers",
        task_answers.fixed_answers,
        5.0,
        "answers are not equally frequent, or padding is scored: draw them evenly, or raise `chance` to this figure",
    ),
    Check(
        "near inputs", task_shortcuts.near_inputs, 0.4, "`draw` puts the answer into the inputs before it is asked for"
    ),
    Check("one input", task_shortcuts.one_input, 0.6, "`draw` always puts the answer into the same place"),
    Check(
        "distances",
        task_shortcuts.distances,
        0.6,
        "`draw` always puts the answer at the same distance: vary it, or declare `shortcuts = frozenset({'distance'})`",
    ),
    Check("order", task_shortcuts.order, 0.5, ""),
    Check(
        "classes",
        task_shortcuts.classes,
        0.8,
        "a plain number tells the answer: vary it, or declare `shortcuts = frozenset({'class'})`",
    ),
    Check(
        "facts",
        task_shortcuts.facts,
        0.8,
        "the answer to a pair of tokens is the same in all splits: draw it for each example, or declare `shortcuts = "
        "frozenset({'facts'})`",
    ),
    Check(
        "knowable",
        task_answers.knowable,
        0.01,
        "the inputs up to a scored position do not decide its target: give such positions the target IGNORE",
    ),
    Check("device", device, 0.0, "`draw` reads a value, indexes by a mask, or leaves a tensor on the CPU"),
)
