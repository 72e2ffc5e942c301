"""Reads the model of a folder: an export, a run of `deltalab train` or one of its checkpoints, or a model of FLA."""

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
from deltalab.export.recipe import RECIPE_FILE, paper_recipe, read_recipe, run_recipe
from deltalab.export.retrain import load_rules
from deltalab.export.source import Source
from deltalab.models.spec import ModelSpec
from deltalab.reading import read_json

CONFIG, RUN, WEIGHTS = "config.json", "run.json", "model.safetensors"
NOT_KEPT = ("model", "tokenizer", "provenance")
"""The keys of a recipe that every export writes anew instead of keeping them."""


def holds_a_model(folder: Path) -> bool:
    """Returns whether a folder has the files of an exported model, of a FLA model, or of a run of `deltalab train`."""
    return any((place / name).is_file() for place in (folder, _run(folder)) for name in (CONFIG, RUN))


def from_folder(folder: Path) -> Source:
    """Reads the model of a folder, with the recipe by which it was trained or is to be trained.

    Args:
        folder: A folder that `deltalab export` or the `save_pretrained` of a loaded model wrote; a run of
            `deltalab train`, whose newest checkpoint counts; one of its `checkpoints/step-N`; or a model of FLA.

    Raises:
        InputError: If the folder is of none of these kinds, if a run has no checkpoint, or if a file cannot be read.
    """
    run = _run(folder)
    if (run / RUN).is_file():
        return _of_a_run(run, folder)
    config = _json(folder / CONFIG)
    if config.get("model_type") != "deltalab":
        return _of_fla(folder)
    return _exported(folder, config, partial(_safetensors, folder) if _files(folder) else None)


def _exported(folder: Path, config: Mapping[str, Any], weights: Callable[[], Mapping[str, Tensor]] | None) -> Source:
    """The model of an exported folder, with the weights that the function `weights` reads."""
    load_rules(folder)
    fields = ModelSpec.__dataclass_fields__
    model = ModelSpec.of({name: value for name, value in config.items() if name in fields})
    has_recipe = (folder / RECIPE_FILE).is_file()
    recipe = read_recipe(folder) if has_recipe else paper_recipe(model)
    provenance = dict(recipe.get("provenance") or config.get("provenance") or {})
    scores = {name: value for name, value in provenance.items() if name.startswith("validation ")}
    return Source(
        model=model,
        weights=weights,
        recipe={name: value for name, value in recipe.items() if name not in NOT_KEPT},
        provenance={name: value for name, value in provenance.items() if name not in (*scores, "weights")},
        # A folder without a recipe was written by `save_pretrained`, and may have been trained in the meantime.
        scores=scores if has_recipe else {},
        tokenizer=str(folder) if (folder / TOKENIZER).is_file() else None,
    )


def _run(folder: Path) -> Path:
    """The folder of the run that a checkpoint belongs to, or the folder itself if it is not a checkpoint."""
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder


def _of_a_run(run: Path, folder: Path) -> Source:
    """The model of the checkpoint `folder`, or of the run's newest checkpoint if `folder` is the run."""
    about = _json(run / RUN)
    # The layers forbid an import statement: the engines read exported folders, so they stand above this package.
    checkpoints = importlib.import_module("deltalab.engines.checkpoints")
    complete = checkpoints.complete_checkpoints(run)
    if folder == run and not complete:
        raise InputError(f"{run}: has no complete checkpoint yet")
    checkpoint = folder if folder != run else complete[-1]
    exported = Path(str(about.get("export")))
    if not (exported / CONFIG).is_file():
        raise InputError(f"{run / RUN}: trained {exported}, which is not there any more")
    weights = partial(checkpoints.read_checkpoint, checkpoint)
    export = _exported(exported, _json(exported / CONFIG), weights)
    if not isinstance(about.get("recipe"), dict):
        raise InputError(f"{run / RUN}: is not that of a run: it has no recipe")
    recipe = run_recipe(export.recipe, about["recipe"], run.name)
    training = {"training": about.get("id"), "checkpoint": checkpoint.name, "data": about.get("data")}
    return Source(export.model, weights, recipe, {**export.provenance, **training}, {}, export.tokenizer)


def _of_fla(folder: Path) -> Source:
    """The model of a folder that FLA wrote."""
    model, weights, provenance = from_fla(folder)
    return Source(
        model=model,
        weights=lambda: weights,
        recipe=paper_recipe(model),
        provenance=provenance,
        scores={},
        tokenizer=str(folder) if (folder / TOKENIZER).is_file() else None,
    )


def _files(folder: Path) -> list[Path]:
    """The files with the weights of an exported folder; [] for an untrained model."""
    index = folder / f"{WEIGHTS}.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(_json(index)["weight_map"].values()))]
    return [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else []


def _safetensors(folder: Path) -> dict[str, Tensor]:
    """The weights of an exported folder, as `Model(spec).state_dict()` names them."""
    weights: dict[str, Tensor] = {}
    for file in _files(folder):
        try:
            weights |= load_file(file)
        except Exception as error:
            raise InputError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    return {name.removeprefix("model."): value for name, value in weights.items()}


def _json(file: Path) -> dict[str, Any]:
    """The contents of a JSON file, whose absence means that its folder holds no model."""
    try:
        return read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        if not file.parent.is_dir():
            raise InputError(f"{file.parent}: no such folder") from None
        raise InputError(
            f"{file.parent}: neither an exported folder, a run of deltalab train, one of its checkpoints, nor a model "
            f"of FLA: it has no {file.name}"
        ) from None
