"""The kernels of random numbers give the bits of PyTorch's operators, in Triton's interpreter or on a GPU."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from tests.support.folders import ROOT

from deltalab.kernels.step import random as kernels
from deltalab.ops.backends import NONE, Kernels, available
from deltalab.tasks import MQAR, Random
from deltalab.tasks.batches import TrainingBatches
from deltalab.tasks.randomness import Together, hashed

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGE = 2**40
MIXTURE = {"length": 24, "pairs": 4, "vocab_size": 32, "mixture": ((24, 4, 1), (16, 2, 2))}


def on(device: torch.device, random: Random) -> Random:
    rows = None if random.rows is None else random.rows.to(device)
    if isinstance(random, Together):
        starts = {stream: start.to(device) for stream, start in random.starts.items()}
        return replace(random, device=device, rows=rows, starts=starts)
    return replace(random, device=device, rows=rows)


def both(random: Random, draw: Callable[[Random], Tensor], having: Callable[[str], Kernels] = available) -> Tensor:
    """Draws without kernels on the CPU and with them, and asserts that both are equal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltalab.tasks.randomness.automatic", lambda device: NONE)
        wanted = draw(random)
        patch.setattr("deltalab.tasks.randomness.automatic", having)
        actual = draw(on(DEVICE, random)).cpu()
    assert actual.dtype == wanted.dtype
    assert torch.equal(actual, wanted)
    return actual


def together(parts: int, rows: Tensor | None) -> Together:
    """Streams whose starts are a column of a table, as in a feed."""
    starts = torch.tensor([[0, hashed(str(part), "s")] for part in range(parts)])[:, 1]
    return Together("", CPU, rows=rows, starts={"s": starts})


def assert_right(random: Random, *shape: int) -> None:
    seen = both(random, lambda r: r.words("s", *shape))
    assert seen.unique().numel() == seen.numel()
    both(random, lambda r: r.exponential("s", *shape))
    for below in (1, 3, LARGE):
        both(random, lambda r, below=below: r.integers("s", below, *shape))
    for form in (shape[-1:], (shape[0], *[1] * (len(shape) - 1)), shape):
        below = 1 + torch.arange(torch.Size(form).numel()).view(form)
        both(random, lambda r, below=below: r.integers("s", below.to(r.device), *shape))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    parts=st.integers(1, 3),
    size=st.integers(1, 3),
    rest=st.sampled_from([(), (1,), (5,), (2, 3), (100,)]),
    rows=st.sampled_from([None, "of each", "of all"]),
    block=st.sampled_from([16, 256]),
)
def test_numbers_of_any_parts_and_rows(
    parts: int, size: int, rest: tuple[int, ...], rows: str | None, block: int
) -> None:
    given = {None: None, "of each": size, "of all": parts * size}[rows]
    table = None if given is None else (LARGE + torch.randperm(2 * given))[::2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "BLOCK", block)
        assert_right(together(parts, table), parts * size, *rest)
        if parts == 1:
            assert_right(Random("an address", CPU, rows=table), size, *rest)


def start_of(word: int) -> int:
    """The start of a stream whose first word this is: SplitMix64 backwards."""
    mask = 2**64 - 1
    for bits, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        unmixed = word
        for _ in range(3):
            unmixed = word ^ unmixed >> bits
        word = unmixed * pow(factor, -1, 2**64) & mask
    start = (word - 0x9E3779B97F4A7C15) & mask
    return start - 2**64 if start >> 63 else start


def test_the_smallest_and_the_largest_words() -> None:
    """Also words whose uniform numbers are the smallest, the largest, and next to a power of 2."""
    words = [0, 1, 2, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, 2**12, 2**12 - 1]
    words += [2**at + by for at in (13, 40, 62, 63) for by in (-(2**12), -1, 0, 2**12)]
    random = Together("", CPU, starts={"s": torch.tensor([start_of(word) for word in words])})
    count = len(words)
    assert [word % 2**64 for word in both(random, lambda r: r.words("s", count)).tolist()] == words
    for below in (1, 2, 2**31, 2**53, 2**63 - 1):
        actual = both(random, lambda r, below=below: r.integers("s", below, count))
        assert actual.tolist() == [(word >> 1) % below for word in words]
    waits = both(random, lambda r: r.exponential("s", count))
    assert 0 < float(waits.min()) < 2e-16
    assert float(waits.max()) == pytest.approx(53 * 0.6931471805599453)


@settings(max_examples=15, deadline=None)
@given(
    parts=st.integers(1, 2),
    rest=st.sampled_from([(1,), (2,), (7,), (2, 3), (2, 1), (16,), (17,), (33,)]),
    spare=st.sampled_from([0, 1, 20, LARGE]),
    given=st.booleans(),
    tile=st.sampled_from([64, 1024]),
)
def test_choices_of_any_count(parts: int, rest: tuple[int, ...], spare: int, given: bool, tile: int) -> None:
    random, below = together(parts, torch.tensor([5, 3]) if given else None), rest[-1] + spare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TILE", tile)
        actual = both(random, lambda r: r.distinct("s", below, 2 * parts, *rest))
    assert (actual.sort(-1).values.diff() > 0).all()


