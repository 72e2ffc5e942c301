"""Runs the training of an exported folder on an engine: checks, the command, progress, and the run's records."""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
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

from deltalab import __version__
from deltalab.data.token_shards import Packed
from deltalab.engines import checkpoints
from deltalab.engines.deltalab_train.lock import FILE as LOCK
from deltalab.engines.torchtitan import PACKAGE, WHERE, package
from deltalab.errors import InputError, unknown
from deltalab.export.recipe import changed, check, flat
from deltalab.export.retrain import load_rules, read_recipe
from deltalab.export.scales import parameters
from deltalab.models.spec import ModelSpec
from deltalab.reading import read_json, read_yaml
from deltalab.training.recipe import KEYS, complete, micro, settings

ENGINES = {"torchtitan": ("torchtitan",), "accelerate": ("accelerate", "transformers")}
"""Engine -> the packages that it needs."""
BYTES_A_PARAMETER = 12
"""A checkpoint holds each parameter and AdamW's two averages in fp32."""
EVERY_SECONDS = 10.0
RECORD_SECONDS = 30.0
FULL = ("No space left on device", "Errno 28", "Disk quota exceeded")


@dataclass(frozen=True)
class Nodes:
    """The machines of a training, of which this is number `rank`. address: HOST:PORT of number 0."""

    count: int = 1
    rank: int = 0
    address: str | None = None


@dataclass
class Launch:
    """A training that is ready to start. gpus: of this machine, 0 for `processes` on its CPUs."""

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
        """The command as a shell takes it, with the environment that it needs."""
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
    """Checks everything that a training needs, and makes the run's folder. Nothing is written before all is checked.

    gpus: None for all of this machine. given: settings KEY=VALUE of the recipe, the value in YAML.

    Raises `InputError` for a folder that is no export or lacks the engine's files, for packed data of another
    tokenizer, for settings that no recipe has, for fewer GPUs than asked, for an engine that is not installed, for a
    disk without room for checkpoints, for a run of another model, data or engine, and for a checkpoint that the engine
    cannot read on so many GPUs.
    """
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES, where="--engine")
    folder = folder.resolve()
    written = read_recipe(folder)
    config = _config(folder)
    if engine == "torchtitan" and not (folder / WHERE).is_dir():
        raise InputError(
            f"{folder}: has no files for torchtitan: export it with --to torchtitan, or use --engine accelerate"
        )
    packed = _packed(data)
    _same_tokenizer(folder, written, config, data, packed)
    version = _installed(engine)
    found = torch.cuda.device_count()
    gpus = found if gpus is None else gpus
    if gpus > found:
        raise InputError(f"--gpus {gpus}: this machine has {found}; --gpus 0 trains on its CPUs")
    recipe = _settled(folder, written, steps, given)
    _enough_rows(recipe, data, packed)
    world = (gpus or processes) * nodes.count
    try:
        micro(recipe, world)
    except ValueError as error:
        raise InputError(f"{error}; --set batch.sequences=... changes it") from None
    if nodes.count > 1 and nodes.address is None:
        raise InputError("--nodes: give --address HOST:PORT of the first machine, the same on every machine")
    load_rules(folder)
    model = ModelSpec.of({name: value for name, value in config.items() if name in ModelSpec.__dataclass_fields__})
    identity = {
        "model": _digest({name: value for name, value in config.items() if name in ModelSpec.__dataclass_fields__}),
        "data": packed.meta["sha256"],
        "engine": engine,
    }
    run = (run or folder / "runs" / f"{engine}-{_digest([identity, recipe])[:8]}").resolve()
    size = parameters(model)
    earlier = _earlier(run, identity)
    if engine == "accelerate":
        _readable(run, sharded=gpus > 0 and world > 1)
    _room(run, size)
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
        "DELTALAB_RECIPE": str(run / "recipe.yaml"),
        "DELTALAB_FOLDER": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(code.parent), os.environ.get("PYTHONPATH")])),
    }
    launch = Launch(folder, run, engine, gpus, processes, nodes, recipe, about, environment)
    launch.command = _command(launch, version)
    about["command"] = launch.text()
    return launch


