"""The key `seeds` of a study: how many, in which looks, after which test, and how many of the base."""

from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, model_validator

from deltalab.statistics.joint_test import seeds_needed
from deltalab.study.specs.sections.search_space import Strict, Whole


class Seeds(Strict):
    """Seeds that are added in up to four looks, until each arm is decided or has no prospect of a decision.

    Attributes:
        at_least: Seeds of the first look.
        at_most: Seeds of the last look.
    """

    at_least: Annotated[Whole, Field(ge=2, le=1000)]
    at_most: Annotated[Whole, Field(ge=2, le=1000)]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.at_most <= self.at_least:
            raise ValueError(f"at_most {self.at_most} must be more than at_least {self.at_least}")
        return self


class Further(Strict):
    """Seeds that are added to those with which the study was tested before. The ledger finds such a test by itself.

    Attributes:
        after: The seeds of the study that was tested, as its key `seeds` gave them.
        at_most: Seeds after the further look.
    """

    after: "SeedsKey"
    at_most: Annotated[Whole, Field(ge=2, le=1000)]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if isinstance(self.after, Unbalanced):
            raise ValueError("no further look can follow seeds for the arms and more for the base")
        tested = self.after if isinstance(self.after, int) else self.after.at_most
        if self.at_most <= tested:
            raise ValueError(f"at_most {self.at_most} must be more than the {tested} seeds before")
        return self


class Unbalanced(Strict):
    """More seeds for the base, which every arm is compared with, than for an arm. They are tested once.

    Attributes:
        arms: Seeds of each arm.
        base: Seeds of the base.
    """

    arms: Annotated[Whole, Field(ge=seeds_needed(), le=1000)]
    base: Annotated[Whole, Field(le=1000)]

    @model_validator(mode="before")
    @classmethod
    def _no_looks(cls, raw: Any) -> Any:
        for key in ("at_least", "at_most", "after"):
            if isinstance(raw, dict) and key in raw:
                raise ValueError(f"arms and base are tested once: leave out {key}, or arms and base")
        return raw

    @model_validator(mode="after")
    def _base_has_more(self) -> Self:
        if self.base <= self.arms:
            raise ValueError(
                f"base {self.base} must be more than arms {self.arms}; as many for all: seeds: {self.arms}"
            )
        return self


def _tag(seeds: Any) -> str:
    """The kind of a study's key `seeds`."""
    if isinstance(seeds, Unbalanced) or (isinstance(seeds, dict) and not seeds.keys().isdisjoint(("arms", "base"))):
        return "[unbalanced]"
    if isinstance(seeds, Further) or (isinstance(seeds, dict) and "after" in seeds):
        return "[further]"
    return "[looks]" if isinstance(seeds, dict | Seeds) else "[number]"


SeedsKey = Annotated[
    Annotated[Whole, Field(ge=1, le=1000), Tag("[number]")]
    | Annotated[Seeds, Tag("[looks]")]
    | Annotated[Further, Tag("[further]")]
    | Annotated[Unbalanced, Tag("[unbalanced]")],
    Discriminator(_tag),
]
Further.model_rebuild()
