"""Models are compared on the items that both have, and no item is measured twice."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.exports import LENGTH, exported

from deltalab.data.token_shards import Packed
from deltalab.evaluation import evaluate as evaluating
from deltalab.evaluation.compare import NO_ITEMS, compare
from deltalab.evaluation.items import Items, of_items
from deltalab.evaluation.proxy import by_example
from deltalab.evaluation.results import Result, named_data, write
from deltalab.registry import get_task
from deltalab.store import Store
from deltalab.store.trainings import add_evaluations, record, trainings
from deltalab.study.reports.lines import comparison_cells
from deltalab.tasks import BUILTIN, IGNORE

pytest.importorskip("transformers")
Platform = Callable[..., int]


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Three models of one shape with other weights, of three trainings."""
    return [exported(tmp_path / name, seed=i, run=name) for i, name in enumerate("abc")]


@pytest.fixture
def words(data: Path) -> tuple[object, ...]:
    return "--tasks", "loss,needle", "--data", data, "--limit", 12, "--length", 2 * LENGTH


def forbid(monkeypatch: pytest.MonkeyPatch, *tasks: str) -> None:
    def measured(*_: Any, **__: Any) -> Any:
        raise AssertionError("a known item is measured again")

    for task in tasks:
        monkeypatch.setattr(evaluating, task, measured)


