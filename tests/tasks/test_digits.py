"""Digits are the images that UCI published, in three splits without one in common, drawn uniformly."""

import csv
import gzip
import math
from collections import Counter
from hashlib import sha256
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

from deltalab.errors import InputError
from deltalab.tasks import IGNORE, SPLITS
from deltalab.tasks.digits import IMAGES, Digits

RARE_EVENT = 1e-4  # every draw here is fixed, so a test below this p-value fails always or never


def published() -> dict[tuple[int, ...], int]:
    """Pixels -> digit, by the standard library's own reader."""
    with gzip.open(IMAGES, "rt") as file:
        lines = [tuple(map(int, line)) for line in csv.reader(file)]
    assert len(lines) == 1797
    return {line[:64]: line[64] for line in lines}


def drawn(split: str, size: int, *, both_ways: bool = False) -> list[tuple[tuple[int, ...], int]]:
    batch = Digits(both_ways=both_ways).batch(split, size, seed=0, step=0)
    assert (batch.targets[:, :-1] == IGNORE).all()
    digits = (batch.targets[:, -1] - 17).tolist()
    return list(zip(map(tuple, batch.inputs.tolist()), digits, strict=True))


def test_the_images_are_those_of_the_uci_repository() -> None:
    images = published()
    assert len(images) == 1797, "all are different"
    # The class distribution that the repository states for the test set.
    assert sorted(Counter(images.values()).items()) == list(
        enumerate([178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    )
    assert sha256(IMAGES.read_bytes()).hexdigest() == Digits().fingerprint()
    assert Digits().fingerprint() == "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"


def test_every_image_is_in_one_split_with_its_digit() -> None:
    images = published()
    seen = {split: dict(drawn(split, 20_000)) for split in SPLITS}
    assert {split: len(found) for split, found in seen.items()} == {"train": 1197, "validation": 300, "test": 300}
    assert seen["train"] | seen["validation"] | seen["test"] == images
    assert not any(seen[a].keys() & seen[b].keys() for a, b in combinations(SPLITS, 2))
    ordered = sorted(images, key=lambda pixels: sha256(bytes(pixels)).digest())
    assert set(ordered[-300:]) == set(seen["test"])
    for found in seen.values():
        assert min(Counter(found.values()).values()) >= 20, "no digit is missing from a split"


def test_images_are_drawn_uniformly_and_independently() -> None:
    pixels = [row for row, _ in drawn("validation", 30_000)]
    counts = Counter(pixels)
    assert stats.chisquare(list(counts.values())).pvalue > RARE_EVENT
    number = {row: i % 10 for i, row in enumerate(sorted(counts))}
    joint = np.zeros((10, 10))
    np.add.at(joint, ([number[p] for p in pixels[0::2]], [number[p] for p in pixels[1::2]]), 1)
    assert stats.chi2_contingency(joint).pvalue > RARE_EVENT


def test_both_ways_are_the_same_images_and_then_their_pixels_backwards() -> None:
    task = Digits(both_ways=True)
    assert (task.length, task.vocab_size) == (128, 27)
    both = drawn("test", 50, both_ways=True)
    for (pixels, digit), (forwards, same) in zip(both, drawn("test", 50), strict=True):
        assert pixels == forwards + forwards[::-1]
        assert digit == same


def test_accuracy_is_the_share_of_right_digits() -> None:
    task = Digits()
    batch = task.batch("test", 200, seed=0, step=0)
    logits = torch.randn(200, 27, generator=torch.Generator().manual_seed(0))
    right, nats = 0, 0.0
    for row, target in zip(logits.tolist(), batch.targets[:, -1].tolist(), strict=True):
        right += max(range(27), key=row.__getitem__) == target
        nats -= math.log(math.exp(row[target]) / sum(map(math.exp, row)))
    found = task.measure(batch, logits)
    assert 0 < right < 200
    assert [float(x) for x in found["accuracy"]] == [right, 200]
    assert float(found["loss"][0] / found["loss"][1]) == pytest.approx(nats / 200, rel=1e-6)
    logits[:, :17] = -math.inf
    total, count = task.measure(task.batch("test", 200, 0, 0), logits)["accuracy"]
    assert float(total / count) == pytest.approx(task.chance, abs=0.06)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_digits_refuse(value: object) -> None:
    with pytest.raises(InputError) as error:
        Digits(both_ways=value)  # type: ignore[arg-type]
    assert str(error.value) == f"task 'digits': parameter 'both_ways' must be true or false, not {value!r}"
