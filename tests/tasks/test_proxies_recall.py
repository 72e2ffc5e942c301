"""The recall proxies: plain readers of the inputs give every answer; places and tokens follow the stated laws."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.oracles import RARE_EVENT, Oracle, assert_solved, fingerprint

import deltalab
from deltalab import check_task
from deltalab.errors import InputError
from deltalab.tasks import IGNORE, Random, Task
from deltalab.tasks.proxies.recall.compositional_mqar import CompositionalMQAR
from deltalab.tasks.proxies.recall.forgetting_mqar import ForgettingMQAR
from deltalab.tasks.proxies.recall.length_copy import LengthCopy
from deltalab.tasks.proxies.recall.needles import Needles
from deltalab.tasks.proxies.recall.places import power_slots, spread
from deltalab.tasks.proxies.recall.variables import Variables


def forgetting(task: Any, inputs: list[int]) -> dict[int, int]:
    context = 2 * (task.pairs + task.updates)
    last = dict(zip(inputs[0:context:2], inputs[1:context:2], strict=True))
    return {i: last[inputs[i]] for i in range(context, task.length) if inputs[i]}


def compositional(task: Any, inputs: list[int]) -> dict[int, int]:
    context, third = 3 * task.side**2, task.vocab_size // 3
    triples = (inputs[i : i + 3] for i in range(0, context, 3))
    value = {(a, b): v for a, b, v in triples}
    assert len(value) == task.side**2
    return {i: value[inputs[i - 1], inputs[i]] for i in range(context, task.length) if inputs[i] >= third}


def needles(task: Any, inputs: list[int]) -> dict[int, int]:
    found: dict[int, list[int]] = {}
    for i, token in enumerate(inputs):
        if token == 0:
            found.setdefault(inputs[i + 1], []).append(inputs[i + 2])
    assert sorted(map(len, found.values())) == [task.values] * task.keys
    asked = [i + 1 for i, token in enumerate(inputs) if token == 1]
    assert len(asked) == task.queries
    return {i + j: value for i in asked for j, value in enumerate(found[inputs[i]])}


def variables(task: Any, inputs: list[int]) -> dict[int, int]:
    gets = {inputs[i + 1]: inputs[i + 2] for i, token in enumerate(inputs) if token == 0}
    assert len(gets) == task.chains * (task.hops + 1)

    def value(name: int) -> int:
        return value(gets[name]) if name in gets else name

    asked = [i + 1 for i, token in enumerate(inputs) if token == 1]
    if task.ask == "value":
        return {i: value(inputs[i]) for i in asked}
    (start,) = asked
    chain, passed = [inputs[start]], {before: name for name, before in gets.items()}
    while chain[-1] in passed:
        chain.append(passed[chain[-1]])
    return {start + i: name for i, name in enumerate(chain[1:])}


def copied(task: Any, inputs: list[int]) -> dict[int, int]:
    copy = inputs.index(task.symbols)
    return {copy + i: symbol for i, symbol in enumerate(inputs[:copy])}


CASES: list[tuple[Task, Oracle, str]] = [
    (ForgettingMQAR(), forgetting, "640fc5e8931d2761"),
    (ForgettingMQAR(length=20, pairs=3, updates=3, vocab_size=14), forgetting, "4fcb62579c344195"),
    (CompositionalMQAR(), compositional, "b4484baed5456c92"),
    (CompositionalMQAR(length=25, side=2, vocab_size=17), compositional, "e5f61050f5fd35ad"),
    (Needles(), needles, "3e36e3546dc72340"),
    (Needles(keys=1, values=4), needles, "676b26ddf31c0b81"),
    (Needles(length=66, keys=4, values=3, queries=4, names=12, times=(1,)), needles, "f85ca2ae6b62d9f9"),
    (Variables(), variables, "1e0b1e1966e1c191"),
    (Variables(ask="variables", hops=4), variables, "f722d878fba3efcf"),
    (LengthCopy(), copied, "e95e30ed9d9204e2"),
]
IDS = [f"{task.name}_{i}" for i, (task, *_) in enumerate(CASES)]


@pytest.mark.parametrize(("task", "oracle", "pinned"), CASES, ids=IDS)
def test_the_inputs_give_every_answer(task: Task, oracle: Oracle, pinned: str) -> None:
    assert_solved(task, oracle)
    assert task.ceiling == 1.0


@pytest.mark.parametrize(("task", "oracle", "pinned"), CASES, ids=IDS)
def test_streams_are_pinned(task: Task, oracle: Oracle, pinned: str) -> None:
    """If this fails, data of recorded trials has changed: raise the task's version."""
    assert fingerprint(task) == pinned


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["forgetting_mqar", "compositional_mqar", "ruler_needles", "ruler_variables", "length_copy"]
)
def test_a_recall_proxy_passes_its_checks(name: str) -> None:
    assert [result for result in check_task(name) if not result.passed] == []


