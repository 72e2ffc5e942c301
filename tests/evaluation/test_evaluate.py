"""What a trained folder is measured on: the figures are those of the model, and wrong input is one line."""

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.exports import LENGTH, MODEL, exported

from deltalab.data.text_tokenizers import load_tokenizer
from deltalab.data.token_shards import Packed
from deltalab.errors import InputError
from deltalab.evaluation import evaluate as evaluating
from deltalab.evaluation.evaluate import evaluate
from deltalab.evaluation.harness import HarnessOptions, _index_of, index_of_tasks
from deltalab.evaluation.model_folder import open_model
from deltalab.evaluation.needle_questions import KINDS, questions
from deltalab.evaluation.results import Result, write
from deltalab.export.recipe import paper_recipe
from deltalab.export.source import Source, model_fields
from deltalab.export.write import export
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_task
from deltalab.store import Store
from deltalab.store.trainings import record, trainings

pytest.importorskip("transformers")
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel


def by_name(results: list[evaluating.Result]) -> dict[str, float]:
    return {f"{result.task} {result.metric}": result.value for result in results}


def test_the_loss_is_that_of_the_model_by_length_and_place(folder: Path, data: Path) -> None:
    with open_model(str(folder)) as found:
        results = evaluate(found, ["loss"], data=Packed(data), limit=6)
        split = Packed(data).split("validation")
        model = found.model
    values = by_name(results)
    assert {result.step for result in results} == {30}
    for times, rows in ((1, 6), (2, 3), (4, 1)):
        size = times * LENGTH
        losses = []
        for i in range(rows):
            tokens = torch.from_numpy(split.row(split.rows(size) * i // rows, size)[0])
            with torch.no_grad():
                losses.append(model(tokens[None], labels=tokens[None]).loss.item())
        assert values[f"loss loss@{size}"] == pytest.approx(sum(losses) / rows, rel=1e-4)
        bits = values[f"loss loss@{size}"] / math.log(2) * split.tokens / split.bytes
        assert values[f"loss bits_per_byte@{size}"] == pytest.approx(bits)
    places = {name: value for name, value in values.items() if "_to_" in name}
    assert [name.removeprefix("loss loss_at_") for name in places] == [
        "0_to_16", "16_to_32", "32_to_64", "64_to_128", "128_to_256",
    ]  # fmt: skip
    weighted = sum(value * width for value, width in zip(places.values(), (16, 16, 32, 64, 128), strict=True)) / 256
    assert weighted == pytest.approx(values["loss loss@256"])


@pytest.mark.parametrize(("task", "held", "asked"), [
    ("needle", 1, 1), ("needle_multikey", 4, 1), ("needle_multivalue", 4, 4), ("needle_multiquery", 4, 4),
])  # fmt: skip
def test_needles_lie_somewhere_in_exactly_as_many_tokens(data: Path, task: str, held: int, asked: int) -> None:
    def encode(text: str) -> list[int]:
        return list(text.encode())

    split = Packed(data).split("train")
    for filler in (None, split):
        drawn = list(questions(encode, 900, 20, KINDS[task], filler=filler))
        assert drawn == list(questions(encode, 900, 20, KINDS[task], filler=filler))
        places = set()
        for question in drawn:
            assert len(question.tokens) + question.room == 900
            text = bytes(question.tokens).decode()
            needles = re.findall(r"One of the special magic numbers for (\w+) is: (\d{7})\. ", text)
            assert len(needles) == held
            words = text[text.rindex("provided text? ") :]
            assert {number for key, number in needles if key in words} == set(question.values)
            assert len(question.values) == asked
            assert text.endswith("mentioned in the provided text is" if asked == 1 else "in the provided text are")
            assert question.room >= 2 * asked * 8
            places.add(text.index("One of the special"))
        assert len(places) > 10
    assert list(questions(encode, 100, 20, KINDS[task])) == []


class Knowing:
    """A model that answers with every number of the text that the question asks for, but with a wrong last digit."""

    generation_config = SimpleNamespace(eos_token_id=None)

    def __init__(self, wrong: bool) -> None:
        self.wrong = wrong

    def can_generate(self) -> bool:
        return True

    def generate(self, tokens: torch.Tensor, *, max_new_tokens: int, **greedy: Any) -> torch.Tensor:
        assert greedy["do_sample"] is False
        rows = []
        for row in tokens.tolist():
            text = bytes(row).decode()
            words = text[text.rindex("provided text? ") :]
            found = re.findall(r"numbers for (\w+) is: (\d{7})\. ", text)
            numbers = [number for key, number in found if key in words]
            if self.wrong:
                numbers[0] = numbers[0][:-1] + str((int(numbers[0][-1]) + 1) % 10)
            answer = " " + ", ".join(numbers) + ". Or so."
            rows.append(row + list(answer.encode().ljust(max_new_tokens)[:max_new_tokens]))
        return torch.tensor(rows)


def test_a_number_counts_as_found_where_every_digit_is_right(folder: Path) -> None:
    tasks = ["needle", "needle_multikey", "needle_multivalue", "needle_multiquery"]
    for wrong, one, four in ((False, 1.0, 1.0), (True, 0.0, 0.75)):
        with open_model(str(folder)) as found:
            vars(found)["model"] = Knowing(wrong)
            values = by_name(evaluate(found, tasks, length=1024, limit=5))
        shares = dict(zip(tasks, (one, one, four, four), strict=True))
        assert values == {
            f"{task + (' v2' if task == 'needle' else '')} exact_match@{size}": share
            for task, share in shares.items()
            for size in (1024, 2048, 4096)
        }


def test_greedy_decoding_goes_on_as_the_logits_say(folder: Path, gpt2: Path) -> None:
    """Through the cache of the model's own `generate`, and without it."""
    for path in (folder, gpt2):
        with open_model(str(path)) as found:
            tokens = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(1))
            want = tokens
            for _ in range(6):
                want = torch.cat([want, found.logits(want)[:, -1:].argmax(-1)], 1)
            assert found.continued(tokens, 6).tolist() == want[:, 20:].tolist()
            found.model.can_generate = lambda: False
            assert found.continued(tokens, 6).tolist() == want[:, 20:].tolist()


def test_a_folder_of_a_proxy_task_has_the_tasks_metrics(tmp_path: Path) -> None:
    task = get_task("mqar", length=32, pairs=4, vocab_size=64)
    model = ModelSpec.of({**model_fields(MODEL), "vocab_size": 64})
    trial = {
        "task": {"name": "mqar", "version": task.version, "parameters": {"length": 32, "pairs": 4, "vocab_size": 64}},
        "model": model_fields(model),
        "train": {"steps": 1, "batch_size": 8, "lr": 1e-3, "eval_batches": 2},
        "seed": 0,
    }
    folder = exported(tmp_path / "model", model, tokenizer=None, trial=trial)
    with open_model(str(folder)) as found:
        tasks, left_out = evaluating.askable(found, None)
        assert tasks == ["proxy"]
        assert left_out == {
            "loss": "it needs packed data: give --data PACKED",
            **dict.fromkeys(KINDS, "the folder has no tokenizer: export it with --tokenizer"),
        }
        results = evaluate(found, tasks)
    values = by_name(results)
    weights = build_model(model, seed=1)
    right = count = 0
    for i in range(2):
        batch = task.batch("test", 8, 0, i)
        with torch.no_grad():
            guesses = weights(batch.inputs, batch.targets != -100).argmax(-1)
        right, count = right + int((guesses == batch.labels).sum()), count + len(batch.labels)
    assert values["proxy mqar accuracy"] == pytest.approx(right / count)
    assert "proxy mqar loss" in values
    [measured] = [result for result in results if result.metric == "accuracy"]
    assert measured.items is not None
    assert len(measured.items.ids) == 16, "the examples are the items, each with all its answers"


TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""


@pytest.mark.slow
def test_the_harness_scores_a_local_task(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"{i} and 1 make", "choices": [" ten", " two", " a"], "answer": i % 3} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    file = tmp_path / "tasks" / "sums.yaml"
    file.write_text(TASK.replace("DATA", str(tmp_path / "rows.jsonl")))
    with open_model(str(folder)) as found:
        [result] = evaluate(found, [str(file)], limit=6)
        again = evaluate(found, ["sums"], limit=6, include=tmp_path / "tasks")
        tokenizer, model = found.tokenizer, found.model
    assert [result] == again
    right = 0
    for row in rows[:6]:
        scores = []
        for choice in row["choices"]:  # type: ignore[attr-defined]
            ids = torch.tensor(tokenizer(str(row["question"]) + choice)["input_ids"])
            with torch.no_grad():
                logs = model(ids[None]).logits[0].log_softmax(-1)
            scores.append(sum(logs[i - 1, ids[i]].item() for i in range(len(ids) - len(choice), len(ids))))
        right += scores.index(max(scores)) == row["answer"]
    assert (result.task, result.metric, result.examples, result.step) == ("sums", "acc", 6, 30)
    assert result.value == pytest.approx(right / 6)
    assert result.stderr == pytest.approx(math.sqrt(right / 6 * (1 - right / 6) / 5)), "that of a mean of 6 answers"


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """A model of transformers over bytes, with random weights."""
    out = tmp_path_factory.mktemp("gpt2") / "model"
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2, n_positions=512)).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_text((folder / name).read_text())
    return out


