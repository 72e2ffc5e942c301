"""The folder of a model to evaluate: an export, or a run of `platform train` that is exported for a while."""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from deltalab.errors import InputError
from deltalab.export.folders import from_folder
from deltalab.export.recipe import RECIPE_FILE, read_recipe
from deltalab.export.write import export
from deltalab.reading import read_json

NO_TOKENIZER = "export it with --tokenizer"


@dataclass(frozen=True)
class ModelFolder:
    """A folder that transformers loads.

    Attributes:
        path: The folder.
        named: The folder that the user named, for messages.
        recipe: The recipe of the export, empty if it has none.
        training: The id of the run that trained the model; None if it is not known.
        step: The number of steps of the training; None if it is not known.
        run: The folder of the run, if the user named the run or one of its checkpoints; else None.
        data: The packed data of the training; None if they are not known or not there any more.
    """

    path: Path
    named: Path
    recipe: Mapping[str, Any]
    training: str | None
    step: int | None
    run: Path | None
    data: Path | None

    @property
    def length(self) -> int | None:
        """Tokens of a training sequence."""
        batch = self.recipe.get("batch")
        return int(batch["length"]) if isinstance(batch, Mapping) else None

    @cached_property
    def device(self) -> torch.device:
        """The GPU if there is one, else the CPU."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def model(self) -> Any:
        """The model, in bfloat16 on a GPU and in float32 on a CPU.

        Raises:
            InputError: If transformers is missing or cannot load the model.
        """
        try:
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise InputError("evaluation needs transformers: pip install 'deltalab[hf]'") from None
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        try:
            model = AutoModelForCausalLM.from_pretrained(self.path, trust_remote_code=True, dtype=dtype)
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"{self.named}: cannot be loaded: {' '.join(str(error).split())}") from None
        return model.to(self.device).eval()

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the folder.

        Raises:
            InputError: If the folder has none.
        """
        if not (self.path / "tokenizer.json").is_file():
            raise InputError(f"{self.named}: has no tokenizer: {NO_TOKENIZER}")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path, trust_remote_code=True)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def logits(self, tokens: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """Computes the logits in float32 after the last `keep` of the tokens [B, T]; 0 means after all of them."""
        with torch.no_grad():
            logits: torch.Tensor = self.model(tokens.to(self.device), logits_to_keep=keep, use_cache=False).logits
        return logits.float()


@contextmanager
def open_folder(folder: Path) -> Iterator[ModelFolder]:
    """Opens the folder of a model. A run or a checkpoint is exported for the length of the block.

    Args:
        folder: A folder that `platform export` wrote, a run of `platform train`, or one of its checkpoints.

    Raises:
        InputError: If the folder is none of these, or is an export without weights.
    """
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if (run / "run.json").is_file():
        source = from_folder(folder)
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "exported"
            export(source, path)
            origin = source.provenance
            step = int(str(origin["checkpoint"]).removeprefix("step-"))
            yield ModelFolder(path, folder, source.recipe, str(origin["training"]), step, run, _trained_on(origin))
        return
    config = read_config(folder)
    recipe = read_recipe(folder) if (folder / RECIPE_FILE).is_file() else {}
    if not any(folder.glob("model*.safetensors")):
        raise InputError(f"{folder}: is exported without weights: train it first")
    origin = {**(config.get("provenance") or {}), **(recipe.get("provenance") or {})}
    checkpoint = re.fullmatch(r"step-(\d+)", str(origin.get("checkpoint")))
    yield ModelFolder(
        folder,
        folder,
        recipe,
        origin.get("training"),
        int(checkpoint[1]) if checkpoint else None,
        None,
        _trained_on(origin),
    )


def _trained_on(provenance: Mapping[str, Any]) -> Path | None:
    """The packed data of a training, if they are known and still there."""
    data = provenance.get("data")
    folder = Path(str(data.get("folder"))) if isinstance(data, Mapping) else None
    return folder if folder is not None and folder.is_dir() else None


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the `config.json` of an exported folder.

    Raises:
        InputError: If the folder is not an export.
    """
    try:
        config = read_json(folder / "config.json")
        if config["model_type"] == "deltalab":
            return config
    except (OSError, InputError, KeyError):
        pass
    why = "neither a folder of `platform export` nor a run of `platform train`" if folder.is_dir() else "no such folder"
    raise InputError(f"{folder}: {why}")
