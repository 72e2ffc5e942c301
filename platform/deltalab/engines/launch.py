"""Launches the training of an exported folder on an engine, follows its progress, and keeps the run's records."""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import yaml

from deltalab.data.token_shards import Packed
from deltalab.engines import checkpoints
from deltalab.engines.deltalab_train import launcher
from deltalab.engines.deltalab_train.lock import FILE as LOCK
from deltalab.engines.stopping import end, signals_raise
from deltalab.engines.torchtitan import PACKAGE, WHERE, package
from deltalab.errors import InputError, NotInstalled, unknown
from deltalab.export.own_code import require_own_code
from deltalab.export.recipe import (
    RECIPE_FILE,
    all_settings,
    changed_recipe,
    check_setting,
    named_settings,
    no_graphs,
    read_recipe,
)
from deltalab.export.retrain import load_rules
from deltalab.export.scales import parameter_count
from deltalab.models.spec import ModelSpec
from deltalab.reading import read_json, read_yaml
from deltalab.training.recipe_keys import DEFAULTS, FREE, default_settings, micro_batch, with_defaults

ENGINES = {"torchtitan": ("torchtitan",), "accelerate": ("accelerate", "transformers")}
"""The engines, each with the packages that it needs."""
BYTES_A_PARAMETER = 12
"""The bytes of a checkpoint for each parameter: the parameter and AdamW's two averages, in fp32."""
EVERY_SECONDS = 10.0
"""Seconds between two lines of progress."""
RECORD_SECONDS = 30.0
"""Seconds between two records of a run in the ledger."""
FULL = ("No space left on device", "Errno 28", "Disk quota exceeded")
"""Texts in an engine's log that mean a full disk."""
KILLED = ("(SIGKILL)", "(SIGTERM)", "(SIGHUP)", "SignalException")
"""Texts in an engine's log that mean that a signal ended one of its processes."""


class Transient(InputError):
    """A training cannot go on now, and can later with the same settings: a disk is full, or another process trains."""

    kind = "transient"


@dataclass(frozen=True)
class Nodes:
    """The machines of a training.

    Attributes:
        count: The number of machines.
        rank: The number of this machine, from 0.
        address: HOST:PORT of machine 0; None if there is one machine.
    """

    count: int = 1
    rank: int = 0
    address: str | None = None


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
    nodes: Nodes = Nodes(),
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
    _reachable(nodes)
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
    if recipe["seconds"] is not None and engine == "torchtitan":
        _ends_by_time(folder, version)
    _enough_rows(recipe, data, packed)
    world = (gpus or processes) * nodes.count
    try:
        micro_batch(recipe, world)
    except ValueError as error:
        raise InputError(f"{error}; --set batch.sequences=... changes it") from None
    require_own_code(folder)
    load_rules(folder)
    model = ModelSpec.of({name: value for name, value in config.items() if name in ModelSpec.__dataclass_fields__})
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
    run = (run or folder / "runs" / f"{engine}-{_digest([identity, recipe])[:8]}").resolve()
    size = parameter_count(model)
    earlier = _earlier(run, identity)
    if earlier:
        keep_warmup = not any(pair.startswith("schedule.warmup_steps=") for pair in given)
        _same_training(run, earlier["recipe"], recipe, keep_warmup=keep_warmup)
    if engine == "accelerate":
        _readable(run, sharded=gpus > 0 and world > 1)
    _room(run, size, recipe)
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
        "versions": _versions(engine),
        "hardware": _hardware(gpus),
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
    }
    launch = Launch(folder, run, engine, gpus, processes, nodes, recipe, about, environment)
    launch.command = _command(launch, version)
    about["command"] = launch.text()
    return launch


def start(
    launch: Launch,
    *,
    say: Callable[[str], None] = print,
    record: Callable[[Path], None] | None = None,
    stepped: Callable[[int], None] | None = None,
) -> int:
    """Trains to the end, from the newest complete checkpoint if there is one.

    Args:
        launch: The training, from `prepare`.
        say: Is called with each line of progress.
        record: Is called with the run's folder at the start, during the training, and at the end, even after an error.
        stepped: Is called with each step of which the engine tells. An exception that it raises ends the engine.

    Returns:
        The exit status of the engine, or minus the signal that ended it.

    Raises:
        Transient: If another process trains the run, or if the disk is full.
        KeyboardInterrupt: The process got SIGINT, in the main thread. All processes of the engine have ended.
        SystemExit: The same for SIGTERM, with code 143, and SIGHUP, with code 129.
    """
    record = record or (lambda run: None)
    run = launch.run
    run.mkdir(parents=True, exist_ok=True)
    with _alone(run):
        torn = checkpoints.remove_torn(run)
        if torn:
            say(f"removed checkpoints that were not finished: {', '.join(torn)}")
        complete = checkpoints.complete_checkpoints(run)
        say(f"from {complete[-1].name}" if complete else "from the start")
        _write(launch)
        record(run)
        if _is_trained(launch):
            return 0  # starting the engine would take minutes
        say(launch.text())
        try:
            status = _follow(launch, say, record, stepped)
        finally:
            record(run)
    if status and _is_trained(launch):  # PyTorch may abort while it ends its threads, when all is written
        say(f"the engine ended with status {status} after its last checkpoint")
        return 0
    if status:
        raise_from_log(launch)
    return status


