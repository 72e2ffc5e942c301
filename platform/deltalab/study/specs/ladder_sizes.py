"""A ladder: sizes at which every arm of a study runs, each against the base of the same size."""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deltalab.errors import InputError, unknown

SIZES = (
    "model.d_model",
    "model.layers",
    "model.heads",
    "model.key_dim",
    "model.qk_heads",
    "model.kv_heads",
    "model.mlp_width",
    "model.gate_rank",
    "train.steps",
    "train.batch_size",
)
"""The settings that a ladder may list; besides, `task.` and a parameter of the tasks, such as `task.length`."""

PARAMETERS = 3
"""Of the power law with an offset, a + b C^-c, which is fitted to the losses of an arm."""

MOST_SIZES = 100
"""The most sizes of a ladder."""

Size = Annotated[int, Field(strict=True, ge=1)]


class Scales(BaseModel):
    """Sizes, as lists that go together: entry i of each list is size i.

    Every key besides the two is a setting by its path: `model.d_model: [32, 64, 128]`. The first list rises from size
    to size, and no other falls.
    transfer: `mup` gives the models a `base_width`, the d_model that the base states: learning rates are those of that
        width, and scaled at the others.
    keep_out: how many of the largest sizes the fit of loss against compute leaves out, to be predicted. By default 1,
        and no fit with fewer than 4 sizes.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, tuple[Size, ...]] = Field(init=False)

    transfer: Literal["none", "mup"] = "none"
    keep_out: Annotated[int, Field(strict=True, ge=0)] | None = None

    @property
    def lists(self) -> dict[str, tuple[int, ...]]:
        """The sizes of each setting, by its path."""
        return self.__pydantic_extra__

    def __len__(self) -> int:
        return len(next(iter(self.lists.values())))

    @property
    def left_out(self) -> int | None:
        """How many of the largest sizes the fit leaves out; None where there are too few sizes for a fit."""
        if self.keep_out is not None:
            return self.keep_out
        return 1 if len(self) > PARAMETERS else None

    @model_validator(mode="before")
    @classmethod
    def _paths(cls, given: Any) -> Any:
        for path in given if isinstance(given, dict) else ():
            of_task = str(path).startswith("task.") and path != "task.task"
            if path not in (*cls.model_fields, *SIZES) and not of_task:
                raise ValueError(str(unknown("size", str(path), [*SIZES, "task.length", *cls.model_fields])))
        return given

    @model_validator(mode="after")
    def _rises(self) -> "Scales":
        if not self.lists:
            raise ValueError("lists no sizes: add a key such as 'model.d_model: [32, 64, 128, 256]'")
        first, *others = self.lists
        for path in others:
            if len(self.lists[path]) != len(self):
                raise ValueError(
                    f"{first} lists {len(self)} sizes and {path} {len(self.lists[path])}: the lists go together, and "
                    "need one length"
                )
        if len(self) > MOST_SIZES:
            raise ValueError(f"{first} lists {len(self)} sizes; a ladder has at most {MOST_SIZES}")
        if len(self) < 2:
            raise ValueError(f"{first} lists one size: a ladder needs at least 2")
        for path, values in self.lists.items():
            for one, other in itertools.pairwise(values):
                if other < one or (other == one and path == first):
                    must = "rise from size to size" if path == first else "not fall"
                    raise ValueError(f"{path} must {must}, and {other} follows {one}")
        if self.keep_out is not None and len(self) - self.keep_out < PARAMETERS:
            raise ValueError(
                f"keep_out {self.keep_out} leaves {max(0, len(self) - self.keep_out)} of {len(self)} sizes to fit the "
                f"{PARAMETERS} parameters of a + b C^-c: give at least {PARAMETERS + self.keep_out} sizes"
            )
        if self.transfer == "mup" and "model.d_model" not in self.lists:
            raise ValueError("transfer: mup carries learning rates across widths: list model.d_model as well")
        return self

    def label(self, task: str, size: int) -> str:
        """What a task is called at a size.

        >>> Scales(**{"model.d_model": (32, 64)}).label("text", 1)
        'text.d_model=64'
        """
        path, values = next(iter(self.lists.items()))
        return f"{task}.{path.rpartition('.')[2]}={values[size]}"

    def at(self, size: int) -> dict[str, int]:
        """The settings of a size, by their paths."""
        return {path: values[size] for path, values in self.lists.items()}


@dataclass(frozen=True)
class SizedTask:
    """A task of a study at one size. label: its name in the plan and the ledger. task: its name in the study's file.

    params: those of the task. model, train: what the size sets.
    """

    label: str
    task: str
    params: dict[str, Any]
    model: dict[str, Any]
    train: dict[str, Any]


def sized(scales: Scales | None, tasks: Mapping[str, dict[str, Any]], base_width: int) -> Iterator[SizedTask]:
    """Every task at every size; the tasks as they are where there is no ladder.

    base_width: the width that the base's learning rate is meant for.
    """
    if scales is None:
        for task, params in tasks.items():
            yield SizedTask(task, task, dict(params), {}, {})
        return
    for (task, params), size in itertools.product(tasks.items(), range(len(scales))):
        parts: dict[str, dict[str, Any]] = {"task": {}, "model": {}, "train": {}}
        for path, value in scales.at(size).items():
            section, _, key = path.partition(".")
            parts[section][key] = value
        if scales.transfer == "mup":
            parts["model"]["base_width"] = base_width
        yield SizedTask(scales.label(task, size), task, {**params, **parts["task"]}, parts["model"], parts["train"])


def rates(scales: Scales, tuned: Collection[str]) -> str | None:
    """How learning rates go with the width, in words; None for a ladder without widths. tuned: the settings that are.

    >>> rates(Scales.model_validate({"model.d_model": [32, 64]}), [])
    'widths 32 to 64 train at one learning rate, and the best one falls with the width'
    """
    widths = scales.lists.get("model.d_model")
    if widths is None:
        return None
    said = f"widths {widths[0]} to {widths[-1]} train at"
    if scales.transfer == "mup":
        return f"{said} learning rates that mup scales"
    if "train.lr" in tuned:
        return f"{said} learning rates that each size tunes"
    return f"{said} one learning rate, and the best one falls with the width"


def at_fault(scales: Scales | None, sections: Collection[str], error: InputError, without: Callable[[], object]) -> str:
    """Which keys of a ladder an error is about, as the file writes them, with a colon after each; "" where none is.

    It is the first that the error names; all of them, where it names none and there is no error without the ladder.
    sections: of the keys that may be wrong. without: does the same without the ladder.
    """
    paths = [path for path in (scales.lists if scales else ()) if path.partition(".")[0] in sections]
    try:
        without()
    except InputError as own:
        if str(own) == str(error):
            return ""
        found = False
    else:
        found = True
    wrong, _, _ = str(error).partition(";")  # what follows is advice
    words = [word.rpartition(".")[2] for word in re.findall(r"[\w.]+", wrong)]
    named = [path for word in words for path in paths if path.partition(".")[2] == word]
    return "".join(f"scales.{path}: " for path in named[:1] or (paths if found else ()))


def refuse_both(scales: Scales | None, given: Mapping[str, Mapping[str, Any]], where: str) -> None:
    """Raises `InputError` where a change sets what the ladder sets. given: section -> key -> value."""
    for path in scales.lists if scales else ():
        section, _, key = path.partition(".")
        if key in given.get(section, {}):
            raise InputError(f"{where} sets {path}, and so does scales: give it in one of them")


def task_of(label: str, scales: Mapping[str, Any] | None, tasks: Sequence[str]) -> str:
    """The name that a study's file gives a task of the ledger.

    scales, tasks: of the study as the ledger has it.

    >>> task_of("text.d_model=64", {"model.d_model": [32, 64]}, ["mqar", "text"])
    'text'
    """
    if not scales:
        return label
    made = Scales.model_validate(scales)
    return next(task for task in tasks for size in range(len(made)) if made.label(task, size) == label)


def families(spec: Mapping[str, Any], labels: Sequence[str]) -> list[list[str]]:
    """The tasks of the ledger whose arms are tested together: all sizes of a task, or the whole study.

    spec: of the study as the ledger has it.

    >>> families({"family": "task", "task": {"a": {}, "b": {}}}, ["a", "b"])
    [['a'], ['b']]
    """
    if spec.get("family") == "study":
        return [list(labels)]
    found: dict[str, list[str]] = {}
    for label in labels:
        found.setdefault(task_of(label, spec.get("scales"), list(spec.get("task", ()))), []).append(label)
    return list(found.values())
