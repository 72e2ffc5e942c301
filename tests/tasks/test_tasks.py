"""Batches are a function of their address alone and follow the stated law; metrics equal a plain loop's."""

import math
import mmap
import pickle
import re
from collections import Counter
from hashlib import sha256
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from deltalab.errors import InputError
from deltalab.tasks import BUILTIN, IGNORE, MQAR, NIAH, SPLITS, Batch, Random, Task, Text
from deltalab.tasks import corpus as corpus_module
from deltalab.tasks.corpus import Corpus, corpus_path, load
from deltalab.tasks.digits import Digits
from deltalab.tasks.images.digit_patches import DigitPatches
from deltalab.tasks.images.shapes import Shapes
from deltalab.tasks.kjv_jargon import FINGERPRINT, FOLDER, cut
from deltalab.tasks.mod_arithmetic import ModArithmetic
from deltalab.tasks.proxies.task import Proxy
from deltalab.tasks.text import open_corpus
from deltalab.tasks.word_problem import WordProblem

RARE_EVENT = 1e-4  # every draw here is fixed, so a test below this p-value fails always or never

TASKS = [
    pytest.param(MQAR(length=32, pairs=4, vocab_size=64), id="mqar"),
    pytest.param(MQAR(length=32, pairs=8, vocab_size=32, random_non_queries=True), id="mqar_filled"),
    pytest.param(
        MQAR(length=64, pairs=8, vocab_size=64, mixture=((32, 4, 2), (64, 8, 1)), random_non_queries=True),
        id="mqar_mixture",
    ),
    pytest.param(MQAR(length=32, pairs=4, vocab_size=64, train_examples=10_000), id="mqar_pool"),
    pytest.param(Text(length=48), id="text"),
    pytest.param(NIAH(variant=1, length=48), id="niah_1"),
    pytest.param(NIAH(variant=3, length=100), id="niah_3"),
    pytest.param(Digits(both_ways=True), id="digits"),
    pytest.param(DigitPatches(), id="digit_patches"),
    pytest.param(Shapes(side=16), id="shapes"),
]


def random(address: str = "test") -> Random:
    return Random(address, torch.device("cpu"))


def same(a: Batch, b: Batch) -> bool:
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)


def scored(batch: Batch, vocab_size: int, seed: int = 0) -> Tensor:
    """Random logits for the scored positions."""
    count = int((batch.targets != IGNORE).sum())
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed))


def value(task: Task, metric: str, batch: Batch, logits: Tensor) -> float:
    total, count = task.measure(batch, logits)[metric]
    assert total.shape == count.shape == ()
    return float(total / count)


# --- random numbers -----------------------------------------------------------------------------------------


def splitmix64(state: int, count: int) -> list[int]:
    """The published algorithm on Python integers."""
    words, mask = [], 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        words.append(z ^ (z >> 31))
    return words


def test_words_are_splitmix64() -> None:
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    start = int.from_bytes(sha256(b"an address/a stream").digest()[:8], "little")
    words = random("an address").words("a stream", 20, 5)
    assert [word % 2**64 for word in words.flatten().tolist()] == splitmix64(start, 100)


def test_exponential_is_minus_log_of_a_uniform() -> None:
    drawn = random().exponential("e", 20_000)
    uniform = [((word % 2**64 >> 12) + 0.5) / 2**52 for word in random().words("e", 20_000).tolist()]
    assert np.abs(drawn.numpy() + np.log(uniform)).max() < 1e-12
    assert stats.kstest(drawn.numpy(), "expon").pvalue > RARE_EVENT


def test_exponential_does_not_depend_on_the_default_dtype() -> None:
    drawn = random().exponential("e", 100)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(random().exponential("e", 100), drawn)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("below", "count"), [(1, 1), (2, 2), (9, 9), (10, 9), (40, 17), (4095, 64), (70, 64)])
def test_distinct_is_the_start_of_a_fisher_yates_shuffle(below: int, count: int) -> None:
    rows = 50
    offsets = random().integers("d", below - torch.arange(count), rows, count).tolist()
    drawn = random().distinct("d", below, rows, count).tolist()
    for offset, row in zip(offsets, drawn, strict=True):
        places = list(range(below))
        for j in range(count):
            other = j + offset[j]
            places[j], places[other] = places[other], places[j]
        assert row == places[:count]


