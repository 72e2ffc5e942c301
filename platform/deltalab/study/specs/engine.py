"""The section `engine`: the program for real training by which a study trains each of its runs."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from deltalab.errors import InputError, unknown
from deltalab.export.recipe import check_setting
from deltalab.study.specs.search_space import Strict, Whole
from deltalab.training.recipe_keys import FREE, default_settings

SETTINGS = ("batch.documents", *(key for key in default_settings() if key.startswith(FREE)))
"""The settings of an engine's recipe that no key of a study stands for."""


class Engine(Strict):
    """An engine, which trains each run of a study on packed data.

    Attributes:
        name: torchtitan, or accelerate (transformers' Trainer).
        processes: The processes of a training on CPUs. With `resources: {gpu: N}`, each of N GPUs has one.
        settings: Settings of the engine's recipe, such as `compile: true` or `batch.micro: 4`. All others are keys of
            the study itself, such as `train.lr`.
        evaluate: Tasks of `platform eval` on which each trained model is measured, such as `needle`.
    """

    name: Literal["torchtitan", "accelerate"]
    processes: Annotated[Whole, Field(ge=1, le=1024)] = 1
    settings: dict[str, Any] = {}  # noqa: RUF012 pydantic copies it
    evaluate: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, raw: Any) -> Any:
        return {"name": raw} if isinstance(raw, str) else raw

    @field_validator("settings")
    @classmethod
    def _are_settings(cls, raw: dict[str, Any]) -> dict[str, Any]:
        for key, value in raw.items():
            try:
                if key not in SETTINGS:
                    raise unknown("setting", key, SETTINGS, where="engine.settings")
                check_setting(key, value, where=f"engine.settings.{key}")
            except InputError as error:
                raise ValueError(str(error)) from None
        return raw

    @property
    def learns_by(self) -> dict[str, Any]:
        """What of the section changes the numbers of a trial, and so is part of its key."""
        documents = self.settings.get("batch.documents", default_settings()["batch.documents"])
        return {"name": self.name, "documents": documents, "evaluate": list(self.evaluate)}