def start(launch: Launch, *, say: Callable[[str], None] = print, record: Callable[[Path], None] | None = None) -> int:
    """Trains to the end, from the newest complete checkpoint where there is one. Returns the engine's exit status.

    say: takes each line of progress. record: is called with the run's folder at the start, while training goes on, and
    at the end, however it ends.

    Raises `InputError` while another process trains the run, and for a disk that is full.
    """
    record = record or (lambda run: None)
    run = launch.run
    run.mkdir(parents=True, exist_ok=True)
    with _alone(run):
        torn = checkpoints.remove_torn(run)
        if torn:
            say(f"removed checkpoints that were not finished: {', '.join(torn)}")
        whole = checkpoints.complete(run)
        say(f"from {whole[-1].name}" if whole else "from the start")
        _write(launch)
        record(run)
        if whole and int(whole[-1].name.removeprefix("step-")) >= launch.recipe["steps"]:
            return 0  # starting the engine would take minutes
        say(launch.text())
        try:
            status = _follow(launch, say, record)
        finally:
            record(run)
    if status:
        raise_from_log(launch)
    return status


def raise_from_log(launch: Launch) -> None:
    """Raises `InputError` if the engine stopped for lack of disk."""
    log = _tail(launch.run / "log.txt")
    free = shutil.disk_usage(launch.run).free
    if any(text in log for text in FULL) or free < BYTES_A_PARAMETER * launch.about["parameters"] // 2:
        whole = checkpoints.complete(launch.run)
        kept = f"{whole[-1]} is whole, and the same command goes on from it" if whole else "there is no checkpoint yet"
        raise InputError(f"{launch.run}: the disk is full, {free / 2**30:.1f} GiB are free; {kept}")


def last_error(run: Path) -> str:
    """The line of the engine's log that names what went wrong."""
    lines = [line.strip() for line in _tail(run / "log.txt").splitlines()]
    wrong = [line for line in lines if "Error" in line.split(":")[0] or "Error:" in line]
    named = [line for line in wrong if "ChildFailedError" not in line and "Signal" not in line]
    return (named or wrong or lines or ["no output"])[-1]


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = read_json(folder / "config.json")
    except (OSError, InputError):
        raise InputError(f"{folder}: not an exported folder: it has no readable config.json") from None
    if config.get("model_type") != "deltalab":
        raise InputError(
            f"{folder / 'config.json'}: not a model of deltalab; a checkpoint of FLA becomes such by `platform export "
            f"{folder} DIR --to torchtitan`"
        )
    return config


def _packed(data: Path) -> Packed:
    try:
        return Packed(data)
    except ValueError as error:
        raise InputError(f"--data {error}") from None


def _same_tokenizer(
    folder: Path, recipe: Mapping[str, Any], config: Mapping[str, Any], data: Path, packed: Packed
) -> None:
    own, theirs = recipe.get("tokenizer"), packed.tokenizer
    if own and own["sha256"] != theirs["sha256"]:
        raise InputError(
            f"--data {data}: packed with another tokenizer ({theirs['name']}, {theirs['vocab_size']} tokens) than "
            f"{folder} has ({own.get('name', own['kind'])}, {own['vocab_size']} tokens): export with "
            f"--tokenizer {data}, or pack with --tokenizer {folder}"
        )
    if theirs["vocab_size"] > config["vocab_size"]:
        raise InputError(
            f"--data {data}: has {theirs['vocab_size']} tokens, the model of {folder} {config['vocab_size']}: export "
            f"with --set model.vocab_size={theirs['vocab_size']}"
        )


