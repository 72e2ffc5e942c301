"""Tells, before models are trained, by which names evaluations will report their values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deltalab.data.text_tokenizers import load_tokenizer
from deltalab.data.token_shards import Packed
from deltalab.errors import InputError
from deltalab.evaluation import loss, needle
from deltalab.evaluation.harness import task_named
from deltalab.evaluation.results import OWN, Result, titled
from deltalab.evaluation.suites import ruler
from deltalab.evaluation.suites.measure import means, task_title
from deltalab.evaluation.suites.suite import Suite, SuiteTask, chosen, lengths_of, suites_among


@dataclass(frozen=True)
class Evaluated:
    """What is evaluated, and how.

    Attributes:
        names: Tasks and suites of `deltalab eval`, all of which can be asked.
        data: The packed data.
        split: The split that is read.
        length: Tokens of a training sequence.
        lengths: The tokens of the suites' texts; empty for those of the suites.
        limit: The examples of each task; None for the tasks' own numbers.
        files: The folder of copies of data sets; None if they come from the Hub.
    """

    names: Sequence[str]
    data: Packed
    split: str
    length: int
    lengths: Sequence[int] = ()
    limit: int | None = None
    files: Path | None = None


def metric_names(asked: Evaluated) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns what an evaluation reports.

    Args:
        asked: What is evaluated.

    Returns:
        Each task, as results name it, with each of its metrics; and the names of the tasks of lm-evaluation-harness,
        whose metrics only a run tells.

    Raises:
        InputError: A suite would ask nothing.
    """
    of_suites, tasks = suites_among(asked.names)
    found = [(titled(task), metric) for task in tasks if task in OWN for metric in _of_ours(task, asked)]
    for suite, its_tasks in chosen(of_suites):
        lengths = lengths_of(suite, asked.lengths)
        pairs, left_out = list[tuple[str, str]](), dict[str, str]()
        for task in its_tasks:
            pairs += _of_suite(suite, task, lengths, asked, left_out)
        if left_out and not pairs:
            raise InputError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
        found += pairs
        if its_tasks == suite.tasks:
            results = [Result(None, task, metric, 0.0, 1) for task, metric in pairs]
            found += [(mean.task, mean.metric) for mean in means(suite, results, lengths)]
    return [*dict.fromkeys(found)], [task_named(task) for task in tasks if task not in OWN]


def _of_ours(task: str, asked: Evaluated) -> list[str]:
    """The metrics of one of our tasks."""
    split = asked.data.split(asked.split)
    if task == "loss":
        return loss.metric_names(split, asked.length)
    filler = split if task == "needle_text" else None
    return needle.metric_names(_Coder(asked.data).encode, task, asked.length, filler)


def _of_suite(
    suite: Suite, task: SuiteTask, lengths: Sequence[int], asked: Evaluated, left_out: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Yields a task of a suite, as results name it, with each of its metrics; notes why it is not asked at a length."""
    title = task_title(suite, task)
    if suite.asked_by == "deltalab":
        yield from ((titled(title), metric) for metric in _of_ours(task.name, asked))
    elif suite.asked_by == "harness":
        yield from ((title, metric) for metric in (task.metric, *task.also) if metric is not None)
    else:
        for length in lengths:
            if suite.asked_by == "ruler" and (reason := _no_question(suite, task, length, lengths, asked)):
                left_out[f"{title}@{length}"] = reason
            else:
                yield title, f"{task.metric}@{length}"


def _no_question(suite: Suite, task: SuiteTask, length: int, lengths: Sequence[int], asked: Evaluated) -> str | None:
    """Says why RULER asks no question of a task at a length: it lacks a file, or its shortest text is longer."""
    sources = ruler.Sources(_Coder(asked.data), asked.files, asked.data.split(asked.split), max(lengths))
    texts_of, count = partial(sources.texts, task.settings, task.needs), asked.limit or suite.examples or 0
    try:
        return ruler.too_short(task.name, texts_of, length, count, sources.tokens)
    except InputError as error:
        return str(error)


class _Coder:
    """The tokenizer of packed data, which a model that is trained on them has, in the form of a model's folder."""

    def __init__(self, data: Packed) -> None:
        self._tokenizer, _ = load_tokenizer(str(data.folder))

    def tokenizer(self, text: str) -> dict[str, Any]:
        return {"input_ids": self._tokenizer.encode(text).ids}

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))