def random(address: str = "test") -> Random:
    return Random(address, torch.device("cpu"))


def test_slots_follow_the_power_law() -> None:
    slots = power_slots(random(), 6, 0.3, 30_000, 2)
    weights = np.arange(1, 7) ** (0.3 - 1)
    share = weights / weights.sum()
    pairs = [(a, b) for a in range(6) for b in range(6) if a != b]
    drawn = Counter(map(tuple, slots.tolist()))
    expected = np.array([share[a] * share[b] / (1 - share[a]) for a, b in pairs])
    assert stats.chisquare([drawn[pair] for pair in pairs], expected * 30_000).pvalue > RARE_EVENT


def test_all_ways_to_spread_parts_are_equally_likely() -> None:
    places = Counter(map(tuple, spread(random(), 10, 3, 20_000, 2).tolist()))
    ways = {(a, b) for a in range(8) for b in range(a + 3, 8)}
    assert places.keys() == ways
    assert stats.chisquare(list(places.values())).pvalue > RARE_EVENT


def test_any_key_may_be_updated_and_its_new_value_is_another() -> None:
    task = ForgettingMQAR(length=32, pairs=4, updates=2, vocab_size=64)
    batch = task.batch("train", 5000, seed=0, step=0)
    assert all(len(set(row)) == 6 for row in batch.inputs[:, 1:12:2].tolist())
    again = (batch.inputs[:, 8:12:2, None] == batch.inputs[:, None, 0:8:2]).int().argmax(2)
    assert (again[:, 0] != again[:, 1]).all()
    assert stats.chisquare(np.bincount(again.flatten(), minlength=4)).pvalue > RARE_EVENT


def test_accuracy_is_also_that_of_updated_and_of_kept_keys() -> None:
    task = ForgettingMQAR(length=32, pairs=4, updates=1, vocab_size=64)
    batch = task.batch("test", 50, seed=0, step=0)
    # A model that names the first value of each key.
    rows = [dict(reversed([*zip(row[0:10:2], row[1:10:2], strict=True)])) for row in batch.inputs.tolist()]
    asked = (batch.targets != IGNORE).nonzero().tolist()
    named = torch.tensor([rows[row][int(batch.inputs[row, place])] for row, place in asked])
    measured = task.measure(batch, torch.nn.functional.one_hot(named, 64).float())
    assert {name: [float(x) for x in pair] for name, pair in measured.items() if name != "loss"} == {
        "accuracy": [150, 200], "updated": [0, 50], "kept": [150, 150],
    }  # fmt: skip


def test_needles_are_counted_by_their_depth() -> None:
    task = Needles()
    batch = task.batch("test", 300, seed=0, step=0)
    kinds = task.kinds(batch)
    assert torch.stack([*kinds.values()]).sum(0).eq(1).all()
    assert all(70 < int(kind.sum()) < 130 for kind in kinds.values())


