"""Where a study is logged besides the ledger: W&B, MLflow, TensorBoard, or what a package adds.

A package adds a logger by the entry-point group `deltalab.loggers`: its name, and the class, which `Logger` describes.
Loggers run in a process of their own (`deltalab.loggers.child`), so that none can hold up or end a study.
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
"""The module and the class of each logger, by its name. A logger needs the package of the same name."""


@dataclass(frozen=True)
class LoggedStudy:
    """A study as it begins.

    Attributes:
        id: 16 hexadecimal digits of the hash of all that it computes.
        label: Its name, profile and overrides in one line.
        spec: The study as resolved.
        arms: The arms by name, each {"is_base", "change", "config" by task}.
        tasks: The tasks by name, each {"metric", "maximize", ...}.
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
    """One seed of a trial that has ended, in one arm.

    Attributes:
        id: 24 hexadecimal digits, the same whenever the run is logged.
        stage: "tune" or "confirm".
        called: What the report calls the trial, without its arm, such as `confirm 0`, or `random candidate 2` of a
            search.
        trial: The trial's key.
        seed: The seed; None for a trial that failed before its seeds ended.
        values: The tuned settings by path.
        config: {"rule", "model", "train"}.
        state: "done", "diverged" or "failed".
        error: The last line of a failed trial's traceback.
        facts: parameters, state_size, seconds, tokens_per_second and diverged_at, each if it is known.
        curves: SPLIT/METRIC -> points (step, value), by rising steps.
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
    """How a study ended.

    Attributes:
        report: The report as `platform study report --json` prints it.
        markdown: The report for a reader.
    """

    state: str
    report: dict[str, Any]
    markdown: str


class Logger(Protocol):
    """A logger of one study.

    It is made without arguments, before anything runs, and imports there what it needs. A method that raises is tried
    again later, as long as the study runs.

    Attributes:
        where: For the user, once `begin` has returned: a URL, or a command that shows what was logged.
    """

    where: str

    def begin(self, study: LoggedStudy) -> Iterable[str]:
        """Opens the target.

        Returns:
            The ids of this study's runs that the target already has as a whole. They are not logged again.
        """
        ...

    def log(self, run: LoggedRun) -> None:
        """Logs a run as a whole.

        If logging was cut off, the target may have a part of the run. The run then comes again, with the same id.
        """
        ...

    def end(self, report: LoggedReport) -> None:
        """Logs the report, in place of an earlier one of the same study, and waits until the target has everything."""
        ...


def logger_names() -> list[str]:
    """Returns the names that `--log-to` takes."""
    return sorted({*BUILTIN, *(point.name for point in entry_points(group="deltalab.loggers"))})


def require_known(names: Sequence[str]) -> None:
    """Raises `InputError` for a name that no logger has, or that two have."""
    known = logger_names()
    for name in names:
        if name not in known:
            raise unknown("logger", name, known, where="--log-to")
        if len(definitions := _definitions(name)) > 1:
            raise InputError(f"--log-to {name}: is defined twice, by {' and by '.join(definitions)}")


def _definitions(name: str) -> list[str]:
    """Returns where the loggers of a name are defined."""
    return [*([BUILTIN[name]] if name in BUILTIN else []), *dict.fromkeys(
        point.value for point in entry_points(group="deltalab.loggers", name=name)
    )]  # fmt: skip


def make_logger(name: str) -> Logger:
    """Makes a logger by its name. Raises what its module, or the class, raises."""
    from importlib import import_module

    if name in BUILTIN:
        module, _, kind = BUILTIN[name].partition(":")
        return cast(Logger, getattr(import_module(module), kind)())
    (point,) = {point.value: point for point in entry_points(group="deltalab.loggers", name=name)}.values()
    return cast(Logger, point.load()())


def flat(values: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """Returns nested settings by their dotted paths. Lists stay whole.

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
    """Returns a row for each task and arm of a report: verdict, score, difference, p, and what the arm costs."""
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
    """Returns a folder for a logger's files, beside the ledger, and makes it."""
    path = Path(folder, *parts)
    path.mkdir(parents=True, exist_ok=True)
    return path
