"""Gives all arms of a study with an engine the training of a paper."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltalab.errors import InputError
from deltalab.export.papers import OURS, PaperRecipe, find_recipe
from deltalab.export.scales import SCALES, parameter_count
from deltalab.models.spec import ModelSpec
from deltalab.study.specs.method_settings import FLOPS, resolve_method
from deltalab.study.specs.setting_text import settings_text
from deltalab.study.specs.study_file import Method, StudySpec
from deltalab.tasks import Task

GIVEN = {
    "lr": "optimizer.lr",
    "final": "schedule.final",
    "warmup": "schedule.warmup_steps",
    "schedule": "schedule.kind",
    "weight_decay": "optimizer.weight_decay",
    "clip": "clip",
    "betas": "optimizer.betas",
    "optimizer": "optimizer.name",
    "z_loss": "z_loss",
}
"""The keys of `train` that a recipe gives a study, each with the key of the recipe. The eps of all recipes is that of a
study, whose seeds are its own."""


@dataclass(frozen=True)
class StudyRecipe:
    """A paper's recipe, as all arms of a study train by it.

    Attributes:
        paper: The recipe.
        scale: The scale of the recipe whose numbers count.
    """

    paper: PaperRecipe
    scale: str

    def train(self, length: int) -> dict[str, Any]:
        """Returns the values of `train` on sequences of `length` tokens. The warm-up keeps its share of the steps."""
        size, stated = SCALES[self.scale], self.paper.at(self.scale)
        steps = round(size.tokens / size.batch)
        values = {key: stated[of_recipe].value for key, of_recipe in GIVEN.items()}
        values["warmup"] /= steps
        return {**values, "batch_size": size.batch // length, "steps": steps}

    def applied(self, base: Method, length: int) -> Method:
        """Puts the recipe below a base, whose own batch and steps, or operations, stay."""
        train = self.train(length)
        if FLOPS in base.train:
            del train["steps"]
        return Method(rule=base.rule, model={**self._start, **base.model}, train={**train, **base.train})

    @property
    def _start(self) -> dict[str, Any]:
        """The settings of the model that the recipe gives."""
        return {} if self.paper.init_std is None else {"init_std": self.paper.init_std.value}

    def note(self, config: Mapping[str, Any], length: int) -> str:
        """Says what the recipe gives, and where a base departs from the paper.

        Args:
            config: The configuration of the base, with every setting spelled out.
            length: The tokens of a sequence.
        """
        stated, train = self.paper.at(self.scale), self.train(length)
        values = {key: value for key, value in train.items() if key in GIVEN} | self._start
        ours = [key for key, of_recipe in GIVEN.items() if stated[of_recipe].source.startswith(OURS)]
        pairs = {key: (config["train"][key], train[key]) for key in ("batch_size", "steps")}
        pairs["vocabulary"] = config["model"]["vocab_size"], self.paper.vocabulary.value
        own = [f"{key} {here:,} (paper: {there:,})" for key, (here, there) in pairs.items() if here != there]
        return (
            f"engine.recipe: {self.paper.name} at {self.scale}, {self.paper.paper}, gives {settings_text(values, 3)}"
            + (f"; {', '.join(ours)} are ours, since the paper does not say" if ours else "")
            + (f". The study's own: {', '.join(own)}" if own else "")
            + "."
        )


def study_recipe(spec: StudySpec, base: Method, task: Task) -> StudyRecipe | None:
    """Returns the recipe of a study's engine, at its scale nearest to the base; None for a study without one.

    Args:
        spec: The study.
        base: The base on the study's first task, at the first size.
        task: That task.

    Raises:
        InputError: The study sets what the recipe gives.
    """
    if spec.engine is None or spec.engine.recipe is None:
        return None
    paper = find_recipe(spec.engine.recipe)
    _refuse_both(spec, paper)
    first = StudyRecipe(paper, next(iter(paper.scales)))
    try:
        config = resolve_method(first.applied(base, task.length), task, where="base")
    except InputError:
        return first  # the plan says what is wrong in the base
    parameters = parameter_count(ModelSpec.of({**config["model"], "rule": config["rule"]}))
    return StudyRecipe(paper, paper.nearest(parameters))


def _refuse_both(spec: StudySpec, paper: PaperRecipe) -> None:
    """Raises `InputError` if the base sets what the recipe gives, on all tasks or on one."""
    given = [f"train.{key}" for key in GIVEN] + ["model.init_std"] * (paper.init_std is not None)
    for where, section in (("base", spec.base), *((f"for_task.{name}", of) for name, of in spec.for_task.items())):
        for path in given:
            part, _, key = path.partition(".")
            if key in getattr(section, part):
                raise InputError(
                    f"{where} sets {path}, and so does engine.recipe {paper.name}: leave it out ({path}: null in a "
                    f"profile, {path}= on the command line), or set it in an arm"
                )