def test_a_choice_that_is_too_wide_is_made_by_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "distinct_kernel", None)

    def narrow(device: str) -> Kernels:
        return available(device)._replace(most_distinct=4)

    both(Random("a", CPU), lambda r: r.distinct("s", 9, 2, 5), narrow)
    with pytest.raises(TypeError):
        both(Random("a", CPU), lambda r: r.distinct("s", 9, 2, 4), narrow)


@pytest.mark.parametrize("kernel", [False, True])
def test_parts_that_are_not_equal_are_refused(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error tells a feed that a task does not draw in rows."""
    monkeypatch.setattr("deltalab.tasks.randomness.automatic", available if kernel else lambda device: NONE)
    for count, rows in ((1, None), (3, None), (4, 3), (3, 3)):
        random = on(DEVICE, together(2, None if rows is None else torch.arange(rows)))
        for draw in (random.words, random.exponential):
            with pytest.raises(RuntimeError):
                draw("s", count, 2)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"train_examples": 9}, {"mixture": ()}], ids=str)
def test_a_feed_draws_the_same(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    task = MQAR(**{**MIXTURE, "random_non_queries": True, **given})
    monkeypatch.setattr("deltalab.tasks.randomness.automatic", available)
    feed = TrainingBatches(task, 3, [5, 7, 5], DEVICE, 2)
    feed.load(10, 12)
    inputs, targets = (x.cpu() for x in feed.draw(torch.tensor(1, device=DEVICE)))
    monkeypatch.setattr("deltalab.tasks.randomness.automatic", lambda device: NONE)
    for i, seed in enumerate([5, 7, 5]):
        batch = task.batch("train", 3, seed, step=11)
        assert torch.equal(inputs[i], batch.inputs)
        assert torch.equal(targets[i], batch.targets)


COMPILED = """
import sys
import torch, triton
from triton.runtime import jit
from deltalab.kernels.step import random
from deltalab.ops.backends import NONE, available

sys.path.insert(0, "benchmarks")
import sass

made, compiler, compile = [], sass.Compiler(), triton.compile
triton.compile = lambda *args, **options: made.append(compile(*args, **options)) or made[-1]
jit.JITFunction.run = lambda kernel, *args, **options: compiler.run(kernel, *args, **options)
random.exponential(torch.zeros(1, dtype=torch.int64), None, (2, 3), terms=12)
print(made[0].metadata.enable_fp_fusion, made[0].asm["ptx"])
"""


@pytest.mark.slow
def test_a_compiler_rounds_each_operation() -> None:
    """Compiled for an H100. PyTorch's operators on a CPU round a product before they add to it, and divide exactly."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILED]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "\nFalse " in run.stdout  # ptxas is told the same.
    assert "fma" not in run.stdout
    assert {word for word in run.stdout.split() if ".f64" in word} == {
        f"{operation}.rn.f64" for operation in ("add", "sub", "mul", "div")
    } | {"cvt.rn.f64.s64", "cvt.rn.f64.u64"}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [None, 2560, 512])
def test_numbers_of_real_batches(rows: int | None) -> None:
    table = None if rows is None else torch.randint(LARGE, (rows,), generator=torch.Generator().manual_seed(0))
    assert_right(together(5, table), 2560, 448)
    assert_right(Random("a", CPU, rows=table), rows or 2560, 4, 100)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 3, 4, 16, 64, 100, 256])
@pytest.mark.parametrize("spare", [0, 1, 4096])
def test_choices_of_real_batches(count: int, spare: int) -> None:
    both(together(5, None), lambda r: r.distinct("s", count + spare, 2560, count))


@pytest.mark.gpu
@pytest.mark.parametrize("given", [{}, {"train_examples": 1000}, MIXTURE], ids=str)
def test_a_graph_draws_what_a_cpu_draws(given: dict[str, Any]) -> None:
    task = MQAR(**{"length": 64, "pairs": 4, **given})
    feed, row = TrainingBatches(task, 128, [1, 2, 3], DEVICE, 4), torch.zeros((), dtype=torch.int64, device=DEVICE)
    feed.load(0, 4)
    feed.draw(row)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = feed.draw(row)
    for begin, step in ((0, 0), (0, 3), (100, 101)):
        feed.load(begin, begin + 4)
        row.fill_(step - begin)
        graph.replay()
        for i, seed in enumerate([1, 2, 3]):
            batch = task.batch("train", 128, seed, step)
            assert torch.equal(drawn[0][i].cpu(), batch.inputs)
            assert torch.equal(drawn[1][i].cpu(), batch.targets)
