"""The suites: prompts and texts hold what is asked, in the tokens that are asked, and scores are right."""

import json
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.support.folders import ROOT

from deltalab.data.pack import pack
from deltalab.data.token_shards import Packed
from deltalab.errors import InputError
from deltalab.evaluation.harness import HarnessOptions
from deltalab.evaluation.model_folder import open_model
from deltalab.evaluation.results import Result, named_data
from deltalab.evaluation.suites import measure as measuring
from deltalab.evaluation.suites import recall, ruler
from deltalab.evaluation.suites.greedy import continuations
from deltalab.evaluation.suites.measure import SuiteOptions, means, measure
from deltalab.evaluation.suites.ruler_needles import Needles
from deltalab.evaluation.suites.ruler_words import hotpot_documents, squad_documents
from deltalab.evaluation.suites.suite import chosen, lengths_of, load_suite, suite_names
from deltalab.evaluation.suites.words import different_words
from deltalab.export.recipe import paper_recipe
from deltalab.export.source import Source
from deltalab.export.write import export
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec

pytest.importorskip("transformers")

MODEL = ModelSpec.of(
    {"rule": {"name": "gated_deltanet"}, "vocab_size": 256, "d_model": 16, "layers": 1, "heads": 2, "mlp": False}
)
PAGE = (ROOT / "docs" / "reference" / "suites.md").read_text()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export over bytes with random weights."""
    out = tmp_path_factory.mktemp("suites") / "model"
    about = {**paper_recipe(MODEL), "batch": {"sequences": 2, "length": 64}}
    export(Source(MODEL, build_model(MODEL, seed=1).state_dict, about, {"checkpoint": "step-30"}, {}, "bytes"), out)
    return out


def squad_file() -> dict[str, Any]:
    paragraphs = [
        {
            "context": f"Town {i} has a mill number {i * 11} by the river. " * 4,
            "qas": [
                {"question": f"Which mill has {i}?", "answers": [{"text": f"number {i * 11}"}], "is_impossible": False},
                {"question": "Who?", "answers": [], "is_impossible": True},
            ],
        }
        for i in range(30)
    ]
    return {"data": [{"paragraphs": paragraphs[:3]}, {"paragraphs": paragraphs[3:]}]}


def hotpot_file() -> list[dict[str, Any]]:
    return [
        {
            "question": f"Where is {i}?",
            "answer": f"place {i}",
            "context": [[f"Title {i}.{j}", [f"It is at place {i}. ", "So they say."]] for j in range(10)],
        }
        for i in range(8)
    ]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small files of the form of all that `recall` and `ruler` need."""
    out = tmp_path_factory.mktemp("files")

    def dataset(name: str, rows: list[dict[str, Any]]) -> None:
        (out / name / "data").mkdir(parents=True)
        (out / name / "data" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    pairs = [
        {"doc_id": str(i), "key": "owner", "value": f"Owner {i}", "text": f"The owner is Owner {i}.\n\nowner:"}
        for i in range(5)
    ]
    dataset("hazyresearch/based-fda", pairs)
    dataset("hazyresearch/based-swde-v2", pairs)
    squad = [
        {"value": "the mill", "text": f"Town {i} has the mill. In it stands", "question": "What stands there?",
         "context": f"Town {i} has the mill. Question: What?"}
        for i in range(5)
    ]  # fmt: skip
    dataset("hazyresearch/based-squad", squad)
    cloze = [
        {"context": f"[DOC] A man in hat {i}.", "question": "The man wears", "orig_question": "What does he wear?",
         "answers": [f"hat {i}", "a hat"]}
        for i in range(5)
    ]  # fmt: skip
    for name in ("based_triviaqa", "based_nq_512", "based_nq_1024", "based_nq_2048", "based_drop"):
        dataset(f"hazyresearch/{name}", cloze)
    (out / "essays").mkdir()
    for i in range(3):
        (out / "essays" / f"{i}.txt").write_text(
            " ".join(f"Essay {i} says in line {j} that work is good, and rest is better." for j in range(40))
        )
    (out / "dev-v2.0.json").write_text(json.dumps(squad_file()))
    (out / "hotpot_dev_distractor_v1.json").write_text(json.dumps(hotpot_file()))
    return out


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


def prompt_of(row: dict[str, Any], form: str, *, twice: bool = False, length: int = 1000) -> str:
    (prompt,) = recall.prompts(iter([row]), form, Bytes(), length, twice=twice, where="here")
    return prompt.text


def test_a_prompt_of_recall_is_the_text_and_the_start_of_the_answer() -> None:
    pair = {
        "key": "device name",
        "value": "Zed 4",
        "text": "\nThe device is Zed 4. It works..\ndevice name: Device Name:",
    }
    assert prompt_of(pair, "pairs") == "The device is Zed 4. It works. Device name:"
    assert prompt_of(pair, "pairs", twice=True) == (
        "Information about Device name. The device is Zed 4. It works.\nThe device is Zed 4. It works. Device name:"
    )
    page = {"key": "model", "value": "T1", "text": "Car T1\n. Summary of information above... model:"}
    assert prompt_of(page, "pairs") == "Car T1. Model:"
    cloze = {
        "context": "[PAR] He ran. He won [TLE].", "question": " The man who ran ", "orig_question": "Did he run:",
        "answers": ["won"],
    }  # fmt: skip
    assert prompt_of(cloze, "question") == "He ran. He won. The man who ran"
    assert prompt_of(cloze, "question", twice=True) == ("Did he run He ran. He won.\nHe ran. He won. The man who ran")
    squad = {"value": "mill", "text": " A mill. It is the ", "question": "What?", "context": "A mill. Question: What?"}
    assert prompt_of(squad, "completion") == "A mill. It is the"
    assert prompt_of(squad, "completion", twice=True) == "What? A mill. \nA mill. It is the"


def test_a_text_is_cut_to_a_window_around_the_first_mention() -> None:
    text = "".join(f"{i:04}," for i in range(400))
    cut = recall.window(text, ["0300", "0200"], Bytes(), 100)
    assert cut == text[5 * 200 - 50 : 5 * 200 + 50]
    assert recall.window(text, ["0003"], Bytes(), 100) == text[:100]
    assert recall.window(text, ["gone"], Bytes(), 100) == text[-50:], "the end, as the authors have it"
    long = {"key": "name", "value": "ZED", "text": "x" * 2000 + " zed " + "y" * 2000}
    prompt = prompt_of(long, "pairs", length=150)
    assert prompt == f"{'x' * 49} zed {'y' * 46}. Name:", "100 letters, half of them before the answer in any case"


def test_an_answer_counts_where_it_stands_in_whatever_case() -> None:
    prompt = recall.Prompt("", ("A+ (b)", "Zed"))
    assert [recall.contains(prompt, text) for text in ("it is zed.", "a+ (B)", "a (b)", "")] == [1.0, 1.0, 0.0, 0.0]
    short = {"key": "k", "value": "7", "text": "7"}
    assert not [*recall.prompts(iter([short]), "pairs", Bytes(), 100, twice=False, where="")], (
        "as the authors leave out"
    )
    with pytest.raises(InputError, match="here: a row has no field 'value'; it has key, text"):
        prompt_of({"key": "a", "text": "b"}, "pairs")


TASKS = {task.name: task for task in load_suite("ruler").tasks}


def asked(folder: Path, files: Path, name: str, length: int, count: int, seed: int = 0) -> list[ruler.Question]:
    with open_model(str(folder)) as found:
        sources = ruler.Sources(found, files, None, length)
        texts = sources.texts(TASKS[name].settings, TASKS[name].needs, length)
        return list(ruler.questions(name, texts, length, count, sources.tokens, seed))


@pytest.mark.parametrize("name", TASKS)
def test_a_text_of_ruler_is_as_long_as_asked_and_the_same_for_the_same_seed(
    folder: Path, files: Path, name: str
) -> None:
    length = 8192 if name == "cwe" else 4096  # 330 words take 5,000 bytes
    with open_model(str(folder)) as found:
        kept = ruler.Sources(found, files, None, 0).texts(TASKS[name].settings, TASKS[name].needs, length).answer_tokens
    questions = asked(folder, files, name, length, 4)
    assert len(questions) == 4
    for question in questions:
        assert len(question.prompt.encode()) == question.tokens
        assert length * 0.95 < question.tokens + kept <= length
    assert asked(folder, files, name, length, 4) == questions
    assert asked(folder, files, name, length, 2) == questions[:2], "fewer examples are the first ones"
    assert len({question.prompt for question in questions}) == 4
    if not name.startswith("qa"):  # whose questions are those of the file, in order
        assert asked(folder, files, name, length, 1, seed=1)[0].answers != questions[0].answers


NEEDLES = {
    "niah_single_1": (1, 1), "niah_single_2": (1, 1), "niah_single_3": (1, 1), "niah_multikey_1": (4, 1),
    "niah_multivalue": (4, 4), "niah_multiquery": (4, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("niah")])
def test_needles_stand_in_the_text_once_and_the_question_asks_for_them(folder: Path, files: Path, name: str) -> None:
    places = set()
    for question in asked(folder, files, name, 2048, 12):
        context, _, end = question.prompt.rpartition("\nWhat ")
        needles, answers = NEEDLES.get(name, (None, 1))
        assert len(set(question.answers)) == len(question.answers) == answers
        found = context.count("One of the special magic ")
        assert found == needles if needles is not None else found > 5
        for answer in question.answers:
            assert question.prompt.count(answer) == 1
            key = context.split(f" is: {answer}.")[0].rpartition(" for ")[2]
            assert end.count(key) == 2, "in the question, and in the start of the answer"
            places.add(context.index(answer) * 4 // len(context))
        assert end.endswith("provided text is" if answers == 1 else "provided text are")
        assert ("magic numbers" in question.prompt) != ("magic uuids" in question.prompt)
    assert len(places) > 2
    assert (name in ("niah_single_3", "niah_multikey_3")) == (len(question.answers[0]) == 36)


def test_no_key_has_two_values_in_a_haystack_of_needles() -> None:
    prompt, _ = Needles("needles", "words", "numbers").text(random.Random(0), 900, 0)
    lines = [line.split() for line in prompt.split("\n") if line.startswith("One of")]
    assert len(lines) == 902
    assert len({line[-3] for line in lines}) == len({line[-1] for line in lines}) == 902


def test_a_chain_of_variables_leads_to_the_value(folder: Path, files: Path) -> None:
    for question in asked(folder, files, "vt", 2048, 5):
        example, _, prompt = question.prompt.rpartition("\n\nMemorize")
        lines = [line.split() for line in prompt.split("\n") if line.startswith("VAR ")]
        value = prompt.rpartition("the value ")[2].partition(",")[0]
        assert [line[1] for line in lines] == list(question.answers)
        assert [line[-1] for line in lines] == [value, *question.answers[:-1]], (
            "each has the value of the one before it"
        )
        assert len(set(question.answers)) == 5
        assert "5 variables are assigned" in prompt
        assert len(example) <= 512 or example.count("The grass is green.") == 5, "a quarter, or as short as can be"
        solved = example.rpartition("they are: ")[2].split()
        assert [len(name) for name in solved] == [3] * 5
        assert all(f"VAR {name} = " in example for name in solved)


@pytest.mark.parametrize(("length", "common", "rare"), [(2048, 6, 1), (8192, 30, 3)])
def test_ten_words_are_more_common_than_the_others(
    folder: Path, files: Path, length: int, common: int, rare: int
) -> None:
    for question in asked(folder, files, "cwe", length, 3):
        example, listed = (part.split("\nQuestion")[0] for part in question.prompt.split("most often.\n")[1:])
        words = listed.split()[1::2]
        counts = {word: words.count(word) for word in words}
        assert sorted(word for word, n in counts.items() if n == common) == sorted(question.answers)
        assert set(counts.values()) == {common, rare}
        assert len(question.answers) == 10
        assert listed.split()[0::2] == [f"{i}." for i in range(1, len(words) + 1)]
        assert len(set(example.split()[1::2])) == (40 if length >= 4096 else 20)


@pytest.mark.parametrize("length", [1024, 4096])
def test_three_coded_words_are_the_most_frequent(folder: Path, files: Path, length: int) -> None:
    for question in asked(folder, files, "fwe", length, 3):
        words = question.prompt.split("coded words. ")[1].split("\nQuestion")[0].split()
        ranked = sorted(set(words), key=words.count, reverse=True)
        assert (ranked[0], set(ranked[1:4])) == ("...", set(question.answers))
        assert words.count(ranked[3]) > words.count(ranked[4])


def test_documents_of_a_question_are_among_those_shown() -> None:
    texts = squad_documents(squad_file())
    assert (texts.count, len(texts.documents)) == (30, 30)
    for size in (0, 2, 7):
        prompt, answers = texts.text(random.Random(3), size, 5)
        assert prompt.count("Document ") == 1 + size
        assert answers == ["number 55"]
        assert "Town 5 has a mill number 55" in prompt
        assert prompt.endswith("Question: Which mill has 5? Answer:")
    near = texts.text(random.Random(3), 2, 0)[0]
    assert all(f"Town {i} " in near for i in range(3)), "those of the same article come first"
    hotpot = hotpot_documents(hotpot_file())
    prompt, answers = hotpot.text(random.Random(3), 1, 2)
    assert answers == ["place 2"]
    assert prompt.count("Title 2.") == 10
    assert prompt.count("Document ") == 11


def test_answers_of_ruler_are_scored_by_the_parts_that_stand_in_them() -> None:
    question = ruler.Question("", ("Ab", "cd", "ef", "gh"), 0)
    assert ruler.match(question, "they are AB, xx and EF") == 0.5
    assert (ruler.match_any(question, "gh"), ruler.match_any(question, "g h")) == (1.0, 0.0)


def test_what_does_not_fit_or_is_not_there_is_left_out_with_its_reason(folder: Path, files: Path) -> None:
    with open_model(str(folder)) as found:
        vars(found)["model"] = Saying(" nothing")
        options = SuiteOptions(lengths=[1500], limit=1, harness=HarnessOptions(files=files.parent))
        results, left_out, versions = measure(found, ["ruler"], options)
        for task in ("vt", "cwe", "fwe"):
            with pytest.raises(InputError, match=f"ruler/{task}@200: its shortest .* 200 tokens, but into ") as refused:
                measure(found, [f"ruler/{task}"], SuiteOptions(lengths=[200]))
            least = int(str(refused.value).rpartition(" ")[2])
            with pytest.raises(InputError, match=f"but into {least}: --lengths {least}"):
                measure(found, [f"ruler/{task}"], SuiteOptions(lengths=[least - 1], limit=1))
            assert measure(found, [f"ruler/{task}"], SuiteOptions(lengths=[least], limit=1))[0]
    assert versions == {"ruler": 1}
    assert left_out["ruler/niah_single_2"] == (
        "it needs a haystack: give --files DIR with a folder essays, or --data PACKED"
    )
    assert left_out["ruler/qa_1"] == "it needs dev-v2.0.json: give --files DIR with it"
    [mean] = [result for result in results if result.task == "ruler"]
    assert (mean.metric, mean.examples) == (f"mean_of_{len(results) - 1}@1500", len(results) - 1)


@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        ("qa_1", "dev-v2.0.json", b"{", r"dev-v2\.0\.json: is no JSON: Expecting property name"),
        ("qa_1", "dev-v2.0.json", b'{"data": [{}]}', "does not have the form of the dev-v2.0.json .* 'paragraphs'"),
        ("qa_2", "hotpot_dev_distractor_v1.json", b'{"a": 1}', "does not have the form of the hotpot_dev"),
        ("qa_2", "hotpot_dev_distractor_v1.json", b"\xff", r"v1\.json: cannot be read: 'utf-8' codec"),
        ("niah_single_2", "essays/0.txt", b"\xff\xfe", r"0\.txt: cannot be read: 'utf-8' codec"),
    ],
)
def test_a_broken_file_of_ruler_is_named_before_anything_is_asked(
    folder: Path, tmp_path: Path, task: str, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with open_model(str(folder)) as found, pytest.raises(InputError, match=f"^[^\n]*{message}[^\n]*$"):
        measuring.require(
            found, ["ruler/niah_single_1", f"ruler/{task}"], SuiteOptions(harness=HarnessOptions(files=tmp_path))
        )


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("pairs", {"text": "a", "key": "k"}, "a row has no field 'value'; it has text, key"),
        ("pairs", {"text": "a", "key": "k", "value": None}, "field 'value' of a row must be a text, not None"),
        ("pairs", {"text": "a", "key": "", "value": "vv"}, "field 'key' of a row must be a text of a letter or more"),
        (
            "question",
            {"context": "a", "question": "b", "answers": "hat"},
            "field 'answers' of a row must be a list of texts",
        ),
        (
            "question",
            {"context": "a", "question": "b", "answers": [1]},
            "field 'answers' of a row must be a list of texts",
        ),
        ("question", {"context": 3, "question": "b", "answers": ["hat"]}, "field 'context' of a row must be a text"),
    ],
)
def test_a_row_of_recall_without_text_is_one_line(form: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^here: {message}"):
        prompt_of(row, form)


def test_a_length_that_is_named_twice_is_asked_once() -> None:
    assert lengths_of(load_suite("ruler"), [800, 900, 800]) == (800, 900)


def test_recall_needs_room_beside_the_answer(folder: Path, files: Path) -> None:
    for length, problem in ((50, "50 tokens are too few for recall, which keeps 50"), (51, None)):
        options = SuiteOptions(lengths=[length], harness=HarnessOptions(files=files))
        with open_model(str(folder)) as found:
            if problem is None:
                assert measuring.require(found, ["recall"], options)
                continue
            with pytest.raises(InputError, match=f"^--lengths: {problem}"):
                measuring.require(found, ["recall"], options)


def test_a_prompt_beyond_a_models_positions_is_one_line(folder: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2, n_positions=64)).save_pretrained(
        tmp_path
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    with open_model(str(tmp_path)) as found:
        assert continuations(found, ["a" * 50], 4, label="here") != []
        with pytest.raises(InputError, match=r"cannot read 104 tokens \(.*\): give a smaller --lengths$"):
            continuations(found, ["a" * 100], 4, label="here")


def test_words_do_not_run_out() -> None:
    words = different_words(random.Random(0), 2000)
    assert len(set(words)) == 2000


class Saying:
    """A model that writes one text after every prompt."""

    def __init__(self, text: str) -> None:
        self.text, self.read = text, list[str]()

    def generate(self, ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        self.read += [bytes(row[mask.bool()].tolist()).decode() for row, mask in zip(ids, attention_mask, strict=True)]
        said = torch.tensor([*self.text.encode()]).expand(len(ids), -1)
        return torch.cat([ids, said], 1)


def test_recall_is_the_share_of_answers_that_the_model_gives(folder: Path, files: Path) -> None:
    with open_model(str(folder)) as found:
        vars(found)["model"] = Saying(" OWNER 3 or hat 2\nthe mill")
        options = SuiteOptions(harness=HarnessOptions(files=files, batch_size=2))
        results, left_out, versions = measure(found, ["recall", "recall_twice/fda"], options)
    assert (left_out, versions) == ({}, {"recall": 1, "recall_twice": 1})
    share = {result.task: (result.metric, result.value, result.examples) for result in results}
    fifth = ("contains@1000", 0.2, 5)
    assert share == {
        "recall/fda": fifth, "recall/swde": fifth, "recall/squad": ("contains@1000", 0.0, 5),
        "recall/triviaqa": fifth, "recall/nq": fifth, "recall/drop": fifth,
        "recall": ("mean@1000", pytest.approx(1 / 6), 6), "recall_twice/fda": fifth,
    }  # fmt: skip
    [fda] = [result for result in results if result.task == "recall/fda"]
    assert fda.stderr == pytest.approx(math.sqrt(0.2 * 0.8 / 4)), "the mill comes after the end of the answer"


def test_nq_is_read_from_the_data_set_of_its_length(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def rows(name: str, split: str, files: Path | None) -> Any:
        read.append(f"{name} {split}")
        return iter([{"context": "A hat.", "question": "It is a", "answers": ["hat"]}])

    monkeypatch.setattr(measuring, "rows", rows)
    with open_model(str(folder)) as found:
        vars(found)["model"] = Saying(" hat")
        results, *_ = measure(found, ["recall/nq"], SuiteOptions(lengths=[512, 513, 4000]))
    assert read == [f"hazyresearch/based_nq_{size} validation" for size in (512, 1024, 2048)]
    assert [result.value for result in results] == [1.0] * 3


def test_answers_are_those_of_the_model_alone_whatever_shares_the_batch(folder: Path) -> None:
    prompts = ["a", "The grass is green.", "One of", "The sky is blue. Here we go."]
    with open_model(str(folder)) as found:
        together = continuations(found, prompts, 5, label="x", batch_size=4)
        ids = [torch.tensor([[*prompt.encode()]]) for prompt in prompts]
        for prompt, written in zip(ids, together, strict=True):
            for _ in range(5):
                prompt = torch.cat([prompt, found.logits(prompt)[:, -1].argmax(-1, keepdim=True).cpu()], 1)
            assert written == found.decode(prompt[0, -5:].tolist())
        letter = together[1][2]
        stopped = continuations(found, prompts, 5, label="x", stop=letter, batch_size=4)
        assert stopped == [text.split(letter)[0] for text in together]
        vars(found)["model"] = saying = Saying("so")
        assert continuations(found, prompts, 5, label="x", batch_size=4) == ["so"] * 4
    assert sorted(saying.read) == sorted(prompts), "padding is masked"


def test_long_work_says_how_far_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deltalab.evaluation.suites.greedy.EVERY_SECONDS", -1)
    with open_model(str(folder)) as found:
        vars(found)["model"] = Saying("so")
        measure(found, ["ruler/niah_single_1"], SuiteOptions(lengths=[1000], limit=2))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ruler/")]
    assert lines == [
        "ruler/niah_single_1@1000: texts: 1 of 2", "ruler/niah_single_1@1000: texts: 2 of 2",
        "ruler/niah_single_1@1000: answers: 1 of 2", "ruler/niah_single_1@1000: answers: 2 of 2",
    ]  # fmt: skip


def test_the_mean_is_of_the_quoted_metrics_alone() -> None:
    suite = load_suite("zero_shot")
    results = [
        Result(None, task.name, metric, value, 10, 0.1)
        for task in suite.tasks
        for metric, value in ((task.metric, 0.5), *((name, 30.0) for name in task.also))
        if metric is not None
    ]
    [mean] = means(suite, results, ())
    assert (mean.task, mean.metric, mean.value, mean.examples) == ("zero_shot", "mean", 0.5, 8)
    assert mean.stderr == pytest.approx(0.1 / math.sqrt(8))
    [part] = means(suite, results[:1], ())
    assert part.metric == "mean_of_1"


def test_a_suite_says_what_it_is_and_stands_on_its_page() -> None:
    assert suite_names() == ["lm", "longbench", "recall", "recall_twice", "ruler", "zero_shot"]
    for suite in map(load_suite, suite_names()):
        assert suite.version >= 1
        assert "arXiv" in suite.source or suite.name == "lm"
        assert f"## `{suite.name}`" in PAGE
        for task in suite.tasks:
            assert f"`{task.name}`" in PAGE, task.name
            assert [name for name in task.needs if f"`{name}`" not in PAGE] == []
    one, two = load_suite("recall"), load_suite("recall_twice")
    assert (one.tasks, one.lengths, two.twice) == (two.tasks, two.lengths, True)
    assert [task.name for _, tasks in chosen(["ruler/vt", "ruler/fwe"]) for task in tasks] == ["vt", "fwe"]
    with pytest.raises(InputError, match="--suite: unknown suite 'rular'; did you mean 'ruler'"):
        chosen(["rular"])
    with pytest.raises(InputError, match="--suite ruler/: unknown task 'niah_single_4'; did you mean 'niah_single_"):
        chosen(["ruler/niah_single_4"])


def test_the_harness_has_the_tasks_and_metrics_of_the_suites() -> None:
    lm_eval = pytest.importorskip("lm_eval")
    folder = Path(lm_eval.__file__).parent / "tasks"
    about: dict[str, str] = {}
    for file in folder.rglob("*.yaml"):
        text = file.read_text(encoding="utf-8")
        if task := re.search(r"^task: (\S+)$", text, re.MULTILINE):
            included = re.search(r"^include: (arc_easy.yaml)$", text, re.MULTILINE)
            about[task[1]] = text + ((file.parent / included[1]).read_text() if included else "")
    for name in ("zero_shot", "longbench"):
        for task in load_suite(name).tasks:
            text = about[task.name]
            assert f"dataset_path: {task.needs[0]}" in text
            for metric in filter(None, (task.metric, *task.also)):
                assert f"metric: {metric}\n" in text.replace('"', ""), task.name


@pytest.mark.slow
def test_a_suite_of_the_harness_reads_copies_of_its_data(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    copy = tmp_path / "allenai" / "ai2_arc"
    copy.mkdir(parents=True)
    row = {"id": "1", "question": "Which?", "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "B"}
    splits = ("train", "validation", "test")
    for split in splits:
        (copy / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 3)
    found = [{"split": split, "path": f"{split}.jsonl"} for split in splits]
    configs = [{"config_name": name, "data_files": found} for name in ("ARC-Easy", "ARC-Challenge")]
    (copy / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    options = SuiteOptions(harness=HarnessOptions(files=tmp_path, max_length=60))
    with open_model(str(folder)) as model:
        results, _, versions = measure(model, ["zero_shot/arc_easy", "zero_shot/arc_challenge"], options)
        with pytest.raises(
            InputError, match="holds no folder baber/piqa: `hf download --repo-type dataset baber/piqa`"
        ):
            measure(model, ["zero_shot/piqa"], options)
    assert [(result.task, result.metric, result.examples) for result in results] == [
        ("arc_easy", "acc", 3), ("arc_challenge", "acc_norm", 3),
    ]  # fmt: skip
    assert {result.max_length for result in results} == {60}
    assert versions == {"zero_shot": 1}


def test_a_suite_is_asked_by_its_name(
    platform: Callable[..., int], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "all.txt").write_text("\n".join(f"Line {i} says that {i * 7} is more." for i in range(900)))
    pack([str(tmp_path / "all.txt")], tmp_path / "packed", shares={"train": 0.1, "validation": 0.8, "test": 0.1})
    monkeypatch.setattr(measuring.recall, "TOKENS", 2)
    words = ("--data", tmp_path / "packed", "--limit", 1, "--lengths", "1024", "--db", tmp_path / "no.db")
    assert platform("eval", folder, "--suite", "lm,ruler/niah_single_2", *words, "--json") == 2
    assert "--lengths: suite 'lm' has no lengths" in capsys.readouterr().err
    assert platform("eval", folder, "--suite", "ruler/niah_single_2,ruler/niah_single_1", *words, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["task"], row["metric"]) for row in rows] == [
        ("ruler/niah_single_1", "match@1024"), ("ruler/niah_single_2", "match@1024"),
    ]  # fmt: skip
    other = named_data(Packed(tmp_path / "packed"))
    assert [(row["split"], row["limit"], row["other_data"]) for row in rows] == [
        (None, 1, None),
        ("validation", 1, other),
    ]
    kept = json.loads((folder / "evaluations.json").read_text())["evaluations"]
    assert {json.dumps(row["suites"]) for row in kept} == {'{"ruler": 1}'}
    assert platform("eval", folder, "--suite", "lm", "--data", tmp_path / "packed", "--limit", 2) == 0
    assert "loss@64" in capsys.readouterr().out
    assert platform("eval", folder, "--lengths", "64") == 2
    assert "--lengths: only suites read it: give --suite" in capsys.readouterr().err
    assert platform("eval", folder, "--suite", "recall", "--lengths", "1k") == 2
    assert "--lengths: '1k' is no number of tokens" in capsys.readouterr().err
    assert platform("eval", folder, "--suite", "recall", "--lengths", "100000000") == 2
    assert "--lengths: 100000000 tokens are too many: at most 1048576" in capsys.readouterr().err
    assert platform("eval", "--suites") == 0
    assert "ruler/niah_single_1" in capsys.readouterr().out


def test_what_a_suite_asked_is_not_asked_again(
    platform: Callable[..., int], folder: Path, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    unasked = shutil.ignore_patterns("items", "evaluations.json")
    model, data = (
        shutil.copytree(folder, tmp_path / "model", ignore=unasked),
        shutil.copytree(files, tmp_path / "files"),
    )
    names = ("--suite", "recall/fda,recall/squad,ruler/vt,ruler/niah_single_2", "--files", data, "--db", "no.db")
    words = (*names, "--lengths", "400,1800", "--json")
    assert platform("eval", model, *words, "--limit", 2) == 0
    before = json.loads(capsys.readouterr().out)
    assert len(before) == 6, "400 tokens are too few for a chain of variables"
    assert len([*(model / "items").glob("*.json.gz")]) == 6

    def again(*given: object, **more: object) -> list[str]:
        raise AssertionError("asked again")

    monkeypatch.setattr(measuring, "continuations", again)
    assert platform("eval", model, *words, "--limit", 2) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == before
    assert said.err.count("reuses the items of") == 6
    assert platform("eval", model, *words, "--limit", 3) == 1
    assert "asked again" in capsys.readouterr().err
    for changed in ("hazyresearch/based-squad/data/validation.jsonl", "essays/0.txt"):
        file = data / changed
        text = file.read_text()
        file.write_text(text.replace("mill", "well").replace("work", "play"))
        assert platform("eval", model, *words, "--limit", 2) == 1
        assert "asked again" in capsys.readouterr().err, changed
        file.write_text(text)
