"""Tasks of recall: a plain loop over the inputs answers each of them, and what is asked follows the stated law."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats

from deltalab import InputError, get_task
from deltalab.tasks import IGNORE, SPLITS, Batch, Task

RARE_EVENT = 1e-4  # every draw here is fixed, so a test below this p-value fails always or never


def last_value(inputs: list[int], task: Any) -> dict[int, int]:
    values: dict[int, int] = {}
    begin = 2 * (task.pairs + task.updates)
    for key, value in zip(inputs[:begin:2], inputs[1:begin:2], strict=True):
        values[key] = value
    return {t: values[token] for t, token in enumerate(inputs) if t >= begin and token}


def of_both(inputs: list[int], task: Any) -> dict[int, int]:
    begin = 3 * task.grid**2
    values = {(inputs[i], inputs[i + 1]): inputs[i + 2] for i in range(0, begin, 3)}
    return {
        t + 1: values[inputs[t], inputs[t + 1]] for t in range(begin, len(inputs) - 1) if inputs[t] and inputs[t + 1]
    }


def followed(inputs: list[int], task: Any) -> dict[int, int]:
    values: dict[int, int] = {}
    for name, source in zip(inputs[::2], inputs[1::2], strict=False):
        if name == 0:
            break
        values[name] = source if source >= 2 + task.names else values[source]
    asked = inputs.index(1)
    return {t: values[inputs[t]] for t in range(asked + 1, len(inputs))}


def in_order(inputs: list[int], task: Any) -> dict[int, int]:
    hay = len(inputs) - task.queries * task.of_each
    found: dict[int, list[int]] = {}
    for word, value in zip(inputs[:hay:2], inputs[1:hay:2], strict=True):
        if task.words <= word < task.words + task.keys:
            found.setdefault(word, []).append(value)
    answers, reader = {}, iter(())
    for t in range(hay, len(inputs)):
        if (t - hay) % task.of_each == 0:
            reader = iter(found[inputs[t]])
        answers[t] = next(reader)
    return answers


def again(inputs: list[int], task: Any) -> dict[int, int]:
    count = inputs.index(task.vocab_size - 2)
    return {count + i: inputs[i] for i in range(count)}


TASKS: dict[str, tuple[Callable[[list[int], Any], dict[int, int]], dict[str, Any]]] = {
    "forgetting_mqar": (last_value, {"length": 40, "pairs": 5, "updates": 3, "vocab_size": 40}),
    "compositional_mqar": (of_both, {"length": 60, "grid": 3, "vocab_size": 60}),
    "variable_tracking": (followed, {"length": 50, "chains": 3, "hops": 4}),
    "needles": (in_order, {"length": 60, "needles": 5, "of_each": 3, "queries": 2}),
    "copying": (again, {"longest": 11}),
}
CASES = pytest.mark.parametrize("name", TASKS)


def made(name: str, **changes: Any) -> Task:
    return get_task(name, **{**TASKS[name][1], **changes})


@CASES
@pytest.mark.parametrize("split", SPLITS)
def test_a_plain_loop_answers(name: str, split: str) -> None:
    task = made(name)
    members = task.evaluations().values() if split != "train" else [task]
    for member in members:
        batch = member.batch(split, 40, seed=1, step=2)
        for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            assert TASKS[name][0](inputs, member) == {t: y for t, y in enumerate(targets) if y != IGNORE}


@CASES
def test_a_row_is_the_same_in_any_batch(name: str) -> None:
    task = made(name, train_examples=20)
    few, many = (task.batch("test", size, seed=0, step=0) for size in (3, 9))
    assert torch.equal(few.inputs, many.inputs[:3])
    pool = task.batch("train", 200, seed=0, step=0).inputs
    assert len(pool.unique(dim=0)) <= 20


def right(task: Task, batch: Batch, answers: torch.Tensor) -> dict[str, float]:
    logits = torch.nn.functional.one_hot(answers, task.vocab_size).float()
    return {name: float(total / count) for name, (total, count) in task.measure(batch, logits).items() if count}


@CASES
def test_the_metric_is_the_share_of_right_answers(name: str) -> None:
    task = made(name)
    batch = task.batch("test", 400, seed=0, step=0)
    assert right(task, batch, batch.labels)["accuracy"] == 1
    wrong = torch.where(torch.arange(len(batch.labels)) % 4 == 0, (batch.labels + 1) % task.vocab_size, batch.labels)
    assert right(task, batch, wrong)["accuracy"] == pytest.approx(0.75, abs=0.01)
    guess = torch.full_like(batch.labels, int(batch.labels.mode().values))
    assert right(task, batch, guess)["accuracy"] == pytest.approx(task.chance, abs=0.02)


def test_forgetting_measures_kept_and_updated_keys_apart() -> None:
    task = made("forgetting_mqar")
    batch = task.batch("test", 200, seed=0, step=0)
    first = []
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        values = dict(zip(inputs[:10:2], inputs[1:10:2], strict=True))
        first += [values[inputs[t]] for t, y in enumerate(targets) if y != IGNORE]
    found = right(task, batch, torch.tensor(first))
    assert (found["updated"], found["kept"]) == (0, 1)
    assert found["accuracy"] == pytest.approx(2 / 5)


def test_second_values_are_uniform_among_the_others() -> None:
    task = get_task("forgetting_mqar", length=16, pairs=2, updates=2, vocab_size=12)
    inputs = task.batch("test", 6000, seed=0, step=0).inputs
    second = dict.fromkeys([])
    counts: Counter[tuple[int, int]] = Counter()
    for row in inputs.tolist():
        second = dict(zip(row[4:8:2], row[5:8:2], strict=True))
        counts.update((row[i + 1], second[row[i]]) for i in (0, 2))
    assert all(old != new for old, new in counts)
    assert stats.chisquare([counts[a, b] for a in range(6, 12) for b in range(6, 12) if a != b]).pvalue > RARE_EVENT


def test_chains_are_interleaved_in_all_ways() -> None:
    task = get_task("variable_tracking", length=11, chains=2, hops=1, names=6, values=4)
    ways: Counter[tuple[int, ...]] = Counter()
    for row in task.batch("test", 4000, seed=0, step=0).inputs.tolist():
        owner: dict[int, int] = {}
        order = []
        for name, source in zip(row[:8:2], row[1:8:2], strict=True):
            owner[name] = source if source >= 8 else owner[source]
            order.append(owner[name])
        first = order[0]
        ways[tuple(int(value != first) for value in order)] += 1
    assert len(ways) == 3
    assert stats.chisquare(list(ways.values())).pvalue > RARE_EVENT


def test_needles_lie_anywhere() -> None:
    task = get_task("needles", length=22, needles=1, queries=1, of_each=2, times=[1])
    places: Counter[int] = Counter()
    for row in task.batch("test", 5000, seed=0, step=0).inputs.tolist():
        places.update(i for i in range(0, 20, 2) if 64 <= row[i] < 96)
    assert stats.chisquare([places[i] for i in range(0, 20, 2)]).pvalue > RARE_EVENT


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("forgetting_mqar", {"updates": 6}, "parameter 'updates' must be from 1 to pairs = 5, not 6"),
    ("forgetting_mqar", {"length": 24}, "parameter 'length' must be at least 4 x pairs + 2 x updates = 26"),
    ("forgetting_mqar", {"length": 41}, "parameter 'length' must be even"),
    ("forgetting_mqar", {"vocab_size": 10}, "parameter 'vocab_size' must be at least 2 x (pairs + 1) = 12"),
    ("forgetting_mqar", {"power": 0.0}, "parameter 'power' must be above 0"),
    ("compositional_mqar", {"grid": 1}, "parameter 'grid' must be at least 2"),
    ("compositional_mqar", {"length": 50}, "parameter 'length' must be at least 6 x grid^2 = 54"),
    ("compositional_mqar", {"vocab_size": 29}, "parameter 'vocab_size' must be at least 3 x (grid^2 + 1) = 30"),
    ("variable_tracking", {"hops": 0}, "parameter 'hops' must be at least 1"),
    ("variable_tracking", {"length": 30}, "must be at least 2 x chains x (hops + 1) + chains + 1 = 34"),
    ("variable_tracking", {"names": 14}, "parameter 'names' must be at least chains x (hops + 1) = 15"),
    ("variable_tracking", {"values": 2}, "parameter 'values' must be at least 3"),
    ("needles", {"queries": 6}, "parameter 'queries' must be at most needles = 5"),
    ("needles", {"keys": 4}, "parameter 'keys' must be at least needles = 5"),
    ("needles", {"values": 14}, "parameter 'values' must be at least needles x of_each = 15"),
    ("needles", {"length": 61}, "parameter 'length' must be even, as queries x of_each"),
    ("needles", {"length": 34}, "parameter 'length' must be at least"),
    ("needles", {"times": [1, 1]}, "parameter 'times' must all be different"),
    ("needles", {"length": 61, "queries": 3}, "parameter 'times' must be odd for an odd number"),
    ("copying", {"longest": 3}, "parameter 'longest' must be at least 4"),
    ("copying", {"times": []}, "parameter 'times' must name a multiple of the length"),
    ("copying", {"train_examples": 0}, "parameter 'train_examples' must be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), WRONG)
def test_wrong_parameters_are_one_line(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        made(name, **changes)
    assert message in str(raised.value)


def test_copies_are_judged_at_longer_lengths() -> None:
    task = made("copying")
    lengths = {
        label: int((other.batch("test", 1, 0, 0).targets != IGNORE).sum())
        for label, other in task.evaluations().items()
    }
    assert lengths == {"11": 11, "22": 22, "44": 44}
    trained = (task.batch("train", 2000, 0, 0).targets != IGNORE).sum(1).tolist()
    assert set(trained) == set(range(5, 12))
