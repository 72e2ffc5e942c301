"""The section `engine`: the program for real training by which a study trains each of its runs."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from deltalab.errors import InputError, unknown
from deltalab.export.papers import recipe_names
from deltalab.export.recipe import check_setting, no_engine_takes, no_milestones, unknown_setting
from deltalab.study.specs.sections.search_space import Strict, Whole
from deltalab.training.recipe_keys import FREE, default_settings

SETTINGS = (
    "batch.documents",
    *(key for key in default_settings() if key.startswith(FREE) and not key.startswith(("validation.", "milestones"))),
)
"""The settings of an engine's recipe that no key of a study stands for."""


class Engine(Strict):
    """An engine, which trains each run of a study on packed data.

    Attributes:
        name: torchtitan, or accelerate (transformers' Trainer).
        recipe: The paper by whose recipe all arms train: its rates, schedule, decay, clipping and start, which the base
            then leaves to it; and batch and steps, unless the study says otherwise.
        processes: The processes of a training on CPUs. With `resources: {gpu: N}`, each of N GPUs has one.
        settings: Settings of the engine's recipe, such as `compile: true` or `batch.micro: 4`. All others are keys of
            the study itself, such as `train.lr`.
        evaluate: Tasks and suites of `deltalab eval` on which each trained model is measured, such as `needle`,
            `recall` or `ruler/vt`. A suite's name wins over that of a task of lm-evaluation-harness.
        evaluate_every: The steps after each of which the model is measured on them, too; None for the last step alone.
        lengths: The tokens of the suites' texts; empty for those of the suites.
        limit: The examples of each of these tasks; None for the tasks' own numbers.
        files: A folder with copies of the data sets that the suites ask, in place of the Hub.
    """

    name: Literal["torchtitan", "accelerate"]
    recipe: Annotated[str, Field(json_schema_extra={"enum": [*recipe_names()]})] | None = None
    processes: Annotated[Whole, Field(ge=1, le=1024)] = 1
    settings: dict[str, Any] = {}  # noqa: RUF012 pydantic copies it
    evaluate: tuple[str, ...] = ()
    evaluate_every: Annotated[Whole, Field(ge=1)] | None = None
    lengths: tuple[Annotated[Whole, Field(ge=1)], ...] = ()
    limit: Annotated[Whole, Field(ge=1)] | None = None
    files: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, raw: Any) -> Any:
        for key in raw if isinstance(raw, dict) else ():
            if key not in cls.model_fields and (reason := no_engine_takes(str(key))) is not None:
                raise ValueError(reason)
        return {"name": raw} if isinstance(raw, str) else raw

    @field_validator("recipe")
    @classmethod
    def _is_recipe(cls, raw: str | None) -> str | None:
        if raw is not None and raw not in recipe_names():
            raise unknown("recipe", raw, recipe_names())
        return raw

    @field_validator("settings")
    @classmethod
    def _are_settings(cls, raw: dict[str, Any]) -> dict[str, Any]:
        for key, value in raw.items():
            try:
                if key not in SETTINGS:
                    raise unknown_setting(key, SETTINGS)
                check_setting(key, value, where=key)
            except InputError as error:
                raise ValueError(str(error)) from None
        return raw

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        for key in ("lengths", "limit", "files", "evaluate_every"):
            if getattr(self, key) and not self.evaluate:
                raise ValueError(f"{key} is of the tasks that evaluate names, and it names none")
        if why := no_milestones(self.evaluate_every, self.settings.get("checkpoint.every")):
            raise ValueError(why.replace("milestones", "evaluate_every").replace("checkpoint", "settings.checkpoint"))
        return self

    @property
    def learns_by(self) -> dict[str, Any]:
        """What of the section changes the numbers of a trial, and so is part of its key."""
        documents = self.settings.get("batch.documents", default_settings()["batch.documents"])
        asked = {"evaluate": list(self.evaluate), "lengths": list(self.lengths), "limit": self.limit}
        asked |= {"evaluate_every": self.evaluate_every}
        return {"name": self.name, "documents": documents} | {key: value for key, value in asked.items() if value}