def test_every_ordered_choice_is_equally_likely() -> None:
    drawn = Counter(map(tuple, random().distinct("d", 5, 30_000, 3).tolist()))
    assert stats.chisquare([drawn[choice] for choice in permutations(range(5), 3)]).pvalue > RARE_EVENT
    assert drawn.total() == sum(drawn[choice] for choice in permutations(range(5), 3))


# --- every task ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_batch_has_the_stated_form(task: Task) -> None:
    batch = task.batch("train", 7, seed=3, step=5)
    assert batch.targets.shape == (7, task.length)
    assert batch.targets.dtype == torch.int64
    if task.patches is None:
        assert batch.inputs.shape == (7, task.length)
        assert batch.inputs.dtype == torch.int64
        assert batch.inputs.min() >= 0
        assert batch.inputs.max() < task.vocab_size
    else:
        assert batch.inputs.shape == (7, task.length, task.patches[2])
        assert batch.inputs.dtype == torch.float32
        assert batch.inputs.abs().max() <= 4
    labels = batch.targets[batch.targets != IGNORE]
    assert labels.min() >= 0
    assert labels.max() < task.vocab_size


@pytest.mark.parametrize("task", TASKS)
def test_batch_is_a_function_of_its_address_alone(task: Task) -> None:
    torch.manual_seed(1)
    first = task.batch("train", 7, seed=3, step=5)
    torch.manual_seed(2)
    torch.nn.Linear(100, 100)
    task.batch("validation", 9, seed=0, step=1)
    state = torch.get_rng_state()
    again = task.batch("train", 7, seed=3, step=5, device=torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(again, first)
    assert same(pickle.loads(pickle.dumps(task)).batch("train", 7, seed=np.int64(3), step=5), first)


@pytest.mark.parametrize("task", TASKS)
def test_another_address_is_another_batch(task: Task) -> None:
    addresses = [(split, seed, step) for split in SPLITS for seed in (0, 1, -1) for step in (0, 1, 11)]
    batches = [str(task.batch(split, 4, seed, step).inputs.tolist()) for split, seed, step in addresses]
    assert len(set(batches)) == len(batches)


DRAWN = [
    *TASKS,
    pytest.param(MQAR(length=512, pairs=64), id="mqar_paper"),
    pytest.param(ModArithmetic(brackets=True), id="mod_arithmetic_brackets"),
    *(pytest.param(WordProblem(group=group), id=group) for group in ("S3", "A5", "S5")),
    *(pytest.param(BUILTIN[name](), id=name) for name in BUILTIN if name.startswith(("mad_", "parity", "mod_"))),
    *(pytest.param(kind(), id=name) for name, kind in BUILTIN.items() if issubclass(kind, Proxy)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("task", DRAWN)
def test_cuda_draws_what_the_cpu_draws(task: Task) -> None:
    for one, split in ((task, "train"), (task, "test"), *((one, "test") for one in task.evaluations().values())):
        for step in range(20):
            on_gpu = one.batch(split, 256, seed=0, step=step, device="cuda")
            assert on_gpu.inputs.is_cuda
            assert on_gpu.targets.is_cuda
            assert same(Batch(on_gpu.inputs.cpu(), on_gpu.targets.cpu()), one.batch(split, 256, seed=0, step=step))


@pytest.mark.gpu
def test_measures_on_cuda_as_on_the_cpu() -> None:
    for task in (MQAR(length=32, pairs=4, vocab_size=64), Text(length=48)):
        batch = task.batch("test", 16, seed=0, step=0)
        logits = scored(batch, task.vocab_size)
        there = task.measure(Batch(batch.inputs.cuda(), batch.targets.cuda()), logits.cuda())
        for metric, (total, count) in task.measure(batch, logits).items():
            assert float(there[metric][0]) == pytest.approx(float(total), rel=1e-5)
            assert float(there[metric][1]) == float(count)


def test_builtin_names() -> None:
    assert BUILTIN["mqar"] is MQAR
    assert BUILTIN["text"] is Text


def test_streams_are_pinned() -> None:
    """If this fails, data of recorded trials has changed: raise the task's version."""
    batch = MQAR(length=64, pairs=8, random_non_queries=True).batch("train", 16, seed=1, step=2)
    content = batch.inputs.numpy().astype("<i8").tobytes() + batch.targets.numpy().astype("<i8").tobytes()
    assert sha256(content).hexdigest() == "dce407b724bdeda005c6abfee09daf1ec0e3a6b8a16fcef59b9c265d4ca54a8a"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            ("valid", 4, 0, 0),
            "task 'mqar': unknown split 'valid'; did you mean 'validation'? allowed: train, ",
        ),
        (("train", 0, 0, 0), "task 'mqar': a batch has at least 1 example, not 0"),
    ],
)
def test_bad_address(address: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(InputError) as error:
        MQAR(length=16, pairs=4).batch(*address)
    assert str(error.value).startswith(message)


# --- mqar ---------------------------------------------------------------------------------------------------


def plain_mqar(task: MQAR, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """One example by the letter of the paper: loops, and slots drawn one after the other."""
    context, half = 2 * task.pairs, task.vocab_size // 2
    keys = rng.choice(np.arange(1, half), task.pairs, replace=False)
    values = rng.choice(np.arange(half, task.vocab_size), task.pairs, replace=False)
    inputs, targets = [0] * task.length, [IGNORE] * task.length
    for j, (key, answer) in enumerate(zip(keys, values, strict=True)):
        inputs[2 * j], inputs[2 * j + 1] = key, answer
    weights = np.arange(1, (task.length - context) // 2 + 1) ** (task.power - 1)
    for key, answer in zip(keys, values, strict=True):
        slot = rng.choice(len(weights), p=weights / weights.sum())
        weights[slot] = 0
        inputs[context + 2 * slot], targets[context + 2 * slot] = key, answer
    return inputs, targets


def slots_of(task: MQAR, inputs: Tensor) -> Tensor:
    """[B, n]: the slot that each key of the context was drawn to, in an unfilled task."""
    context = 2 * task.pairs
    asked = inputs[:, None, context::2] == inputs[:, 0:context:2, None]
    assert (asked.sum(-1) == 1).all()
    return asked.int().argmax(-1)


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize(("length", "pairs", "vocab_size"), [(64, 4, 8192), (20, 5, 12), (22, 5, 13), (512, 64, 8192)])
def test_mqar_layout(length: int, pairs: int, vocab_size: int, fill: bool) -> None:
    task = MQAR(length=length, pairs=pairs, vocab_size=vocab_size, random_non_queries=fill)
    batch = task.batch("train", 40, seed=0, step=0)
    half = vocab_size // 2
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        keys, values = inputs[0 : 2 * pairs : 2], inputs[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(1 <= key < half for key in keys)
        assert all(half <= v < vocab_size for v in values)
        queries = [t for t, target in enumerate(targets) if target != IGNORE]
        assert all(t >= 2 * pairs and t % 2 == 0 for t in queries)
        assert sorted(inputs[t] for t in queries) == sorted(keys)
        assert all(dict(zip(keys, values, strict=True))[inputs[t]] == targets[t] for t in queries)
        elsewhere = [inputs[t] for t in range(2 * pairs, length) if t not in queries]
        assert fill or not any(elsewhere)


def test_mqar_slots_follow_the_law_of_a_plain_sampler() -> None:
    task = MQAR(length=16, pairs=2, vocab_size=16, power=0.3)
    rng = np.random.default_rng(0)
    plain = torch.tensor([plain_mqar(task, rng)[0] for _ in range(3000)])
    ours = task.batch("train", 30_000, seed=0, step=0).inputs
    pairs_of_slots = [(a, b) for a in range(6) for b in range(6) if a != b]
    table = []
    for inputs in (plain, ours):
        drawn = Counter(map(tuple, slots_of(task, inputs).tolist()))
        table.append([drawn[pair] for pair in pairs_of_slots])
    assert stats.chi2_contingency(table).pvalue > RARE_EVENT
    weights = np.arange(1, 7) ** (0.3 - 1)
    share = weights / weights.sum()
    exact = np.array([share[a] * share[b] / (1 - share[a]) for a, b in pairs_of_slots])
    assert stats.chisquare(table[1], exact * 30_000).pvalue > RARE_EVENT


def test_mqar_paper_slots_follow_the_power_law() -> None:
    task = MQAR(length=64, pairs=4)
    first = slots_of(task, task.batch("train", 20_000, seed=0, step=0).inputs)[:, 0]
    weights = np.arange(1, 29) ** (0.01 - 1)
    assert stats.chisquare(np.bincount(first, minlength=28), 20_000 * weights / weights.sum()).pvalue > RARE_EVENT


def test_mqar_tokens_are_uniform_and_unrelated() -> None:
    task = MQAR(length=16, pairs=3, vocab_size=19, random_non_queries=True)
    batch = task.batch("train", 20_000, seed=0, step=0)
    for position in range(6):
        drawn = np.bincount(batch.inputs[:, position], minlength=19)
        low, high = (1, 9) if position % 2 == 0 else (9, 19)
        assert stats.chisquare(drawn[low:high]).pvalue > RARE_EVENT
        assert drawn[low:high].sum() == 20_000
    gaps = batch.inputs[:, 6:][batch.targets[:, 6:] == IGNORE]
    assert stats.chisquare(np.bincount(gaps, minlength=19)).pvalue > RARE_EVENT
    joint = np.zeros((8, 10))
    np.add.at(joint, (batch.inputs[:, 0] - 1, batch.inputs[:, 1] - 9), 1)
    assert stats.chi2_contingency(joint).pvalue > RARE_EVENT


@pytest.mark.slow
@pytest.mark.parametrize("fill", [False, True])
def test_mqar_mixture_is_of_its_parts_by_weight_each_with_its_own_law(fill: bool) -> None:
    parts = ((16, 2, 3), (12, 3, 2), (20, 1, 1))  # told apart by their pairs
    task = MQAR(length=20, pairs=1, vocab_size=16, power=0.3, mixture=parts, random_non_queries=fill)
    batch = task.batch("train", 30_000, seed=0, step=0)
    asked = (batch.targets != IGNORE).sum(1)
    drawn = [int((asked == pairs).sum()) for _, pairs, _ in parts]
    assert sum(drawn) == 30_000
    assert stats.chisquare(drawn, [15_000, 10_000, 5_000]).pvalue > RARE_EVENT
    for length, pairs, _ in parts:
        inputs, targets = batch.inputs[asked == pairs], batch.targets[asked == pairs]
        assert not inputs[:, length:].any()
        assert (targets[:, length:] == IGNORE).all()
        row, position = (targets != IGNORE).nonzero().T
        answers = dict.fromkeys(range(len(inputs)), ())
        for example, at in zip(row.tolist(), position.tolist(), strict=True):
            context = inputs[example, : 2 * pairs].tolist()
            found = dict(zip(context[0::2], context[1::2], strict=True))[int(inputs[example, at])]
            assert int(targets[example, at]) == found
            answers[example] += (int(inputs[example, at]),)
        assert all(len(set(keys)) == pairs for keys in answers.values())
        # The slot of the first key of the context.
        first = position[inputs[row, position] == inputs[row, 0]]
        slots = length // 2 - pairs
        weights = np.arange(1, slots + 1) ** (0.3 - 1)
        counts = np.bincount((first - 2 * pairs) // 2, minlength=slots)
        assert stats.chisquare(counts, len(inputs) * weights / weights.sum()).pvalue > RARE_EVENT
        gaps = inputs[:, 2 * pairs : length][targets[:, 2 * pairs : length] == IGNORE]
        assert bool(gaps.any()) == fill
        assert not fill or stats.chisquare(np.bincount(gaps, minlength=16)).pvalue > RARE_EVENT


def test_mqar_is_evaluated_at_its_tests() -> None:
    task = MQAR(length=64, pairs=8, mixture=((32, 4, 2), (64, 8, 1)), tests=((32, 4), (128, 32)), train_examples=9)
    found = task.evaluations()
    assert {label: (other.length, other.pairs) for label, other in found.items()} == {
        "32x4": (32, 4),
        "128x32": (128, 32),
    }
    alone = MQAR(length=32, pairs=4)
    assert same(found["32x4"].batch("test", 8, 0, 0), alone.batch("test", 8, 0, 0))
    assert {*map(tuple, task.batch("train", 200, 0, 0).inputs.tolist())} == {
        *map(tuple, task.batch("train", 200, 0, 1).inputs.tolist())
    }, "all nine examples, twice"
    assert alone.evaluations() == {"": alone}


def test_mqar_accuracy_is_the_mean_share_of_right_answers() -> None:
    task = MQAR(length=32, pairs=4, vocab_size=16)
    batch = task.batch("test", 50, seed=0, step=0)
    logits = scored(batch, 16)
    right, nats, row = [], [], 0
    for targets in batch.targets.tolist():
        hits = 0
        for target in targets:
            if target != IGNORE:
                hits += max(range(16), key=logits[row].tolist().__getitem__) == target
                nats.append(-math.log(math.exp(logits[row, target]) / sum(map(math.exp, logits[row].tolist()))))
                row += 1
        right.append(hits / 4)
    assert 0 < np.mean(right) < 1
    assert value(task, "accuracy", batch, logits) == pytest.approx(np.mean(right))
    assert value(task, "loss", batch, logits) == pytest.approx(np.mean(nats), rel=1e-6)
    assert [float(count) for _, count in task.measure(batch, logits).values()] == [50, 200]


def test_mqar_chance_is_that_of_any_value() -> None:
    task = MQAR(length=32, pairs=4, vocab_size=16)
    batch = task.batch("test", 5000, seed=0, step=0)
    guess = scored(batch, 16)
    guess[:, :8] = -math.inf
    assert value(task, "accuracy", batch, guess) == pytest.approx(task.chance, abs=0.01)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"length": True}, "parameter 'length' must be an integer, not True"),
        ({"length": 16.0}, "parameter 'length' must be an integer, not 16.0"),
        ({"pairs": "4"}, "parameter 'pairs' must be an integer, not '4'"),
        ({"vocab_size": None}, "parameter 'vocab_size' must be an integer, not None"),
        ({"random_non_queries": 1}, "parameter 'random_non_queries' must be true or false, not 1"),
        ({"power": "low"}, "parameter 'power' must be a finite number, not 'low'"),
        ({"power": math.nan}, "parameter 'power' must be a finite number, not nan"),
        ({"power": 0}, "parameter 'power' must be above 0, not 0.0"),
        ({"pairs": 0}, "parameter 'pairs' must be at least 1, not 0"),
        ({"length": 17}, "parameter 'length' must be even, not 17"),
        ({"length": 14}, "parameter 'length' must be at least 4 x pairs = 16, not 14"),
        ({"vocab_size": 9}, "parameter 'vocab_size' must be at least 2 x (pairs + 1) = 10, not 9"),
        ({"train_examples": 0}, "parameter 'train_examples' must be at least 1, not 0"),
        ({"tests": [[16, 4], [16, 5]]}, "parameter 'length' must be at least 4 x pairs = 20, not 16, in 'tests'"),
        (
            {"tests": [[16, 4], [16, 4]]},
            "parameter 'tests' must have each [length, pairs] once, not ((16, 4), (16, 4))",
        ),
        ({"tests": [16, 4]}, "parameter 'tests' must be [[an integer, an integer], ...], not (16, 4)"),
        ({"mixture": [[16, 4, 1], [9, 1, 1]]}, "parameter 'length' must be even, not 9, in 'mixture'"),
        ({"mixture": [[16, 4, 0]]}, "parameter 'mixture' must have weights of at least 1, not ((16, 4, 0),)"),
        (
            {"mixture": [[8, 2, 1]]},
            "parameter 'mixture' must have [length, pairs] = [16, 4] in it, and nothing longer, not ((8, 2, 1),)",
        ),
        (
            {"mixture": [[16, 4, 1], [32, 2, 1]]},
            "parameter 'mixture' must have [length, pairs] = [16, 4] in it, and nothing longer, not ((16, 4, 1), ",
        ),
    ],
)
def test_mqar_refuses(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        MQAR(**({"length": 16, "pairs": 4} | parameters))
    assert str(error.value).startswith(f"task 'mqar': {message}")


def test_mqar_at_its_limits() -> None:
    batch = MQAR(length=16, pairs=4, vocab_size=10).batch("train", 20, seed=0, step=0)
    assert batch.inputs[:, 0:8:2].sort().values.tolist() == [[1, 2, 3, 4]] * 20
    assert MQAR(length=16, pairs=4, power=1) == MQAR(length=16, pairs=4, power=1.0)
    assert repr(MQAR(length=16, pairs=4, power=1)) == repr(MQAR(length=16, pairs=4, power=1.0))


# --- text ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, joined: Path) -> Path:
    """20 files, each of one byte value of its own, in two folders, and a hidden one."""
    for i in range(20):
        path = tmp_path / f"sub{i % 2}" / f"file{i:02d}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([i]) * (50 + i))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"\xff" * 500)
    (tmp_path / ".hidden").write_bytes(b"\xff" * 500)
    return tmp_path


@pytest.fixture
def joined(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the joined files of a folder are kept."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "deltalab" / "corpora"


def seen(task: Text, split: str) -> set[int]:
    batch = task.batch(split, 500, seed=0, step=0)
    return set(batch.inputs.flatten().tolist()) | set(batch.targets.flatten().tolist())


def test_text_splits_a_folder_by_file(folder: Path) -> None:
    task = Text(length=8, corpus=str(folder))
    files = {split: seen(task, split) for split in SPLITS}
    assert [len(files[split]) for split in SPLITS] == [16, 2, 2]
    assert files["train"] | files["validation"] | files["test"] == set(range(20))


def test_text_cuts_a_file(tmp_path: Path) -> None:
    file = tmp_path / "corpus"
    file.write_bytes(bytes(range(200)))
    task = Text(length=8, corpus=str(file), times=())
    assert {split: seen(task, split) for split in SPLITS} == {
        "train": set(range(160)),
        "validation": set(range(160, 180)),
        "test": set(range(180, 200)),
    }


def test_text_predicts_the_next_byte(tmp_path: Path) -> None:
    file = tmp_path / "corpus"
    file.write_bytes(bytes(range(250)))
    batch = Text(length=8, corpus=str(file), times=()).batch("train", 2000, seed=0, step=0)
    assert torch.equal(batch.targets, batch.inputs + 1)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    starts = np.bincount(batch.inputs[:, 0], minlength=192)
    assert len(starts) == 192
    assert stats.chisquare(starts).pvalue > RARE_EVENT


def test_text_default_corpus_is_pinned() -> None:
    assert Text().fingerprint() == NIAH(variant=2).fingerprint() == FINGERPRINT
    found = {split: sha256((FOLDER / f"{split}.txt").read_bytes()).hexdigest() for split in SPLITS}
    assert all(f"| `{digest}` |" in (FOLDER / "SOURCE.md").read_text() for digest in found.values())


def test_text_refuses_a_default_corpus_that_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in SPLITS:
        (tmp_path / f"{split}.txt").write_bytes((FOLDER / f"{split}.txt").read_bytes().replace(b"\n", b"\r\n"))
    monkeypatch.setattr(corpus_module, "FOLDER", tmp_path)
    with pytest.raises(InputError, match="are not those of the release: install deltalab again"):
        Text()


def test_every_chapter_of_the_default_corpus_is_in_the_split_of_its_name() -> None:
    chapters: dict[str, list[str]] = {}
    entries: dict[str, list[str]] = {}
    for split in SPLITS:
        text = (FOLDER / f"{split}.txt").read_text(encoding="utf-8")
        chapters[split] = re.findall(r"^(?!1st )((?:[123])?[A-Z][A-Za-z]+ \d+)\n\n(?=1 )", text, re.MULTILINE)
        entries[split] = re.findall(r"^(:\S.*?:)(?= |$)", text, re.MULTILINE)
        assert {cut.split_of(name) for name in chapters[split] + entries[split]} == {split}
    sizes = {split: (len(chapters[split]), len(entries[split])) for split in SPLITS}
    assert sizes == {"train": (939, 1838), "validation": (121, 244), "test": (129, 225)}
    assert len({name for names in chapters.values() for name in names}) == 1189


def test_cut_takes_chapters_and_entries_apart() -> None:
    bible = "Ge1:1 In the beginning\nGe1:2 And the earth\n1Jn2:1 My little children: these\n"
    assert cut.chapters(bible) == [
        ("Ge 1", "Ge 1\n\n1 In the beginning\n2 And the earth\n\n"),
        ("1Jn 2", "1Jn 2\n\n1 My little children: these\n\n"),
    ]
    jargon = (
        "   Glossary\n\n   :a b: n.\n\n   See {c}:\n     deeper\n\n   :c:\n\n   Part III.\xa0Appendices\n\n   :d:\n"
    )
    assert cut.entries(jargon) == [(":a b:", ":a b: n.\n\nSee {c}:\n  deeper\n\n"), (":c:", ":c:\n\n")]


def test_text_of_python_is_the_library_without_tests_and_tables(joined: Path) -> None:
    task = Text(corpus="python")
    contents = [data.tobytes() for data in load(task._path, True).data.values()]
    assert all(len(content) > 100_000 for content in contents)
    for name, times in ("abc.py", 1), ("json/decoder.py", 1), ("encodings/cp1250.py", 0):
        assert sum(Path(task._path, name).read_bytes() in content for content in contents) == times


def test_text_maps_a_corpus_and_uses_all_of_it(folder: Path, joined: Path) -> None:
    (folder / "sub1" / "file19").write_bytes(bytes([19]) * 9_000_000)  # more than was once read of a split
    for corpus, expected in (folder / "sub1" / "file19", 9_000_000), (folder, 9_000_000 + sum(range(50, 69))):
        data = load(str(corpus), False).data
        assert sum(map(len, data.values())) == expected
        assert all(mapped(part) for part in data.values())
    assert [*joined.iterdir()] == [joined / Text(length=8, corpus=str(folder)).fingerprint()]


def mapped(data: np.ndarray) -> bool:
    owner: Any = data
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, mmap.mmap) and not data.flags.writeable


def test_text_joins_a_folder_once_for_all_processes(folder: Path, joined: Path) -> None:
    first = Text(length=8, corpus=str(folder)).batch("test", 4, 0, 0)
    before = {path: path.stat().st_mtime_ns for path in joined.rglob("*")}
    open_corpus.cache_clear()  # as in another process
    assert same(Text(length=8, corpus=str(folder)).batch("test", 4, 0, 0), first)
    assert {path: path.stat().st_mtime_ns for path in joined.rglob("*")} == before


def test_text_refuses_a_folder_that_changes_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = corpus_module._blocks

    def grows(root: Path, paths: list[Path]) -> Any:
        yield from blocks(root, paths)
        (root / paths[0]).write_bytes(b"more" * 50)

    monkeypatch.setattr(corpus_module, "_blocks", grows)
    with pytest.raises(InputError, match="changed while it was read"):
        Text(length=8, corpus=str(folder))


def test_rare_bigrams_are_counted_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).integers(0, 3, 5000).astype(np.uint8)
    data[[700, 701]] = 9, 10  # on both sides of a block's end
    whole = Corpus({"train": data}).rare
    monkeypatch.setattr(corpus_module, "_BLOCK", 701)
    assert torch.equal(Corpus({"train": data}).rare, whole)
    seen = sorted((256 * a + b for a, b in set(pairwise(data.tolist()))))
    assert [pair for pair in seen if whole[pair]] == [pair for pair in seen if 9 in divmod(pair, 256) or pair >= 2560]


def test_text_fingerprint_is_that_of_the_bytes(folder: Path) -> None:
    before = Text(length=8, corpus=str(folder)).fingerprint()
    (folder / ".hidden").write_bytes(b"other")
    open_corpus.cache_clear()
    assert Text(length=16, times=(), corpus=f"{folder}/.").fingerprint() == before
    (folder / "sub0" / "file00").write_bytes(b"\x01" + bytes(49))
    assert Text(length=8, corpus=str(folder)).fingerprint() == before  # read once per process
    open_corpus.cache_clear()
    assert Text(length=8, corpus=str(folder)).fingerprint() != before
    assert MQAR(length=16, pairs=4).fingerprint() == ""


def test_text_is_tested_at_multiples_of_its_length_on_as_many_bytes() -> None:
    task = Text(length=32, times=(2, 4))
    found = task.evaluations()
    assert {label: one.length for label, one in found.items()} == {"": 32, "64": 64, "128": 128}
    sizes = {split: [task.evaluated(one, split, 16, 3) for one in found.values()] for split in ("validation", "test")}
    assert sizes["test"] == [(16, 3), (8, 3), (4, 3)]
    assert [batches for _, batches in sizes["validation"]] == [3, 0, 0]
    assert task.evaluated(found["128"], "test", 2, 3) == (1, 3)


def test_text_is_measured_by_quarters_of_the_positions() -> None:
    task = Text(length=10)
    batch = task.batch("test", 3, seed=0, step=0)
    logits = torch.zeros(3, 10, 256)
    for t in range(10):  # a bit more at each position
        logits[:, t].scatter_(1, batch.targets[:, t, None], -math.log(2) * t)
    quarters = [value(task, f"bits_per_byte_quarter_{i}", batch, logits.flatten(0, 1)) for i in (1, 2, 3, 4)]
    bits = [t + math.log2(255 + 2.0**-t) for t in range(10)]
    means = [sum(bits[a:b]) / (b - a) for a, b in ((0, 2), (2, 5), (5, 7), (7, 10))]
    assert quarters == pytest.approx(means, rel=1e-5)


def test_a_plan_can_count_passes_over_finite_data(folder: Path) -> None:
    assert Text().train_tokens == (FOLDER / "train.txt").stat().st_size
    assert Digits().train_tokens == 1197 * 64
    assert MQAR(length=16, pairs=4).train_tokens is None
    assert MQAR(length=16, pairs=4, train_examples=50).train_tokens == 800


def test_text_keeps_its_corpus_in_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    task = Text(length=8, corpus="sub0")
    sent = pickle.dumps(task)
    monkeypatch.chdir("/")
    arrived = pickle.loads(sent)
    assert arrived.fingerprint() == task.fingerprint()
    assert arrived.evaluations()["16"].fingerprint() == task.fingerprint()
    assert task.corpus == "sub0"


def test_uniform_logits_are_8_bits_everywhere() -> None:
    task = Text(length=64)
    batch = task.batch("validation", 16, seed=0, step=0)
    logits = torch.zeros(16 * 64, 256)
    assert value(task, "bits_per_byte", batch, logits) == pytest.approx(task.chance)
    assert value(task, "recall_bits_per_byte", batch, logits) == pytest.approx(task.chance)
    assert value(task, "loss", batch, logits) == pytest.approx(math.log(256))


def test_text_measures_as_a_plain_loop() -> None:
    task = Text(length=96)
    train = load(corpus_path(None), False).data["train"].tolist()
    counts = Counter(pairwise(train))
    batch = task.batch("test", 24, seed=0, step=0)
    logits = scored(batch, 256)
    bits = (
        torch.logsumexp(logits.double(), 1) - logits.double().gather(1, batch.targets.view(-1, 1))[:, 0]
    ) / math.log(2)
    recalled = []
    for row, (inputs, targets) in enumerate(zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)):
        before: set[tuple[int, int]] = set()
        for t, bigram in enumerate(zip(inputs, targets, strict=True)):
            if bigram in before and counts[bigram] < 2e-3 * (len(train) - 1):
                recalled.append(float(bits[row * 96 + t]))
            before.add(bigram)
    assert len(recalled) > 50
    total, count = task.measure(batch, logits)["recall_bits_per_byte"]
    assert float(count) == len(recalled)
    assert float(total) == pytest.approx(sum(recalled), rel=1e-6)
    assert value(task, "bits_per_byte", batch, logits) == pytest.approx(float(bits.mean()), rel=1e-6)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"length": "long"}, "parameter 'length' must be an integer, not 'long'"),
        ({"length": 0}, "parameter 'length' must be at least 1, not 0"),
        ({"corpus": 5}, "parameter 'corpus' must be text or null, not 5"),
        ({"corpus": " "}, "parameter 'corpus' must name a file or a folder, not ' '"),
        ({"corpus": "a\0b"}, "parameter 'corpus' must name a file or a folder, not 'a\\x00b'"),
        ({"times": [1, 2]}, "parameter 'times' must all be at least 2, not (1, 2)"),
        ({"times": [2, 2]}, "parameter 'times' must all be different, not (2, 2)"),
        ({"corpus": "/no/such"}, "parameter 'corpus': cannot read '/no/such': "),
        ({"corpus": "/dev/null"}, "parameter 'corpus': cannot read '/dev/null': "),
        ({"corpus": "/" + "long" * 100}, "parameter 'corpus': cannot read '/longlong"),
        ({"corpus": "{folder}/empty"}, "parameter 'corpus': the train split of "),
        ({"corpus": "{folder}/sub0", "length": 200}, "parameter 'corpus': the validation split of "),
        (
            {"corpus": "{folder}/sub1/file19", "length": 2},
            "parameter 'corpus': the validation split of '{folder}/sub1/file19' has 7 bytes, it needs more than "
            "4 (in `times`) x length = 8",
        ),
        ({"corpus": "{folder}/two"}, "parameter 'corpus': '{folder}/two' holds 2 files; "),
    ],
)
def test_text_refuses(folder: Path, parameters: dict[str, Any], message: str) -> None:
    (folder / "empty").touch()
    (folder / "two").mkdir()
    for name in "ab":
        (folder / "two" / name).write_bytes(bytes(500))
    if isinstance(parameters.get("corpus"), str):
        parameters = parameters | {"corpus": parameters["corpus"].replace("{folder}", str(folder))}
    with pytest.raises(InputError) as error:
        Text(**parameters)
    assert str(error.value).startswith("task 'text': " + message.replace("{folder}", str(folder)))
    assert "\n" not in str(error.value)


def test_text_says_the_nearest_corpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    allowed = "a corpus is a file, a folder, 'python' for the standard library, or null"
    for given, meant in ("pyton", "'python'"), ("sub3", "'sub1'"), ("sub0/fil02", "'file02'"):
        with pytest.raises(InputError) as error:
            Text(corpus=given)
        assert str(error.value).endswith(f"; did you mean {meant}? {allowed}")
    with pytest.raises(InputError, match=r"No such file or directory; a corpus is a file"):
        Text(corpus="sub0/python")


def test_text_says_where_it_cannot_join_the_files_of_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "sub0" / "file00"))
    with pytest.raises(InputError, match=r"cannot join the files of '.*' in '.*/sub0/file00/deltalab/corpora', which"):
        Text(length=8, corpus=str(folder))
