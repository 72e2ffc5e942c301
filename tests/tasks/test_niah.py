"""Sequences of niah are what a plain reader of the definition makes of their parts, and these follow their laws."""

import math
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats

from deltalab.errors import InputError
from deltalab.tasks import IGNORE, NIAH, SPLITS, Text

RARE_EVENT = 1e-4  # every draw here is fixed, so a test below this p-value fails always or never


class Parts(NamedTuple):
    filler: list[int]
    place: int
    key: int
    value: list[int]


def parts(row: list[int], m: int) -> Parts:
    """What a sequence was made of, read off it."""
    place = row.index(256)
    key, value = row[place + 1], row[place + 2 : place + 2 + m]
    return Parts(row[:place] + row[place + 2 + m : -m - 1], place, key, value)


def written(part: Parts) -> list[int]:
    """The sequence, with the whole value after the question."""
    needle = [256, part.key, *part.value]
    return part.filler[: part.place] + needle + part.filler[part.place :] + [257, part.key, *part.value]


def drawn(task: NIAH, split: str, size: int) -> list[Parts]:
    batch = task.batch(split, size, seed=0, step=0)
    found = []
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        part = parts(inputs, task.digits)
        assert [*inputs, part.value[-1]] == written(part)
        assert targets == [IGNORE] * (task.length - task.digits) + part.value
        found.append(part)
    return found


@pytest.mark.parametrize(
    ("variant", "m", "alphabet"), [(1, 7, "0123456789"), (2, 7, "0123456789"), (3, 32, "0123456789abcdef")]
)
@pytest.mark.parametrize("split", SPLITS)
def test_sequences_are_filler_needle_and_question(variant: int, m: int, alphabet: str, split: str) -> None:
    task = NIAH(variant=variant, length=2 * m + 40, keys=5)
    corpus = b"" if variant == 1 else task._text._corpus.data[split].tobytes()
    for part in drawn(task, split, 300):
        assert len(part.filler) == 37
        if variant == 1:
            assert bytes(part.filler) == (b"The grass is green. The sky is blue. The sun is yellow.")[:37]
        else:
            assert bytes(part.filler) in corpus
        assert set(part.value) <= set(alphabet.encode())
        assert 258 <= part.key < 263


def test_the_period_starts_again() -> None:
    part = drawn(NIAH(variant=1, length=200), "test", 1)[0]
    sentences = b"The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    assert bytes(part.filler) == (3 * sentences)[: 200 - 17]


