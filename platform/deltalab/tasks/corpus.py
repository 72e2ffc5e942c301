"""The bytes of a corpus, mapped into memory and divided among training, validation and test."""

import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltalab.errors import InputError
from deltalab.tasks.kjv_jargon import FINGERPRINT, FOLDER
from deltalab.tasks.task import SPLITS

Bytes: TypeAlias = NDArray[np.uint8]

PYTHON = "python"
"""The value of `corpus` that stands for the source files of this machine's Python standard library."""

RARE = 2e-3
"""The share of the training split's bigrams below which a bigram is rare. In the default corpus, 97% of the bigrams
that occur are rare, and they make up 28% of the text."""

# Folders that are left out of the standard library. Some hold packages that are installed beside it, or are not on
# every machine. Two hold no source text: `encodings` has near-copies of one table, and `pydoc_data` has one string that
# is as long as half a held-out split.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

_BLOCK = 2**18
"""The number of bytes that are hashed, joined or counted at a time. Blocks of 2^22 would double the time to count."""

MOST_FILES, MOST_BYTES = 20_000, 2**29
"""The most files of a folder, and the most bytes in them. Reading, joining and hashing more takes a plan minutes."""

SHARE = 16
"""A split of at most 1 / SHARE of a GPU's memory is copied there. Several processes may use a GPU, each with a copy."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """The bytes of the splits of a corpus.

    Attributes:
        data: The bytes of each split, uint8 [N], mapped into memory.
        known: The fingerprint, if it is known already.
    """

    data: Mapping[str, Bytes]
    known: str = ""
    unit = "bytes"
    vocab_size = 256
    bytes_per_token = 1.0

    def size(self, split: str) -> int:
        """Returns the number of bytes in a split."""
        return len(self.data[split])

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of lines 'SPLIT BYTES SHA256', one for each split. The first call reads every byte."""
        return self.known or fingerprint({split: [data.data] for split, data in self.data.items()})

    @cached_property
    def rare(self) -> Tensor:
        """Whether the bigram `256 first + second` is `RARE`, bool [65536]. The first call reads all of training."""
        train, counts = self.data["train"], np.zeros(256 * 256, np.int64)
        for begin in range(0, len(train) - 1, _BLOCK):
            block = train[begin : begin + _BLOCK + 1].astype(np.int32)
            counts += np.bincount((block[:-1] << 8) | block[1:], minlength=256 * 256)
        return torch.tensor(counts < RARE * counts.sum())

    def is_rare(self, first: Tensor, second: Tensor) -> Tensor:
        """Returns whether the bigrams (first, second) are rare."""
        return self.rare.to(first.device)[first * 256 + second]

    def fits(self, split: str, device: torch.device) -> bool:
        """Returns whether a device can hold a copy of a split. The CPU needs no copy."""
        if device.type != "cuda":
            return True
        return len(self.data[split]) <= torch.cuda.get_device_properties(device).total_memory // SHARE

    def windows(self, split: str, places: Tensor) -> Tensor:
        """Returns the bytes at `places`, int64 on the device of `places`."""
        device, data = places.device, self.data[split]
        if device.type != "cpu" and self.fits(split, device):
            return _device_copy(self, split, device)[places].long()
        return torch.from_numpy(data[places.cpu().numpy()]).to(device).long()


@cache
def _device_copy(corpus: Corpus, split: str, device: torch.device) -> Tensor:
    return torch.tensor(corpus.data[split], device=device)


def corpus_path(corpus: str | None) -> str:
    """Returns the absolute path of the corpus that a parameter `corpus` names."""
    if corpus is None:
        return str(FOLDER)
    return sysconfig.get_path("stdlib") if corpus == PYTHON else os.path.abspath(os.path.expanduser(corpus))


def load(path: str, library: bool) -> Corpus:
    """Reads the corpus at a path.

    Args:
        path: A file or a folder.
        library: Whether to read only the source of the standard library itself in the folder.

    Raises:
        InputError: The corpus cannot be read, or is a folder of fewer than 3 files.
    """
    try:
        if path == str(FOLDER):
            return _pinned()
        if os.path.isfile(path):
            return Corpus(_cut(Path(path)))
        return _folder(Path(path), library)
    except OSError as error:
        reason = error.strerror if str(error.filename) == path else error
        hint = "" if os.path.exists(path) else _hint(Path(path))
        raise InputError(f"task 'text': parameter 'corpus': cannot read '{path}': {reason}{hint}") from error


