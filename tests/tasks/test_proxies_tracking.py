"""Traces of programs and grammars with gaps: plain interpreters of the inputs give every answer."""

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
from deltalab.tasks import IGNORE, Task
from deltalab.tasks.proxies.tracking.program_trace import ProgramTrace
from deltalab.tasks.proxies.tracking.selectiv import Selectiv, grammar


def printed(task: Any, inputs: list[int]) -> dict[int, int]:
    memory, found = {}, {}
    for place in range(0, len(inputs), 3):
        line, x, y = inputs[place : place + 3]
        if line == 0:
            memory[x] = y
        elif line == 1:
            memory[x], memory[y] = memory[y], memory[x]
        else:
            found[place + 1] = memory[x]
            assert y == memory[x]
    return found


def states(task: Any, inputs: list[int]) -> dict[int, int]:
    symbols, copies = task.symbols, task.copies
    shifts, moves = (x.tolist() for x in grammar(task.grammar, symbols, copies, task.branches, torch.device("cpu")))
    symbol, copy = divmod(inputs[0] - symbols, copies)
    found = {}
    for place, shown in enumerate(inputs[1:], 1):
        legal = {(symbol + shifts[copy][branch]) % symbols: branch for branch in range(task.branches)}
        if shown in legal:
            symbol, copy = shown, moves[legal[shown]][copy]
            found[place] = symbols + symbol * copies + copy
    return found


CASES: list[tuple[Task, Oracle, str]] = [
    (ProgramTrace(), printed, "ea2890dbea96372e"),
    (ProgramTrace(variables=3, lines=1, reveal=0.0), printed, "a202c95b73fdd101"),
    (ProgramTrace(variables=8, lines=33, reveal=0.5), printed, "ddcb7bbd41ed16a7"),
    (Selectiv(), states, "0cbaedfad66e182a"),
    (Selectiv(length=2, symbols=3, copies=1, branches=2, gap=0.5), states, "a1925b69f75c09af"),
    (Selectiv(length=100, symbols=9, copies=5, branches=6, gap=0.0, grammar=3), states, "3b58a09c3573936e"),
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
@pytest.mark.parametrize("name", ["program_trace", "selectiv"])
def test_a_tracking_proxy_passes_its_checks(name: str) -> None:
    assert [result for result in check_task(name) if not result.passed] == []


def test_lines_follow_the_stated_law() -> None:
    task = ProgramTrace(variables=4, lines=40, reveal=0.3)
    lines = task.batch("train", 300, seed=0, step=0).inputs.view(300, 44, 3)[:, 4:]
    assert (lines[:, -1, 0] == 2).all()
    early = lines[:, :-1].flatten(0, 1)
    prints = early[:, 0] == 2
    assert stats.binomtest(int(prints.sum()), len(early), 0.3).pvalue > RARE_EVENT
    swaps = Counter(map(tuple, (early[~prints][:, 1:] - 3).tolist()))
    assert swaps.keys() == {(x, y) for x in range(4) for y in range(4) if x != y}
    assert stats.chisquare(list(swaps.values())).pvalue > RARE_EVENT


def test_states_are_equally_frequent_and_gaps_as_many_as_said() -> None:
    task = Selectiv(length=40, gap=0.25)
    batch = task.batch("train", 1000, seed=0, step=0)
    last = batch.targets[:, -1]
    assert stats.chisquare(np.bincount(last[last != IGNORE] - 6, minlength=48)).pvalue > RARE_EVENT
    assert stats.binomtest(int((batch.targets[:, 1:] == IGNORE).sum()), 39_000, 0.25).pvalue > RARE_EVENT


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("program_trace", {"variables": 2}, "parameter 'variables' must be at least 3, not 2"),
        ("program_trace", {"lines": 0}, "parameter 'lines' must be at least 1, not 0"),
        ("program_trace", {"reveal": 1}, "parameter 'reveal' must be at least 0 and below 1, not 1.0"),
        ("program_trace", {"times": [1, 1]}, "parameter 'times' must all be different, not (1, 1)"),
        ("selectiv", {"length": 1}, "parameter 'length' must be at least 2, not 1"),
        ("selectiv", {"copies": 0}, "parameter 'copies' must be at least 1, not 0"),
        ("selectiv", {"branches": 1}, "parameter 'branches' must be at least 2, not 1"),
        ("selectiv", {"symbols": 3}, "parameter 'symbols' must be above branches = 3, not 3"),
        ("selectiv", {"gap": -0.1}, "parameter 'gap' must be at least 0 and below 1, not -0.1"),
        ("selectiv", {"times": []}, "parameter 'times' must name a multiple of the length, not ()"),
    ],
)
def test_a_tracking_proxy_refuses(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        deltalab.get_task(name, **parameters)
    assert str(error.value) == f"task '{name}': {message}"
