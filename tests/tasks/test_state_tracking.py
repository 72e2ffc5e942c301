"""State tracking: each task follows its law as a plain sampler or evaluator has it; no sequence is in two splits."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import deltalab
from deltalab.errors import InputError
from deltalab.models.spec import ModelSpec
from deltalab.store import Store
from deltalab.study.reports.report import report
from deltalab.tasks import IGNORE, SPLITS, Batch, Random, Task
from deltalab.tasks.mod_arithmetic import ModArithmetic
from deltalab.tasks.parity import Parity
from deltalab.tasks.splits import share_out, shared_from
from deltalab.tasks.word_problem import WordProblem, _table, elements
from deltalab.training.train import TrainSpec, train

RARE_EVENT = 1e-4  # every draw here is fixed, so a test below this p-value fails always or never
SYMBOLS = "01234+-*= ()"

TASKS = [
    pytest.param(Parity(), id="parity"),
    pytest.param(ModArithmetic(), id="mod_arithmetic"),
    pytest.param(ModArithmetic(brackets=True), id="mod_arithmetic_brackets"),
    *(pytest.param(WordProblem(group=group), id=group) for group in ("S3", "A5", "S5")),
]


def value(task: Task, metric: str, batch: Batch, logits: Tensor) -> float:
    total, count = task.measure(batch, logits)[metric]
    assert total.shape == count.shape == ()
    return float(total / count)


def says(answers: Tensor, vocab_size: int) -> Tensor:
    """Logits of a model that is sure of these answers."""
    return torch.nn.functional.one_hot(answers, vocab_size).float()


def expected(totals: Tensor, low: int, high: int, step: int = 1) -> float:
    """The p-value of `totals` being uniform on low, low + step ... high; 0 where one is not of them."""
    counts = Counter(totals.tolist())
    drawn = [counts.pop(total, 0) for total in range(low, high + 1, step)]
    return 0.0 if counts else float(stats.chisquare(drawn).pvalue)


# --- shared out ---------------------------------------------------------------------------------------------


def shared(base: int, count: int, width: int, split: str, size: int = 30_000) -> list[tuple[int, ...]]:
    random = Random(f"{split} {width}", torch.device("cpu"))
    digits = random.integers("digits", base, size, width)
    found = share_out(digits, torch.full((size,), count), base, split, random)
    assert torch.equal(found[:, count:], digits[:, count:])
    return [tuple(row) for row in found[:, :count].tolist()]


@pytest.mark.parametrize(("base", "of_each"), [(2, 32), (5, 25), (6, 36), (60, 60)])
def test_the_shortest_that_are_shared_out_are_each_in_one_split(base: int, of_each: int) -> None:
    count = shared_from(base)
    rows = {split: Counter(shared(base, count, count, split)) for split in SPLITS}
    held_out = rows["validation"].keys(), rows["test"].keys()
    assert [len(found) for found in held_out] == [of_each, of_each]
    assert not held_out[0] & held_out[1]
    assert not rows["train"].keys() & (held_out[0] | held_out[1])
    assert sum(map(len, rows.values())) == base**count or base == 60
    for split in ("train", "validation", "test") if base < 60 else ("validation", "test"):
        assert stats.chisquare(list(rows[split].values())).pvalue > RARE_EVENT


@pytest.mark.slow
def test_a_sequence_is_of_one_split_however_much_room_is_beside_it() -> None:
    narrow, wide = ({split: set(shared(2, 10, width, split)) for split in SPLITS} for width in (10, 33))
    assert narrow == wide


def test_short_sequences_stay_as_they_were() -> None:
    for base in (2, 5, 6):
        rows = Counter(shared(base, shared_from(base) - 1, 20, "train"))
        assert len(rows) == base ** (shared_from(base) - 1)
        assert stats.chisquare(list(rows.values())).pvalue > RARE_EVENT


# --- parity -------------------------------------------------------------------------------------------------


def taken_apart(batch: Batch, padding: int) -> Iterator[tuple[list[int], int]]:
    """The tokens of each row without padding, and the answer, which is at the last of them and nowhere else."""
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        asked = [t for t, target in enumerate(targets) if target != IGNORE]
        assert asked == [len([token for token in inputs if token != padding]) - 1]
        assert padding not in inputs[: asked[0] + 1]
        yield inputs[: asked[0] + 1], targets[asked[0]]


@pytest.mark.parametrize("split", SPLITS)
def test_parity_is_that_of_the_bits(split: str) -> None:
    for task in (Parity(), Parity().evaluations()[""]):
        for bits, answer in taken_apart(task.batch(split, 300, seed=1, step=2), padding=2):
            assert set(bits) <= {0, 1}
            assert answer == bits.count(1) % 2


@pytest.mark.parametrize(
    ("label", "split", "low", "high"), [(None, "train", 3, 40), ("11-40", "test", 11, 40), ("", "validation", 40, 256)]
)
def test_parity_lengths_and_bits_are_uniform(label: str | None, split: str, low: int, high: int) -> None:
    task = Parity() if label is None else Parity().evaluations()[label]
    batch = task.batch(split, 20_000, seed=0, step=0)
    assert batch.inputs.shape == (20_000, high - 1)
    bits = (batch.inputs != 2).sum(1)
    assert expected(bits + 1, low, high) > RARE_EVENT
    for at in (0, 1, 5, high - 2):
        assert stats.chisquare(np.bincount(batch.inputs[bits > at, at], minlength=2)).pvalue > RARE_EVENT
    assert stats.chisquare(np.bincount(batch.targets[batch.targets != IGNORE], minlength=2)).pvalue > RARE_EVENT
    pair = batch.inputs[bits > 9, 2] * 2 + batch.inputs[bits > 9, 9]
    assert stats.chisquare(np.bincount(pair, minlength=4)).pvalue > RARE_EVENT


@pytest.mark.slow
def test_parity_of_few_bits_is_for_training_alone_and_of_more_in_one_split() -> None:
    task = Parity(length_range=(3, 14), test_range=(12, 14))
    seen: dict[str, set[tuple[int, ...]]] = {split: set() for split in SPLITS}
    for split in SPLITS:
        for one in (task, *task.evaluations().values()):
            seen[split] |= {tuple(bits) for bits, _ in taken_apart(one.batch(split, 25_000, 0, 0), padding=2)}
    assert sorted({len(bits) for bits in seen["train"]}) == [*range(2, 14)]
    assert sorted({len(bits) for bits in seen["test"]}) == [10, 11, 12, 13]
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]
    for few in range(2, 9):
        assert len({bits for bits in seen["train"] if len(bits) == few}) == 2**few


# --- modular arithmetic -------------------------------------------------------------------------------------


def written(batch: Batch) -> list[tuple[str, int]]:
    """Each row's expression and its answer, which is asked for at the = sign."""
    found = []
    for tokens, answer in taken_apart(batch, padding=9):
        text = "".join(SYMBOLS[token] for token in tokens)
        assert text.count("=") == 1
        assert text.endswith("=")
        found.append((text[:-1], answer))
    return found


