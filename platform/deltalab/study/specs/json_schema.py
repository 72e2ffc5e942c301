"""The JSON schema of a study file, with which editors complete keys, explain them and mark those that do not exist.

`studies/study.schema.json` holds it for the shipped studies, and `platform study new` puts a copy beside a new one.
It refuses nothing that a study may say; what it cannot express, such as a rule's knobs, `platform study plan` checks.
"""

import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from pydantic import TypeAdapter

from deltalab.models.spec import ModelSpec
from deltalab.study.specs import budget, ladder_sizes, search_space, study_file
from deltalab.study.specs.method_settings import OF_THE_TASK
from deltalab.tasks import BUILTIN
from deltalab.training.train import TrainSpec

_MODELS: tuple[type, ...] = (
    study_file.StudySpec, study_file.Method, study_file.Change, study_file.Seeds, study_file.Resources,
    ladder_sizes.Scales, budget.Tune, budget.Searching, search_space.Search,
    budget.Match, budget.Constrain, budget.Bound, budget.Fidelity,
)  # fmt: skip


def schema() -> dict[str, Any]:
    """The JSON schema of a study file."""
    found: dict[str, Any] = study_file.StudySpec.model_json_schema()
    defs = found["$defs"]
    for model in _MODELS:
        place = found if model is study_file.StudySpec else defs[model.__name__]
        _describe(place, model)
    for name, kind, left_out in (("ModelSpec", ModelSpec, ("rule", *OF_THE_TASK)), ("TrainSpec", TrainSpec, ())):
        about = TypeAdapter(kind).json_schema()
        defs |= about.pop("$defs", {})
        about.pop("required", None)  # an arm states what it changes
        _describe(about, kind)
        for key in left_out:
            del about["properties"][key]
        defs[name] = about
        section = name.removesuffix("Spec").lower()
        for method in ("Method", "Change"):
            own = defs[method]["properties"][section]
            defs[method]["properties"][section] = {"$ref": f"#/$defs/{name}", "description": own["description"]}
    # What validators take besides.
    search = defs["Search"]["properties"]
    search["lengths"] = {"description": search["lengths"]["description"]}
    either = [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]
    search["when"] = {"anyOf": either, "description": search["when"]["description"]}
    task = found["properties"]["task"]
    task["anyOf"] = [{"type": "string"}, {"type": "object", "minProperties": 1, "properties": dict(_tasks())}]
    for key in ("type", "minProperties", "patternProperties", "additionalProperties", "propertyNames"):
        task.pop(key, None)
    found["properties"]["profiles"] = {
        "type": "object",
        "title": "Changes by name",
        "description": "Changes of the study by name, for --profile NAME; null takes a key away.",
        "additionalProperties": {**_loose(found, defs), "type": "object"},
    }
    return found


def schema_text() -> str:
    """The text of a file with the schema."""
    return json.dumps(schema(), indent=1) + "\n"


def _describe(place: dict[str, Any], kind: type) -> None:
    said = inspect.cleandoc(kind.__doc__ or "")
    place["description"] = said.split("\n\n")[0].replace("\n", " ")
    for key, text in explained(said, place["properties"]).items():
        place["properties"][key]["description"] = text


def explained(docstring: str, names: Iterable[str]) -> dict[str, str]:
    """What a docstring says of its names, as `name, name: text` at the start of a line or after a sentence.

    >>> explained("A bar. a, b: its ends, as in {a: 1}. c: where\\nit hangs.", ["a", "b", "c"])
    {'a': 'Its ends, as in {a: 1}.', 'b': 'Its ends, as in {a: 1}.', 'c': 'Where it hangs.'}
    """
    one = "|".join(sorted(names, key=len, reverse=True))
    head = re.compile(rf"(?:^\s*|(?<=\. )|(?<=\.\) ))((?:(?:{one}), )*(?:{one})): ", re.MULTILINE)
    found = {}
    for paragraph in docstring.split("\n\n"):
        heads = [*head.finditer(paragraph)]
        for at, next_one in zip_longest(heads, heads[1:]):
            text = " ".join(paragraph[at.end() : next_one.start() if next_one else None].split())
            for name in at[1].split(", "):
                found[name] = text[:1].upper() + text[1:]
    return found


def _tasks() -> Iterable[tuple[str, dict[str, Any]]]:
    for name, kind in BUILTIN.items():
        said = inspect.cleandoc(kind.__doc__ or "")
        parameters: dict[str, Any] = {f.name: {} for f in fields(kind)}
        yield name, {"description": said.split("\n\n")[0].replace("\n", " "), "properties": parameters}


def _loose(about: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """The keys of a mapping, with any values: a profile states a part of what a study states, or takes it away."""
    if "$ref" in about:
        about = {**defs[about["$ref"].rpartition("/")[2]], **about}
    said = {"description": about["description"]} if "description" in about else {}
    if about.get("additionalProperties", True) is not False or "properties" not in about:
        return said
    properties = {key: _loose(value, defs) for key, value in about["properties"].items() if key != "profiles"}
    return {**said, "type": ["object", "null"], "properties": properties, "additionalProperties": False}
