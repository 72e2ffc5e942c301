"""Images are cut into patches as stated, classes follow their definition, and labels are wrong at the stated rate."""

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from PIL import Image

from deltalab.errors import InputError
from deltalab.tasks import IGNORE, SPLITS
from deltalab.tasks.digits import images_of
from deltalab.tasks.images import pixels
from deltalab.tasks.images.digit_patches import DigitPatches
from deltalab.tasks.images.image_folder import ImageFolder
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


def picture(folder: Path, name: str, pixels: torch.Tensor) -> Path:
    """Writes an image, uint8 [rows, columns, 3]."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.numpy()).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve red images, eight green ones, and one of each twice; red rises from the left to the right."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ramp = torch.arange(16).mul(8).expand(16, 16)
    for i in range(20):
        pixels = torch.stack([ramp, 0 * ramp, 0 * ramp], -1) + i
        name = f"{'red' if i < 12 else 'green'}/{i}.png"
        picture(tmp_path / "set", name, pixels.to(torch.uint8))
        if i in (3, 14):
            picture(tmp_path / "set", name.replace(".png", " again.png"), pixels.to(torch.uint8))
    return tmp_path / "set"


def levels(task: ImageFolder, split: str, size: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of a folder as levels [B, side, side, 3], and their labels [B]."""
    batch = task.batch(split, size, 0, 0)
    side, patch = task.side // task.patch, task.patch
    cut = batch.inputs.view(size, side, side, patch, patch, 3).transpose(2, 3)
    return (cut.reshape(size, task.side, task.side, 3) * 64 + 128).long(), batch.targets[:, -1]


def test_a_folder_is_split_into_different_images_of_its_classes(folder: Path) -> None:
    task = ImageFolder(folder=str(folder), side=16)
    seen = {}
    for split in SPLITS:
        images, labels = levels(task, split)
        numbers = images[:, 0, 0, 1]
        assert (images[:, :, :, 0] - numbers[:, None, None] == torch.arange(16).mul(8)).all()
        assert ((numbers < 12) == (labels == 1)).all(), "classes are numbered by name: green, red"
        seen[split] = set(numbers.tolist())
    assert [len(seen[split]) for split in SPLITS] == [16, 2, 2]
    assert len(set.union(*seen.values())) == 20
    red = len([number for number in seen["train"] if number < 12])
    assert task.chance == max(red, 16 - red) / 16
    assert task.train_tokens == 16 * task.length


def test_augmented_images_are_moved_and_mirrored_in_training_alone(folder: Path) -> None:
    task = ImageFolder(folder=str(folder), side=16, augment=True)
    plain = ImageFolder(folder=str(folder), side=16)
    assert (levels(task, "test")[0] == levels(plain, "test")[0]).all()
    images, number = levels(task, "train")[0], levels(plain, "train")[0][:, 0, 0, 1]
    ramp = (images[:, 0, :, 0] - number[:, None]) // 8
    kinds = {tuple(row) for row in ramp.tolist()}
    places = [[min(max(at + moved, 0), 15) for at in range(16)] for moved in range(-2, 3)]
    assert kinds == {tuple(row[:: 1 if ahead else -1]) for row in places for ahead in (True, False)}
    assert (levels(task, "train")[1] == levels(plain, "train")[1]).all()


def test_a_folder_is_decoded_again_only_where_its_files_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ImageFolder(folder=str(folder), side=16).fingerprint()
    pixels.pixels_of.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(pixels, "_image", lambda *_: pytest.fail("decoded again"))
        assert ImageFolder(folder=str(folder), side=16).fingerprint() == first
    pixels.pixels_of.cache_clear()
    picture(folder, "red/new.png", torch.full((16, 16, 3), 200, dtype=torch.uint8))
    assert ImageFolder(folder=str(folder), side=16).fingerprint() != first


def test_an_image_is_cut_to_its_middle(folder: Path) -> None:
    wide = torch.zeros(16, 48, 3, dtype=torch.uint8)
    wide[:, 16:32] = 240
    for i in range(20):
        picture(folder, f"wide/{i}.png", torch.where(wide > 0, wide + i // 2, wide))
    images, labels = levels(ImageFolder(folder=str(folder), side=16), "train", 500)
    assert (images[labels == 2] >= 240).all()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: shutil.rmtree(folder / "red"), "holds 1 folders; it needs one for each of at least 2 classes"),
        (lambda folder: shutil.rmtree(folder), "cannot read"),
        (lambda folder: (folder / "blue").mkdir(), "holds no image; allowed: .bmp, .jpeg"),
        (lambda folder: (folder / "red" / "x.png").write_text("no"), "x.png' is no image that can be read"),
        (lambda folder: shutil.copy(folder / "red" / "1.png", folder / "green"), "are one image in two classes"),
        (lambda folder: [file.unlink() for file in folder.glob("*/1*.png")], "different images; it needs at least 10"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused_in_one_line(folder: Path, spoil: object, said: str) -> None:
    spoil(folder)  # type: ignore[operator]
    for file in sorted(folder.glob("red/[5-9].png")) if "at least 10" in said else []:
        file.unlink()
    if "at least 10" in said:
        picture(folder, "green/1.png", torch.zeros(16, 16, 3, dtype=torch.uint8))
    with pytest.raises(InputError, match=r"^task 'image_folder': parameter 'folder': .*") as error:
        ImageFolder(folder=str(folder), side=16)
    assert said in str(error.value)
    assert not list((folder.parent / "cache").rglob("tmp*")), "nothing half-written stays"
