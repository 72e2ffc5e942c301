"""The JSON schema that editors read: it knows every key, takes every study that there is, and marks a misspelt key."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from deltalab.authoring.files.scaffold import new_study
from deltalab.authoring.files.study_folder import SCHEMA, shipped_studies
from deltalab.reading import read_yaml
from deltalab.study.specs.json_schema import schema, schema_text
from deltalab.study.specs.study_file import StudySpec

LINE = "# yaml-language-server: $schema=study.schema.json"
FULL = """
name: full
task: {mqar: {length: 32, pairs: 4, vocab_size: 64}, text: }
base: {rule: {name: comba, transition: iplr}, model: {d_model: 32, rope: true}, train: {steps: 180, lr: 5e-2}}
for_task: {text: {train: {steps: 70}}}
ablate: [d]
factorial: [[d, b]]
arms: {local: {rule: attention, match: {state: true, scale: rule.window}}}
seeds: {at_least: 6, at_most: 15}
search:
  rule.d: {choice: [0, head], when: {rule: comba}}
  model.layers: {pattern: [rule, {name: attention, window: 64}], lengths: 2, when: [{rule: gla}, {rule: [comba]}]}
  trials: 64
  warm: [gla, {study: earlier}]
  fidelity: {train.steps: [200, 600], keep: 0.33}
  constrain: {state: {at_most: 4096}}
profiles:
  gpu: {base: {model: {d_model: null}}, tune: null, resources: {cpu: 4, gpu: 1}}
"""


def wrong(text: str) -> list[str]:
    return [error.message for error in Draft202012Validator(schema()).iter_errors(read_yaml(text, where="test"))]


def test_more_seeds_of_the_base_are_in_the_schema() -> None:
    assert wrong("{name: s, task: mqar, base: {rule: comba}, seeds: {arms: 6, base: 16}}") == []
    assert wrong("{name: s, task: mqar, base: {rule: comba}, seeds: {arms: 6, bsae: 16}}")


def test_the_shipped_file_is_the_schema() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), "deltalab study schema --out studies/study.schema.json"


@pytest.mark.parametrize("name", shipped_studies())
def test_a_shipped_study_names_the_schema_and_meets_it(name: str) -> None:
    text = shipped_studies()[name].read_text(encoding="utf-8")
    assert text.splitlines()[0] == LINE
    assert (shipped_studies()[name].parent / LINE.partition("=")[2]).is_file()
    assert wrong(text) == []


def test_a_new_study_has_the_schema_beside_it(tmp_path: Path) -> None:
    (tmp_path / "study.schema.json").write_text("of an earlier version")
    text = new_study("mine", tmp_path).read_text()
    assert text.splitlines()[0] == LINE
    assert wrong(text) == []
    assert (tmp_path / "study.schema.json").read_text() == SCHEMA.read_text()


def test_the_schema_takes_every_form_of_a_study() -> None:
    assert wrong(FULL) == []
    assert wrong("{name: a, task: mqar, base: {rule: comba}, seeds: 7}") == []


@pytest.mark.parametrize(
    ("right", "misspelt"),
    [
        ("ablate:", "ablat:"),
        ("steps: 180", "stepz: 180"),
        ("d_model: 32", "dmodel: 32"),
        ("transition: iplr}, model", "transition: iplr}, modell"),
        ("at_most: 15", "at_mots: 15"),
        ("trials: 64", "trails: 64"),
        ("{choice: [0, head]", "{choise: [0, head]"),
        ("at_most: 4096", "most: 4096"),
        ("{d_model: null}", "{dmodel: null}"),
        ("cpu: 4", "cpus: 4"),
    ],
)
def test_a_misspelt_key_does_not_meet_the_schema(right: str, misspelt: str) -> None:
    assert right in FULL
    assert wrong(FULL.replace(right, misspelt))


def test_every_key_is_explained() -> None:
    def unexplained(about: dict[str, Any], where: str) -> Iterator[str]:
        for key, value in about.get("properties", {}).items():
            if not value.get("description", "").strip():
                yield f"{where}.{key}"

    found = schema()
    assert {*StudySpec.model_fields, "profiles"} == set(found["properties"])
    assert [*unexplained(found, "study")] == []
    assert [line for name, about in found["$defs"].items() for line in unexplained(about, name)] == []