def _is_trained(launch: Launch) -> bool:
    """Returns whether the checkpoint of the last step is complete."""
    complete = checkpoints.complete_checkpoints(launch.run)
    if not complete:
        return False
    step = int(complete[-1].name.removeprefix("step-"))
    return step >= launch.recipe["steps"] or _timed_out(launch, step)


def _timed_out(launch: Launch, step: int) -> bool:
    """Returns whether the time of a run ended with a step, as the engine writes after the checkpoint of this step."""
    metrics, seconds = launch.run / "metrics.jsonl", launch.recipe["seconds"]
    if seconds is None or not metrics.is_file():
        return False
    whole = [line for line in metrics.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
    rows = [row for line in whole if (row := json.loads(line))["name"] == "seconds" and row["step"] == step]
    return bool(rows) and bool(rows[-1]["value"] >= seconds)


def raise_from_log(launch: Launch) -> None:
    """Reports the failure of an engine whose disk was full.

    Raises:
        Transient: If the disk is full.
    """
    log = _tail(launch.run / "log.txt")
    free = shutil.disk_usage(launch.run).free
    if any(text in log for text in FULL) or free < BYTES_A_PARAMETER * launch.about["parameters"] // 2:
        complete = checkpoints.complete_checkpoints(launch.run)
        newest = f"{complete[-1]} is whole, and the same command goes on from it" if complete else None
        what_is_left = newest or "there is no checkpoint yet"
        raise Transient(f"{launch.run}: the disk is full, {_amount(free)} are free; {what_is_left}")


def was_killed(run: Path, status: int) -> bool:
    """Returns whether something from outside ended an engine or one of its processes, as its status or log tells."""
    return status < 0 or any(text in _tail(run / "log.txt") for text in KILLED)


def last_error(run: Path) -> str:
    """Returns the last line of the engine's log that names an error, or the last line if none does."""
    lines = [line.strip() for line in _tail(run / "log.txt").splitlines()]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "Error:" in line]
    causes = [line for line in errors if "ChildFailedError" not in line and "Signal" not in line]
    return (causes or errors or lines or ["no output"])[-1]


def _reachable(nodes: Nodes) -> None:
    """Raises `InputError` for machines that would wait for each other without end."""
    if not 0 <= nodes.rank < nodes.count:
        raise InputError(f"--node-rank {nodes.rank}: must be in 0..{nodes.count - 1}, as --nodes is {nodes.count}")
    if nodes.address is None:
        if nodes.count > 1:
            raise InputError("--nodes: give --address HOST:PORT of the first machine, the same on every machine")
        return
    host, port = _host_and_port(nodes.address)
    # A host may be a name, an IPv4 address, or an IPv6 address in brackets.
    if not re.fullmatch(r"[\w.-]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\w+)?", host) or not re.fullmatch(r"\d{1,5}", port):
        raise InputError(f"--address {nodes.address}: must be HOST:PORT of the first machine, such as host0:29500")
    if not 0 < int(port) < 2**16:
        raise InputError(f"--address {nodes.address}: the port must be in 1..65535")


def _host_and_port(address: str) -> tuple[str, str]:
    """Splits HOST:PORT or [IPV6]:PORT; a part that is missing is empty."""
    if address.startswith("["):
        host, _, port = address[1:].partition("]:")
    else:
        host, _, port = address.partition(":")
    return host, port


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
    if of_folder and of_folder["sha256"] != of_data["sha256"]:
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


