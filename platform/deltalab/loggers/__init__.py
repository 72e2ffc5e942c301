"""Loggers copy a study from the ledger to W&B, MLflow, TensorBoard, or a target that a package adds.

A package adds a logger by an entry point of the group `deltalab.loggers`. The entry point names the logger and its
class, whose methods `Logger` describes. Each logger runs in its own process (`deltalab.loggers.child`), so that no
logger can hold up or end a study.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

from deltalab.errors import InputError, unknown

BUILTIN = {
    "mlflow": "deltalab.loggers.mlflow:MlflowLogger",
    "tensorboard": "deltalab.loggers.tensorboard:TensorboardLogger",
    "wandb": "deltalab.loggers.wandb:WandbLogger",
}
"""Name of a logger -> its module and class. A logger needs the package of the same name."""


@dataclass(frozen=True)
class LoggedStudy:
    """A study, as a logger receives it before any run.

    Attributes:
        id: 16 hexadecimal digits of the hash of all that it computes.
        label: The study's name, profile and overrides in one line.
        spec: The study as resolved.
        arms: name of an arm -> {"is_base", "change", "config" by task}.
        tasks: name of a task -> {"metric", "maximize", ...}.
        folder: The folder of the ledger, for files.
    """

    id: str
    name: str
    profile: str | None
    overrides: dict[str, Any]
    label: str
    description: str
    spec: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    tasks: dict[str, dict[str, Any]]
    folder: str


@dataclass(frozen=True)
class LoggedRun:
    """A run in one arm: one seed of a trial that has ended.

    Attributes:
        id: 24 hexadecimal digits, the same whenever the run is logged.
        stage: "tune" or "confirm".
        called: The name of the trial in the report, without its arm, such as `confirm 0`, or `random candidate 2` of a
            search.
        trial: The trial's key.
        seed: The seed; None for a trial that failed before its seeds ended.
        values: dotted path -> value of the tuned settings.
        config: The settings, as {"rule", "model", "train"}.
        state: "done", "diverged" or "failed".
        error: The last line of a failed trial's traceback.
        facts: parameters, state_size, seconds, tokens_per_second and diverged_at, each if it is known.
        curves: SPLIT/METRIC -> points (step, value), sorted by step.
    """

    id: str
    arm: str
    task: str
    stage: str
    number: int
    called: str
    trial: str
    seed: int | None
    values: dict[str, Any]
    config: dict[str, Any]
    state: str
    error: str | None
    facts: dict[str, float]
    curves: dict[str, list[tuple[int, float]]]

    @property
    def label(self) -> str:
        """The run in one line."""
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{self.arm}, {self.task}, {self.called}{seed}"


@dataclass(frozen=True)
class LoggedReport:
    """The state and the report of a study that has ended.

    Attributes:
        report: The report as `deltalab study report --json` prints it.
        markdown: The report for a reader.
    """

    state: str
    report: dict[str, Any]
    markdown: str


class Logger(Protocol):
    """A logger of one study.

    It is made without arguments, before anything runs, and imports there what it needs. If a method
    raises, it is called again later, as long as the study runs.

    Attributes:
        where: A URL for the user, or a command that shows the logged study. It is set once `begin` has returned.
    """

    where: str

    def begin(self, study: LoggedStudy) -> Iterable[str]:
        """Opens the target to which the logger writes.

        Returns:
            The ids of this study's runs that the target already has as a whole. They are not logged again.
        """
        ...

    def log(self, run: LoggedRun) -> None:
        """Logs a run as a whole.

        If an earlier call was cut off, the target may have a part of the run. The run is passed again with the same id.
        """
        ...

    def end(self, report: LoggedReport) -> None:
        """Logs the report, in place of an earlier one of the same study, and waits until the target has everything."""
        ...


def logger_names() -> list[str]:
    """Returns the names that `--log-to` takes."""
    return sorted({*BUILTIN, *(point.name for point in entry_points(group="deltalab.loggers"))})


def require_known(names: Sequence[str]) -> None:
    """Raises `InputError` for a name that no logger has, or that two loggers have."""
    known = logger_names()
    for name in names:
        if name not in known:
            raise unknown("logger", name, known, where="--log-to")
        if len(definitions := _definitions(name)) > 1:
            raise InputError(f"--log-to {name}: is defined twice, by {' and by '.join(definitions)}")


def _definitions(name: str) -> list[str]:
    """Returns the modules and classes that define a logger of this name."""
    return [*([BUILTIN[name]] if name in BUILTIN else []), *dict.fromkeys(
        point.value for point in entry_points(group="deltalab.loggers", name=name)
    )]  # fmt: skip


def make_logger(name: str) -> Logger:
    """Makes a logger by its name. An error that its module or its class raises passes through."""
    from importlib import import_module

    if name in BUILTIN:
        module, _, kind = BUILTIN[name].partition(":")
        return cast(Logger, getattr(import_module(module), kind)())
    (point,) = {point.value: point for point in entry_points(group="deltalab.loggers", name=name)}.values()
    return cast(Logger, point.load()())


def flat(values: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """Returns nested settings as one dictionary: dotted path -> value. Lists stay whole.

    Examples:
        >>> flat({"train": {"lr": 0.1, "betas": [0.9, 0.95]}})
        {'train.lr': 0.1, 'train.betas': [0.9, 0.95]}
    """
    flat_values: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat_values |= flat(value, f"{under}{key}.")
        else:
            flat_values[f"{under}{key}"] = value
    return flat_values


def arms_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each task and arm of a report: verdict, score, difference, p, and the costs of the arm."""
    return [
        {
            "task": table["task"],
            "arm": row["arm"],
            "verdict": row["verdict"],
            "metric": table["metric"],
            "score": row["score"]["mean"],
            "difference": (row["difference"] or {}).get("mean"),
            "p": (row["difference"] or {}).get("p"),
            "parameters": row["parameters"],
            "state_size": row["state_size"],
            "flops_per_token": row["flops_per_token"],
        }
        for table in report["tables"]
        for row in table["rows"]
    ]


def local(folder: str, *parts: str) -> Path:
    """Makes a folder for a logger's files beside the ledger, and returns it."""
    path = Path(folder, *parts)
    path.mkdir(parents=True, exist_ok=True)
    return path