def test_chains_keep_their_order_and_mix() -> None:
    task = Variables(length=24, chains=2, hops=1, names=8, times=(1,))
    mixed = 0
    for inputs in task.batch("train", 300, seed=0, step=0).inputs.tolist():
        lines = [inputs[i + 1 : i + 3] for i, token in enumerate(inputs) if token == 0]
        seen: set[int] = set()
        for name, before in lines:
            assert before >= 18 + 8 or before in seen
            seen.add(name)
        mixed += all(a[0] != b[1] for a, b in pairwise(lines))
    assert 70 < mixed < 130  # one of three orders


def test_strings_of_training_have_all_lengths() -> None:
    inputs = LengthCopy(lengths=(3, 6)).batch("train", 4000, seed=0, step=0).inputs
    counts = np.bincount((inputs == 26).int().argmax(1), minlength=7)
    assert counts[:3].sum() == 0
    assert stats.chisquare(counts[3:]).pvalue > RARE_EVENT
    assert {label: task.length for label, task in LengthCopy().evaluations().items()} == {
        "32": 64,
        "64": 128,
        "128": 256,
    }


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("forgetting_mqar", {"pairs": 0}, "parameter 'pairs' must be at least 1, not 0"),
        ("forgetting_mqar", {"updates": 9}, "parameter 'updates' must be between 1 and pairs = 8, not 9"),
        ("forgetting_mqar", {"length": 65}, "parameter 'length' must be even, not 65"),
        ("forgetting_mqar", {"length": 38}, "parameter 'length' must be at least 4 x pairs + 2 x updates = 40, not 38"),
        ("forgetting_mqar", {"vocab_size": 25}, "must be at least 2 x (pairs + updates + 1) = 26, not 25"),
        ("forgetting_mqar", {"power": 0}, "parameter 'power' must be above 0, not 0"),
        ("compositional_mqar", {"side": 1}, "parameter 'side' must be at least 2, not 1"),
        ("compositional_mqar", {"length": 53}, "parameter 'length' must be at least 6 x side^2 = 54, not 53"),
        ("compositional_mqar", {"vocab_size": 26}, "parameter 'vocab_size' must be at least 3 x side^2 = 27, not 26"),
        ("compositional_mqar", {"power": -1.0}, "parameter 'power' must be above 0, not -1.0"),
        ("ruler_needles", {"values": 0}, "parameter 'values' must be at least 1, not 0"),
        ("ruler_needles", {"queries": 5}, "parameter 'queries' must be at most keys = 4, not 5"),
        ("ruler_needles", {"names": 3}, "parameter 'names' must be at least keys x values = 4, not 3"),
        ("ruler_needles", {"length": 13}, "parameter 'length' must be at least 14, for needles and questions, not 13"),
        ("ruler_needles", {"times": [0]}, "parameter 'times' must all be at least 1, not (0,)"),
        ("ruler_variables", {"ask": "name"}, "unknown ask 'name'"),
        ("ruler_variables", {"chains": 1}, "parameter 'chains' must be at least 2, not 1"),
        ("ruler_variables", {"hops": 0}, "parameter 'hops' must be at least 1, not 0"),
        ("ruler_variables", {"names": 11}, "parameter 'names' must be at least chains x (hops + 1) = 12, not 11"),
        ("ruler_variables", {"length": 43}, "parameter 'length' must be at least 44, for chains and questions, not 43"),
        ("length_copy", {"lengths": [0, 4]}, "parameter 'lengths' must begin at 1 or above, not (0, 4)"),
        ("length_copy", {"lengths": [5, 4]}, "parameter 'lengths' must not end before they begin, not (5, 4)"),
        ("length_copy", {"symbols": 1}, "parameter 'symbols' must be at least 2, not 1"),
        ("length_copy", {"times": []}, "parameter 'times' must name a multiple of the length, not ()"),
    ],
)
def test_a_recall_proxy_refuses(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        deltalab.get_task(name, **parameters)
    assert message in str(error.value)
    assert f"task '{name}'" in str(error.value)
    assert "\n" not in str(error.value)
