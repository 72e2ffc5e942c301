"""The model to evaluate: an export, a run of `deltalab train` that is exported for a while, or one of transformers."""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from deltalab import trust
from deltalab.errors import InputError, NotInstalled
from deltalab.evaluation.results import fingerprint
from deltalab.export.folders import from_folder
from deltalab.export.own_code import require_own_code
from deltalab.export.recipe import RECIPE_FILE, read_recipe
from deltalab.export.write import export
from deltalab.reading import read_json

NO_TOKENIZER = "export it with --tokenizer"

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""The form of a model's name on the Hub."""


@dataclass(frozen=True)
class ModelFolder:
    """A model that transformers loads.

    Attributes:
        path: The folder, or the name on the Hugging Face Hub.
        named: What the user named, for messages.
        recipe: The recipe of the export, empty if it has none.
        training: The id of the run that trained the model; None if it is not known.
        step: The number of steps of the training; None if it is not known.
        run: The folder of the run, if the user named the run or one of its checkpoints; else None.
        data: The packed data of the training; None if they are not known or not there any more.
        data_hash: The SHA-256 of these data; None if it is not known.
        foreign: Whether the model is not deltalab's. Its code is run only if `trusted`.
        trusted: Whether code in the folder may run, which an exported folder needs.
    """

    path: Path | str
    named: Path | str
    recipe: Mapping[str, Any]
    training: str | None
    step: int | None
    run: Path | None
    data: Path | None
    data_hash: str | None = None
    foreign: bool = False
    trusted: bool = True

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
            from safetensors import SafetensorError
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise NotInstalled("evaluation needs transformers", "'deltalab[hf]'") from None
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        try:
            model = AutoModelForCausalLM.from_pretrained(self.path, trust_remote_code=self.trusted, dtype=dtype)
        except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            trust = "; --trust-remote-code runs the model's own code" if "trust_remote_code" in reason else ""
            raise InputError(f"{self.named}: cannot be loaded: {reason:.300}{trust}") from None
        return model.to(self.device).eval()

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the folder.

        Raises:
            InputError: If the folder has none.
        """
        if not self.has_tokenizer:
            raise InputError(f"{self.named}: has no tokenizer: {NO_TOKENIZER}")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path, trust_remote_code=self.trusted)
        except (OSError, ValueError, ImportError) as error:
            raise InputError(f"{self.named}: has no tokenizer: {' '.join(str(error).split()):.300}") from None
        # Without files, transformers makes an empty tokenizer, by which every text has 0 tokens.
        if not tokenizer("the", add_special_tokens=False)["input_ids"]:
            raise InputError(f"{self.named}: has no tokenizer: by its files a text has no tokens")
        return tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer, as far as its files tell."""
        return self.foreign or (Path(self.path) / "tokenizer.json").is_file()

    @cached_property
    def vocab_size(self) -> int:
        """The tokens that the model tells apart."""
        if self.foreign:
            return int(self.config.get_text_config().vocab_size)
        return int(read_config(Path(self.path))["vocab_size"])

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def logits(self, tokens: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """Computes the logits in float32 after the last `keep` of the tokens [B, T]; 0 means after all of them."""
        with torch.no_grad():
            # A model of transformers may not know how to keep some logits.
            kept = {} if self.foreign else {"logits_to_keep": keep}
            with self.positions(tokens.shape[1]):
                logits: torch.Tensor = self.model(tokens.to(self.device), use_cache=False, **kept).logits
        return logits[:, -keep:].float()

    def continued(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """Continues tokens [B, T] by greedy decoding, through the model's own `generate` where it has one.

        Returns:
            The next tokens [B, count] or, if all rows end before, fewer.
        """
        tokens = tokens.to(self.device)
        if not self.model.can_generate():
            for _ in range(count):
                tokens = torch.cat([tokens, self.logits(tokens, keep=1).argmax(-1)], 1)
            return tokens[:, -count:]
        ends = self.model.generation_config.eos_token_id
        # What a model's own configuration says of sampling and penalties must not enter.
        greedy: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}
        greedy |= dict.fromkeys(("temperature", "top_p", "top_k"))
        with torch.no_grad(), self.positions(tokens.shape[1] + count):
            out: torch.Tensor = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=count,
                pad_token_id=ends[0] if isinstance(ends, list) else ends,
                **greedy,
            )
        return out[:, tokens.shape[1] :]

    @contextmanager
    def positions(self, length: int, *, option: str = "--length") -> Iterator[None]:
        """Raises `InputError` if a model with a vector for each position has too few of them for `length` tokens.

        Args:
            length: The tokens.
            option: The option that says how many they are.
        """
        try:
            yield
        except IndexError as error:
            raise InputError(f"{self.named}: cannot read {length} tokens ({error}): give a smaller {option}") from None

    def release(self) -> None:
        """Lets go of the loaded model, whose memory another one needs."""
        vars(self).pop("model", None)

    @cached_property
    def weights(self) -> str | None:
        """What names the weights: a hash of their files or, for a model of the Hub, its name and commit.

        None if no files are known that could tell them from others.
        """
        if isinstance(self.path, Path):
            files = [file for suffix in ("safetensors", "bin", "pt", "pth") for file in self.path.glob(f"*.{suffix}")]
            return fingerprint(files) if files else None
        commit = getattr(self.config, "_commit_hash", None)
        return None if commit is None else f"{self.path}@{commit}"

    @cached_property
    def config(self) -> Any:
        """The configuration of a model that is not deltalab's."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.path, trust_remote_code=self.trusted)

    @property
    def identity(self) -> dict[str, Any] | None:
        """What the model computes with: weights, code and tokenizer, and the type of numbers; None if not known."""
        if self.weights is None:
            return None
        about = "" if isinstance(self.path, str) else fingerprint(_descriptions(self.path))
        numbers = "bfloat16" if self.device.type == "cuda" else "float32"
        return {"weights": self.weights, "described": about, "numbers": numbers, "deltalab": version("deltalab")}


def _descriptions(folder: Path) -> list[Path]:
    """The files of a folder that say how a model computes and reads text, but for its weights."""
    named = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json")
    others = (file for suffix in ("py", "txt", "model") for file in folder.rglob(f"*.{suffix}"))
    return [*(folder / name for name in named if (folder / name).is_file()), *others]


@contextmanager
def open_model(named: str, *, trusted: bool = False) -> Iterator[ModelFolder]:
    """Opens a model. A run or a checkpoint is exported for the length of the block.

    Args:
        named: A folder that `deltalab export` wrote, a run of `deltalab train`, one of its checkpoints, a folder that
            transformers loads, or a name on the Hugging Face Hub.
        trusted: Whether the code of a model may run that is not deltalab's, or not as this version writes it.

    Raises:
        InputError: If the folder is none of these, is an export without weights, or has code that is not trusted.
    """
    folder = Path(named)
    if trusted and folder.is_dir():
        trust.for_now(folder)
    kind = _model_type(folder)
    if kind not in (None, "deltalab"):
        yield ModelFolder(folder, folder, {}, None, None, None, None, foreign=True, trusted=trusted)
    elif not folder.exists() and _HUB_NAME.fullmatch(named):
        _on_hub(named, trusted)
        yield ModelFolder(named, named, {}, None, None, None, None, foreign=True, trusted=trusted)
    else:
        with _of_deltalab(folder) as ours:
            yield ours


@contextmanager
def _of_deltalab(folder: Path) -> Iterator[ModelFolder]:
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if (run / "run.json").is_file():
        source = from_folder(folder)
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "exported"
            export(source, path)
            origin = source.provenance
            step = int(str(origin["checkpoint"]).removeprefix("step-"))
            yield ModelFolder(path, folder, source.recipe, str(origin["training"]), step, run, *_trained_on(origin))
        return
    config = read_config(folder)
    recipe = read_recipe(folder) if (folder / RECIPE_FILE).is_file() else {}
    if not any(folder.glob("model*.safetensors")):
        raise InputError(f"{folder}: is exported without weights: train it first")
    require_own_code(folder, option="--trust")
    origin = {**(config.get("provenance") or {}), **(recipe.get("provenance") or {})}
    checkpoint = re.fullmatch(r"step-(\d+)", str(origin.get("checkpoint")))
    yield ModelFolder(
        folder,
        folder,
        recipe,
        origin.get("training"),
        int(checkpoint[1]) if checkpoint else None,
        None,
        *_trained_on(origin),
    )


def _trained_on(provenance: Mapping[str, Any]) -> tuple[Path | None, str | None]:
    """The packed data of a training, if they are known and still there, and their hash, if it is known."""
    data = provenance.get("data")
    if not isinstance(data, Mapping):
        return None, None
    folder = Path(str(data.get("folder")))
    return folder if folder.is_dir() else None, data.get("sha256")


def _on_hub(name: str, trusted: bool) -> None:
    """Raises `InputError` if the Hub has no model of this name, as far as its configuration tells."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise NotInstalled("evaluation needs transformers", "'deltalab[hf]'") from None
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        trust = "; --trust-remote-code runs the model's own code" if "trust_remote_code" in reason else ""
        raise InputError(f"{name}: no such folder, and not to be had from the Hub: {reason:.200}{trust}") from None


def _model_type(folder: Path) -> str | None:
    """The type of the model that a folder's `config.json` describes; None if it says none."""
    try:
        kind = read_json(folder / "config.json").get("model_type")
    except (OSError, InputError, AttributeError):
        return None
    return None if kind is None else str(kind)


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
    why = "neither a folder of `deltalab export` nor a run of `deltalab train`, nor one of transformers"
    if not folder.is_dir():
        why = "no such folder; a model of the Hub is named ORG/NAME"
    raise InputError(f"{folder}: {why}")