def version_of(engine: str) -> str:
    """Returns the version of the engine. Raises `InputError` if the engine is not installed or does not fit torch."""
    for name in ENGINES[engine]:
        if importlib.util.find_spec(name) is None:
            raise NotInstalled(f"engine {engine} is not installed", "'deltalab[train]'")
    version = importlib.metadata.version(ENGINES[engine][0])
    if engine == "torchtitan" and not version.startswith("0.2."):
        torch_version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        if torch_version <= (2, 11):
            raise InputError(
                f"torchtitan {version} needs torch above 2.11, not {torch.__version__}; for older torch, install "
                "torchtitan 0.2.2"
            )
    return version


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
    return with_defaults(changed_recipe({key: value for key, value in written.items() if key in DEFAULTS}, asked))


def _asked(given: Sequence[str]) -> dict[str, Any]:
    """Returns the settings that a user gives as KEY=VALUE, by dotted key."""
    asked: dict[str, Any] = {}
    for pair in given:
        key, equals, text = pair.partition("=")
        if not equals:
            raise InputError(f"--set {pair}: give settings as KEY=VALUE")
        asked[key] = read_yaml(text, where=f"--set {key}")
    return asked


def _ends_by_time(folder: Path, version: str) -> None:
    """Raises `InputError` if torchtitan or the files that an export has for it know nothing of `seconds`."""
    if version.startswith("0.2."):
        raise InputError(
            f"seconds: torchtitan {version} cannot end by time: install torchtitan 0.3, or take accelerate"
        )
    if not (folder / WHERE / "clock.py").is_file():
        raise InputError(f"seconds: {folder} has files for torchtitan that cannot end by time: export it again")


def _enough_rows(recipe: dict[str, Any], data: Path, packed: Packed) -> None:
    """Limits the recipe's validation rows to those in the data. Raises `InputError` if there is no training row."""
    length = recipe["batch"]["length"]
    rows = packed.split("train").rows(length)
    if not rows:
        raise InputError(
            f"--data {data}: its {packed.split('train').tokens:,} training tokens make no row of batch.length {length}"
        )
    recipe["validation"]["sequences"] = min(recipe["validation"]["sequences"], packed.split("validation").rows(length))


def _earlier(run: Path, identity: Mapping[str, str]) -> dict[str, Any]:
    """Returns the `run.json` of a run that has begun, else {}. Raises `InputError` if the run has another identity."""
    if not (run / "run.json").is_file():
        if run.exists() and (not run.is_dir() or any(file.name != LOCK for file in run.iterdir())):
            raise InputError(f"{run}: is neither empty nor a run of deltalab train")
        return {}
    about: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))
    for name, value in identity.items():
        if about["identity"][name] != value:
            raise InputError(
                f"{run}: its checkpoints are of another {name}: give another --out, or train {about['export']} on "
                f"{about['data']['folder']} with --engine {about['engine']}"
            )
    return about


def _same_training(run: Path, before: Mapping[str, Any], recipe: dict[str, Any], *, keep_warmup: bool) -> None:
    """Raises `InputError` if a run has trained steps with other settings: its records would speak of all steps.

    The number of steps may change while the schedule's rates of the steps so far do not depend on it: always if it is
    `constant`, and before the decay if it is `wsd`.

    Args:
        run: The folder of the run.
        before: The recipe of the run so far.
        recipe: The recipe to go on with.
        keep_warmup: Whether `recipe` gets the run's own warm-up, which otherwise grows with the number of steps.
    """
    trained = _trained(run)
    was = all_settings(before)
    if not trained or was == all_settings(recipe):
        return
    kind, steps = was["schedule.kind"], (was["steps"], recipe["steps"])
    decays = [round((1 - was["schedule.stable"]) * count) for count in steps]
    stable = kind == "wsd" and all(trained + decay <= count for decay, count in zip(decays, steps, strict=True))
    if kind == "constant" or stable:
        if keep_warmup:
            recipe["schedule"]["warmup_steps"] = was["schedule.warmup_steps"]
        was["steps"] = recipe["steps"]
    now = all_settings(recipe)
    for key in sorted(now, key="schedule.warmup_steps".__eq__):  # the warm-up last: it follows the number of steps
        if now[key] != was[key] and not key.startswith(FREE):
            why = f"; the rates of schedule.kind {kind} depend on the number of steps" if key == "steps" else ""
            raise InputError(
                f"{run}: has trained {trained} steps with {key} {was[key]}, now {now[key]}{why}: give another --out, "
                f"or leave {key} as it was"
            )


def _trained(run: Path) -> int:
    """Returns the number of the last step that a run has trained, as its checkpoints and its metrics say; 0 if none."""
    steps = [int(folder.name.removeprefix("step-")) for folder in checkpoints.complete_checkpoints(run)]
    metrics = run / "metrics.jsonl"
    # A killed process may have left a last line unfinished.
    whole = [line for line in _tail(metrics).splitlines(True)[-2:] if line.endswith("\n")] if metrics.is_file() else []
    return max([0, *steps, *(int(json.loads(line)["step"]) for line in whole)])


