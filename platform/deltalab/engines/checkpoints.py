"""The checkpoints of a run of `deltalab train`."""

import re
import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor

from deltalab.errors import InputError

LAST_FILES = (".metadata", "trainer_state.json")
"""The files that engines write last into a checkpoint: torchtitan the first one, Trainer the second one."""
FOLDER = "checkpoints"
BYTES_A_PARAMETER = 12
"""The bytes of a checkpoint for each parameter: the parameter and AdamW's two averages, in fp32."""
SHARDED = "pytorch_model_fsdp_0"
"""The folder of the weights in a checkpoint that Accelerate divided among several GPUs."""


def complete_checkpoints(run: Path) -> list[Path]:
    """Returns the complete checkpoints of a run, from the oldest to the newest."""
    checkpoints = [
        (int(match[1]), folder)
        for folder in (run / FOLDER).glob("step-*")
        if (match := re.fullmatch(r"step-(\d+)", folder.name)) and any((folder / name).is_file() for name in LAST_FILES)
    ]
    return [folder for _, folder in sorted(checkpoints)]


def remove_torn(run: Path) -> list[str]:
    """Removes the checkpoints of a run that are not complete, and returns their names."""
    complete = complete_checkpoints(run)
    torn = [folder for folder in (run / FOLDER).glob("*-*") if folder.is_dir() and folder not in complete]
    for folder in torn:
        shutil.rmtree(folder)
    return sorted(folder.name for folder in torn)


def read_checkpoint(checkpoint: Path) -> dict[str, Tensor]:
    """Reads the weights of a checkpoint. Their names are those of `Model(spec).state_dict()`.

    Raises:
        InputError: If the folder is not a complete checkpoint of an engine.
    """
    if not any((checkpoint / name).is_file() for name in LAST_FILES):
        raise InputError(f"{checkpoint}: is no complete checkpoint: it has neither {' nor '.join(LAST_FILES)}")
    whole = checkpoint / "model.safetensors"
    sharded = checkpoint / SHARDED
    if whole.is_file():
        from safetensors.torch import load_file

        weights = load_file(whole)
    else:
        weights = _distributed(sharded if sharded.is_dir() else checkpoint)
    return {name.removeprefix("model."): value for name, value in weights.items()}


def _distributed(folder: Path) -> dict[str, Tensor]:
    """Returns the weights of a distributed checkpoint of PyTorch. Their names begin with `model.`."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    from deltalab.engines.checkpoint_index import IndexReader

    reader = IndexReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    if not weights:
        raise InputError(f"{folder}: holds no weights of a model")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `load` warns that there is one process, as intended
            load(weights, storage_reader=reader, no_dist=True)
    except Exception as error:  # The library raises what it stumbles over, among others from files that are cut off.
        raise InputError(
            f"{folder}: cannot be read: {type(error).__name__}: {' '.join(str(error).split()):.300}"
        ) from None
    # Accelerate adds another prefix "model." to all names.
    twice = all(name.startswith("model.model.") for name in weights)
    return {name.removeprefix("model.") if twice else name: value for name, value in weights.items()}
