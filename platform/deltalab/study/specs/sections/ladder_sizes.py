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
    "model.q_rank",
    "model.kv_rank",
    "model.rope_dim",
    "train.steps",
    "train.batch_size",
)
"""The settings that a ladder may list, besides a parameter of the tasks, such as `task.length`."""

PARAMETERS = 3
"""Parameters of the power law with an offset, a + b C^-c, which is fitted to the losses of an arm."""

MOST_SIZES = 20
"""The most sizes of a ladder."""

Size = Annotated[int, Field(strict=True, ge=1)]


class Ladder(BaseModel):
    """Sizes, as lists that go together: entry i of each list is size i.

    Every key besides the two is a setting by its path: `model.d_model: [32, 64, 128]`. The first list rises from size
    to size, and no other falls.

    Attributes:
        transfer: `mup` gives the models a `base_width`, the d_model that the base states: learning rates are meant for
            that width, and scaled at the others.
        keep_out: How many of the largest sizes the fit of loss against compute leaves out, to be predicted. By default
            1, and no fit with fewer than 4 sizes.
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
        """The number of sizes."""
        return len(next(iter(self.lists.values())))

    @property
    def left_out(self) -> int | None:
        """How many of the largest sizes the fit leaves out; None if there are too few sizes for a fit."""
        if self.keep_out is not None:
            return self.keep_out
        return 1 if len(self) > PARAMETERS else None

    @model_validator(mode="before")
    @classmethod
    def _paths(cls, raw: Any) -> Any:
        for path in raw if isinstance(raw, dict) else ():
            of_task = str(path).startswith("task.") and path != "task.task"
            if path not in (*cls.model_fields, *SIZES) and not of_task:
                raise unknown("size", str(path), [*SIZES, "task.length", *cls.model_fields])
        return raw

    @model_validator(mode="after")
    def _rises(self) -> "Ladder":
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
            for before, after in itertools.pairwise(values):
                if after < before or (after == before and path == first):
                    must = "rise from size to size" if path == first else "not fall"
                    raise ValueError(f"{path} must {must}, and {after} follows {before}")
        if self.keep_out is not None and len(self) - self.keep_out < PARAMETERS:
            raise ValueError(
                f"keep_out {self.keep_out} leaves {max(0, len(self) - self.keep_out)} of {len(self)} sizes to fit the "
                f"{PARAMETERS} parameters of a + b C^-c: give at least {PARAMETERS + self.keep_out} sizes"
            )
        if self.transfer == "mup" and "model.d_model" not in self.lists:
            raise ValueError("transfer: mup carries learning rates across widths: list model.d_model as well")
        return self

    def label(self, task: str, size: int) -> str:
        """Names a task at a size.

        Examples:
            >>> Ladder(**{"model.d_model": (32, 64)}).label("text", 1)
            'text.d_model=64'
        """
        path, values = next(iter(self.lists.items()))
        return f"{task}.{path.rpartition('.')[2]}={values[size]}"

    def at(self, size: int) -> dict[str, int]:
        """The settings of a size, by their paths."""
        return {path: values[size] for path, values in self.lists.items()}


@dataclass(frozen=True)
class SizedTask:
    """A task of a study at one size.

    Attributes:
        label: The task's name in the plan and in the ledger.
        task: The task's name in the study's file.
        params: The parameters of the task.
        model: The settings of the model that the size sets.
        train: The settings of the training that the size sets.
    """

    label: str
    task: str
    params: dict[str, Any]
    model: dict[str, Any]
    train: dict[str, Any]


def tasks_at_sizes(ladder: Ladder | None, tasks: Mapping[str, dict[str, Any]], base_width: int) -> Iterator[SizedTask]:
    """Yields every task at every size, or the tasks as they are if there is no ladder.

    Args:
        ladder: The study's ladder.
        tasks: The parameters of each task, by its name in the study's file.
        base_width: The width that the base's learning rate is meant for.
    """
    if ladder is None:
        for task, params in tasks.items():
            yield SizedTask(task, task, dict(params), {}, {})
        return
    for (task, params), size in itertools.product(tasks.items(), range(len(ladder))):
        parts: dict[str, dict[str, Any]] = {"task": {}, "model": {}, "train": {}}
        for path, value in ladder.at(size).items():
            section, _, key = path.partition(".")
            parts[section][key] = value
        if ladder.transfer == "mup":
            parts["model"]["base_width"] = base_width
        yield SizedTask(ladder.label(task, size), task, {**params, **parts["task"]}, parts["model"], parts["train"])


def learning_rates_text(ladder: Ladder, tuned: Collection[str]) -> str | None:
    """Says how learning rates go with the width; None for a ladder without widths.

    Args:
        ladder: The study's ladder.
        tuned: The settings that the study tunes.

    Examples:
        >>> learning_rates_text(Ladder.model_validate({"model.d_model": [32, 64]}), [])
        'widths 32 to 64 train at one learning rate, and the best one falls with the width'
    """
    widths = ladder.lists.get("model.d_model")
    if widths is None:
        return None
    text = f"widths {widths[0]} to {widths[-1]} train at"
    if ladder.transfer == "mup":
        return f"{text} learning rates that mup scales"
    if "train.lr" in tuned:
        return f"{text} learning rates that each size tunes"
    return f"{text} one learning rate, and the best one falls with the width"


def keys_at_fault(
    ladder: Ladder | None, sections: Collection[str], error: InputError, without: Callable[[], object]
) -> str:
    """Finds the keys of a ladder that an error is about.

    Args:
        ladder: The study's ladder.
        sections: The sections of the keys that may be wrong.
        error: The error.
        without: Does without the ladder what raised the error.

    Returns:
        The first key that the error names, as the file writes it, with a colon after it. All keys if the error names
        none and there is no error without the ladder. Otherwise an empty text.
    """
    paths = [path for path in (ladder.lists if ladder else ()) if path.partition(".")[0] in sections]
    try:
        without()
    except InputError as plain:
        if str(plain) == str(error):
            return ""
        by_the_ladder = False
    else:
        by_the_ladder = True
    wrong, _, _ = str(error).partition(";")  # Advice follows the semicolon.
    words = [word.rpartition(".")[2] for word in re.findall(r"[\w.]+", wrong)]
    named = [path for word in words for path in paths if path.partition(".")[2] == word]
    return "".join(f"scales.{path}: " for path in named[:1] or (paths if by_the_ladder else ()))


def refuse_both(ladder: Ladder | None, settings: Mapping[str, Mapping[str, Any]], where: str) -> None:
    """Raises `InputError` if a change sets what the ladder sets.

    Args:
        ladder: The study's ladder.
        settings: The change's settings, as section -> key -> value.
        where: The change, which errors name.
    """
    for path in ladder.lists if ladder else ():
        section, _, key = path.partition(".")
        if key in settings.get(section, {}):
            raise InputError(f"{where} sets {path}, and so does scales: give it in one of them")


def task_of(label: str, scales: Mapping[str, Any] | None, tasks: Sequence[str]) -> str:
    """The name that a study's file gives a task of the ledger.

    Args:
        label: The task's name in the ledger.
        scales: The section `scales` of the study as the ledger has it; None if the study is no ladder.
        tasks: The tasks as the file names them.

    Examples:
        >>> task_of("text.d_model=64", {"model.d_model": [32, 64]}, ["mqar", "text"])
        'text'
    """
    if not scales:
        return label
    ladder = Ladder.model_validate(scales)
    return next(task for task in tasks for size in range(len(ladder)) if ladder.label(task, size) == label)
