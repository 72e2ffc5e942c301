"""The checkpoints of a run of `platform train`: which are complete, and the weights that they hold."""

import re
import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor

from deltalab.errors import InputError

DONE = (".metadata", "trainer_state.json")
"""The file that an engine writes last: torchtitan's distributed checkpoint, or Trainer's."""
FOLDER = "checkpoints"
SHARDED = "pytorch_model_fsdp_0"
"""The folder of Accelerate's weights in a checkpoint that several GPUs share."""


def complete(run: Path) -> list[Path]:
    """The complete checkpoints of a run, from the oldest to the newest."""
    found = [
        (int(match[1]), each)
        for each in (run / FOLDER).glob("step-*")
        if (match := re.fullmatch(r"step-(\d+)", each.name)) and any((each / name).is_file() for name in DONE)
    ]
    return [each for _, each in sorted(found)]


def remove_torn(run: Path) -> list[str]:
    """Removes checkpoints that a training did not finish, and returns their names."""
    whole = complete(run)
    torn = [each for each in (run / FOLDER).glob("*-*") if each.is_dir() and each not in whole]
    for each in torn:
        shutil.rmtree(each)
    return sorted(each.name for each in torn)


def read_checkpoint(checkpoint: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, as `Model(spec).state_dict()`.

    Raises `InputError` for a folder that is no complete checkpoint of an engine.
    """
    if not any((checkpoint / name).is_file() for name in DONE):
        raise InputError(f"{checkpoint}: is no complete checkpoint: it has neither {' nor '.join(DONE)}")
    whole = checkpoint / "model.safetensors"
    sharded = checkpoint / SHARDED
    if whole.is_file():
        from safetensors.torch import load_file

        found = load_file(whole)
    else:
        found = _distributed(sharded if sharded.is_dir() else checkpoint)
    return {name.removeprefix("model."): value for name, value in found.items()}


def _distributed(folder: Path) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in known.items()
        if name.startswith("model.") and isinstance(about, TensorStorageMetadata)
    }
    if not found:
        raise InputError(f"{folder}: holds no weights of a model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that there is one process, as intended
        load(found, checkpoint_id=folder, no_dist=True)
    # Accelerate names the model's state dict "model" once more.
    twice = all(name.startswith("model.model.") for name in found)
    return {name.removeprefix("model.") if twice else name: value for name, value in found.items()}
