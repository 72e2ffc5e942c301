"""Depo, Brevo, Mano and Lano: plain solvers of the inputs give every answer, or as many as the ceiling says."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.oracles import RARE_EVENT, Oracle, assert_solved, fingerprint

import deltalab
from deltalab import check_task
from deltalab.errors import InputError
from deltalab.tasks import Task
from deltalab.tasks.proxies.physics.brevo import Brevo
from deltalab.tasks.proxies.physics.depo import Depo
from deltalab.tasks.proxies.physics.lano import Lano, ceiling, tables
from deltalab.tasks.proxies.physics.mano import Mano


def successors(task: Any, inputs: list[int]) -> dict[int, int]:
    end = 2 * task.nodes
    after = dict(zip(inputs[0:end:2], inputs[1:end:2], strict=True))
    assert after.keys() == set(after.values())
    found = {}
    for place in range(end, task.length, 3):
        node = inputs[place + 1]
        for _ in range(inputs[place] - task.names + 1):
            node = after[node]
        found[place + 1] = node
    return found


def ancestors(task: Any, inputs: list[int]) -> dict[int, int]:
    query, answer, blank = range(task.names, task.names + 3)
    end = inputs.index(query)
    edges = [edge for edge in zip(inputs[0:end:2], inputs[1:end:2], strict=True) if edge[0] != blank]
    assert len(set(edges)) == len(edges)
    parents: dict[int, set[int]] = {}
    for parent, child in edges:
        parents.setdefault(child, set()).add(parent)
    assert max(map(len, parents.values())) <= task.parents
    assert inputs[end + 2] == answer
    todo = [inputs[end + 1]]
    wanted: set[int] = set()
    while todo:
        new = parents.get(todo.pop(), set()) - wanted
        wanted |= new
        todo += new
    found: list[int] = []
    while len(found) < len(wanted):
        ready = [node for node in wanted - {*found} if parents.get(node, set()) <= {*found}]
        found.append(min(ready, key=inputs.index))
    return {end + 2 + i: node for i, node in enumerate(found)}


def value(task: Any, inputs: list[int]) -> dict[int, int]:
    end = inputs.index(26)
    tokens = iter(inputs[1:end])
    operations = 0

    def part() -> int:
        nonlocal operations
        token = next(tokens)
        if token < 23:
            return token
        operations += 1
        x, y = part(), part()
        return (x + y if token == 23 else x - y if token == 24 else x * y) % 23

    found = part()
    assert next(tokens, None) is None
    assert operations == inputs[0] - 28
    return {end: found}


def starts_of(task: Any, string: list[int]) -> set[int]:
    """All start symbols that a string can be derived from: for each level, which symbol can be between which places."""
    spans = {(i, i + 1, symbol) for i, symbol in enumerate(string)}
    for rules in reversed(tables(task.grammar, task.levels, task.starts, torch.device("cpu"))):
        ends: dict[tuple[int, int], set[int]] = {}
        for begin, end, symbol in spans:
            ends.setdefault((begin, symbol), set()).add(end)
        spans = set()
        for symbol, sides in enumerate(rules.tolist()):
            for side in sides:
                for begin in range(len(string)):
                    reached = {begin}
                    for part in side:
                        reached = reached if part < 0 else {end for i in reached for end in ends.get((i, part), ())}
                    spans |= {(begin, end, symbol) for end in reached}
    return {symbol for begin, end, symbol in spans if begin == 0 and end == len(string)}


def start(task: Any, inputs: list[int]) -> dict[int, int]:
    end = inputs.index(3)
    (found,) = starts_of(task, inputs[:end])
    return {end: 5 + found}


CASES: list[tuple[Task, Oracle, str]] = [
    (Depo(), successors, "e663ff95eacede7a"),
    (Depo(nodes=5, hops=4, queries=4, names=5), successors, "73c29bbf4f323718"),
    (Brevo(), ancestors, "29a5cc9c64e90739"),
    (Brevo(nodes=16, parents=4, names=16), ancestors, "8c256fdb9e026e1b"),
    (Brevo(nodes=4, parents=1, names=9), ancestors, "41ee417e5165b9fd"),
    (Mano(), value, "96504dea7d9ec79d"),
    (Mano(operations=(1, 12)), value, "c31464ec88eaf1a0"),
    (Lano(levels=3), start, "783ffc26a79d5917"),
]
IDS = [f"{task.name}_{i}" for i, (task, *_) in enumerate(CASES)]


@pytest.mark.parametrize(("task", "oracle", "pinned"), CASES, ids=IDS)
def test_the_inputs_give_every_answer(task: Task, oracle: Oracle, pinned: str) -> None:
    assert_solved(task, oracle, size=50)


@pytest.mark.parametrize(("task", "oracle", "pinned"), CASES, ids=IDS)
def test_streams_are_pinned(task: Task, oracle: Oracle, pinned: str) -> None:
    """If this fails, data of recorded trials has changed: raise the task's version."""
    assert fingerprint(task) == pinned