@pytest.mark.parametrize("variant", [2, 3])
@pytest.mark.parametrize("split", ["train", "test"])
def test_place_key_and_value_are_uniform_and_unrelated(variant: int, split: str) -> None:
    task = NIAH(variant=variant, length=80, keys=6)
    found = drawn(task, split, 6000)
    places = task.length - 2 * task.digits - 2
    base = len(set().union(*(part.value for part in found)))
    order = {byte: i for i, byte in enumerate(sorted(set().union(*(part.value for part in found))))}
    first = [order[part.value[0]] for part in found]
    assert base == (10 if variant == 2 else 16)
    assert stats.chisquare(np.bincount([part.place for part in found], minlength=places)).pvalue > RARE_EVENT
    assert stats.chisquare(np.bincount([part.key - 258 for part in found], minlength=6)).pvalue > RARE_EVENT
    for i in range(task.digits):
        counts = np.bincount([order[part.value[i]] for part in found], minlength=base)
        assert stats.chisquare(counts).pvalue > RARE_EVENT
    for other, kinds in (
        ([part.key - 258 for part in found], 6),
        ([part.place * 4 // places for part in found], 4),
        ([order[part.value[1]] for part in found], base),
        ([order[part.value[-1]] for part in found], base),
    ):
        joint = np.zeros((base, kinds))
        np.add.at(joint, (first, other), 1)
        assert stats.chi2_contingency(joint).pvalue > RARE_EVENT


def test_no_value_is_in_two_splits() -> None:
    seen = {split: {tuple(part.value) for part in drawn(NIAH(variant=1, length=24), split, 20_000)} for split in SPLITS}
    assert min(map(len, seen.values())) > 15_000
    # Of 10^7 values, 20,000 drawn twice over would have 40 in common.
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]


def test_it_is_evaluated_at_multiples_of_its_length() -> None:
    task = NIAH(variant=1, length=32, times=(1, 8))
    found = task.evaluations()
    assert {label: other.length for label, other in found.items()} == {"32": 32, "256": 256}
    assert found["256"].batch("test", 2, 0, 0).inputs.shape == (2, 256)
    assert list(NIAH(variant=1).evaluations()) == ["512", "1024", "2048", "4096"]


def test_exact_match_wants_all_digits() -> None:
    task = NIAH(variant=1, length=24)
    batch = task.batch("test", 40, seed=0, step=0)
    logits = torch.randn(280, task.vocab_size, generator=torch.Generator().manual_seed(0))
    answers = batch.targets[:, -7:].flatten()
    logits[torch.arange(280), answers] += 5.5  # most are right
    right, nats = [], 0.0
    for row, target in zip(logits.tolist(), answers.tolist(), strict=True):
        right.append(max(range(len(row)), key=row.__getitem__) == target)
        nats -= math.log(math.exp(row[target]) / sum(map(math.exp, row)))
    matches = sum(all(right[7 * i : 7 * i + 7]) for i in range(40))
    assert 0 < matches < 40
    found = {name: [float(total), float(count)] for name, (total, count) in task.measure(batch, logits).items()}
    assert found["exact_match"] == [matches, 40]
    assert found["accuracy"] == [sum(right), 280]
    assert found["loss"] == [pytest.approx(nats, rel=1e-6), 280]
    assert task.chance == pytest.approx(1e-7)
    assert NIAH(variant=3, length=70).chance == pytest.approx(16.0**-32)


def test_fingerprint_is_that_of_the_text_it_reads(tmp_path: Any) -> None:
    file = tmp_path / "corpus"
    file.write_bytes(bytes(range(32, 96)) * 50)
    task = NIAH(variant=2, length=32, times=(1,), corpus=str(file))
    assert task.fingerprint() == Text(length=8, corpus=str(file)).fingerprint() != ""
    assert NIAH(variant=1, length=32).fingerprint() == ""
    assert all(bytes(part.filler) in file.read_bytes() for part in drawn(task, "train", 50))


def test_stream_is_pinned() -> None:
    """If this fails, data of recorded trials has changed: raise the task's version."""
    batch = NIAH(variant=1, length=64).batch("train", 16, seed=1, step=2)
    content = batch.inputs.numpy().astype("<i8").tobytes() + batch.targets.numpy().astype("<i8").tobytes()
    assert sha256(content).hexdigest() == "907ae65ee553c8d98cad3503be05ce93617acfc876f2482b0451527d05442a90"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"variant": 4}, "parameter 'variant' must be 1, 2 or 3, not 4"),
        ({"variant": "2"}, "parameter 'variant' must be an integer, not '2'"),
        ({"length": 17}, "parameter 'length' must be at least 18, for 7 digits twice, not 17"),
        ({"variant": 3, "length": 67}, "parameter 'length' must be at least 68, for 32 digits twice, not 67"),
        ({"keys": 0}, "parameter 'keys' must be at least 1, not 0"),
        ({"times": []}, "parameter 'times' must name a multiple of the length, not ()"),
        ({"times": [0, 1]}, "parameter 'times' must all be at least 1, not (0, 1)"),
        ({"times": [2, 2]}, "parameter 'times' must all be different, not (2, 2)"),
        ({"times": 2}, "parameter 'times' must be [an integer, ...], not 2"),
        ({"variant": 1, "corpus": "x"}, "parameter 'corpus' is not read in variant 1: leave it out, not 'x'"),
        ({"corpus": "/no/such"}, "filler of 15 bytes: task 'text': parameter 'corpus': cannot read '/no/such': "),
    ],
)
def test_niah_refuses(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        NIAH(**({"variant": 2, "length": 32} | parameters))
    assert str(error.value).startswith(f"task 'niah': {message}")
    assert "\n" not in str(error.value)


def test_a_text_that_is_long_enough_to_train_but_not_to_test_is_refused_at_planning(tmp_path: Any) -> None:
    from deltalab import get_task

    file = tmp_path / "corpus"
    file.write_bytes(bytes(1000))
    with pytest.raises(
        InputError, match=r"filler of 111 bytes: task 'text': .* the validation split of .* has 100 bytes"
    ):
        get_task("niah", variant=2, length=32, times=[1, 4], corpus=str(file))