def _installed(engine: str) -> str:
    """The version of the engine."""
    for name in ENGINES[engine]:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"engine {engine} is not installed: pip install 'deltalab[train]'")
    version = importlib.metadata.version(ENGINES[engine][0])
    if engine == "torchtitan" and not version.startswith("0.2."):
        have = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        if have <= (2, 11):
            raise InputError(
                f"torchtitan {version} needs torch above 2.11, not {torch.__version__}; for older torch, install "
                "torchtitan 0.2.2"
            )
    return version


def _settled(folder: Path, written: Mapping[str, Any], steps: int | None, given: Sequence[str]) -> dict[str, Any]:
    """The folder's recipe with what the user asks for.

    Raises `InputError` for keys that no recipe has, and for values that they do not take.
    """
    for part, default in KEYS.items():
        for name in (written.get(part) or {}) if isinstance(default, Mapping) else ():
            if name not in default:
                raise unknown("setting", f"{part}.{name}", settings(), where=str(folder / "recipe.yaml"))
    for key, value in flat(written).items():
        check(key, value, where=f"{folder / 'recipe.yaml'}: {key}")
    asked: dict[str, Any] = {}
    for pair in given:
        key, equals, text = pair.partition("=")
        if not equals:
            raise InputError(f"--set {pair}: give settings as KEY=VALUE")
        asked[key] = read_yaml(text, where=f"--set {key}")
    if steps is not None:
        asked["steps"] = steps
    return complete(changed({key: value for key, value in written.items() if key in KEYS}, asked))


def _enough_rows(recipe: dict[str, Any], data: Path, packed: Packed) -> None:
    length = recipe["batch"]["length"]
    rows = packed.split("train").rows(length)
    if not rows:
        raise InputError(
            f"--data {data}: its {packed.split('train').tokens:,} training tokens make no row of batch.length {length}"
        )
    recipe["validation"]["sequences"] = min(recipe["validation"]["sequences"], packed.split("validation").rows(length))


def _earlier(run: Path, identity: Mapping[str, str]) -> dict[str, Any]:
    """What `run.json` says if the run has begun already."""
    if not (run / "run.json").is_file():
        if run.exists() and (not run.is_dir() or any(each.name != LOCK for each in run.iterdir())):
            raise InputError(f"{run}: is neither empty nor a run of platform train")
        return {}
    about: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))
    for name, value in identity.items():
        if about["identity"][name] != value:
            raise InputError(
                f"{run}: its checkpoints are of another {name}: give another --out, or train {about['export']} on "
                f"{about['data']['folder']} with --engine {about['engine']}"
            )
    return about


def _readable(run: Path, *, sharded: bool) -> None:
    """Raises `InputError` for a checkpoint of Accelerate that several GPUs share where one trains, or the reverse."""
    for newest in checkpoints.complete(run)[-1:]:
        if (newest / checkpoints.SHARDED).is_dir() != sharded:
            here, there = ("one GPU", "several GPUs")[:: 1 if sharded else -1]
            raise InputError(
                f"{run}: {newest.name} is of {here}, and Accelerate cannot go on from it on {there}: give --gpus as "
                "before, or another --out"
            )


def _room(run: Path, size: int) -> None:
    there = next(each for each in (run, *run.parents) if each.exists())
    free, needed = shutil.disk_usage(there).free, 2 * BYTES_A_PARAMETER * size
    if free < needed:
        raise InputError(
            f"{there}: {free / 2**30:.1f} GiB are free; two checkpoints of {size:,} parameters take "
            f"{needed / 2**30:.1f}"
        )


def _versions(engine: str) -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("torch", *ENGINES[engine])}
    return {"deltalab": __version__, "python": platform.python_version(), **packages}


def _hardware(gpus: int) -> dict[str, Any]:
    names = [torch.cuda.get_device_name(index) for index in range(gpus)]
    return {"host": platform.node(), "gpus": names, "cpus": os.cpu_count()}