def _readable(run: Path, *, sharded: bool) -> None:
    """Raises `InputError` if Accelerate cannot go on from the newest checkpoint of a run.

    It cannot if several GPUs wrote the checkpoint and one GPU shall train, or the reverse.

    Args:
        run: The folder of the run.
        sharded: Whether several GPUs shall train.
    """
    for newest in checkpoints.complete_checkpoints(run)[-1:]:
        if (newest / checkpoints.SHARDED).is_dir() != sharded:
            before, now = ("one GPU", "several GPUs")[:: 1 if sharded else -1]
            raise InputError(
                f"{run}: {newest.name} is of {before}, and Accelerate cannot go on from it on {now}: give --gpus as "
                "before, or another --out"
            )


def _room(run: Path, size: int, recipe: Mapping[str, Any]) -> None:
    """Raises `Transient` if the disk has no room for the checkpoints that a run will add.

    There is one more than `checkpoint.keep` while the newest is written, unless the run writes fewer.
    """
    folder = next(parent for parent in (run, *run.parents) if parent.exists())
    keep, every = (recipe["checkpoint"][name] for name in ("keep", "every"))
    complete = [int(each.name.removeprefix("step-")) for each in checkpoints.complete_checkpoints(run)]
    to_write = math.ceil(recipe["steps"] / every) - max(complete, default=0) // every
    count = min(max(1, keep + 1 - len(complete)), to_write)
    free, needed = shutil.disk_usage(folder).free, count * BYTES_A_PARAMETER * size
    if free < needed:
        raise Transient(
            f"{folder}: {_amount(free)} are free; {count} checkpoints of {size:,} parameters (checkpoint.keep {keep}, "
            f"and one while it is written) take {_amount(needed)}"
        )


