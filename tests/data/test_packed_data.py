"""Packed data hold each document once, in one split, the same bytes whoever packed them and however often killed."""

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltalab.cli.app import main
from deltalab.data import pack as packing
from deltalab.data import row_log
from deltalab.data.key_set import KeySet
from deltalab.data.pack import LOCK, META, STATE, pack
from deltalab.data.sources import BLOCK, Reading, find
from deltalab.data.token_shards import SPLITS, Packed, _scrambled
from deltalab.data.vocabulary import train_tokenizer
from deltalab.errors import InputError
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_task
from deltalab.tasks.corpus import RARE
from deltalab.tasks.text import Text, open_corpus
from deltalab.training.spec import TrainSpec
from deltalab.training.train import train

HALVES = {"train": 0.5, "validation": 0.25, "test": 0.25}
WORDS = ["the", "king", "of", "ten", "ships", "told", "them", "a", "story", "about", "gold", "and", "another", "sea"]


def write_jsonl(file: Path, documents: list[str], field: str = "text") -> Path:
    file.write_text("".join(json.dumps({field: text}) + "\n" for text in documents))
    return file


def documents_of(folder: Path) -> dict[str, list[bytes]]:
    """Each split's documents, of data packed as bytes."""
    found = {}
    for name in SPLITS:
        split = Packed(folder).split(name)
        ends = [*split.starts(0, split.tokens).tolist(), split.tokens]
        tokens = split.read(0, split.tokens).astype(np.uint8).tobytes()
        found[name] = [tokens[a : b - 1] for a, b in pairwise(ends)]
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture
def story(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    texts = [f"{i} {' '.join(random.choice(WORDS, 40))}" for i in range(400)]
    return write_jsonl(tmp_path / "story.jsonl", texts)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40), max_size=30),
    st.integers(1, 60),
)
def test_a_packed_document_reads_back_whole_whatever_the_shards(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], bound: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    source = write_jsonl(folder / "all.jsonl", texts)
    if not any(texts):
        with pytest.raises(InputError, match="no text to pack"):
            pack([str(source)], folder / "packed", shares=HALVES, shard_tokens=bound)
        return
    pack([str(source)], folder / "packed", shares=HALVES, shard_tokens=bound)
    found = documents_of(folder / "packed")
    together = [text for split in SPLITS for text in found[split]]
    assert sorted(together) == sorted({text.encode() for text in texts if text})
    for split in SPLITS:
        facts = Packed(folder / "packed").meta["splits"][split]
        assert facts["documents"] == len(found[split])
        assert facts["bytes"] == sum(map(len, found[split]))
        assert all(shard["tokens"] < bound + 200 for shard in facts["shards"])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 5), st.integers(0, 3))
