"""The images of a folder with one folder for each class, decoded once and mapped into memory."""

import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor

from deltalab.errors import InputError
from deltalab.tasks.corpus import cache_folder
from deltalab.tasks.task import SPLITS

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp")
SHARE = 16
"""Images of at most 1 / SHARE of a GPU's memory are copied there. Several processes may use a GPU, each with a copy."""
SECONDS = 5
"""The seconds between two lines about images that are being decoded."""
RELEASE = 1
"""Counts the ways in which files became pixels. Another way is another folder of the cache."""
CHANNELS = 3

_log = logging.getLogger(__name__)
_WHERE = "task 'image_folder': parameter 'folder'"

Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Pixels:
    """The images of a folder.

    Attributes:
        data: All images, uint8 [N, side, side, 3], mapped into memory.
        labels: The number of each image's class, int64 [N].
        members: The images of each split, int64 [n]. Each different image is in one of them.
        classes: The names of the classes, which are their folders'.
        fingerprint: The SHA-256 of classes, images and splits.
    """

    data: Bytes
    labels: Tensor
    members: Mapping[str, Tensor]
    classes: tuple[str, ...]
    fingerprint: str

    def fits(self, device: torch.device) -> bool:
        """Returns whether a device can hold a copy. The CPU needs no copy."""
        if device.type != "cuda":
            return True
        return self.data.nbytes <= torch.cuda.get_device_properties(device).total_memory // SHARE

    def of(self, split: str, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Returns images of a split, uint8 [B, side, side, 3], and their labels [B], on the device of `drawn`.

        Args:
            split: The split.
            drawn: Their numbers in the split, int64 [B].
        """
        device = drawn.device
        all_labels, members = _numbers_on(self, device)
        number = members[split][drawn]
        labels = all_labels[number]
        if device.type != "cpu" and self.fits(device):
            return _data_on(self, device)[number], labels
        return torch.from_numpy(self.data[number.cpu().numpy()]).to(device), labels


@cache
def _numbers_on(pixels: Pixels, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    return pixels.labels.to(device), {split: members.to(device) for split, members in pixels.members.items()}


@cache
def _data_on(pixels: Pixels, device: torch.device) -> Tensor:
    return torch.tensor(pixels.data, device=device)


@cache
def pixels_of(folder: str, side: int) -> Pixels:
    """Returns the images of a folder.

    The first call decodes them into $XDG_CACHE_HOME/deltalab/images/KEY, by default in ~/.cache. KEY follows from the
    names, sizes and times of the files.

    Args:
        folder: The absolute path of a folder, with one folder of images for each class.
        side: The pixels of an image in each direction. The middle of an image is cut to a square and resized.

    Raises:
        InputError: The folder has fewer than two classes, fewer than ten different images, a file that is no image, or
            one image in two classes.
    """
    root = Path(folder)
    try:
        classes, files = _files(root)
        listed = [(str(path.relative_to(root)), *path.stat()[6:9:2]) for path in files]
    except OSError as error:
        raise InputError(f"{_WHERE}: cannot read '{error.filename or root}': {error.strerror}") from None
    key = sha256(json.dumps([RELEASE, side, listed]).encode()).hexdigest()
    cached = cache_folder("images") / key
    if not cached.is_dir():
        try:
            _decode(root, classes, files, side, cached)
        except OSError as error:
            raise InputError(
                f"{_WHERE}: cannot keep the images of '{root}' in '{cached.parent}', which the environment variable "
                f"XDG_CACHE_HOME moves: {error}"
            ) from None
    about = json.loads((cached / "about.json").read_text(encoding="utf-8"))
    data = np.load(cached / "pixels.npy", mmap_mode="r")
    labels = torch.from_numpy(np.load(cached / "labels.npy"))
    members = {split: torch.from_numpy(np.load(cached / f"{split}.npy")) for split in SPLITS}
    return Pixels(data, labels, members, tuple(about["classes"]), about["fingerprint"])


def _files(root: Path) -> tuple[list[str], list[Path]]:
    """Returns the classes of a folder, and the files of their images."""
    classes = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    if len(classes) < 2:
        raise InputError(
            f"{_WHERE}: '{root}' holds {len(classes)} folders; it needs one for each of at least 2 classes"
        )
    files = []
    for name in classes:
        found = [path for path in (root / name).rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()]
        if not found:
            raise InputError(f"{_WHERE}: '{root / name}' holds no image; allowed: {', '.join(SUFFIXES)}")
        files += sorted(found)
    return classes, files


def _image(path: Path, side: int) -> Bytes:
    """Returns the middle of an image as a square of `side` pixels, [side, side, 3]."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            square = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BICUBIC)
            return np.asarray(square, np.uint8)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        raise InputError(f"{_WHERE}: '{path}' is no image that can be read") from None


def _decode(root: Path, classes: list[str], files: list[Path], side: int, cached: Path) -> None:
    """Writes the images of files, their classes and splits."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    labels = np.array([classes.index(path.relative_to(root).parts[0]) for path in files])
    with TemporaryDirectory(dir=cached.parent) as temporary, ThreadPoolExecutor() as threads:
        made = Path(temporary, "made")
        made.mkdir()
        file, shape = made / "pixels.npy", (len(files), side, side, CHANNELS)
        data: np.memmap = open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)  # type: ignore[no-untyped-call]
        start = said = time.monotonic()
        seen: dict[bytes, int] = {}
        for i, pixels in enumerate(threads.map(lambda path: _image(path, side), files)):
            data[i] = pixels
            first = seen.setdefault(sha256(pixels.tobytes()).digest(), i)
            if labels[first] != labels[i]:
                raise InputError(f"{_WHERE}: '{files[first]}' and '{files[i]}' are one image in two classes")
            if (now := time.monotonic()) - said > SECONDS:
                left, said = (now - start) / (i + 1) * (len(files) - i - 1), now
                done = f"{i + 1:,} of {len(files):,} images of '{root}' are decoded, once"
                _log.warning(f"task 'image_folder': {done}; {left:.0f} s left")
        data.flush()
        tenth = len(seen) // 10
        if tenth == 0:
            raise InputError(f"{_WHERE}: '{root}' holds {len(seen)} different images; it needs at least 10")
        order = np.array([seen[digest] for digest in sorted(seen)])
        cuts = {"validation": order[:tenth], "test": order[tenth : 2 * tenth], "train": order[2 * tenth :]}
        for split, members in cuts.items():
            np.save(made / f"{split}.npy", members)
        np.save(made / "labels.npy", labels)
        listing = [(digest.hex(), int(labels[number])) for digest, number in sorted(seen.items())]
        fingerprint = sha256(json.dumps([RELEASE, side, classes, listing]).encode()).hexdigest()
        about = json.dumps({"classes": classes, "fingerprint": fingerprint})
        (made / "about.json").write_text(about, encoding="utf-8")
        try:
            made.rename(cached)
        except OSError:
            if not cached.is_dir():  # otherwise, another process was first
                raise