def _command(launch: Launch, version: str) -> list[str]:
    here, nodes = launch.gpus or launch.processes, launch.nodes
    host, _, port = (nodes.address or "").partition(":")
    if launch.engine == "accelerate" and launch.gpus:
        several = ["--multi_gpu"] if here * nodes.count > 1 else []
        place = ["--num_machines", str(nodes.count), "--machine_rank", str(nodes.rank)]
        place += ["--main_process_ip", host, "--main_process_port", port or "29500"] if nodes.count > 1 else []
        counted = [
            "--num_processes",
            str(here * nodes.count),
            *place,
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
        ]
        return [sys.executable, "-m", "accelerate.commands.launch", *several, *counted, "-m", f"{PACKAGE}.with_trainer"]
    place = [
        "--nnodes",
        str(nodes.count),
        "--node-rank",
        str(nodes.rank),
        "--master-addr",
        host,
        "--master-port",
        port or "29500",
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
    """The run's own files; `run.json` is last, and makes the folder a run."""
    if launch.engine == "accelerate":
        code = launch.run / "code" / PACKAGE
        code.mkdir(parents=True, exist_ok=True)
        for name, text in package().items():
            (code / name).write_text(text, encoding="utf-8")
    texts = {
        "recipe.yaml": yaml.safe_dump(launch.recipe, sort_keys=False),
        "run.json": json.dumps(launch.about, indent=2, default=str) + "\n",
    }
    for name, text in texts.items():
        partial = launch.run / f".{name}"
        partial.write_text(text, encoding="utf-8")
        partial.replace(launch.run / name)


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Holds the run for this process and those that it starts. Raises `InputError` if others hold it."""
    with (run / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{run}: another process is training it") from None
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _follow(launch: Launch, say: Callable[[str], None], record: Callable[[Path], None]) -> int:
    """Runs the command, with its output in `log.txt`, says how far it is, and records it now and then."""
    metrics = launch.run / "metrics.jsonl"
    place = _whole_lines(metrics)
    device = {} if launch.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    with (launch.run / "log.txt").open("ab") as log:
        child = subprocess.Popen(
            launch.command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **launch.environment, **device}
        )
        said = recorded = time.monotonic()
        try:
            with metrics.open("a+", encoding="utf-8") as lines:
                lines.seek(place)
                progress = _Progress(launch.recipe)
                while child.poll() is None:
                    time.sleep(0.2)
                    progress.read(lines)
                    now = time.monotonic()
                    if progress.news and (now - said > EVERY_SECONDS or progress.news_is_validation):
                        said = now
                        say(progress.line())
                    if now - recorded > RECORD_SECONDS:
                        recorded = now
                        _try(record, launch.run, say)
                progress.read(lines)
                if progress.news:
                    say(progress.line())
        except BaseException:
            child.send_signal(signal.SIGINT)
            child.wait()
            raise
    return child.returncode


def _try(record: Callable[[Path], None], run: Path, say: Callable[[str], None]) -> None:
    """Records a run that goes on. An error, such as of a database that is away, must not end the training."""
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
    """What `metrics.jsonl` says of a training that goes on."""

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self.steps = recipe["steps"]
        self.tokens = recipe["batch"]["sequences"] * recipe["batch"]["length"]
        self.step = 0
        self.values: dict[tuple[str, str], tuple[int, float | None]] = {}
        """(split, name) -> the last step that has a value, and the value."""
        self.news = self.news_is_validation = False
        self.rest = ""

    def read(self, lines: Any) -> None:
        text = self.rest + lines.read()
        *whole, self.rest = text.split("\n")
        for each in whole:
            found = json.loads(each)
            self.step = found["step"]
            self.values[found["split"], found["name"]] = found["step"], found["value"]
            self.news = True
            self.news_is_validation |= found["split"] == "validation"

    def line(self) -> str:
        """The last values. A loss of an earlier step than the last names its step."""
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
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _tail(file: Path, size: int = 2**16) -> str:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - size))
        return stream.read().decode("utf-8", errors="replace")


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