def test_rows_cover_the_stream_and_name_each_document_start(
    tmp_path_factory: pytest.TempPathFactory, length: int, seed: int, epoch: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    texts = [WORDS[i % len(WORDS)] + str(i) for i in range(23)]
    pack([str(write_jsonl(folder / "a.jsonl", texts))], folder / "p", shares={"train": 1.0}, shard_tokens=20)
    split = Packed(folder / "p").split("train")
    stream, starts = split.read(0, split.tokens), set(split.starts(0, split.tokens).tolist())
    assert starts == {0, *(np.flatnonzero(stream == 0) + 1)[:-1].tolist()}
    order = split.order(seed, epoch, length)
    assert sorted(order) == list(range(split.rows(length)))
    assert split.tokens - 1 - length < split.rows(length) * length <= split.tokens - 1
    for index in order:
        tokens, places = split.row(index, length)
        assert tokens.dtype == np.int64
        assert tokens.tolist() == stream[index * length : index * length + length + 1].tolist()
        assert places.tolist() == [p for p in range(length + 1) if index * length + p in starts]
    with pytest.raises(ValueError, match=r"row \d+ is not among the"):
        split.row(split.rows(length), length)


def test_the_order_differs_by_seed_and_epoch_alone(story: Path, tmp_path: Path) -> None:
    pack([str(story)], tmp_path / "p")
    split = pickle.loads(pickle.dumps(Packed(tmp_path / "p").split("train")))
    orders = [split.order(seed, epoch, 16).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == Packed(tmp_path / "p").split("train").order(0, 0, 16).tolist()
    # The published outputs of SplitMix64 from seed 0: another numpy must not change the order of a stopped training.
    states = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert _scrambled(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_splits_share_no_document_and_keep_their_shares(story: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    again.write_bytes(story.read_bytes())
    meta = pack([str(story), str(again)], tmp_path / "p", shares=HALVES)
    found = documents_of(tmp_path / "p")
    assert sum(map(len, found.values())) == len(set().union(*found.values())) == 400
    assert [source["duplicates"] for source in meta["sources"]] == [0, 400]
    assert 150 < len(found["train"]) < 250
    assert 60 < len(found["test"]) < 140
    other = pack([str(again)], tmp_path / "q", shares=HALVES)
    assert other["sha256"] == meta["sha256"]  # the identity is that of the tokens, wherever they came from


def test_a_set_of_documents_knows_the_first_of_each() -> None:
    random, key_set, known = np.random.default_rng(1), KeySet(), set[int]()
    for _ in range(50):
        keys = random.integers(0, 500, random.integers(0, 40)).astype(np.uint64)
        is_new = key_set.add(keys)
        for key, first in zip(keys.tolist(), is_new, strict=True):
            assert first == (key not in known)
            known.add(key)


@pytest.mark.slow(keep="bpe")
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_workers_do_not_change_a_byte(story: Path, tmp_path: Path, kind: str) -> None:
    tokenizer = "bytes"
    if kind == "bpe":
        tokenizer = str(tmp_path / "bpe.json")
        assert train_tokenizer([str(story)], tmp_path / "bpe.json", vocab_size=300) == 300
    for workers in (1, 2):
        command = [sys.executable, "-m", "deltalab", "data", "pack", "--tokenizer", tokenizer, "--shard", "5000"]
        command += ["--out", str(tmp_path / f"p{workers}"), "--workers", str(workers), str(story)]
        subprocess.run(command, check=True, capture_output=True)
    assert contents(tmp_path / "p1") == contents(tmp_path / "p2")


def test_a_trained_tokenizer_is_deterministic_and_gives_the_text_back(story: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    for name in ("a.json", "b.json"):
        train_tokenizer([str(story)], tmp_path / name, vocab_size=320)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    pack([str(story)], tmp_path / "p", tokenizer=str(tmp_path / "a.json"), shares={"train": 1.0})
    packed = Packed(tmp_path / "p")
    assert (packed.tokenizer["vocab_size"], packed.tokenizer["eos"]) == (320, 0)
    tokenizer = Tokenizer.from_file(str(tmp_path / "p" / "tokenizer.json"))
    tokens, _ = packed.split("train").row(0, 200)
    text = json.loads(story.read_text().splitlines()[0])["text"]
    assert tokenizer.decode(tokens.tolist()).startswith(text)
    assert packed.split("train").bytes / packed.split("train").tokens > 1.5


def test_special_tokens_in_a_text_end_no_document(story: Path, tmp_path: Path) -> None:
    train_tokenizer([str(story)], tmp_path / "a.json", vocab_size=300)
    source = write_jsonl(tmp_path / "tricky.jsonl", ["before <eos> after"])
    pack([str(source)], tmp_path / "p", tokenizer=str(tmp_path / "a.json"), shares={"train": 1.0})
    split = Packed(tmp_path / "p").split("train")
    assert np.flatnonzero(split.read(0, split.tokens) == 0).tolist() == [split.tokens - 1]


SLOWLY = """
import os, signal, sys
from deltalab.data import pack as packing, shard_writer
left = int(sys.argv[1])
def dying(function):
    def wrapped(*args):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return wrapped
shard_writer._to_disk = dying(shard_writer._to_disk)
from pathlib import Path
packing.pack([sys.argv[2]], Path(sys.argv[3]), shard_tokens=20000)
"""


def test_a_killed_packing_goes_on_and_makes_no_shard_twice(story: Path, tmp_path: Path) -> None:
    whole = pack([str(story)], tmp_path / "whole", shard_tokens=20000)
    out, made = tmp_path / "killed", dict[str, int]()
    for writes in (1, 2, 4, 1, 3):  # each process dies at another point of writing a shard
        ended = subprocess.run([sys.executable, "-c", SLOWLY, str(writes), str(story), str(out)], check=False)
        assert ended.returncode == -signal.SIGKILL
        with pytest.raises(ValueError, match="is no packed data"):
            Packed(out)
        state = json.loads((out / STATE).read_text()) if (out / STATE).exists() else {"splits": {}}
        now = {s["file"]: (out / s["file"]).stat().st_mtime_ns for found in state["splits"].values() for s in found}
        assert all(now[file] == when for file, when in made.items())
        made = now
    assert made
    assert pack([str(story)], out, shard_tokens=20000) == whole
    assert all((out / file).stat().st_mtime_ns == when for file, when in made.items())
    assert contents(out) == contents(tmp_path / "whole")


def test_a_packing_goes_on_with_its_tokenizer_saved_anew(story: Path, tmp_path: Path) -> None:
    vocabulary = {chr(byte): byte for byte in range(128)}
    file = {"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (tmp_path / "first.json").write_text(json.dumps(file))
    whole = pack([str(story)], tmp_path / "p", tokenizer=str(tmp_path / "first.json"))
    file["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    (tmp_path / "again.json").write_text(json.dumps(file))
    assert pack([str(story)], tmp_path / "p", tokenizer=str(tmp_path / "again.json")) == whole
    file["model"]["vocab"] |= {"a": ord("b"), "b": ord("a")}
    (tmp_path / "other.json").write_text(json.dumps(file))
    with pytest.raises(InputError, match="is packed with another tokenizer"):
        pack([str(story)], tmp_path / "p", tokenizer=str(tmp_path / "other.json"))


class Died(BaseException):
    """What stands for a kill."""


class Kills:
    """Kills a packing at one of its writes, and packs again until it ends.

    Attributes:
        deaths: The kills so far.
    """

    def __init__(self) -> None:
        self.left = self.deaths = 0

    def at(self, write: Callable[..., None], *, is_made: bool) -> Callable[..., None]:
        """Returns a write at which a packing may die, after the write if `is_made`, else before."""

        def wrapped(*arguments: Any) -> None:
            self.left -= 1
            if is_made:
                write(*arguments)
            if self.left == 0:
                raise Died
            if not is_made:
                write(*arguments)

        return wrapped

    def pack(self, each: int, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Packs, and dies at the write of number `each` of every attempt that has so many."""
        for _ in range(100):
            self.left = each
            try:
                return pack(*arguments, **options)
            except Died:
                self.deaths += 1
        raise AssertionError("it does not end")


def mixed(tmp_path: Path) -> list[str]:
    """Three sources; the second repeats documents of the first, the third is too short for its share."""
    random = np.random.default_rng(1)
    texts = [
        [f"{name}{i} {' '.join(random.choice(WORDS, 9))}" for i in range(n)]
        for name, n in zip("abc", (90, 90, 7), strict=True)
    ]
    texts[1][3:40:3] = texts[0][3:40:3]
    return [str(write_jsonl(tmp_path / f"{name}.jsonl", rows)) for name, rows in zip("abc", texts, strict=True)]


@pytest.mark.parametrize(
    ("most", "weights"), [(3000, None), (3000, [2, 1, 1]), (None, None)], ids=["in order", "weighted", "unbounded"]
)
def test_training_tokens_are_bounded_however_often_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None, weights: list[float] | None
) -> None:
    monkeypatch.setattr(packing, "BATCH_DOCUMENTS", 5)
    names = mixed(tmp_path)
    options: dict[str, Any] = {"shares": HALVES, "shard_tokens": 500, "most_tokens": most, "weights": weights}
    meta = pack(names, tmp_path / "whole", **options)
    tokens = [source["train_tokens"] for source in meta["sources"]]
    assert sum(tokens) == meta["splits"]["train"]["tokens"]
    longest = 80  # bytes of a document
    if most is None:
        assert [source["documents"] for source in meta["sources"]] == [90, 90, 7]
    elif weights is None:
        assert most <= sum(tokens) < most + longest
        assert [source["documents"] for source in meta["sources"]][2] == 0
    else:
        assert 1500 <= tokens[0] < 1500 + longest
        assert 750 <= tokens[1] < 750 + longest
        assert tokens[2] < 750
        assert meta["sources"][2]["documents"] == 7
    kept = documents_of(tmp_path / "whole")
    everything = [text for split in kept.values() for text in split]
    assert len(everything) == len(set(everything))

    kills = Kills()
    monkeypatch.setattr(packing, "write_json", kills.at(packing.write_json, is_made=True))
    for each in (2, 3, 4):
        out = tmp_path / f"killed{each}"
        assert kills.pack(each, names, out, **options) == meta
        assert contents(out) == contents(tmp_path / "whole")
    assert kills.deaths >= 8


def test_the_tokens_of_another_packing_are_refused(story: Path, tmp_path: Path) -> None:
    pack([str(story)], tmp_path / "p", most_tokens=500)
    with pytest.raises(InputError, match="is packed with most_tokens 500, not None; give another --out"):
        pack([str(story)], tmp_path / "p")


def test_the_command_bounds_and_weighs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = mixed(tmp_path)
    assert run("data", "pack", "--out", tmp_path / "p", "--tokens", "3K", f"{a}=2", f"{b}=1", f"{c}=1") == 0
    out, error = capsys.readouterr()
    short = Packed(tmp_path / "p").meta["sources"][2]["train_tokens"]
    assert f"note: {c}: ended after {short} of its 750 training tokens" in error
    assert f"{short} training tokens" in out
    assert run("data", "pack", "--out", tmp_path / "q", "--tokens", "0.0009M", a) == 0
    assert 900 <= Packed(tmp_path / "q").split("train").tokens < 980
    assert run("data", "pack", "--out", tmp_path / "r", "--tokens", "1B", a) == 0
    assert "note: the sources ended after" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.jsonl=2"], "--tokens: sources with weights share out a number of training tokens"),
        (["--tokens", "5K", "a.jsonl=x"], "a.jsonl=x: 'x' is no weight; give for example a.jsonl=0.3"),
        (["--tokens", "5K", "a.jsonl=0"], "a.jsonl=0: a weight must be a positive number"),
        (["--tokens", "5K", "a.jsonl=1", "b.jsonl"], "b.jsonl: has no weight, and others have"),
        (["--tokens", "many", "a.jsonl"], "--tokens: 'many' is no number of tokens; give for example 15B"),
        (["--tokens", "-5", "a.jsonl"], "--tokens: '-5' is no number of tokens"),
    ],
)
def test_a_wrong_bound_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    mixed(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run("data", "pack", "--out", "p", *words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "p").exists()


def test_sources_that_change_between_two_goes_are_refused(story: Path, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", SLOWLY, "6", str(story), str(tmp_path / "p")], check=False)
    assert ended.returncode == -signal.SIGKILL
    text = story.read_text()
    story.write_text(text.replace("0 ", "9 ", 1))  # as many bytes
    with pytest.raises(InputError, match="the sources have changed since its first shards were packed"):
        pack([str(story)], tmp_path / "p", shard_tokens=20000)
    story.write_text(text + "\n")
    with pytest.raises(InputError, match="the sources have changed"):
        pack([str(story)], tmp_path / "p", shard_tokens=20000)


def test_two_packings_of_one_folder_exclude_each_other(story: Path, tmp_path: Path) -> None:
    with packing._held(tmp_path / "p"), pytest.raises(InputError, match="another process is packing into it"):
        pack([str(story)], tmp_path / "p")
    assert not (tmp_path / "p" / LOCK).exists()


def test_folders_and_kinds_of_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / ".hidden" / "x.txt").write_text("hidden")
    (root / ".x.txt").write_text("hidden")
    (root / "a.txt").write_text("first file")
    write_jsonl(root / "b.jsonl", ["one", "two"])
    (root / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n\n'))
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": ["four", None, "five"]}), root / "d.parquet")
    (root / "sub" / "e.txt").write_text("last")
    pack([str(root)], tmp_path / "p", shares={"train": 1.0})
    assert documents_of(tmp_path / "p")["train"] == [
        b"first file", b"one", b"two", b"three", b"four", b"five", b"last",
    ]  # fmt: skip
    pack([str(root)], tmp_path / "q", shares={"train": 1.0}, reading=Reading(pattern="*.txt"))
    assert documents_of(tmp_path / "q")["train"] == [b"first file", b"last"]


@pytest.mark.parametrize("size", [3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
def test_a_separator_cuts_a_text_file_wherever_its_blocks_end(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.txt").write_text("x" * size + "\n---\n" + "second\n---\nthird")
    [source] = find([str(tmp_path / "a.txt")], Reading(separator="\n---\n"))
    found = list(source.documents(Reading(separator="\n---\n")))
    assert [len(text) for text, _ in found] == [size, 6, 5]
    assert found[-1][1] == (tmp_path / "a.txt").stat().st_size


class Hub:
    """What stands in for the Hub: data sets, each with rows by revision, of which the last is the newest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **revisions: list[str]) -> None:
        import datasets
        import huggingface_hub

        self.revisions, self.asked = revisions, list[Any]()
        monkeypatch.setattr(datasets, "load_dataset", self.load)
        monkeypatch.setattr(huggingface_hub, "dataset_info", self.info)

    def info(self, name: str, *, revision: str | None = None) -> Any:
        assert name.count("/") == 1
        sha = revision or [*self.revisions][-1]
        if sha not in self.revisions:
            raise ValueError(f"Revision Not Found\n for {sha}")
        return SimpleNamespace(sha=sha)

    def load(self, name: str, config: str | None, *, revision: str, **options: Any) -> "Rows":
        self.asked.append((name, config, revision, options))
        if revision not in self.revisions:
            raise FileNotFoundError("no such revision")
        return Rows(self.revisions[revision])


class Rows:
    """What stands for a streaming data set."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.next = texts, 0

    def __iter__(self) -> Iterator[dict[str, str]]:
        while self.next < len(self.texts):
            text = self.texts[self.next]
            if text == "killed":
                raise KeyboardInterrupt
            self.next += 1
            yield {"body": text}

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


BODY = Reading(field="body")


def test_a_data_set_of_the_hub_is_streamed_by_name_and_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch, aa=["old"], bb=["first", "second"])
    meta = pack(["org/name:sample"], tmp_path / "p", shares={"train": 1.0}, reading=BODY)
    assert hub.asked == [("org/name", "sample", "bb", {"split": "train", "streaming": True})]
    assert documents_of(tmp_path / "p")["train"] == [b"first", b"second"]
    assert meta["settings"]["revisions"] == {"org/name:sample": "bb"}
    pack(["org/name:sample@aa"], tmp_path / "q", shares={"train": 1.0}, reading=BODY)
    assert documents_of(tmp_path / "q")["train"] == [b"old"]


@pytest.mark.parametrize(
    ("name", "dataset", "config"),
    [
        ("fineweb-edu", "HuggingFaceFW/fineweb-edu", "sample-100BT"),
        ("slimpajama@bb", "cerebras/SlimPajama-627B", None),
    ],
)
def test_a_corpus_of_the_papers_has_a_short_name(
    name: str, dataset: str, config: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is packed as by its whole name: revision and hash are kept, and documents are held out."""
    hub = Hub(monkeypatch, bb=[f"document {i}" for i in range(60)])
    shares = {"train": 0.8, "validation": 0.1, "test": 0.1}
    meta = pack([name], tmp_path / "p", shares=shares, reading=BODY)
    assert hub.asked == [(dataset, config, "bb", {"split": "train", "streaming": True})]
    whole = f"{dataset}{f':{config}' if config else ''}{'@bb' if '@' in name else ''}"
    assert meta["settings"]["revisions"] == {whole: "bb"}
    assert [row["source"] for row in meta["sources"]] == [whole]
    assert pack([whole], tmp_path / "q", shares=shares, reading=BODY)["sha256"] == meta["sha256"]
    by_split = documents_of(tmp_path / "p")
    assert all(by_split.values()), "each split has documents"
    assert sum(map(len, by_split.values())) == len(set().union(*by_split.values())) == 60
    folder = tmp_path / "fineweb-edu"
    folder.mkdir()
    (folder / "a.txt").write_text("a file")
    monkeypatch.chdir(tmp_path)
    assert find(["fineweb-edu"], Reading())[0].files is not None, "a path of this name is the path"


def test_a_short_name_that_is_written_wrong_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch)
    with pytest.raises(InputError, match=r"slimpajamas@x: is no file or folder, .*; did you mean 'slimpajama'\?$"):
        pack(["slimpajamas@x"], tmp_path / "p")


@pytest.mark.parametrize(("most", "weights"), [(None, None), (9000, [1, 2, 1, 2])], ids=["unbounded", "weighted"])
def test_a_stream_goes_on_where_the_killed_packing_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None, weights: list[float] | None
) -> None:
    """Beside files, with duplicates and documents in shards that are not whole; by `datasets`, without the network."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    monkeypatch.setattr(packing, "BATCH_DOCUMENTS", 5)
    random = np.random.default_rng(2)
    texts = [f"{i} {' '.join(random.choice(WORDS, 9))}" for i in range(420)]
    texts[300:330] = texts[20:50]
    for part in range(3):
        table = pyarrow.table({"text": texts[100 * part : 100 * part + 100] + texts[300:320]})
        parquet.write_table(table, tmp_path / f"{part}.parquet", row_group_size=10)
    load, read = datasets.load_dataset, 0

    class Counted(Rows):
        def __init__(self, name: str) -> None:
            files = [str(tmp_path / f"{part}.parquet") for part in ((0, 1) if name == "org/one" else (2,))]
            self.rows = load("parquet", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))

        def __iter__(self) -> Iterator[dict[str, str]]:
            nonlocal read
            for row in self.rows:
                read += 1
                yield row

        def state_dict(self) -> Any:
            return self.rows.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.rows.load_state_dict(state)

    Hub(monkeypatch, aa=[])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, **options: Counted(name))
    before, after = (
        str(write_jsonl(tmp_path / f"{n}.jsonl", texts[at : at + 60])) for n, at in (("a", 330), ("b", 360))
    )
    names = [before, "org/one", after, "org/two"]
    options: dict[str, Any] = {"shares": HALVES, "shard_tokens": 700, "most_tokens": most, "weights": weights}
    meta = pack(names, tmp_path / "whole", **options)
    once = read
    kills = Kills()
    monkeypatch.setattr(row_log, "BLOCK", 7)
    for module in (packing, row_log):
        monkeypatch.setattr(module, "write_json", kills.at(module.write_json, is_made=False))
    for each in (5, 8, 11):
        out, read, kills.deaths = tmp_path / f"killed{each}", 0, 0
        assert kills.pack(each, names, out, **options) == meta
        assert contents(out) == contents(tmp_path / "whole")
        assert kills.deaths >= 2
        assert read <= once + 30 * kills.deaths, "a death costs the rows since the last whole shard, not all"


def test_a_packing_goes_on_with_the_revision_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def packed(name: str = "org/name") -> dict[str, Any]:
        return pack([name], tmp_path / "p", shares={"train": 1.0}, reading=BODY, shard_tokens=50_000)

    texts = [f"{i} of many" for i in range(2 * packing.BATCH_DOCUMENTS)]
    hub = Hub(monkeypatch, aa=[*texts, "killed"])
    with pytest.raises(KeyboardInterrupt):
        packed()
    hub.revisions = {"aa": texts, "bb": ["another"]}
    with pytest.raises(InputError, match=r"is packed with sources \['org/name'\], not \['org/name@bb'\]"):
        packed("org/name@bb")
    hub.revisions.pop("aa")
    with pytest.raises(InputError, match="datasets cannot load it at revision aa: no such revision"):
        packed()
    hub.revisions = {"aa": texts, "bb": ["another"]}
    assert packed()["settings"]["revisions"] == {"org/name": "aa"}
    assert len(documents_of(tmp_path / "p")["train"]) == len(texts)
    before = contents(tmp_path / "p")
    assert packed()["settings"]["revisions"] == {"org/name": "aa"}, "the Hub has a newer one, and the data are packed"
    assert contents(tmp_path / "p") == before
    meta = json.loads((tmp_path / "p" / META).read_text())
    del meta["settings"]["revisions"]
    (tmp_path / "p" / META).write_text(json.dumps(meta))
    packed()  # as an earlier version packed it


@pytest.mark.parametrize("there", [False, True])
def test_a_packing_that_fails_before_its_first_shard_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: Path, there: bool
) -> None:
    Hub(monkeypatch, aa=["text"])
    out = tmp_path / "new" / "packed"
    if there:
        out.mkdir(parents=True)
    (tmp_path / "empty.txt").write_text("")
    for source, reading, said in (
        (
            "org/name@zz",
            BODY,
            "org/name@zz: is no file or folder, and the Hub does not give it: Revision Not Found for zz",
        ),
        ("org/name", Reading(), "org/name: row 1: has no 'text'"),
        (str(story), BODY, "has no 'body'"),
        (str(tmp_path / "empty.txt"), Reading(), "no text to pack"),
    ):
        with pytest.raises(InputError, match=said) as refused:
            pack([source], out, reading=reading)
        assert "\n" not in str(refused.value)
        assert list(out.iterdir()) == [] if there else not out.parent.exists()
    out.mkdir(parents=True, exist_ok=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something else"):
        pack([str(story)], out)
    assert contents(out) == {"notes.txt": b"mine"}


def run(*arguments: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["platform", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def test_the_commands_pack_show_and_pack_again(story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "pack", "--out", tmp_path / "p", story) == 0
    first = capsys.readouterr().out
    assert "train" in first
    assert "tokenizer: bytes, 256 ids; token 0 ends a document" in first
    before = contents(tmp_path / "p")
    assert run("data", "pack", "--out", tmp_path / "p", story) == 0
    assert capsys.readouterr().out == first
    assert contents(tmp_path / "p") == before
    assert run("data", "show", tmp_path / "p", "--json") == 0
    assert json.loads(capsys.readouterr().out) == Packed(tmp_path / "p").meta


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "bad.jsonl:2: is not JSON"),
        ("[1]", "bad.jsonl:2: is no JSON object with a field 'text'"),
        ('{"txt": "a"}', "bad.jsonl:2: has no 'text'; did you mean 'txt'? --field names one of: txt"),
        ('{"text": 5}', "bad.jsonl:2: 'text' is no text but int"),
        ('{"text": "\\ud800"}', "bad.jsonl:2: 'text' is not Unicode text"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    assert run("data", "pack", "--out", tmp_path / "p", tmp_path / "bad.jsonl") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n')  # mended: the same folder takes it
    assert run("data", "pack", "--out", tmp_path / "p", tmp_path / "bad.jsonl") == 0


def test_documents_in_another_encoding_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, encoding in (("a", "utf-8"), ("b", "latin-1"), ("c", "utf-16")):
        (texts / f"{name}.txt").write_bytes(f"größer {name}".encode(encoding))
    assert run("data", "pack", "--out", tmp_path / "p", texts) == 0
    assert f"{texts}: 2 of 3 documents are not UTF-8 text" in capsys.readouterr().err
    (texts / "b.txt").unlink()
    (texts / "c.txt").unlink()
    assert run("data", "pack", "--out", tmp_path / "q", texts) == 0
    assert "UTF-8" not in capsys.readouterr().err


def test_what_cannot_be_packed_is_one_line(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "p"

    def refused(*arguments: object, saying: str) -> None:
        assert run("data", "pack", *arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert saying in error, error

    (tmp_path / "empty.txt").touch()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / ".hidden").touch()
    (tmp_path / "latin.txt").write_bytes("größer".encode("latin-1"))
    (tmp_path / "no.parquet").write_text("no")
    (tmp_path / "no.json").write_text("{}")
    train_tokenizer([str(story)], tmp_path / "bpe.json", vocab_size=300)
    refused("--out", out, tmp_path / "stori.jsonl", saying=f"did you mean {story}?")
    refused("--out", out, tmp_path / "empty.txt", saying="no text to pack")
    refused("--out", out, tmp_path / "none", saying="holds no files that match '*'")
    refused("--out", out, tmp_path / "no.parquet", saying="no.parquet: is no readable Parquet file")
    refused("--out", out, "--tokenizer", tmp_path / "no.json", story, saying="no.json: not a file of the library")
    refused("--out", out, "--tokenizer", tmp_path / "x.json", story, saying="there is no file")
    refused("--out", out, "--tokenizer", tmp_path / "bpe.json", tmp_path / "latin.txt", saying="is not UTF-8: byte 2")
    refused("--out", out, "--split", "train=0.5,tset=0.5", story, saying="did you mean 'test'?")
    refused("--out", out, "--split", "train=0.5", story, saying="sum to 1, not to 0.5")
    refused("--out", tmp_path, story, saying="holds something else than packed data")
    assert run("data", "pack", "--out", out, story) == 0
    capsys.readouterr()
    refused("--out", out, "--tokenizer", tmp_path / "bpe.json", story, saying="'bytes' of 256 ids, not '")
    refused("--out", out, "--shard", 5, story, saying="is packed with shard_tokens 134217728, not 5")
    assert Packed(out).split("train").documents  # the refused commands left it whole

    monkeypatch.setattr(packing, "load_tokenizer", lambda given: (None, {"vocab_size": 2**33}))
    refused("--out", tmp_path / "q", story, saying="8589934592 ids are more than 2^32")


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(story: Path, tmp_path: Path) -> None:
    def full(file: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltalab.data.shard_writer._to_disk", full)
        with pytest.raises(InputError, match=r"No space left on device; the same command goes on") as error:
            pack([str(story)], tmp_path / "p")
    assert "\n" not in str(error.value)
    pack([str(story)], tmp_path / "p")
    assert Packed(tmp_path / "p").split("train").documents


def test_a_folder_that_is_no_packed_data_is_one_line(story: Path, tmp_path: Path) -> None:
    pack([str(story)], tmp_path / "p")
    file = tmp_path / "p" / "train-00000.bin"
    meta = json.loads((tmp_path / "p" / META).read_text())

    def refused(saying: str) -> None:
        with pytest.raises(ValueError, match=saying) as error:
            Packed(tmp_path / "p")
        assert "\n" not in str(error.value)

    os.truncate(file, 10)
    refused(r"train-00000.bin: has 10 bytes, not the \d+ of meta.json")
    file.unlink()
    refused("train-00000.bin: is missing, though meta.json lists it")
    for change, saying in (({"version": 9}, "version 9; this deltalab reads version 1"), ({"dtype": "x"}, "'x'")):
        (tmp_path / "p" / META).write_text(json.dumps(meta | change))
        refused(saying)
    (tmp_path / "p" / META).write_text("{")
    refused("is not JSON")
    with pytest.raises(ValueError, match=r"is no packed data: meta\.json: No such file"):
        Packed(tmp_path)


def test_ids_above_16_bits_take_32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = packing.load_tokenizer
    monkeypatch.setattr(packing, "load_tokenizer", lambda given: (load(given)[0], {**load(given)[1], "eos": 2**16 + 5,
                                                                               "vocab_size": 2**17}))  # fmt: skip
    monkeypatch.setattr(packing, "_tokens", lambda documents, *_: (np.array([1, 2**16 + 5]) for _ in documents))
    meta = pack([str(write_jsonl(tmp_path / "a.jsonl", ["a"]))], tmp_path / "p", shares={"train": 1.0})
    assert meta["dtype"] == "uint32"
    assert Packed(tmp_path / "p").split("train").read(0, 2).tolist() == [1, 2**16 + 5]


@pytest.fixture
def packed_bpe(story: Path, tmp_path: Path) -> Path:
    """Of a vocabulary above 256, in shards that a window may cross."""
    train_tokenizer([str(story)], tmp_path / "bpe.json", vocab_size=300)
    thirds = {"train": 0.4, "validation": 0.3, "test": 0.3}
    pack([str(story)], tmp_path / "bpe", tokenizer=str(tmp_path / "bpe.json"), shares=thirds, shard_tokens=500)
    return tmp_path / "bpe"


def test_the_task_text_reads_packed_tokens(packed_bpe: Path, tmp_path: Path) -> None:
    task = get_task("text", corpus=str(packed_bpe), length=32)
    assert isinstance(task, Text)
    packed = Packed(packed_bpe)
    assert task.vocab_size == 300
    assert task.fingerprint() == packed.meta["sha256"]
    assert task.train_tokens == packed.split("train").tokens
    batch = task.batch("train", 64, 0, 0)
    stream = packed.split("train").read(0, packed.split("train").tokens).tolist()
    windows = {tuple(stream[i : i + 33]) for i in range(len(stream) - 32)}
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        assert (*inputs, targets[-1]) in windows
        assert inputs[1:] == targets[:-1]

    uniform = task.measure(batch, torch.zeros(64 * 32, 300))
    total, count = uniform["bits_per_byte"]
    splits = [packed.split(name) for name in SPLITS]
    ratio = sum(split.bytes for split in splits) / sum(split.tokens for split in splits)
    assert (total / count).item() == pytest.approx(np.log2(300) / ratio)
    assert task.chance == pytest.approx(np.log2(300) / ratio)

    moved = packed_bpe.rename(tmp_path / "moved")
    assert get_task("text", corpus=str(moved), length=32).fingerprint() == task.fingerprint()


def test_rare_bigrams_of_packed_tokens_are_those_that_a_count_finds(packed_bpe: Path) -> None:
    task = get_task("text", corpus=str(packed_bpe), length=32)
    assert isinstance(task, Text)
    split = Packed(packed_bpe).split("train")
    stream = split.read(0, split.tokens)
    pairs = Counter(pairwise(stream.tolist()))
    frequent = {pair for pair, count in pairs.items() if count >= RARE * (len(stream) - 1)}
    assert 10 < len(frequent) < len(pairs)
    first, second = torch.cartesian_prod(torch.arange(300), torch.arange(300)).T
    rare = task._corpus.is_rare(first, second).reshape(300, 300)
    assert {tuple(pair) for pair in (~rare).nonzero().tolist()} == frequent


def test_text_packed_as_bytes_is_text_for_both_tasks(story: Path, packed_bpe: Path, tmp_path: Path) -> None:
    thirds = {"train": 0.4, "validation": 0.3, "test": 0.3}
    pack([str(story)], tmp_path / "bytes", shares=thirds)
    assert get_task("text", corpus=str(tmp_path / "bytes"), length=32).vocab_size == 256
    get_task("niah", variant=2, length=60, corpus=str(tmp_path / "bytes")).batch("train", 2, 0, 0)
    with pytest.raises(InputError, match="task 'niah': parameter 'corpus' must be bytes, or packed as bytes, not '"):
        get_task("niah", variant=2, length=60, corpus=str(packed_bpe))
    os.truncate(tmp_path / "bytes" / "train-00000.bin", 10)
    open_corpus.cache_clear()
    with pytest.raises(InputError, match=r"task 'text': parameter 'corpus': .*train-00000.bin: has 10 bytes"):
        get_task("text", corpus=str(tmp_path / "bytes"), length=32)


def test_a_folder_of_text_with_a_meta_json_stays_text(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "meta.json"):
        (tmp_path / name).write_text(f"{name} " * 100)
    assert get_task("text", corpus=str(tmp_path), length=16).vocab_size == 256


def test_a_model_learns_packed_tokens(packed_bpe: Path) -> None:
    task = get_task("text", corpus=str(packed_bpe), length=32, times=[2])
    spec = ModelSpec.of(
        {"rule": {"name": "linear_attention"}, "vocab_size": 300, "d_model": 16, "layers": 1, "heads": 2}
    )
    result = train(task, spec, TrainSpec(steps=80, batch_size=8, lr=2e-2, eval_batches=2), [0], test=True)
    before, after = task.chance, result.runs[0].final("test", "bits_per_byte")
    assert after < 0.8 * before
    assert result.runs[0].final("test", "bits_per_byte@64") < 0.8 * before


def test_a_share_after_a_path_is_no_configuration_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    with pytest.raises(
        InputError, match=r"corpus is one, and a path takes no ':0\.7': a weight is written .*corpus=0\.7"
    ) as refused:
        find([f"{tmp_path / 'corpus'}:0.7"], Reading())
    assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match=r"a path takes no ':en'; NAME:CONFIG is for data sets of the Hub"):
        find([f"{tmp_path / 'corpus'}:en"], Reading())
