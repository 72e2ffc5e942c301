"""Images are cut into patches as stated, classes follow their definition, and labels are wrong at the stated rate."""

from itertools import product

import pytest
import torch

from deltalab.errors import InputError
from deltalab.tasks import IGNORE
from deltalab.tasks.digits import images_of
from deltalab.tasks.images.digit_patches import DigitPatches
from deltalab.tasks.images.shapes import COLOURS, Shapes


def test_digit_patches_are_the_pixels_of_digits() -> None:
    known = {tuple(row[:64]): row[64] for row in images_of("test", torch.device("cpu")).tolist()}
    images = DigitPatches(patch=1).batch("test", 20, 0, 0)
    assert images.inputs.shape == (20, 64, 1)
    cut = DigitPatches(patch=4).batch("test", 20, 0, 0)
    for whole, parts, label in zip(images.inputs[..., 0], cut.inputs, cut.targets[:, -1].tolist(), strict=True):
        pixels = whole.view(8, 8)
        for row, column in product(range(2), range(2)):
            patch = pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert parts[2 * row + column].tolist() == patch.flatten().tolist()
        assert known[tuple((4 * whole + 8).long().tolist())] == label
    assert (cut.targets[:, :-1] == IGNORE).all()


def test_fewer_training_images_are_the_first_ones() -> None:
    few = DigitPatches(train_images=12).batch("train", 500, 0, 0).inputs
    assert len({tuple(image) for image in few.flatten(1).tolist()}) == 12


def figures(task: Shapes, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images as levels [B, side, side, 3], and their labels [B]."""
    batch = task.batch("validation", size, 0, 0)
    side, patch = task.side // task.patch, task.patch
    cut = batch.inputs.view(size, side, side, patch, patch, 3).transpose(2, 3)
    return (cut.reshape(size, task.side, task.side, 3) * 64 + 128).long(), batch.targets[:, -1]


def test_a_class_is_the_sum_of_shape_and_colour() -> None:
    images, labels = figures(Shapes(noise=0, label_noise=0.0), 300)
    shares: dict[int, list[float]] = {}
    for image, label in zip(images, labels.tolist(), strict=True):
        found = [number for number, colour in enumerate(COLOURS) if (image == torch.tensor(colour)).all(-1).any()]
        assert len(found) == 1
        covered = (image == torch.tensor(COLOURS[found[0]])).all(-1)
        rows = covered.any(1).nonzero()[:, 0]
        box = int(rows[-1] - rows[0] + 1) ** 2
        shares.setdefault((label - found[0]) % 5, []).append(float(covered.sum()) / box)
    least, most = ({shape: pick(seen) for shape, seen in shares.items()} for pick in (min, max))
    # Of its box a square fills all, a disc pi / 4, a ring 3/16 pi, a diamond a half, and a cross 5 / 9.
    assert least[1] == 1
    assert 0.66 < least[0] <= most[0] < 0.85
    assert 0.48 < least[2] <= most[2] < 0.53
    assert least[0] > max(most[3], most[4])


def test_labels_are_wrong_at_the_rate_of_the_ceiling() -> None:
    (_, right), (_, said) = (figures(Shapes(side=16, label_noise=rate), 4000) for rate in (0.0, 0.4))
    assert Shapes(label_noise=0.4).ceiling == 0.68
    assert float((right == said).double().mean()) == pytest.approx(0.68, abs=4 * (0.68 * 0.32 / 4000) ** 0.5)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DigitPatches(patch=3), "parameter 'patch' must divide the 8 pixels of an image, not 3"),
        (lambda: DigitPatches(train_images=3), "parameter 'train_images' must be from 10 to 1,197, not 3"),
        (lambda: Shapes(side=8), "parameter 'side' must be from 16 to 256, not 8"),
        (lambda: Shapes(patch=0), "parameter 'patch' must divide the 32 pixels of an image, not 0"),
        (lambda: Shapes(noise=256), "parameter 'noise' must be from 0 to 255, not 256"),
        (lambda: Shapes(label_noise=1), "parameter 'label_noise' must be at least 0 and below 1, in steps of 0.001"),
        (lambda: Shapes(train_examples=2), "parameter 'train_examples' must be at least 5, or null, not 2"),
    ],
)
def test_images_refuse(make: object, said: str) -> None:
    with pytest.raises(InputError) as error:
        make()  # type: ignore[operator]
    assert said in str(error.value)
    assert "\n" not in str(error.value)