def fingerprint(contents: Mapping[str, Iterable[bytes | memoryview]]) -> str:
    """Returns the `fingerprint` of a corpus whose splits arrive in blocks."""
    lines = []
    for split, blocks in contents.items():
        digest, size = sha256(), 0
        for block in blocks:
            digest.update(block)
            size += len(block)
        lines.append(f"{split} {size} {digest.hexdigest()}\n")
    return sha256("".join(lines).encode()).hexdigest()


def _pinned() -> Corpus:
    corpus = Corpus(_mapped(FOLDER))
    if corpus.fingerprint != FINGERPRINT:
        raise InputError(f"task 'text': the files in '{FOLDER}' are not those of the release: install deltalab again")
    return corpus


def _mapped(folder: Path) -> dict[str, Bytes]:
    return {split: _map(folder / f"{split}.txt") for split in SPLITS}


def _map(path: Path) -> Bytes:
    if path.stat().st_size == 0:
        return np.empty(0, np.uint8)  # an empty file cannot be mapped
    return np.asarray(np.memmap(path, np.uint8, mode="r"))


def _cut(path: Path) -> dict[str, Bytes]:
    data = _map(path)
    return dict(zip(SPLITS, np.split(data, [len(data) * 8 // 10, len(data) * 9 // 10]), strict=True))


def _folder(root: Path, library: bool) -> Corpus:
    """Joins the files of each split into one cached file, and maps the cached files into memory.

    The folder in the cache is named after a hash of the content.
    """
    members = _members(root, library)
    digest = fingerprint({split: _blocks(root, members[split]) for split in SPLITS})
    folder = cache_folder("corpora") / digest
    if not folder.is_dir():
        try:
            _join(root, members, digest, folder)
        except OSError as error:
            raise InputError(
                f"task 'text': parameter 'corpus': cannot join the files of '{root}' in '{folder.parent}', which the "
                f"environment variable XDG_CACHE_HOME moves: {error}"
            ) from error
    return Corpus(_mapped(folder), digest)


def _join(root: Path, members: Mapping[str, list[Path]], digest: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        joined = Path(temporary, "joined")
        joined.mkdir()
        for split in SPLITS:
            with (joined / f"{split}.txt").open("wb") as file:
                file.writelines(_blocks(root, members[split]))
        if Corpus(_mapped(joined)).fingerprint != digest:
            raise InputError(f"task 'text': parameter 'corpus': '{root}' changed while it was read")
        try:
            joined.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise, another process was first
                raise


def cache_folder(kind: str) -> Path:
    """Returns the cache of what is made of a user's data: $XDG_CACHE_HOME/deltalab/KIND, in ~/.cache by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "deltalab" / kind


def _members(root: Path, library: bool) -> dict[str, list[Path]]:
    def refuse(error: OSError) -> None:
        raise error

    paths, size = list[Path](), 0
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and not (library and name in _NOT_LIBRARY)]
        names = [name for name in files if name[0] != "." and (name.endswith(".py") or not library)]
        found = [path for name in names if (path := Path(folder, name)).is_file()]
        paths += [path.relative_to(root) for path in found]
        size += sum(path.stat().st_size for path in found)
        if len(paths) > MOST_FILES or size > MOST_BYTES:
            raise InputError(
                f"task 'text': parameter 'corpus': '{root}' holds over {MOST_FILES:,} files or {MOST_BYTES:,} bytes; "
                "name a smaller folder or a single file, or pack the text: deltalab data pack"
            )
    if len(paths) < 3:
        raise InputError(
            f"task 'text': parameter 'corpus': '{root}' holds {len(paths)} files; "
            "a folder is split by file and needs at least 3, or name a single file"
        )
    paths.sort(key=lambda path: sha256(os.fsencode(path.as_posix())).digest())
    tenth = max(1, len(paths) // 10)
    held_out = {"validation": paths[:tenth], "test": paths[tenth : 2 * tenth]}
    return {split: sorted(members) for split, members in {"train": paths[2 * tenth :], **held_out}.items()}


def _blocks(root: Path, paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        with (root / path).open("rb") as file:
            while block := file.read(_BLOCK):
                yield block


def _hint(path: Path) -> str:
    """Suggests the name in the same folder with the nearest spelling. In the working folder, `PYTHON` is a name too."""
    names = [PYTHON] if path.parent == Path.cwd() else []
    with suppress(OSError):
        names += sorted(entry for entry in os.listdir(path.parent) if entry != path.name)
    near = get_close_matches(path.name, names, n=1)
    meant = f" did you mean '{near[0]}'?" if near else ""
    return f";{meant} a corpus is a file, a folder, '{PYTHON}' for the standard library, or null"
