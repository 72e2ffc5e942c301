"""Reads the training recipes of papers, one YAML file each, in the folder `recipes`.

A file names its paper, the scales of `scales.SCALES` that the paper trains, and the settings of the training. Tokens,
batches and lengths are those of the scale. Each setting has its `value`, and under `from` the place in the paper, or
null: then the paper does not say, and the value is ours.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltalab.errors import unknown
from deltalab.export.scales import LENGTH_IS_OURS, SCALES
from deltalab.reading import read_text, read_yaml

OURS = "ours"
HEADINGS = ("recipe", "scale", "tokens", "a step", "length", "lr", "to", "warm-up", "decay", "std", "vocabulary")
"""The columns of the table of recipes. lr falls to `to` after a warm-up in steps, `decay` is that of weights, and `std`
is where matrices start."""
FOLDER = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Stated:
    """A value of a paper's recipe.

    Attributes:
        value: The value.
        source: The paper and the place in it, or a text that says that the value is ours.
    """

    value: Any
    source: str


@dataclass(frozen=True)
class PaperRecipe:
    """The training of a paper.

    Attributes:
        name: The name of the recipe.
        paper: The paper.
        settings: The settings of all scales, by dotted key of a recipe.
        scales: The settings that differ, by name of a scale.
        warmup: The warm-up, {steps: n}, {tokens: n} or {share: of the steps}.
        vocabulary: The number of tokens of the paper's tokenizer.
        init_std: The `init_std` of the model; None if the paper states none.
    """

    name: str
    paper: str
    settings: Mapping[str, Stated]
    scales: Mapping[str, Mapping[str, Stated]]
    warmup: Stated
    vocabulary: Stated
    init_std: Stated | None

    def nearest(self, parameters: float) -> str:
        """Returns the name of the recipe's scale whose number of parameters is nearest, by its logarithm."""
        return min(self.scales, key=lambda name: abs(math.log(SCALES[name].parameters / parameters)))

    def at(self, scale: str) -> dict[str, Stated]:
        """Returns the settings of a scale of the recipe by dotted key, with the warm-up in steps of the scale."""
        size = SCALES[scale]
        (unit, amount), steps = next(iter(self.warmup.value.items())), size.tokens / size.batch
        count = round({"steps": amount, "tokens": amount / size.batch, "share": amount * steps}[unit])
        warmup = Stated(count, f"{self.warmup.source}: {amount:g} {_UNITS[unit]}")
        return {**self.settings, **self.scales[scale], "schedule.warmup_steps": warmup}


_UNITS = {"steps": "steps", "tokens": "tokens", "share": "of the steps"}


def recipe_names() -> list[str]:
    """Returns the names of all recipes."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def find_recipe(name: str) -> PaperRecipe:
    """Reads the recipe of a name.

    Raises:
        InputError: If no recipe has the name.
    """
    if name not in recipe_names():
        raise unknown("recipe", name, recipe_names(), where="--recipe")
    file = FOLDER / f"{name}.yaml"
    text = read_yaml(read_text(file), where=str(file))
    paper = text["paper"]

    def stated(entry: Mapping[str, Any]) -> Stated:
        place = entry["from"]
        value = entry["value"] if "value" in entry else {key: x for key, x in entry.items() if key != "from"}
        return Stated(value, f"{paper}, {place}" if place else f"{OURS}; {paper} does not say")

    def all_stated(entries: Mapping[str, Any]) -> dict[str, Stated]:
        return {key: stated(entry) for key, entry in entries.items()}

    return PaperRecipe(
        name=name,
        paper=paper,
        settings=all_stated(text["settings"]),
        scales={scale: all_stated(entries) for scale, entries in text["scales"].items()},
        warmup=stated(text["warmup"]),
        vocabulary=stated(text["vocabulary"]),
        init_std=stated(text["init_std"]) if "init_std" in text else None,
    )


def recipes_rows() -> list[dict[str, str]]:
    """Returns all recipes, a row for each of their scales: heading -> text. A * marks what the paper does not say."""
    recipes = [find_recipe(name) for name in recipe_names()]
    return [dict(zip(HEADINGS, _row(recipe, name), strict=True)) for recipe in recipes for name in recipe.scales]


def recipes_table() -> list[str]:
    """Returns the lines of a table of all recipes, a line for each of their scales, and the papers below it."""
    recipes = [find_recipe(name) for name in recipe_names()]
    rows: list[tuple[str, ...]] = [HEADINGS, *(tuple(row.values()) for row in recipes_rows())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, "", "* ours: the paper does not say", *(f"{recipe.name}: {recipe.paper}" for recipe in recipes)]


def _row(recipe: PaperRecipe, scale: str) -> tuple[str, ...]:
    """Returns the cells of a scale of a recipe."""
    size, said = SCALES[scale], recipe.at(scale)

    def cell(name: str, times: float = 1.0) -> str:
        return f"{said[name].value * times:.4g}{_mark(said[name].source)}"

    return (
        recipe.name,
        scale,
        f"{size.tokens / 1e9:g}B",
        f"{size.batch / 2**20:g}M",
        f"{size.length}{'*' if size.source.endswith(LENGTH_IS_OURS) else ''}",
        cell("optimizer.lr"),
        cell("schedule.final", said["optimizer.lr"].value),
        cell("schedule.warmup_steps"),
        cell("optimizer.weight_decay"),
        f"{recipe.init_std.value:g}" if recipe.init_std else "-",
        f"{recipe.vocabulary.value}{_mark(recipe.vocabulary.source)}",
    )


def _mark(source: str) -> str:
    """Returns a star for a value that the paper does not state."""
    return "*" if source.startswith(OURS) else ""
