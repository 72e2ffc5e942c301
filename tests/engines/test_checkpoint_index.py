"""The index of a distributed checkpoint is read without running what its pickle asks for."""

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from deltalab.engines.checkpoint_index import IndexReader


class ByAttribute(pickle.Pickler):
    """Pickles members of enumerations as some versions of Python 3.11 do: as attributes of their class."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_members_of_enumerations_are_read_as_any_python_writes_them(tmp_path: Path) -> None:
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([2]), [])
    index, written = Metadata({"weight": tensor}, storage_data={}), io.BytesIO()
    ByAttribute(written).dump(index)
    assert b"getattr" in written.getvalue()
    (tmp_path / ".metadata").write_bytes(written.getvalue())
    assert IndexReader(tmp_path).read_metadata().state_dict_metadata == {"weight": tensor}
