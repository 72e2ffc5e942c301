"""Checks everything that the training of an exported folder needs, and makes it ready to start."""

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from deltalab.data.text_tokenizers import same_ids
from deltalab.data.token_shards import Packed
from deltalab.engines.earlier_run import check_readable, check_room, check_same_training, earlier_run
from deltalab.engines.machines import ENGINES, ONE_MACHINE, Nodes, check_nodes, command, hardware, version_of, versions
from deltalab.engines.torchtitan import PACKAGE, WHERE
from deltalab.errors import InputError, unknown
from deltalab.export.own_code import require_own_code
from deltalab.export.recipe import (
    RECIPE_FILE,
    all_settings,
    changed_recipe,
    check_setting,
    named_settings,
    no_context,
    no_graphs,
    no_graphs_of,
    no_milestones,
    read_recipe,
)
from deltalab.export.retrain import load_rules
from deltalab.export.scales import parameter_count
from deltalab.models.spec import ModelSpec
from deltalab.reading import read_json, read_yaml
from deltalab.training.recipe_keys import DEFAULTS, LATER, default_settings, micro_batch, with_defaults


@dataclass
class Launch:
    """A training that is ready to start.

    Attributes:
        folder: The exported folder.
        run: The folder of the run.
        engine: A name of `ENGINES`.
        gpus: The number of GPUs to use on this machine; 0 trains on its CPUs.
        processes: The number of processes on this machine if `gpus` is 0.
        nodes: The machines.
        recipe: The recipe, with all settings.
        about: The contents of `run.json`.
        environment: The environment variables that the command needs.
        command: The command that starts the engine.
    """

    folder: Path
    run: Path
    engine: str
    gpus: int
    processes: int
    nodes: Nodes
    recipe: dict[str, Any]
    about: dict[str, Any]
    environment: dict[str, str]
    command: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Returns the command with its environment, as a shell takes it."""
        return " ".join(
            [*(f"{name}={shlex.quote(value)}" for name, value in self.environment.items()), shlex.join(self.command)]
        )


def prepare(
    folder: Path,
    data: Path,
    *,
    run: Path | None = None,
    engine: str = "torchtitan",
    gpus: int | None = None,
    processes: int = 1,
    nodes: Nodes = ONE_MACHINE,
    steps: int | None = None,
    given: Sequence[str] = (),
) -> Launch:
    """Checks everything that a training needs, and makes its command. Nothing is written.

    Args:
        folder: The exported folder.
        data: The folder of packed data.
        run: The folder of the run; None derives a folder in `folder` from the other arguments.
        engine: A name of `ENGINES`.
        gpus: The number of GPUs of this machine; None means all of them, and 0 trains on its CPUs.
        processes: The number of processes if `gpus` is 0.
        nodes: The machines.
        steps: The number of steps; None takes the number in the recipe.
        given: Settings KEY=VALUE of the recipe, the value in YAML.

    Raises:
        InputError: If no machine has such a number or address; if the folder is not an export or lacks the engine's
            files; if the data have another tokenizer; if a
            setting does not exist; if the machine has fewer GPUs; if the engine is not installed; if the disk has no
            room for checkpoints; if the run is one of another model, data or engine, or has trained steps with other
            settings; or if the engine cannot read the run's checkpoint on so many GPUs.
    """
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES, where="--engine")
    check_nodes(nodes)
    folder = folder.resolve()
    written = read_recipe(folder)
    config = _config(folder)
    if engine == "torchtitan" and not (folder / WHERE).is_dir():
        raise InputError(
            f"{folder}: has no files for torchtitan: export it with --to torchtitan, or use --engine accelerate"
        )
    packed = _packed(data)
    _same_tokenizer(folder, written, config, data, packed)
    version = version_of(engine)
    available = torch.cuda.device_count()
    gpus = available if gpus is None else gpus
    if gpus > available:
        raise InputError(f"--gpus {gpus}: this machine has {available}; --gpus 0 trains on its CPUs")
    recipe = _recipe(folder, written, steps, given)
    if _asked(given).get("graphs") and (why := no_graphs(all_settings(recipe), engine, gpus * nodes.count)):
        raise InputError(f"--set graphs: {why}: leave it out")
    if engine == "torchtitan":
        _takes_settings(folder, version, recipe)
    _enough_rows(recipe, data, packed)
    world = (gpus or processes) * nodes.count
    try:
        micro_batch(recipe, world)
    except ValueError as error:
        key = "context_parallel" if str(error).startswith("context_parallel") else "batch.sequences"
        raise InputError(f"{error}; --set {key}=... changes it") from None
    require_own_code(folder)
    load_rules(folder)
    model = ModelSpec.of({name: value for name, value in config.items() if name in ModelSpec.__dataclass_fields__})
    if _asked(given).get("graphs") and (why := no_graphs_of(model)):
        raise InputError(f"--set graphs: {why}: leave it out")
    if why := no_context(model, recipe, engine):
        raise InputError(why)
    if recipe["optimizer"]["name"] == "muon" and model.width_share != 1:
        raise InputError(
            f"optimizer.name muon does not go with base_width {model.base_width} of {folder}: its steps have one size "
            "at all widths; export with --set model.base_width=null, or give --set optimizer.name=adamw"
        )
    identity = {
        "model": _digest({name: value for name, value in config.items() if name in ModelSpec.__dataclass_fields__}),
        "data": packed.meta["sha256"],
        "engine": engine,
    }
    run = (run or folder / "runs" / f"{engine}-{_digest([identity, _named(recipe)])[:8]}").resolve()
    size = parameter_count(model)
    earlier = earlier_run(run, identity)
    if earlier:
        keep_warmup = not any(pair.startswith("schedule.warmup_steps=") for pair in given)
        check_same_training(run, earlier["recipe"], recipe, keep_warmup=keep_warmup)
    if engine == "accelerate":
        check_readable(run, sharded=gpus > 0 and world > 1)
    check_room(run, size, recipe)
    provenance = written.get("provenance") or {}
    about = {
        "id": earlier.get("id") or uuid4().hex,
        "export": str(folder),
        "rule": model.make_rule().name,
        "study": provenance.get("study"),
        "arm": provenance.get("arm"),
        "provenance": dict(provenance),
        "engine": engine,
        "gpus": gpus,
        "processes": world,
        "nodes": nodes.count,
        "parameters": size,
        "versions": versions(engine),
        "hardware": hardware(gpus),
        "data": {"folder": str(data.resolve()), "sha256": packed.meta["sha256"]},
        "recipe": recipe,
        "identity": identity,
        "started": earlier.get("started") or datetime.now(UTC).isoformat(timespec="seconds"),
    }
    code = folder / WHERE if engine == "torchtitan" else run / "code" / PACKAGE
    environment = {
        "DELTALAB_DATA": str(data.resolve()),
        "DELTALAB_RUN": str(run),
        "DELTALAB_RECIPE": str(run / RECIPE_FILE),
        "DELTALAB_FOLDER": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(code.parent), os.environ.get("PYTHONPATH")])),
        "PYTHONSAFEPATH": "1",  # A file of the working folder is no module, also of the processes that torchrun starts.
    }
    launch = Launch(folder, run, engine, gpus, processes, nodes, recipe, about, environment)
    launch.command = command(engine, version, nodes, gpus=gpus, processes=processes)
    about["command"] = launch.text()
    return launch


def _config(folder: Path) -> dict[str, Any]:
    """Returns the contents of `config.json` in an exported folder."""
    if (folder / "run.json").is_file():
        export = read_json(folder / "run.json").get("export", "EXPORT")
        raise InputError(
            f"{folder}: is a run, not an exported folder; `deltalab train {export} --out {folder}` with the options of "
            "before goes on with it"
        )
    try:
        config = read_json(folder / "config.json")
    except (OSError, InputError):
        raise InputError(f"{folder}: not an exported folder: it has no readable config.json") from None
    if config.get("model_type") != "deltalab":
        raise InputError(
            f"{folder / 'config.json'}: not a model of deltalab; a checkpoint of FLA becomes such by `deltalab export "
            f"{folder} DIR --to torchtitan`"
        )
    return config


def _packed(data: Path) -> Packed:
    """Returns the packed data of a folder."""
    try:
        return Packed(data)
    except ValueError as error:
        raise InputError(f"--data {error}") from None


def _same_tokenizer(
    folder: Path, recipe: Mapping[str, Any], config: Mapping[str, Any], data: Path, packed: Packed
) -> None:
    """Raises `InputError` if the data were packed with another tokenizer, or have more tokens than the model."""
    of_folder, of_data = recipe.get("tokenizer"), packed.tokenizer
    if of_folder and of_folder["sha256"] != of_data["sha256"] and not same_ids(str(folder), str(data)):
        raise InputError(
            f"--data {data}: packed with another tokenizer ({of_data['name']}, {of_data['vocab_size']} tokens) than "
            f"{folder} has ({of_folder.get('name', of_folder['kind'])}, {of_folder['vocab_size']} tokens): export with "
            f"--tokenizer {data}, or pack with --tokenizer {folder}"
        )
    if of_data["vocab_size"] > config["vocab_size"]:
        raise InputError(
            f"--data {data}: has {of_data['vocab_size']} tokens, the model of {folder} {config['vocab_size']}: export "
            f"with --set model.vocab_size={of_data['vocab_size']}"
        )


def _recipe(folder: Path, written: Mapping[str, Any], steps: int | None, given: Sequence[str]) -> dict[str, Any]:
    """Returns the folder's recipe with the user's settings. Raises `InputError` for a wrong key or value in either."""
    for part, default in DEFAULTS.items():
        for name in (written.get(part) or {}) if isinstance(default, Mapping) else ():
            if name not in default:
                raise unknown("setting", f"{part}.{name}", default_settings(), where=str(folder / RECIPE_FILE))
    for key, value in named_settings(written).items():
        check_setting(key, value, where=f"{folder / RECIPE_FILE}: {key}")
    asked = _asked(given)
    if steps is not None:
        asked["steps"] = steps
    recipe = with_defaults(changed_recipe({key: value for key, value in written.items() if key in DEFAULTS}, asked))
    if why := no_milestones(recipe["milestones"], recipe["checkpoint"]["every"]):
        raise InputError(f"--set {why}")
    return recipe


def _asked(given: Sequence[str]) -> dict[str, Any]:
    """Returns the settings that a user gives as KEY=VALUE, by dotted key."""
    asked: dict[str, Any] = {}
    for pair in given:
        key, equals, text = pair.partition("=")
        if not equals:
            raise InputError(f"--set {pair}: give settings as KEY=VALUE")
        asked[key] = read_yaml(text, where=f"--set {key}")
    return asked


def _takes_settings(folder: Path, version: str, recipe: Mapping[str, Any]) -> None:
    """Raises `InputError` if torchtitan or the files that an export has for it cannot do what the recipe asks for."""
    asked = {
        "seconds": (recipe["seconds"] is not None, "end by time", ", or take accelerate", f"{WHERE}/clock.py"),
        "context_parallel": (recipe["context_parallel"] > 1, "hand on states", "", "models_parts_context.py"),
        "milestones": (recipe["milestones"] is not None, "keep milestones", None, f"{WHERE}/milestones.py"),
    }
    for key, (is_asked, what, or_else, file) in asked.items():
        if is_asked and or_else is not None and version.startswith("0.2."):
            raise InputError(f"{key}: torchtitan {version} cannot {what}: install torchtitan 0.3{or_else}")
        if is_asked and not (folder / file).is_file():
            raise InputError(f"{key}: {folder} has files for torchtitan that cannot {what}: export it again")


def _enough_rows(recipe: dict[str, Any], data: Path, packed: Packed) -> None:
    """Limits the recipe's validation rows to those in the data. Raises `InputError` if there is no training row."""
    length = recipe["batch"]["length"]
    rows = packed.split("train").rows(length)
    if not rows:
        raise InputError(
            f"--data {data}: its {packed.split('train').tokens:,} training tokens make no row of batch.length {length}"
        )
    recipe["validation"]["sequences"] = min(recipe["validation"]["sequences"], packed.split("validation").rows(length))


def _named(recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns what names a run of the recipe: without the settings of a later release that are at their defaults."""
    return {name: value for name, value in recipe.items() if name not in LATER or value != DEFAULTS[name]}


def _digest(value: object) -> str:
    """Returns the SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