def test_models_are_compared_item_by_item(
    platform: Platform, models: list[Path], words: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert platform("eval", *models, *words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    values = {model: {(row["task"], row["metric"]): row for row in rows} for model, rows in report["results"].items()}
    first = str(models[0])
    assert report["reference"] == first
    assert {one["model"] for one in report["comparisons"]} == set(map(str, models[1:]))
    assert {one["family"] for one in report["comparisons"]} == {len(report["comparisons"])}
    for one in report["comparisons"]:
        name = one["task"], one["metric"]
        assert one["difference"] == pytest.approx(values[one["model"]][name]["value"] - values[first][name]["value"])
        assert one["low"] <= one["difference"] <= one["high"]
    reasons = {(row["model"], tuple(row["metrics"][:1])): row["reason"] for row in report["not_compared"]}
    assert reasons[str(models[2]), ("loss@256",)] == "an interval takes 6 common items, and there are 5"
    assert platform("eval", *models[:2], *words) == 0
    said = capsys.readouterr().out
    assert "difference to a" in said
    assert "hold together with 95%" in said


def test_what_is_measured_is_not_measured_again(
    platform: Platform,
    models: list[Path],
    words: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for model in models[:2]:
        assert platform("eval", model, *words, "--json") == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    with monkeypatch.context() as patched:
        forbid(patched, "loss", "needle")
        assert platform("eval", *models[:2], *words, "--json") == 0
        said = capsys.readouterr()
        assert json.loads(said.out)["results"][str(models[1])] == alone
        assert said.err.count("reuses the items of") == 4
        with pytest.raises(AssertionError, match="measured again"):  # another limit has other items
            platform("eval", models[0], *words[:-3], 13, *words[-2:])
    (models[0] / "tokenizer_config.json").write_text("{}")
    with monkeypatch.context() as patched:
        forbid(patched, "loss")
        with pytest.raises(AssertionError, match="measured again"):  # another tokenizer may give other texts
            platform("eval", models[0], *words)


def test_a_killed_evaluation_keeps_the_tasks_that_it_finished(
    platform: Platform,
    models: list[Path],
    words: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def killed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(evaluating, "needle", killed)
        assert platform("eval", *models[:2], *words) != 0
    items = sorted(file.name for file in (models[0] / "items").iterdir())
    assert [name.split("-")[0] for name in items] == ["loss"]
    (models[0] / "items" / ".needle-0.json.gz.9.partial").write_bytes(b"half")
    with monkeypatch.context() as patched:
        patched.setattr(evaluating, "loss", killed)
        assert platform("eval", models[0], *words) == 0
    (models[0] / "items" / items[0]).write_bytes(b"half")
    assert platform("eval", models[0], *words) == 2
    assert "is no file of items" in capsys.readouterr().err


def test_wrong_models_are_one_line_before_any_is_measured(
    platform: Platform,
    models: list[Path],
    words: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(*arguments: object, saying: str) -> None:
        assert platform("eval", *arguments, *words) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert saying in error, error
        assert not (models[0] / "evaluations.json").exists()

    (tmp_path / "empty").mkdir()
    refused(models[0], models[0], saying="is named 2 times; name two models to compare them")
    refused(models[0], tmp_path / "empty", saying="neither a folder of `deltalab export` nor a run")
    refused(models[0], "nowhere", saying="nowhere: no such folder")
    forbid(monkeypatch, "loss")
    for name in (models[:1], models[:2]):
        refused(*name, "--suite", "recal", saying="--suite: unknown suite 'recal'; did you mean 'recall'?")
        refused(*name, "--suite", "ruler/vtt", saying="--suite ruler/: unknown task 'vtt'; did you mean 'vt'?")
        refused(*name, "--suite", "lm", "--lengths", "64", saying="--lengths: suite 'lm' has no lengths")
        refused(*name, "--suite", "recall", "--files", tmp_path, saying="holds no folder")
        for file in ("nowhere", models[0] / "config.json"):
            refused(*name, "--suite", "ruler/vt", "--files", file, saying=f"--files {file}: no such folder")
        refused(*name, "--suite", "zero_shot", "--few-shot", 2, saying="--few-shot: a suite has its own number")


@pytest.mark.slow
def test_a_word_that_only_stands_in_a_text_of_the_harness_is_no_task(
    platform: Platform,
    models: list[Path],
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`lose` stands in the solved examples of MMLU, and `acp_bench` in the tags of an included file."""
    pytest.importorskip("lm_eval")
    forbid(monkeypatch, "loss")
    assert platform("eval", *models[:2], "--tasks", "loss,lose", "--data", data) == 2
    assert "unknown task 'lose'; did you mean 'loss'?" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="measured again"):
        platform("eval", models[0], "--tasks", "loss,acp_bench", "--data", data)


def test_equal_models_do_not_differ(
    platform: Platform, tmp_path: Path, words: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    twins = [exported(tmp_path / name, seed=1, run=name) for name in "ab"]
    assert platform("eval", *twins, *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)["comparisons"]
    assert {(one["difference"], one["p"]) for one in found} == {(0.0, 1.0)}
    assert all(one["high"] > 0 for one in found if one["task"] == "needle v2"), "the next item need not agree"


def test_models_of_two_tokenizers_share_no_rows(
    platform: Platform, models: list[Path], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = models[1] / "tokenizer.json"
    file.write_text(file.read_text().replace("<0x41>", "<0xZZ>"))
    recipe = models[1] / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("sha256: ", "sha256: 0"))
    assert platform("eval", *models[:2], "--tasks", "loss", "--data", data) == 2
    assert "is packed with another tokenizer" in capsys.readouterr().err


def test_only_equal_items_are_paired() -> None:
    def result(metric: str, items: Items) -> Result:
        return of_items(1, "task", metric, items)

    ids = [f"{i}" for i in range(40)]
    scores = np.random.default_rng(0).normal(2, 1, 40)
    first = [result("a", Items.mean(ids, scores.tolist())), Result(1, "task", "mcc", 0.1, 40)]
    order = np.random.default_rng(1).permutation(40)
    other = Items.mean([ids[i] for i in order[:30]] + ["new"], [*(scores[order[:30]] + 0.5), 99.0])
    found = compare(
        {"x": first, "y": [result("a", other), Result(1, "task", "mcc", 0.3, 40), Result(1, "z", "m", 1, 1)]}
    )
    [one] = found.comparisons
    assert (one.difference, one.items, one.family) == (pytest.approx(0.5), 30, 1)
    assert one.high - one.low < 1e-6, "every common item differs by 0.5, so nothing varies where equal items are paired"
    assert found.partly == [
        "task a: y and the first model have 30 items in common of 40, and their difference is that of these"
    ]
    assert found.left_out == {
        ("task", "y", NO_ITEMS): ["mcc"],
        ("z", "y", "the first model has no such result"): ["m"],
    }
    strangers = compare({"x": first[:1], "y": [result("a", Items.mean(["q", "r"], [1.0, 2.0]))]})
    assert "share no item" in next(iter(strangers.left_out))[2]


def test_a_difference_of_few_skewed_items_is_said_to_be_uncertain() -> None:
    def lines(count: int, last: float) -> list[str]:
        ids = [f"{i}" for i in range(count)]
        zeros, other = [0.0] * count, [*np.linspace(-1, 1, count - 1).tolist(), last]
        of_model = {"x": Items.mean(ids, zeros), "y": Items.mean(ids, other)}
        return compare({name: [of_items(1, "task", "a", items)] for name, items in of_model.items()}).too_skewed

    assert lines(12, 9.0) == ["task a: y: 12 items, skewed: the interval may be too short"]
    assert lines(12, 0.5) == lines(30, 9.0) == []


def test_errors_of_ratios_are_those_of_the_delta_method() -> None:
    random = np.random.default_rng(2)
    words = random.integers(5, 40, 400).astype(float)
    nats = words * random.normal(3, 0.5, 400)
    items = Items([str(i) for i in range(400)], nats.tolist(), words.tolist(), is_log=True)
    drawn = random.integers(0, 400, (2000, 400))
    resampled = (nats[drawn].sum(1) / words[drawn].sum(1)).std()
    assert items.stderr == pytest.approx(resampled, rel=0.1)
    assert items.value == pytest.approx(math.exp(nats.sum() / words.sum()))


@pytest.mark.parametrize(
    "name", sorted(set(BUILTIN) - {"text", "digits", "digit_patches", "image_folder"})
)  # which read files, or answer once
def test_examples_sum_up_to_their_batch(name: str) -> None:
    task = get_task(name, **BUILTIN[name].example)
    batch = task.batch("test", 6, 0, 0)
    scored = int((batch.targets != IGNORE).sum())
    logits = torch.randn(scored, task.vocab_size, generator=torch.Generator().manual_seed(0))
    examples = by_example(task, batch, logits)
    assert len({example for example, _ in examples}) == 6
    for metric, (total, count) in task.measure(batch, logits).items():
        assert sum(scores[metric][0].item() for _, scores in examples) == pytest.approx(total.item())
        assert sum(scores[metric][1].item() for _, scores in examples) == pytest.approx(count.item())


TASK = """
task: NAME
tag: OF
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: [" yes", " no"]
doc_to_target: answer
metric_list: [{metric: acc}, {metric: mcc}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
GROUP = """
group: both
task: [first, second]
aggregate_metric_list: [{metric: acc, weight_by_size: SIZE}]
"""


@pytest.mark.slow
@pytest.mark.parametrize("by_size", [True, False])
def test_tasks_of_the_harness_are_compared_by_document(
    platform: Platform,
    models: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by_size: bool,
) -> None:
    """Models of two tokenizers have the same documents, and losses a byte and a word are comparable."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tasks").mkdir()
    for name, form, count in (("first", CHOICE, 20), ("second", CHOICE, 9), ("prose", ROLLING, 15)):
        rows = [{"question": f"{name} asks whether {i} is {'so ' * (i % 7)}odd", "answer": i % 2} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = (TASK + form).replace("NAME", name).replace("DATA", str(tmp_path / f"{name}.jsonl"))
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text.replace("tag: OF\n", ""))
    (tmp_path / "tasks" / "both.yaml").write_text(GROUP.replace("SIZE", str(by_size)))
    file = models[1] / "tokenizer.json"
    file.write_text(file.read_text().replace("<0x41>", "<0xZZ>"))
    words = ("--tasks", "both,prose", "--include", tmp_path / "tasks", "--json")
    assert platform("eval", *models[:2], *words) == 0
    report = json.loads(capsys.readouterr().out)
    a, b = (
        {(row["task"], row["metric"]): row["value"] for row in report["results"][str(model)]} for model in models[:2]
    )
    found = {(one["task"], one["metric"]): one for one in report["comparisons"]}
    assert set(found) == {
        ("both", "acc"), ("first", "acc"), ("second", "acc"),
        ("prose", "word_perplexity"), ("prose", "byte_perplexity"), ("prose", "bits_per_byte"),
    }  # fmt: skip
    for name, one in found.items():
        logs = name[1].endswith("perplexity")
        assert one["is_log"] == logs
        want = math.log(b[name] / a[name]) if logs else b[name] - a[name]
        assert one["difference"] == pytest.approx(want, abs=1e-6)
    assert (found["both", "acc"]["items"], found["prose", "bits_per_byte"]["items"]) == (29, 15)
    assert {(row["task"], *row["metrics"], row["reason"]) for row in report["not_compared"]} == {
        ("first", "mcc", NO_ITEMS), ("second", "mcc", NO_ITEMS),
    }  # fmt: skip
    assert platform("eval", models[1], *words) == 0
    assert capsys.readouterr().err.count("reuses the items of") == 2
    (tmp_path / "prose.jsonl").write_text((tmp_path / "prose.jsonl").read_text().replace("odd", "even"))
    assert platform("eval", models[1], *words) == 0
    assert "reuses" not in capsys.readouterr().err, "a data set that changed is another one"


def run_of(folder: Path, run: str) -> Path:
    about = {
        "id": run, "rule": "gated_deltanet", "started": 0, "study": None, "export": "x",
        "recipe": {"batch": {"sequences": 2, "length": LENGTH}},
    }  # fmt: skip
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def test_the_ledger_has_differences_until_one_of_their_values_changes(
    platform: Platform, models: list[Path], words: tuple[object, ...], data: Path, tmp_path: Path
) -> None:
    asked = {"limit": 12, "other_data": named_data(Packed(data))}
    with Store.open("lab.db") as store:
        for model in models:
            record(store, run_of(tmp_path / f"run-{model.name}", model.name))
    assert platform("eval", *models, *words, "--db", "lab.db") == 0
    with Store.open("lab.db") as store:
        rows = trainings(store)
        assert [len(row.comparisons) > 0 for row in rows] == [False, True, True]
        kept = json.loads((models[1] / "evaluations.json").read_text())
        assert len(kept["comparisons"]) == len(rows[1].comparisons)
        shown = comparison_cells(rows)
        assert {tuple(cells[:2]) for cells in shown} == {("run-b", "run-a step-30"), ("run-c", "run-a step-30")}
        [loss] = [
            one
            for one in rows[1].comparisons
            if one.name == f"loss loss@{2 * LENGTH} (limit 12, data {asked['other_data']})"
        ]
        assert rows[1].evaluations[loss.name] - rows[0].evaluations[loss.name] == pytest.approx(loss.difference)
        again = {"step": 30, "task": "loss", "metric": f"loss@{2 * LENGTH}", "value": 1.0, **asked}
        add_evaluations(store, "b", [again])  # the value of the one model changes ...
        assert [loss.name in {one.name for one in row.comparisons} for row in trainings(store)] == [False, False, True]
        add_evaluations(store, "a", [again])  # ... and that of the model that others are compared with
        assert [loss.name in {one.name for one in row.comparisons} for row in trainings(store)] == [False] * 3
        assert all(len(row.comparisons) == 3 for row in trainings(store)[1:]), "other values keep theirs"


def test_a_difference_does_not_outlive_the_value_of_the_first_model(
    platform: Platform, models: list[Path], words: tuple[object, ...], data: Path
) -> None:
    asked: Any = {"split": "validation", "limit": 12, "other_data": named_data(Packed(data))}

    def compared(model: Path) -> set[str]:
        content = json.loads((model / "evaluations.json").read_text())
        return {one["metric"] for one in content.get("comparisons", []) if one["task"] == "loss"}

    assert platform("eval", *models, *words) == 0
    before = compared(models[1])
    assert platform("eval", models[0], *words) == 0
    assert compared(models[1]) == before, "the same value is measured again"
    assert platform("eval", models[0], *words[:-3], 3, *words[-2:]) == 0
    assert compared(models[1]) == before, "another limit gives another value"
    file = models[0] / "evaluations.json"
    write([Result(30, "loss", f"loss@{2 * LENGTH}", 1.0, 12, **asked)], models[0], {})
    assert compared(models[1]) == compared(models[2]) == before - {f"loss@{2 * LENGTH}"}
    assert len(json.loads(file.read_text())["compared_in"]) == 2
    (models[2] / "evaluations.json").unlink()
    write([Result(30, "loss", f"bits_per_byte@{2 * LENGTH}", 1.0, 12, **asked)], models[0], {})
    assert compared(models[1]) == before - {f"loss@{2 * LENGTH}", f"bits_per_byte@{2 * LENGTH}"}


def test_a_difference_on_data_that_one_model_was_trained_on_names_the_values_of_both(
    platform: Platform, data: Path, tmp_path: Path
) -> None:
    """The first model read these data in its training and the other one did not, so their settings differ."""
    trained_on = {"folder": str(data), "sha256": Packed(data).meta["sha256"]}
    models = [exported(tmp_path / "a", run="a", data=trained_on), exported(tmp_path / "b", seed=2, run="b")]
    assert platform("eval", *models, "--tasks", "loss", "--limit", 12) == 0
    contents = [json.loads((model / "evaluations.json").read_text()) for model in models]
    for content, other in zip(contents, (None, named_data(Packed(data))), strict=True):
        assert {row["other_data"] for row in content["evaluations"]} == {other}
    compared = contents[1]["comparisons"]
    assert {(one["other_data"], one["reference_other_data"]) for one in compared} == {(named_data(Packed(data)), None)}
    metric = compared[0]["metric"]
    write([Result(30, "loss", metric, 1.0, 12, split="validation", limit=12)], models[0], {})
    left = json.loads((models[1] / "evaluations.json").read_text())["comparisons"]
    assert [one["metric"] for one in left] == [one["metric"] for one in compared if one["metric"] != metric]
