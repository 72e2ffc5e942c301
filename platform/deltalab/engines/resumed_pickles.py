"""Finds out, before an engine goes on from a checkpoint, whether the pickles in it ask for more than data.

An engine reads a checkpoint by its own reader, which runs what a pickle asks for. A pickle that asks only for the names
that such a reader needs builds tensors, numbers and containers.
"""

import io
import os
import stat
from pathlib import Path

from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.serialization import get_unsafe_globals_in_checkpoint

from deltalab import trust
from deltalab.engines.checkpoint_index import FILE, IndexReader
from deltalab.errors import InputError

PICKLED = {".bin", ".pkl", ".pt", ".pth"}
"""The suffixes of the files that Trainer and Accelerate read as pickles."""

ALLOWED = {
    "_codecs.encode",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
}
"""Names beside those of PyTorch's own reader of weights: random states of numpy have them. None of them runs code."""

NOT_READ = {"training_args.bin"}
"""Files of a checkpoint that no engine reads in order to go on."""


def require_harmless(checkpoint: Path) -> None:
    """Raises `InputError` if a pickle of a checkpoint asks for code, and its folder is not trusted.

    Args:
        checkpoint: The folder of a complete checkpoint, from which an engine is about to go on.
    """
    if trust.is_trusted(checkpoint):
        return
    for file in sorted(path for path in checkpoint.rglob("*") if path.name == FILE or path.suffix in PICKLED):
        if file.name in NOT_READ:
            continue
        if why := _asks_for(file):
            raise InputError(
                f"{file}: {why}, and the engine would run it: `deltalab trust {checkpoint.parent.parent}` lets it go "
                "on from the checkpoints of this folder, if they are yours"
            )


def _asks_for(file: Path) -> str | None:
    """Says what a file asks for beside data; None if there is nothing."""
    if not stat.S_ISREG(os.lstat(file).st_mode):
        return "is no plain file"
    if file.name != FILE:
        return _names(file)
    try:
        reader = IndexReader(file.parent)
        index = reader.read_metadata()
    except InputError as error:
        return str(error).removeprefix(f"{file}: ")
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            where = next((where for place, where in index.storage_data.items() if place.fqn == key), None)
            if where is None:
                return f"{key} has no place in a file"
            with (file.parent / where.relative_path).open("rb") as stream:
                stream.seek(where.offset)
                if why := _names(io.BytesIO(stream.read(where.length))):
                    return f"{key} {why}"
    return None


def _names(saved: Path | io.BytesIO) -> str | None:
    """Says which names the pickle of `torch.save` asks for that no data needs; None if there are none."""
    try:
        asked = get_unsafe_globals_in_checkpoint(saved)
    except Exception as error:  # Such a reader raises almost anything of a file that is cut off or made up.
        return f"cannot be read as data: {' '.join(str(error).split()) or type(error).__name__:.200}"
    others = sorted({*asked} - ALLOWED)
    return f"asks for {', '.join(others[:3])}, which no data needs" if others else None
