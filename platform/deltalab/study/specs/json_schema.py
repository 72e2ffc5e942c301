"""The JSON schema of a study file, with which editors complete keys, explain them and mark those that do not exist.

`studies/study.schema.json` holds the schema for the shipped studies, and `deltalab study new` puts a copy beside a new
study. The schema refuses nothing that a study may say. It cannot express everything, such as a rule's knobs:
`deltalab study plan` checks the rest.
"""

import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_args

from pydantic import TypeAdapter

from deltalab.models.hybrids import HYBRIDS, PRESET
from deltalab.models.spec import MIXER, ModelSpec
from deltalab.study.specs import study_file
from deltalab.study.specs.method_settings import FLOPS
from deltalab.study.specs.sections import budget, engine, ladder_sizes, resources, search_space, seeds
from deltalab.study.specs.setting_paths import OF_THE_TASK
from deltalab.tasks import BUILTIN
from deltalab.training.train import TrainSpec

_MODELS: tuple[type, ...] = (
    study_file.StudySpec, study_file.Method, study_file.Change, resources.Resources,
    seeds.Seeds, seeds.Further, seeds.Unbalanced,
    ladder_sizes.Ladder, budget.Tune, budget.Searching, search_space.Search,
    engine.Engine, budget.Match, budget.Constrain, budget.Bound, budget.Fidelity,
)  # fmt: skip


def schema() -> dict[str, Any]:
    """Makes the JSON schema of a study file."""
    study_schema: dict[str, Any] = study_file.StudySpec.model_json_schema()
    defs = study_schema["$defs"]
    for model in _MODELS:
        _describe(study_schema if model is study_file.StudySpec else defs[model.__name__], model)
    for name, kind, left_out in (("ModelSpec", ModelSpec, ("rule", *OF_THE_TASK)), ("TrainSpec", TrainSpec, ())):
        section_schema = TypeAdapter(kind).json_schema()
        defs |= section_schema.pop("$defs", {})
        section_schema.pop("required", None)  # An arm states what it changes.
        _describe(section_schema, kind)
        for key in left_out:
            del section_schema["properties"][key]
        defs[name] = section_schema
        section = name.removesuffix("Spec").lower()
        for method in ("Method", "Change"):
            reference = defs[method]["properties"][section]
            defs[method]["properties"][section] = {"$ref": f"#/$defs/{name}", "description": reference["description"]}
    defs["TrainSpec"]["properties"][FLOPS] = {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "The operations of matrix products that each run trains for, in place of steps; for all arms.",
    }
    # Validators take more than the types say.
    module = {"module": {"type": "string"}, "kwargs": {"type": "object"}}
    defs["ModelSpec"]["properties"][MIXER] = {
        "anyOf": [{"type": "string"}, {"type": "object", "properties": module, "required": ["module"]}],
        "description": "A torch.nn.Module in place of a rule: {module: file.py:Name or package.Name, kwargs: {...}}.",
    }
    defs["ModelSpec"]["properties"][PRESET] = {
        "enum": [*HYBRIDS],
        "description": "A published hybrid in place of a rule: `deltalab model list` describes them.",
    }
    del defs["Method"]["required"]
    search = defs["Search"]["properties"]
    search["lengths"] = {"description": search["lengths"]["description"]}
    either = [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]
    search["when"] = {"anyOf": either, "description": search["when"]["description"]}
    for section in ("Change", "Searching"):
        quantities = {"type": "array", "items": {"enum": [*get_args(budget.Quantity)]}}
        defs[section]["properties"]["match"]["anyOf"].append(quantities)
    task = study_schema["properties"]["task"]
    task["anyOf"] = [{"type": "string"}, {"type": "object", "minProperties": 1, "properties": dict(_tasks())}]
    for key in ("type", "minProperties", "patternProperties", "additionalProperties", "propertyNames"):
        task.pop(key, None)
    study_schema["properties"]["profiles"] = {
        "type": "object",
        "title": "Changes by name",
        "description": "Changes of the study by name, for --profile NAME; null takes a key away.",
        "additionalProperties": {**_loose(study_schema, defs), "type": "object"},
    }
    return study_schema


def schema_text() -> str:
    """The text of a file with the schema."""
    return json.dumps(schema(), indent=1) + "\n"


def _describe(section: dict[str, Any], kind: type) -> None:
    """Puts the texts of a class's docstring into the schema of its section."""
    docstring = inspect.cleandoc(kind.__doc__ or "")
    section["description"] = docstring.split("\n\n")[0].replace("\n", " ")
    for name, text in attributes(docstring).items():
        if name in section["properties"]:
            section["properties"][name]["description"] = text


def attributes(docstring: str) -> dict[str, str]:
    r"""Reads the section `Attributes:` of a docstring as texts by name.

    Examples:
        >>> attributes("A bar.\n\nAttributes:\n    a: Its end, as in {a: 1}.\n    b: Where it\n        hangs.")
        {'a': 'Its end, as in {a: 1}.', 'b': 'Where it hangs.'}
    """
    texts: dict[str, str] = {}
    name = ""
    for line in docstring.partition("Attributes:\n")[2].partition("\n\n")[0].splitlines():
        if first := re.match(r" {4}(\w+): (.*)", line):
            name, texts[first[1]] = first[1], first[2]
        else:
            texts[name] += f" {line.strip()}"
    return texts


def _tasks() -> Iterable[tuple[str, dict[str, Any]]]:
    """The schema of each built-in task's parameters, by the task's name."""
    for name, kind in BUILTIN.items():
        docstring = inspect.cleandoc(kind.__doc__ or "")
        parameters: dict[str, Any] = {f.name: {} for f in fields(kind)}
        yield name, {"description": docstring.split("\n\n")[0].replace("\n", " "), "properties": parameters}


def _loose(whole: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """The schema of a profile, which states a part of what a study states, or takes keys away with null."""
    if "$ref" in whole:
        whole = {**defs[whole["$ref"].rpartition("/")[2]], **whole}
    description = {"description": whole["description"]} if "description" in whole else {}
    if whole.get("additionalProperties", True) is not False or "properties" not in whole:
        return description
    properties = {key: _loose(value, defs) for key, value in whole["properties"].items() if key != "profiles"}
    return {**description, "type": ["object", "null"], "properties": properties, "additionalProperties": False}
