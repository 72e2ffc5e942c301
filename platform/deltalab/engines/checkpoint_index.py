"""Reads the index of a distributed checkpoint, which PyTorch pickles, without running what a pickle asks for."""

import pickle
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from deltalab.errors import InputError

FILE = ".metadata"
ALLOWED = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # Python 3.13
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
"""The names that an index of PyTorch uses. None of them runs code, reads a file or writes one."""


class _Index(pickle.Unpickler):
    """Unpickles nothing but `ALLOWED`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        # A dotted name would lead from an allowed class to whatever its module imports.
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index of a checkpoint needs")
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Any:
    """Stands for `getattr`, by which some versions of Python 3.11 pickle the members of enumerations."""
    if not (isinstance(kind, EnumType) and isinstance(name, str) and name in kind.__members__):
        raise pickle.UnpicklingError("it asks for an attribute of what is no enumeration")
    return kind[name]


class IndexReader(FileSystemReader):
    """Reads a distributed checkpoint of a folder that others may have written."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the index.

        Raises:
            InputError: It cannot be read, asks for code, or names a file outside of the checkpoint.
        """
        file = Path(self.path) / FILE
        try:
            with file.open("rb") as stream:
                index = _Index(stream).load()
            if not isinstance(index, Metadata):
                raise TypeError(f"it is a {type(index).__name__}")
            outside = [part.relative_path for part in index.storage_data.values() if Path(part.relative_path).parts[1:]]
        except Exception as error:  # A pickle that is cut off or made up raises almost anything.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"{file}: is no index of a checkpoint: {reason:.300}") from None
        if outside:
            raise InputError(f"{file}: names a file outside of the checkpoint: {outside[0]!r:.100}")
        if index.storage_meta is None:
            from torch.distributed.checkpoint.metadata import StorageMeta

            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index
