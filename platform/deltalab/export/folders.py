"""What a folder holds that can be exported again: an exported model, a checkpoint of `platform train`, a FLA model."""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from deltalab.data.text_tokenizers import FILE as TOKENIZER
from deltalab.errors import InputError
from deltalab.export.fla import from_fla
from deltalab.export.recipe import of_paper, of_run
from deltalab.export.retrain import load_rules, read_recipe
from deltalab.export.source import Source
from deltalab.models.spec import ModelSpec
from deltalab.reading import read_json

CONFIG, RUN, WEIGHTS = "config.json", "run.json", "model.safetensors"
OF_THE_RECIPE = ("model", "tokenizer", "provenance")
"""The parts of a recipe that an export writes anew."""


def holds_a_model(folder: Path) -> bool:
    """Whether a folder has the files of an exported model, of a FLA model, or of a run of `platform train`."""
    return any((each / name).is_file() for each in (folder, _run(folder)) for name in (CONFIG, RUN))


def from_folder(folder: Path) -> Source:
    """The model of a folder, with the recipe that it was or is to be trained by.

    folder: one that `platform export` or a loaded model's `save_pretrained` wrote; a run of `platform train`, of which
    the newest checkpoint counts; one of its `checkpoints/step-N`; or a model of FLA.

    Raises `InputError` for any other folder, for a run without a checkpoint, and for files that cannot be read.
    """
    run = _run(folder)
    if (run / RUN).is_file():
        return _of_a_run(run, folder)
    config = _json(folder / CONFIG)
    if config.get("model_type") != "deltalab":
        return _of_fla(folder)
    return _exported(folder, config, partial(_safetensors, folder) if _files(folder) else None)


def _exported(folder: Path, config: Mapping[str, Any], weights: Callable[[], Mapping[str, Tensor]] | None) -> Source:
    load_rules(folder)
    fields = ModelSpec.__dataclass_fields__
    model = ModelSpec.of({name: value for name, value in config.items() if name in fields})
    ours = (folder / "recipe.yaml").is_file()
    recipe = read_recipe(folder) if ours else of_paper(model)
    provenance = dict(recipe.get("provenance") or config.get("provenance") or {})
    scores = {name: value for name, value in provenance.items() if name.startswith("validation ")}
    return Source(
        model=model,
        weights=weights,
        recipe={name: value for name, value in recipe.items() if name not in OF_THE_RECIPE},
        provenance={name: value for name, value in provenance.items() if name not in (*scores, "weights")},
        # A folder that `save_pretrained` wrote may have been trained since, and holds no recipe.
        scores=scores if ours else {},
        tokenizer=str(folder) if (folder / TOKENIZER).is_file() else None,
    )


def _run(folder: Path) -> Path:
    """The folder of the run that a checkpoint belongs to; the folder itself where it is no checkpoint."""
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder


def _of_a_run(run: Path, folder: Path) -> Source:
    about = _json(run / RUN)
    # The engines read exported folders, so they stand above this package, which loads them by name.
    checkpoints = importlib.import_module("deltalab.engines.checkpoints")
    whole = checkpoints.complete(run)
    if folder == run and not whole:
        raise InputError(f"{run}: has no complete checkpoint yet")
    checkpoint = folder if folder != run else whole[-1]
    exported = Path(str(about.get("export")))
    if not (exported / CONFIG).is_file():
        raise InputError(f"{run / RUN}: trained {exported}, which is not there any more")
    weights = partial(checkpoints.read_checkpoint, checkpoint)
    found = _exported(exported, _json(exported / CONFIG), weights)
    if not isinstance(about.get("recipe"), dict):
        raise InputError(f"{run / RUN}: is not that of a run: it has no recipe")
    recipe = of_run(found.recipe, about["recipe"], run.name)
    trained = {"training": about.get("id"), "checkpoint": checkpoint.name, "data": about.get("data")}
    return Source(found.model, weights, recipe, {**found.provenance, **trained}, {}, found.tokenizer)


def _of_fla(folder: Path) -> Source:
    model, weights, provenance = from_fla(folder)
    return Source(
        model=model,
        weights=lambda: weights,
        recipe=of_paper(model),
        provenance=provenance,
        scores={},
        tokenizer=str(folder) if (folder / TOKENIZER).is_file() else None,
    )


def _files(folder: Path) -> list[Path]:
    """The files of an exported folder's weights; none where it is untrained."""
    index = folder / f"{WEIGHTS}.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(_json(index)["weight_map"].values()))]
    return [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else []


def _safetensors(folder: Path) -> dict[str, Tensor]:
    """The weights of an exported folder, as `Model(spec).state_dict()` names them."""
    found: dict[str, Tensor] = {}
    for file in _files(folder):
        try:
            found |= load_file(file)
        except Exception as error:
            raise InputError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    return {name.removeprefix("model."): value for name, value in found.items()}


def _json(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        if not file.parent.is_dir():
            raise InputError(f"{file.parent}: no such folder") from None
        raise InputError(
            f"{file.parent}: neither an exported folder, a run of platform train, one of its checkpoints, nor a model "
            f"of FLA: it has no {file.name}"
        ) from None
