"""The suites that the harness asks, whole, from a folder of small files in the form that the Hub has."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltalab.data.token_shards import Packed
from deltalab.errors import NotInstalled
from deltalab.evaluation.harness import HarnessOptions
from deltalab.evaluation.metric_names import Evaluated, metric_names
from deltalab.evaluation.model_folder import open_model
from deltalab.evaluation.suites import measure as measuring
from deltalab.evaluation.suites.measure import SuiteOptions, measure
from deltalab.evaluation.suites.suite import load_suite
from deltalab.export.recipe import paper_recipe
from deltalab.export.source import Source
from deltalab.export.write import export
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

MODEL = ModelSpec.of(
    {"rule": {"name": "gated_deltanet"}, "vocab_size": 256, "d_model": 16, "layers": 1, "heads": 2, "mlp": False}
)
ARC = {"id": "1", "question": "Which?", "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "B"}
ZERO_SHOT: dict[str, dict[str | None, dict[str, Any]]] = {
    "EleutherAI/lambada_openai": {"default": {"text": "the mill stands by the river"}},
    "Rowan/hellaswag": {
        None: {
            "ind": 1, "activity_label": "Milling", "ctx_a": "A man grinds.", "ctx_b": "he", "source_id": "a~1",
            "endings": ["sits.", "runs.", "eats.", "sings."], "label": "2", "ctx": "A man grinds. he",
            "split": "val", "split_type": "indomain",
        }
    },
    "allenai/ai2_arc": {"ARC-Easy": ARC, "ARC-Challenge": ARC},
    "baber/piqa": {None: {"goal": "grind corn", "sol1": "use a mill", "sol2": "use a spoon", "label": 0}},
    "allenai/winogrande": {
        "winogrande_xl": {"sentence": "The mill beat the spoon as _ was big.", "option1": "mill", "option2": "spoon",
                          "answer": "1"}
    },
    "aps/super_glue": {"boolq": {"question": "is it a mill", "passage": "It is a mill.", "idx": 0, "label": 1}},
    "lighteval/siqa": {
        None: {"context": "Ann mills.", "question": "Why?", "answerA": "Corn", "answerB": "Fun", "answerC": "Rain",
               "label": "2"}
    },
    "EleutherAI/wikitext_document_level": {"wikitext-2-raw-v1": {"page": " = Mill = \n A mill stands , by it . \n"}},
}  # fmt: skip
"""Data set -> configuration -> a row."""
LONGBENCH = {
    "input": "Which?", "question": "Which?", "context": "Paragraph 1: a mill.", "answers": ["Paragraph 1"],
    "length": 4, "dataset": "d", "language": "en", "all_classes": ["Paragraph 1", "Paragraph 2"], "_id": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export over bytes with random weights."""
    out = tmp_path_factory.mktemp("offline") / "model"
    about = {**paper_recipe(MODEL), "batch": {"sequences": 2, "length": 64}}
    export(Source(MODEL, build_model(MODEL, seed=1).state_dict, about, {"checkpoint": "step-30"}, {}, "bytes"), out)
    return out


def dataset(folder: Path, rows: dict[str | None, dict[str, Any]]) -> None:
    """Writes a data set with two examples a split, as the Hub has it: files, and their configurations in README.md."""
    folder.mkdir(parents=True)
    configs = []
    for config, row in rows.items():
        splits = ("train", "validation", "test")
        for split in splits:
            (folder / f"{config}-{split}.jsonl").write_text((json.dumps(row) + "\n") * 2)
        files = [{"split": split, "path": f"{config}-{split}.jsonl"} for split in splits]
        configs.append({"config_name": config or "default", "data_files": files})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")


def ask(suite: str, folder: Path, files: Path) -> dict[tuple[str, str], float]:
    """(task, metric) -> value."""
    options = SuiteOptions(harness=HarnessOptions(files=files, max_length=600), limit=1)
    with open_model(str(folder)) as model:
        results, left_out, _ = measure(model, [suite], options)
    assert left_out == {}
    assert all(math.isfinite(result.value) for result in results)
    return {(result.task, result.metric): result.value for result in results}


@pytest.mark.slow
def test_zero_shot_asks_all_its_tasks_from_files(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, rows in ZERO_SHOT.items():
        dataset(tmp_path / name, rows)
    values = ask("zero_shot", folder, tmp_path)
    quoted = [(task.name, task.metric) for task in load_suite("zero_shot").tasks if task.metric]
    assert len(quoted) == 8
    assert values["zero_shot", "mean"] == pytest.approx(sum(values[pair] for pair in quoted) / 8)
    assert values["wikitext", "word_perplexity"] > 1
    assert set(values) == set(metric_names(Evaluated(["zero_shot"], Packed(data), "test", 64))[0])


def test_packages_that_a_metric_lacks_are_named_before_anything_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "find_spec", lambda name: None if name == "rouge" else name)
    with open_model(str(folder)) as model, pytest.raises(NotInstalled, match="suite longbench: needs rouge") as refused:
        measuring.require(model, ["zero_shot/piqa", "longbench/longbench_qasper"], SuiteOptions())
    assert refused.value.mend == "pip install 'deltalab[eval]'"


@pytest.mark.slow
def test_longbench_asks_all_its_tasks_from_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in load_suite("longbench").packages:
        pytest.importorskip(name)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names = [task.name.removeprefix("longbench_") for task in load_suite("longbench").tasks]
    dataset(tmp_path / "Xnhyacinth/LongBench", dict.fromkeys(names, LONGBENCH))
    values = ask("longbench", folder, tmp_path)
    assert {task for task, _ in values} == {"longbench", *(f"longbench_{name}" for name in names)}