def _amount(size: int) -> str:
    """Returns a number of bytes as text, in a unit that suits it."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 2**10:.1f} KiB"


def _versions(engine: str) -> dict[str, str]:
    """Returns the versions that `run.json` records."""
    packages = {name: importlib.metadata.version(name) for name in ("deltalab", "torch", *ENGINES[engine])}
    return {"python": platform.python_version(), **packages}


def _hardware(gpus: int) -> dict[str, Any]:
    """Returns the hardware that `run.json` records."""
    names = [torch.cuda.get_device_name(index) for index in range(gpus)]
    return {"host": platform.node(), "gpus": names, "cpus": os.cpu_count()}


def _command(launch: Launch, version: str) -> list[str]:
    """Returns the command that starts this version of the engine."""
    here, nodes = launch.gpus or launch.processes, launch.nodes
    host, port = _host_and_port(nodes.address or "")
    if launch.engine == "accelerate" and launch.gpus:
        multi_gpu = ["--multi_gpu"] if here * nodes.count > 1 else []
        place = ["--num_machines", str(nodes.count), "--machine_rank", str(nodes.rank)]
        place += ["--main_process_ip", host, "--main_process_port", port] if nodes.count > 1 else []
        options = [
            "--num_processes",
            str(here * nodes.count),
            *place,
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
        ]
        launcher = [sys.executable, "-m", "accelerate.commands.launch", *multi_gpu, *options]
        return [*launcher, "-m", f"{PACKAGE}.with_trainer"]
    place = [
        "--nnodes",
        str(nodes.count),
        "--node-rank",
        str(nodes.rank),
        "--master-addr",
        host,
        "--master-port",
        port,
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(here)]
    torchrun += place if nodes.count > 1 else ["--standalone"]
    if launch.engine == "accelerate":
        return [*torchrun, "-m", f"{PACKAGE}.with_trainer"]  # on CPUs, `accelerate launch` asks for MPI
    config = (
        ["--job.custom_config_module", f"{PACKAGE}.titan_02"]
        if version.startswith("0.2.")
        else ["--module", f"{PACKAGE}.titan_03", "--config", "pretrain"]
    )
    return [*torchrun, "-m", "torchtitan.train" if launch.gpus else f"{PACKAGE}.on_cpu", *config]


def _write(launch: Launch) -> None:
    """Writes the recipe, `run.json` and, for Accelerate, the code. `run.json` comes last: it makes a folder a run."""
    if launch.engine == "accelerate":
        code = launch.run / "code" / PACKAGE
        code.mkdir(parents=True, exist_ok=True)
        for name, text in package().items():
            (code / name).write_text(text, encoding="utf-8")
    texts = {
        RECIPE_FILE: yaml.safe_dump(launch.recipe, sort_keys=False),
        "run.json": json.dumps(launch.about, indent=2, default=str) + "\n",
    }
    for name, text in texts.items():
        partial = launch.run / f".{name}"
        partial.write_text(text, encoding="utf-8")
        partial.replace(launch.run / name)


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Locks the run for this process and its children. Raises `InputError` if another process holds the lock."""
    with (run / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Transient(f"{run}: another process is training it") from None
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _follow(
    launch: Launch,
    say: Callable[[str], None],
    record: Callable[[Path], None],
    stepped: Callable[[int], None] | None,
) -> int:
    """Runs the engine with its output in `log.txt`, reports progress, and records the run. Returns the exit status."""
    metrics = launch.run / "metrics.jsonl"
    size = _whole_lines(metrics)
    extra = {
        launcher.VARIABLE: launcher.identity(os.getpid()) or "",
        **({} if launch.gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }
    with (launch.run / "log.txt").open("ab") as log, signals_raise():
        child = subprocess.Popen(
            launch.command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **launch.environment, **extra}
        )
        last_line = last_record = time.monotonic()
        try:
            with metrics.open("a+", encoding="utf-8") as lines:
                lines.seek(size)
                progress = _Progress(launch.recipe)
                while child.poll() is None:
                    time.sleep(0.2)
                    before = progress.step
                    progress.read(lines)
                    if stepped is not None and progress.step > before:
                        stepped(progress.step)
                    now = time.monotonic()
                    if progress.news and (now - last_line > EVERY_SECONDS or progress.news_is_validation):
                        last_line = now
                        say(progress.line())
                    if now - last_record > RECORD_SECONDS:
                        last_record = now
                        _try(record, launch.run, say)
                progress.read(lines)
                if progress.news:
                    say(progress.line())
        except BaseException:
            end(child)
            raise
    return child.returncode


def _try(record: Callable[[Path], None], run: Path, say: Callable[[str], None]) -> None:
    """Records a run during its training. An error, such as that of a database that is away, must not end the run."""
    try:
        record(run)
    except Exception as error:
        say(f"the ledger was not brought up to date: {' '.join(str(error).split())}")


def _whole_lines(file: Path) -> int:
    """Cuts off a last line that a killed process did not finish, and returns the file's size."""
    if not file.exists():
        return 0
    size = file.read_bytes().rfind(b"\n") + 1
    os.truncate(file, size)
    return size


class _Progress:
    """The progress of a training, as `metrics.jsonl` shows it."""

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self.steps = recipe["steps"]
        self.tokens = recipe["batch"]["sequences"] * recipe["batch"]["length"]
        self.step = 0
        self.values: dict[tuple[str, str], tuple[int, float | None]] = {}
        """(split, name) -> the last step with a value, and the value."""
        self.news = self.news_is_validation = False
        self.rest = ""

    def read(self, lines: Any) -> None:
        """Reads the lines that were written since the last call."""
        text = self.rest + lines.read()
        *whole, self.rest = text.split("\n")
        for line in whole:
            row = json.loads(line)
            self.step = row["step"]
            self.values[row["split"], row["name"]] = row["step"], row["value"]
            self.news = True
            self.news_is_validation |= row["split"] == "validation"

    def line(self) -> str:
        """Returns a line with the last values. A loss from before the last step is shown with its step."""
        self.news = self.news_is_validation = False
        parts = [f"step {self.step}/{self.steps}"]
        for key, form in (
            (("train", "loss"), "loss {:.4f}"),
            (("validation", "loss"), "validation {:.4f}"),
            (("train", "tokens_per_second"), "{:,.0f} tokens/s"),
            (("train", "mfu"), "{:.1%} of peak"),
            (("train", "memory_gib"), "{:.1f} GiB"),
        ):
            step, value = self.values.get(key, (0, None))
            if value is not None and not (key[1] == "mfu" and value < 0.001):
                earlier = f" (step {step})" if key[1] == "loss" and step != self.step else ""
                parts.append(form.format(value) + earlier)
        _, speed = self.values.get(("train", "tokens_per_second"), (0, None))
        if speed and self.step < self.steps:
            parts.append(f"{_duration((self.steps - self.step) * self.tokens / speed)} to go")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    """Returns a duration as text."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _tail(file: Path, size: int = 2**16) -> str:
    """Returns the last `size` bytes of a file as text."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - size))
        return stream.read().decode("utf-8", errors="replace")


def _digest(value: object) -> str:
    """Returns the SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