@pytest.mark.slow
@pytest.mark.parametrize("name", ["depo", "brevo", "mano", "lano"])
def test_a_task_of_physics_passes_its_checks(name: str) -> None:
    assert [result for result in check_task(name) if not result.passed] == []


def test_hops_are_uniform_and_counted_apart() -> None:
    task = Depo()
    batch = task.batch("test", 500, seed=0, step=0)
    counts = [int(kind.sum()) for kind in task.kinds(batch).values()]
    assert sum(counts) == 500 * task.queries
    assert stats.chisquare(counts).pvalue > RARE_EVENT


def test_a_graph_has_as_many_roots_as_the_law_says() -> None:
    task = Brevo(nodes=9, parents=2, names=9)
    roots = Counter[int]()
    for inputs in task.batch("train", 1500, seed=0, step=0).inputs.tolist():
        edges = inputs[: inputs.index(9)]
        roots[9 - len({*edges[1::2]} - {11})] += 1
    assert roots.keys() == {1, 2, 3}
    assert stats.chisquare(list(roots.values())).pvalue > RARE_EVENT


def test_always_zero_has_the_accuracy_of_chance() -> None:
    for high in (1, 4, 6):
        task = Mano(operations=(1, high))
        (member,) = task.evaluations().values()
        labels = member.batch("test", 20_000, seed=0, step=0).labels
        counts = np.bincount(labels, minlength=23)
        assert stats.binomtest(int(counts[0]), 20_000, task.chance).pvalue > RARE_EVENT
        assert stats.chisquare(counts[1:]).pvalue > RARE_EVENT


@pytest.mark.slow
@pytest.mark.parametrize(("grammar", "least", "most"), [(0, 0.0, 0.01), (1, 0.01, 0.06)])
def test_few_strings_have_two_starts(grammar: int, least: float, most: float) -> None:
    task = Lano(grammar=grammar)
    batch = task.batch("test", 400, seed=0, step=0)
    several = 0
    for inputs, label in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        found = starts_of(task, inputs[: inputs.index(3)])
        assert label - 5 in found
        several += len(found) > 1
    assert least <= several / 400 <= most


def test_the_inputs_decide_all_but_a_grammar() -> None:
    assert {task.ceiling for task, *_ in CASES if task.name != "lano"} == {1.0}
    assert Lano(levels=3).ceiling == pytest.approx(1, abs=0.01)


def derived(rules: list[torch.Tensor], symbol: int) -> Counter[tuple[int, ...]]:
    """The probability of each string that a symbol becomes, by all derivations."""
    if not rules:
        return Counter({(symbol,): 1.0})
    found = Counter[tuple[int, ...]]()
    for side in rules[0][symbol].tolist():
        strings = Counter({(): 0.5})
        for part in [part for part in side if part >= 0]:
            ends = derived(rules[1:], part)
            strings = Counter({a + b: p * q for a, p in strings.items() for b, q in ends.items()})
        found.update(strings)
    return found


@pytest.mark.parametrize(("grammar", "starts"), [(0, 4), (1, 4), (2, 9)])
def test_the_ceiling_of_a_grammar_is_that_of_all_its_strings(
    grammar: int, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltalab.tasks.proxies.physics.lano.STRINGS", 2000)
    rules = tables(grammar, 2, starts, torch.device("cpu"))
    from_start = [derived(rules, start) for start in range(starts)]
    best = sum(max(found[string] for found in from_start) for string in set().union(*from_start)) / starts
    assert ceiling.__wrapped__(grammar, 2, starts) == pytest.approx(best, abs=0.02)


def test_no_two_rules_of_a_level_have_one_right_side() -> None:
    for number in range(20):
        for level, rules in enumerate(tables(number, 4, 9, torch.device("cpu"))):
            sides = {*map(tuple, rules.flatten(0, 1).tolist())}
            assert len(sides) == 2 * (9 if level == 0 else 3)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("depo", {"nodes": 2}, "parameter 'nodes' must be at least 3, not 2"),
        ("depo", {"hops": 16}, "parameter 'hops' must be at least 1 and below nodes = 16, not 16"),
        ("depo", {"queries": 0}, "parameter 'queries' must be at least 1 and below nodes = 16, not 0"),
        ("depo", {"names": 15}, "parameter 'names' must be at least nodes = 16, not 15"),
        ("brevo", {"nodes": 3}, "parameter 'nodes' must be at least 4, not 3"),
        ("brevo", {"parents": 0}, "parameter 'parents' must be at least 1, not 0"),
        ("brevo", {"names": 9}, "parameter 'names' must be at least nodes = 10, not 9"),
        ("mano", {"operations": [0, 2]}, "parameter 'operations' must begin at 1 or above, not (0, 2)"),
        ("mano", {"operations": [3, 2]}, "parameter 'operations' must not end before they begin, not (3, 2)"),
        ("lano", {"levels": 7}, "parameter 'levels' must be between 1 and 6, not 7"),
        ("lano", {"starts": 10}, "parameter 'starts' must be between 2 and 9, not 10"),
    ],
)
def test_a_task_of_physics_refuses(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        deltalab.get_task(name, **parameters)
    assert str(error.value) == f"task '{name}': {message}"