@pytest.mark.parametrize("brackets", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_the_value_is_what_python_makes_of_the_expression(split: str, brackets: bool) -> None:
    task = ModArithmetic(brackets=brackets)
    for one in (task, task.evaluations()[""]):
        for expression, answer in written(one.batch(split, 250, seed=2, step=3)):
            assert answer == eval(expression) % 5
            assert brackets or re.fullmatch(r"[0-4]([-+*][0-4])*", expression)


@pytest.mark.parametrize(
    ("label", "split", "brackets", "low", "high"),
    [
        (None, "train", False, 3, 39),
        ("", "test", False, 41, 255),
        ("9-40", "validation", False, 9, 39),
        (None, "train", True, 3, 40),
        ("21-40", "test", True, 21, 40),
    ],
)
def test_expressions_have_uniform_lengths(label: str | None, split: str, brackets: bool, low: int, high: int) -> None:
    task = ModArithmetic(brackets=brackets)
    task = task if label is None else task.evaluations()[label]  # type: ignore[assignment]
    drawn = written(task.batch(split, 4000, seed=0, step=0))
    totals = torch.tensor([len(expression) + 2 for expression, _ in drawn])
    assert expected(totals, low, high, 1 if brackets else 2) > RARE_EVENT


def plain_bracketed(length: int, rng: np.random.Generator) -> str:
    """One expression by the letter of the paper, recursively."""
    x = str(rng.integers(5))
    if length < 5:
        return {1: x, 2: f"-{x}", 3: f"({x})", 4: f"(-{x})"}[length]
    left = int(rng.integers(1, length - 3))
    a, b = plain_bracketed(left, rng), plain_bracketed(length - 3 - left, rng)
    return f"({a}{'+-*'[rng.integers(3)]}{b})"


@pytest.mark.slow(keep="[2]")
@pytest.mark.parametrize("length", [*range(1, 13), 17])
def test_bracketed_expressions_follow_the_law_of_a_plain_sampler(length: int) -> None:
    task = ModArithmetic(brackets=True, length_range=(length + 2, max(length + 2, 21)), test_range=(21, 22))
    rng = np.random.default_rng(length)
    drawn = [written(task.batch("train", 4000, seed=0, step=step)) for step in range(6)]
    ours = [expression for batch in drawn for expression, _ in batch if len(expression) == length]
    assert len(ours) > 500
    plain = [plain_bracketed(length, rng) for _ in range(4000)]
    # Whole at 3 tokens and less; the tree and the operators, but not the digits, above.
    forms = [Counter(re.sub(r"\d", "d" if length > 3 else r"\g<0>", one) for one in some) for some in (ours, plain)]
    common = [form for form, _ in forms[1].most_common(200) if forms[1][form] >= 20]
    table = [[*(form[one] for one in common), form.total() - sum(form[one] for one in common)] for form in forms]
    table = [row if table[1][-1] else row[:-1] for row in table]
    assert forms[0].keys() <= forms[1].keys() or length > 9
    assert len(table[0]) < 2 or stats.chi2_contingency(table).pvalue > RARE_EVENT
    for at in (0, -1):
        digits = [int(re.findall(r"\d", one)[at]) for one in ours]
        assert stats.chisquare(np.bincount(digits, minlength=5)).pvalue > RARE_EVENT


def test_the_deepest_expression_there_is_is_made_whole() -> None:
    """With its cuts always at the far end, an expression is as deep as its length allows."""

    class Deep(Random):
        def integers(self, stream: str, below: Any, *shape: int) -> Tensor:
            drawn = super().integers(stream, below, *shape)
            # The cut is the draw modulo the number of cuts there are: -1 is the last of them all.
            return torch.full_like(drawn, math.lcm(*range(1, 40)) - 1) if stream == "split" else drawn

    for length in range(1, 39):
        task = ModArithmetic(brackets=True, length_range=(length + 2, max(length + 2, 21)), test_range=(21, 22))
        batch = task.draw("train", 200, Deep("deep", torch.device("cpu")))
        for expression, answer in written(batch):
            assert answer == eval(expression) % 5
    depth = max(len(re.match(r"\(*", expression)[0]) for expression, _ in written(batch))  # type: ignore[index]
    assert depth >= (38 - 1) // 4


def test_flat_expressions_have_uniform_digits_and_operators() -> None:
    task = ModArithmetic(length_range=(3, 11), test_range=(11, 13))
    drawn = [expression for expression, _ in written(task.batch("train", 30_000, seed=0, step=0))]
    assert stats.chisquare([*Counter(one for one in drawn if len(one) == 1).values()]).pvalue > RARE_EVENT
    short = Counter(one for one in drawn if len(one) == 3)
    assert short.keys() == {f"{a}{op}{b}" for a, op, b in product("01234", "+-*", "01234")}
    assert stats.chisquare([*short.values()]).pvalue > RARE_EVENT
    longest = [one for one in drawn if len(one) == 9]
    for at in range(9):
        assert stats.chisquare([*Counter(one[at] for one in longest).values()]).pvalue > RARE_EVENT
    joint = Counter(one[1::2] for one in longest)
    assert len(joint) == 81
    assert stats.chisquare([*joint.values()]).pvalue > RARE_EVENT


@pytest.mark.slow
@pytest.mark.parametrize(("brackets", "low", "high"), [(False, 9, 11), (True, 21, 22)])
def test_an_expression_is_of_one_split_by_its_digits(brackets: bool, low: int, high: int) -> None:
    task = ModArithmetic(brackets=brackets, length_range=(3, high), test_range=(low, high))
    splits: dict[tuple[str, ...], set[str]] = {}
    for split in SPLITS:
        for expression, _ in written(task.batch(split, 20_000 if brackets else 40_000, seed=0, step=0)):
            assert split == "train" or len(expression) + 2 >= low
            if len(digits := tuple(re.findall(r"\d", expression))) >= 4:
                splits.setdefault(digits, set()).add(split)
            else:
                assert split == "train"
    assert all(len(found) == 1 for found in splits.values())
    shortest = Counter(found for digits, (found,) in splits.items() if len(digits) == 4)
    assert brackets or shortest == {"train": 575, "validation": 25, "test": 25}


# --- word problems ------------------------------------------------------------------------------------------


def matrix(element: tuple[int, ...]) -> np.ndarray:
    return np.eye(len(element), dtype=int)[list(element)]


@pytest.mark.parametrize(("group", "size", "points"), [("S3", 6, 3), ("A5", 60, 5), ("S5", 120, 5)])
def test_the_tables_are_those_of_the_groups(group: str, size: int, points: int) -> None:
    task = WordProblem(group=group, length=4)
    words = torch.cartesian_prod(torch.arange(size), torch.arange(size))
    table = _table(group, torch.device("cpu"))
    found = elements(group)
    assert (task.vocab_size, len(set(found))) == (size, size)
    assert all(sorted(element) == [*range(points)] for element in found)
    assert {round(np.linalg.det(matrix(element))) for element in found} == ({1} if group == "A5" else {1, -1})
    # Matrices whose rows are permuted, multiplied from left to right, are an independent account of the product.
    matrices = np.array([matrix(element) for element in found])
    for a, b in words[:: max(1, len(words) // 500)].tolist():
        assert (matrices[table[a, b]] == matrices[a] @ matrices[b]).all()
    everything = torch.arange(size)
    assert torch.equal(table[0], everything)
    assert torch.equal(table[:, 0], everything)
    assert torch.equal(table.sort(0).values, everything[:, None].expand(size, size))
    assert torch.equal(table.sort(1).values, everything.expand(size, size))
    assert (table != table.T).any()
    assert torch.equal(table[table], table[everything[:, None, None], table])  # (a b) c = a (b c)


@pytest.mark.parametrize("group", ["S3", "A5", "S5"])
@pytest.mark.parametrize("length", [4, 31, 64])
def test_targets_are_the_running_product(group: str, length: int) -> None:
    batch = WordProblem(group=group, length=length).batch("train", 20, seed=1, step=1)
    found = elements(group)
    for words, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        now = [*range(len(found[0]))]
        for word, target in zip(words, targets, strict=True):
            now = [found[word][point] for point in now]
            assert found[target] == tuple(now)


@pytest.mark.parametrize("split", SPLITS)
def test_words_are_uniform_and_unrelated(split: str) -> None:
    batch = WordProblem(group="S3", length=8).batch(split, 20_000, seed=0, step=0)
    for at in range(8):
        assert stats.chisquare(np.bincount(batch.inputs[:, at], minlength=6)).pvalue > RARE_EVENT
        assert stats.chisquare(np.bincount(batch.targets[:, at], minlength=6)).pvalue > RARE_EVENT
    joint = np.bincount(batch.inputs[:, 0] * 6 + batch.inputs[:, 5], minlength=36)
    assert stats.chisquare(joint).pvalue > RARE_EVENT


def test_a_word_is_of_one_split() -> None:
    task = WordProblem(group="S3", length=4)
    seen = {split: set(map(tuple, task.batch(split, 20_000, 0, 0).inputs.tolist())) for split in SPLITS}
    assert sum(map(len, seen.values())) == len(set.union(*seen.values())) == 6**4


def test_a_sequence_is_right_if_every_prefix_is() -> None:
    task = WordProblem(group="S3", length=5, test_lengths=(5,))
    batch = task.batch("test", 4, seed=0, step=0)
    answers = batch.targets.clone()
    answers[1, 4] = (answers[1, 4] + 1) % 6
    answers[3, 0] = (answers[3, 0] + 1) % 6
    logits = says(answers.flatten(), 6)
    assert value(task, "sequence_accuracy", batch, logits) == 0.5
    assert value(task, "accuracy", batch, logits) == 0.9
    counts = {name: float(count) for name, (_, count) in task.measure(batch, logits).items()}
    assert counts == {"sequence_accuracy": 4, "accuracy": 20, "loss": 20}


def test_chance_is_that_of_guessing_every_product() -> None:
    task = WordProblem(group="S3", length=4, test_lengths=(4, 6))
    assert task.chance == pytest.approx((6**-4 + 6**-6) / 2)
    assert WordProblem(group="S5").chance < 1e-60
    batch = task.batch("train", 40_000, seed=0, step=0)
    guess = torch.randn(160_000, 6, generator=torch.Generator().manual_seed(0))
    assert value(task, "sequence_accuracy", batch, guess) == pytest.approx(6**-4, abs=5e-4)


# --- all of them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_no_example_is_in_two_splits(task: Task) -> None:
    ones = [task, *task.evaluations().values()]
    seen = {
        split: {tuple(row) for one in ones for row in one.batch(split, 200, 0, 0).inputs.tolist()} for split in SPLITS
    }
    seen["train"] |= {tuple(row) for row in task.batch("train", 2000, 1, 1).inputs.tolist()}
    assert sum(map(len, seen.values())) == len(set.union(*seen.values()))


@pytest.mark.parametrize("task", [case for case in TASKS if "arith" in case.id or "parity" in case.id])
def test_accuracy_is_scaled_so_that_guessing_is_0_and_right_is_1(task: Task) -> None:
    batch = task.batch("test", 2000, seed=0, step=0)
    answers = batch.targets[batch.targets != IGNORE]
    share = 1 / (2 if task.name == "parity" else 5)
    assert value(task, "scaled_accuracy", batch, says(answers, task.vocab_size)) == pytest.approx(1)
    wrong = (answers + 1) % round(1 / share)
    assert value(task, "scaled_accuracy", batch, says(wrong, task.vocab_size)) == pytest.approx(-share / (1 - share))
    half = torch.where(torch.arange(2000) % 2 == 0, answers, wrong)
    assert value(task, "scaled_accuracy", batch, says(half, task.vocab_size)) == pytest.approx(
        (0.5 - share) / (1 - share)
    )
    guess = torch.randn(2000, task.vocab_size, generator=torch.Generator().manual_seed(0))
    guess[:, round(1 / share) :] = -math.inf
    assert value(task, "scaled_accuracy", batch, guess) == pytest.approx(0, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("task", [case for case in TASKS if "arith" in case.id or "parity" in case.id])
def test_chance_is_that_of_the_most_frequent_answer(task: Task) -> None:
    """Products make 0 frequent in bracketed expressions; elsewhere answers are equally frequent."""
    judged = task.evaluations()[""]
    batch = judged.batch("test", 4000, seed=0, step=0)
    answers = batch.targets[batch.targets != IGNORE]
    always = value(judged, "scaled_accuracy", batch, says(torch.full_like(answers, answers.mode()[0]), task.vocab_size))
    assert always == pytest.approx(task.chance, abs=0.03)
    assert (task.chance > 0.1) == getattr(task, "brackets", False)


def test_what_each_is_evaluated_at() -> None:
    parity = Parity().evaluations()
    assert {label: one.length for label, one in parity.items()} == {"": 255, "11-40": 39}
    words = WordProblem(group="A5", test_lengths=[32, 500])  # type: ignore[arg-type]
    assert {label: one.length for label, one in words.evaluations().items()} == {"32": 32, "500": 500}
    assert hash(words) == hash(WordProblem(group="A5", test_lengths=(32, 500)))


@pytest.mark.parametrize("task", TASKS)
def test_batches_are_made_without_the_host(task: Task) -> None:
    # Tensors on this device have no values, so whatever looked at one, or waited for one, would raise.
    batch = task.batch("train", 4, seed=0, step=0, device="meta")
    assert batch.inputs.shape == batch.targets.shape == (4, task.length)


def test_streams_are_pinned() -> None:
    """If this fails, data of recorded trials has changed: raise the task's version."""
    content = b""
    for case in TASKS:
        for split in SPLITS:
            batch = case.values[0].batch(split, 16, seed=1, step=2)
            content += batch.inputs.numpy().astype("<i8").tobytes() + batch.targets.numpy().astype("<i8").tobytes()
    assert sha256(content).hexdigest() == "51bf88f8298591e24fb6bce368dfbe39a7a3e000a19430c3c7e2035dba00f36d"


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("parity", {"length_range": [3]}, "parameter 'length_range' must be [an integer, an integer], not (3,)"),
        ("parity", {"length_range": 40}, "parameter 'length_range' must be [an integer, an integer], not 40"),
        ("parity", {"length_range": [3, 40.0]}, "parameter 'length_range' must be [an integer, an integer], not"),
        ("parity", {"length_range": [2, 40]}, "parameter 'length_range' must begin at 3 or above, not (2, 40)"),
        ("parity", {"length_range": [40, 3]}, "parameter 'length_range' must not end before it begins, not (40, 3)"),
        ("parity", {"length_range": [3, 10]}, "parameter 'length_range' must end at 11 or above, not (3, 10)"),
        ("parity", {"test_range": [10, 256]}, "parameter 'test_range' must begin at 11 or above, not (10, 256)"),
        ("mod_arithmetic", {"test_range": [40, 40]}, "parameter 'test_range' must hold an odd length, not (40, 40)"),
        ("mod_arithmetic", {"brackets": 1}, "parameter 'brackets' must be true or false, not 1"),
        (
            "mod_arithmetic",
            {"brackets": True, "length_range": [3, 20]},
            "parameter 'length_range' must end at 21 or above, not (3, 20)",
        ),
        ("word_problem", {}, "needs group"),
        ("word_problem", {"group": "A6"}, "unknown group 'A6'; allowed: S3, A5, S5"),
        ("word_problem", {"group": "S3", "length": 3}, "parameter 'length' must be at least 4, not 3"),
        ("word_problem", {"group": "S5", "length": 1}, "parameter 'length' must be at least 2, not 1"),
        ("word_problem", {"group": "S5", "test_lengths": []}, "parameter 'test_lengths' must name a length, not ()"),
        (
            "word_problem",
            {"group": "S5", "test_lengths": [32, True]},
            "parameter 'test_lengths' must be [an integer, ...], not (32, True)",
        ),
        (
            "word_problem",
            {"group": "S5", "test_lengths": [32, 1]},
            "parameter 'test_lengths' must all be at least 2, not (32, 1)",
        ),
        (
            "word_problem",
            {"group": "S5", "test_lengths": [32, 32]},
            "parameter 'test_lengths' must all be different, not (32, 32)",
        ),
    ],
)
def test_refuses(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        deltalab.get_task(name, **parameters)
    assert str(error.value).startswith(f"task '{name}': {message}")


# --- what they are for --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parity_needs_negative_eigenvalues() -> None:
    """The delta rule in one layer and 200 steps: at up to four times the trained length, or not at all."""
    task = Parity(length_range=(3, 12), test_range=(12, 48))
    spec = TrainSpec(steps=200, batch_size=64, lr=1e-2, evaluations=1, eval_batches=2)
    solved = {}
    for high in (1, 2):
        rule = {"name": "deltanet", "beta": {"sigmoid": {"max": high}}}
        model = ModelSpec(rule=rule, vocab_size=3, d_model=32, layers=1, heads=2, conv=0, chunk_size=16)
        (run,) = train(task, model, spec, [1]).runs
        solved[high] = run.final("validation", "scaled_accuracy")
    assert solved[2] > 0.9
    assert solved[1] < 0.3


def test_a_study_records_every_length_and_reports_the_mean(tmp_path: Path) -> None:
    study = tmp_path / "words.yaml"
    study.write_text(
        "name: words\n"
        "task: {word_problem: {group: S3, length: 4, test_lengths: [4, 6]}}\n"
        "base:\n"
        "  rule: deltanet\n"
        "  model: {d_model: 8, layers: 1, heads: 1}\n"
        "  train: {steps: 2, batch_size: 8, lr: 1e-3, evaluations: 1, eval_batches: 8}\n"
        "seeds: 2\n"
    )
    db = tmp_path / "lab.db"
    deltalab.run_study(study, db=db, executor="inline")
    with Store.open(db) as store:
        found = store.study("words")
        finals = [final for final in store.final_metrics(found.id) if final.split == "test"]
        (row,) = report(store, found.id).tables[0].rows
    by_name = {(final.metric, final.seed): final.value for final in finals}
    assert {name for name, _ in by_name} == {
        f"{name}{end}" for name in ("sequence_accuracy", "accuracy", "loss", "output_rms") for end in ("", "@4", "@6")
    }
    assert row.score.mean == pytest.approx(sum(by_name["sequence_accuracy", seed] for seed in (1, 2)) / 2)
    for seed in (1, 2):
        mean = (by_name["sequence_accuracy@4", seed] + by_name["sequence_accuracy@6", seed]) / 2
        assert by_name["sequence_accuracy", seed] == pytest.approx(mean)
        assert by_name["accuracy@4", seed] != by_name["accuracy@6", seed]