def test_a_model_of_transformers_is_measured(
    platform: Callable[..., int], gpt2: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--tasks", "loss,needle", "--data", data, "--length", LENGTH, "--limit", 4, "--json")
    assert platform("eval", gpt2, *words) == 0
    results = json.loads(capsys.readouterr().out)
    found = {(row["task"], row["metric"]): row["value"] for row in results}
    split = Packed(data).split("validation")
    tokens = torch.from_numpy(np.stack([split.row(split.rows(LENGTH) * i // 4, LENGTH)[0] for i in range(4)])).long()
    model = GPT2LMHeadModel.from_pretrained(gpt2)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert found["loss", f"loss@{LENGTH}"] == pytest.approx(float(want), rel=1e-5)
    assert any(task == "needle v2" for task, _ in found)
    assert len(json.loads((gpt2 / "evaluations.json").read_text())["evaluations"]) == len(results)


def test_a_tokenizer_that_transformers_saved_anew_reads_the_same_data(
    platform: Callable[..., int], gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers writes other bytes for the same tokenizer, such as "" for null."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(["documents say little"] * 3, trainers.BpeTrainer(vocab_size=40, show_progress=False))
    (tmp_path / "hub").mkdir()
    tokenizer.save(str(tmp_path / "hub/tokenizer.json"))
    (tmp_path / "hub/tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "text.txt").write_text("".join(f"documents say little {i}\n" for i in range(300)))
    words = ("--tokenizer", tmp_path / "hub", "--separator", "\n", "--split", "train=0.4,validation=0.3,test=0.3")
    assert platform("data", "pack", tmp_path / "text.txt", "--out", tmp_path / "packed", *words) == 0
    shutil.copytree(gpt2, tmp_path / "first", ignore=shutil.ignore_patterns("*token*", "items", "evaluations.json"))
    for file in (tmp_path / "hub").iterdir():
        shutil.copy(file, tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "again")
    AutoTokenizer.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "again")
    hashes = {load_tokenizer(str(tmp_path / name))[1]["sha256"] for name in ("first", "again")}
    assert len(hashes) == 2, "the case is not met: transformers writes what it read"
    words = ("--tasks", "loss", "--data", tmp_path / "packed", "--length", 16, "--limit", 8, "--json")
    capsys.readouterr()
    assert platform("eval", tmp_path / "first", tmp_path / "again", *words) == 0
    first, again = json.loads(capsys.readouterr().out)["results"].values()
    assert [row["value"] for row in first] == [row["value"] for row in again]


@pytest.mark.slow
def test_options_of_the_harness_reach_it_and_its_results(
    gpt2: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    seen: dict[str, Any] = {}

    def asked(model: Any, **given: Any) -> dict[str, Any]:
        seen.update(given, length=model.max_length, batch=model.batch_size)
        return {"results": {"arc_easy": {"acc,none": 0.5}}}

    monkeypatch.setattr(lm_eval, "simple_evaluate", asked)
    with open_model(str(gpt2)) as found:
        results = evaluate(found, ["arc_easy"], options=HarnessOptions(few_shot=5, batch_size=3, max_length=77))
        assert (seen["num_fewshot"], seen["batch"], seen["length"]) == (5, 3, 77)
        results += evaluate(found, ["arc_easy"])
        assert (seen["num_fewshot"], seen["length"]) == (None, 512)
    with open_model(str(folder)) as found:  # whose questions have four times the training's length by themselves
        results += evaluate(found, ["arc_easy"], options=HarnessOptions(max_length=4 * LENGTH))
    settings = [(result.task, result.few_shot, result.max_length) for result in results]
    assert settings == [("arc_easy", 5, 77), ("arc_easy", None, None), ("arc_easy", None, None)]
    write(results[:2], tmp_path, {})
    assert len(json.loads((tmp_path / "evaluations.json").read_text())["evaluations"]) == 2, (
        "other settings, other rows"
    )


def test_the_index_of_tasks_is_made_anew_after_a_change_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_path: object())
    file = tmp_path / "task.yaml"
    file.write_text("task: a\n")
    first = index_of_tasks([tmp_path])
    assert index_of_tasks([tmp_path]) is first
    os.utime(file, ns=(0, 0))
    assert index_of_tasks([tmp_path]) is not first
    assert index_of_tasks([]) is not index_of_tasks([tmp_path])
    _index_of.cache_clear()


def test_a_model_of_another_tokenizer_or_nowhere_is_one_line(
    platform: Callable[..., int], gpt2: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(gpt2, other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<0x41>", "<0xZZ>"))
    assert platform("eval", other, "--tasks", "loss", "--data", data, "--length", LENGTH) == 2
    assert "is packed with another tokenizer" in capsys.readouterr().err
    assert platform("eval", gpt2, "--tasks", "loss", "--data", data) == 2
    assert "no recipe says how long a training sequence is: give --length" in capsys.readouterr().err
    assert platform("eval", "nowhere") == 2
    assert "nowhere: no such folder; a model of the Hub is named ORG/NAME" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("model.safetensors", r"cannot be loaded: Error while deserializing header"),
        ("tokenizer*.json", r"has no tokenizer: by its files a text has no tokens$"),
    ],
)
def test_a_model_of_broken_files_is_one_line(
    platform: Callable[..., int], gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str,
    message: str,
) -> None:  # fmt: skip
    other = tmp_path / "other"
    shutil.copytree(gpt2, other, ignore=shutil.ignore_patterns("evaluations.json", "items"))
    for file in other.glob(broken):
        if file.suffix == ".json":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:100])
    assert platform("eval", other, "--suite", "ruler/fwe", "--lengths", 800, "--limit", 1) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(f"^error: .*other: {message}", error)
    assert not (other / "evaluations.json").exists()


def test_a_broken_file_of_evaluations_is_found_before_anything_is_measured(
    platform: Callable[..., int], gpt2: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    other = tmp_path / "other"
    shutil.copytree(gpt2, other, ignore=shutil.ignore_patterns("evaluations.json", "items"))
    (other / "evaluations.json").write_text("[1")
    monkeypatch.setattr(evaluating, "evaluate", lambda *_, **__: pytest.fail("measures"))
    assert platform("eval", other, "--tasks", "loss", "--data", data, "--length", LENGTH) == 2
    assert capsys.readouterr().err.endswith("evaluations.json: is no file of evaluations; move it away\n")
    assert (other / "evaluations.json").read_text() == "[1"


def test_what_a_folder_cannot_be_asked_is_left_out_with_its_reason(
    platform: Callable[..., int], tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of 16 tokens hold no needle, and a model over bytes cannot do a task of 64 ids."""
    task = {"name": "mqar", "version": 1, "parameters": {"length": 32, "pairs": 4, "vocab_size": 64}}
    folder = exported(tmp_path / "model", batch={"sequences": 2, "length": 16}, trial={"task": task})
    assert platform("eval", folder, "--data", data, "--limit", 1) == 0
    said = capsys.readouterr()
    assert "loss@64" in said.out
    assert "needle" not in said.out
    ours = [task for task in KINDS if task != "needle_text"]
    assert [line for line in said.err.splitlines() if line.startswith("left out")] == [
        *(
            f"left out {task}: the needles and their question do not fit into 64 tokens: give a longer --length"
            for task in ours
        ),
        "left out needle_text: the needles and their question do not fit into 64 tokens, or the split is too short to "
        "fill them: give a longer --length",
        "left out proxy: the model's vocabulary has 256 ids now, and that of task 'mqar' 64",
    ]


def test_results_stand_in_the_folder_and_in_the_ledger(
    platform: Callable[..., int], tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(data, tmp_path / "more")
    meta = json.loads((data / "meta.json").read_text())
    (tmp_path / "more" / "meta.json").write_text(json.dumps(meta | {"sha256": "0123456789"}))
    folder = exported(tmp_path / "model", data={"folder": str(data), "sha256": meta["sha256"]})
    about = {
        "id": "r1", "rule": "gated_deltanet", "started": 0, "study": None, "export": str(folder),
        "recipe": {"batch": {"sequences": 2, "length": LENGTH}},
    }  # fmt: skip
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    assert platform("eval", folder, "--data", data, "--tasks", "loss", "--limit", 2) == 0
    assert "in the ledger" not in capsys.readouterr().out
    with Store.open("lab.db") as store:
        record(store, tmp_path / "run")
    for words in (("--limit", 2), ("--limit", 3, "--split", "test"), ("--data", tmp_path / "more"), ("--data", data)):
        assert platform("eval", folder, "--tasks", "loss", *words, "--db", "lab.db") == 0
        assert "also in the ledger" in capsys.readouterr().out
    rows = json.loads((folder / "evaluations.json").read_text())["evaluations"]
    assert {row["step"] for row in rows} == {30}
    shortest = [row for row in rows if row["metric"] == f"loss@{LENGTH}"]
    assert [(row["split"], row["limit"], row["other_data"]) for row in shortest] == [
        ("validation", 2, None), ("test", 3, None), ("validation", None, "more-01234567"), ("validation", None, None),
    ]  # fmt: skip
    assert [row["examples"] for row in shortest[:2]] == [2, 3]
    with Store.open("lab.db") as store:
        record(store, tmp_path / "run")  # which knows nothing of evaluations, and leaves them
        [training] = trainings(store)
    ends = {2: " (limit 2)", 3: " (test, limit 3)", "more-01234567": " (data more-01234567)", None: ""}
    assert training.evaluations == {
        f"loss {row['metric']}{ends[row['limit'] or row['other_data']]}": row["value"] for row in rows
    }


def test_a_file_of_evaluations_without_splits_and_limits_is_read(tmp_path: Path) -> None:
    row = {"step": 3, "task": "loss", "metric": "loss@64", "value": 2.0, "examples": 64, "stderr": None}
    compared = {**row, "reference": "a", "reference_step": 3, "difference": 0.5}
    file = tmp_path / "evaluations.json"
    file.write_text(json.dumps({"evaluations": [row], "comparisons": [compared]}))
    measured = Result(3, "loss", "loss@64", 2.0, 64, split="validation")
    write([replace(measured, split="test", value=9.0)], tmp_path, {})
    write([replace(measured, limit=10, value=8.0)], tmp_path, {})
    kept = json.loads(file.read_text())
    assert [one["value"] for one in kept["evaluations"]] == [2.0, 9.0, 8.0]
    assert len(kept["comparisons"]) == 1, "the value that was compared is still the value"
    write([replace(measured, value=3.0)], tmp_path, {})
    kept = json.loads(file.read_text())
    assert [one["value"] for one in kept["evaluations"]] == [3.0, 9.0, 8.0], "what an old file says is of the defaults"
    assert "comparisons" not in kept


@pytest.mark.slow
def test_a_run_is_measured_by_its_newest_whole_checkpoint(
    platform: Callable[..., int], tmp_path: Path, data: Path
) -> None:
    from safetensors.torch import save_file

    folder, run = exported(tmp_path / "model"), tmp_path / "run"
    about = {
        "id": "r7", "rule": "gated_deltanet", "started": 0, "study": None, "export": str(folder),
        "recipe": {"batch": {"sequences": 2, "length": 72}},
        "data": {"folder": str(data), "sha256": Packed(data).meta["sha256"]},
    }  # fmt: skip
    whole, torn = (run / "checkpoints" / name for name in ("step-12", "step-20"))
    for checkpoint in (whole, torn):
        checkpoint.mkdir(parents=True)
    weights = {f"model.{name}": value for name, value in build_model(MODEL, seed=5).state_dict().items()}
    save_file(weights, whole / "model.safetensors")
    (whole / "trainer_state.json").write_text("{}")
    (run / "run.json").write_text(json.dumps(about))
    assert platform("eval", run, "--tasks", "loss", "--limit", 1, "--db", "lab.db") == 0
    rows = json.loads((run / "evaluations.json").read_text())["evaluations"]
    assert {row["step"] for row in rows} == {12}
    assert {"loss@72", "loss@288"} <= {row["metric"] for row in rows}, "the length is the run's, not the export's"
    with (
        open_model(str(run)) as found,
        pytest.raises(InputError, match=f"task 'proxy': {run}: the model does not come from"),
    ):
        evaluate(found, ["proxy"])
    Store.open("lab.db").close()
    assert platform("export", run, "hf") == 0  # which names its run, and the data of the training
    assert platform("eval", "hf", "--tasks", "loss", "--limit", 1) == 0
    [first, *_] = json.loads(Path("hf", "evaluations.json").read_text())["evaluations"]
    assert (first["step"], first["value"], first["data"]) == (12, rows[0]["value"], str(data))
    assert platform("eval", run / "checkpoints" / "step-12", "--tasks", "needle", "--limit", 1, "--db", "lab.db") == 0
    with Store.open("lab.db") as store:
        [training] = trainings(store)
    assert {"loss loss@72 (limit 1)", "needle v2 exact_match@288 (limit 1)"} <= set(training.evaluations)


@pytest.mark.slow
def test_what_cannot_be_evaluated_is_one_line(
    platform: Callable[..., int],
    folder: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*arguments: object, saying: str) -> None:
        assert platform("eval", *arguments) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert saying in error, error

    bare = exported(tmp_path / "bare", tokenizer=None)
    source = Source(MODEL, None, paper_recipe(MODEL), {}, {}, "bytes")
    export(source, tmp_path / "untrained")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", saying="neither a folder of `deltalab export` nor a run of `deltalab train`")
    refused(tmp_path / "untrained", saying="is exported without weights: train it first")
    refused(bare, saying="bare: none of our tasks can be asked of it: loss: it needs packed data: give --data PACKED; ")
    refused(bare, "--tasks", "needle", saying="has no tokenizer: export it with --tokenizer")
    refused(bare, "--tasks", "proxy", saying="bare: the model does not come from a study")
    refused(folder, "--tasks", "loss", saying="task 'loss': it needs packed data: give --data PACKED")
    refused(folder, "--tasks", "loss", "--data", tmp_path / "empty", saying="is no packed data")
    refused(folder, "--tasks", "loss", "--data", data, "--split", "tests", saying="did you mean 'test'?")
    refused(folder, "--tasks", "loss", "--data", data, "--length", 10**6, saying="a row takes 1000001: give --length")
    refused(folder, "--tasks", "needle", "--length", 8, saying="do not fit into 32 tokens")
    refused(folder, "--tasks", "needle", "--include", tmp_path, saying="--include: only tasks of lm-evaluation-harness")
    refused(folder, "--suite", "zero_shot", "--include", tmp_path, saying="that --tasks names read it, and none is")
    refused(
        folder, "--few-shot", 5, saying="--few-shot: only tasks of lm-evaluation-harness read it, and none is asked"
    )
    refused(folder, "--suite", "ruler", "--max-length", 9, saying="--max-length: only tasks of lm-evaluation-harness")
    refused(folder, "--suite", "lm", "--batch-size", 2, saying="--batch-size: only tasks of lm-evaluation-harness and")
    refused(folder, "--tasks", "loss", "--files", tmp_path, saying="--files: only tasks of lm-evaluation-harness and")
    meta = json.loads((data / "meta.json").read_text())
    for file in data.iterdir():
        (tmp_path / "empty" / file.name).write_bytes(file.read_bytes())
    meta["tokenizer"] |= {"sha256": "0" * 64, "name": "other"}
    tokenizer = tmp_path / "empty" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<0x41>", "<0xZZ>"))
    (tmp_path / "empty" / "meta.json").write_text(json.dumps(meta))
    refused(folder, "--data", tmp_path / "empty", saying="is packed with another tokenizer, 'other' of 256 ids, than")

    pytest.importorskip("lm_eval")
    refused(folder, "--tasks", "x.yaml", saying="x.yaml: cannot be read: No such file")
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)  # its index takes 20 s of a core
    refused(folder, "--tasks", "arc_esay", saying="unknown task 'arc_esay'; did you mean 'arc_easy'?")
    refused(folder, "--tasks", "loss,neddle", saying="unknown task 'neddle'; did you mean 'needle'?")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refused(folder, "--tasks", "arc_easy", saying="need lm-evaluation-harness: pip install 'deltalab[eval]'")
    with pytest.raises(InputError), open_model(str(tmp_path / "nowhere")):
        pass
