"""A tokenizer goes along with data and models: bytes, or a file of the library `tokenizers`."""

import json

import pytest

from deltalab.data.text_tokenizers import byte_tokenizer, load_tokenizer, same_ids, tokenizer_files
from deltalab.errors import InputError

TEXTS = ["plain", "Ā ā <0x0 \t\r\n  two  spaces ", "日本語 🙂 é", "\x00\x01\x7f\u2028", "", "<|endoftext|></s>"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_of_bytes_are_the_bytes(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def trained(tmp_path, *, end="</s>"):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the rain in spain stays in the plain"] * 5, trainer)
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    return file


@pytest.mark.parametrize("given", ["bytes", "file", "folder"])
def test_transformers_loads_the_files_and_gives_the_same_tokens(given, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "given").mkdir()
    file = trained(tmp_path / "given")
    tokenizer, about = load_tokenizer({"bytes": "bytes", "file": str(file), "folder": str(file.parent)}[given])
    for name, text in tokenizer_files(tokenizer, about).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:5]:
        ids = loaded(text, add_special_tokens=False).input_ids
        assert ids == tokenizer.encode(text).ids
        assert loaded.decode(ids) == tokenizer.decode(ids)
    assert loaded.eos_token_id == loaded.pad_token_id == about["eos"] == 0
    assert loaded.eos_token == ("<0x00>" if given == "bytes" else "</s>")
    assert len(loaded) == about["vocab_size"]


def test_a_description_tells_equal_tokenizers_from_others(tmp_path):
    file = trained(tmp_path)
    _, ours = load_tokenizer(str(file))
    (tmp_path / "other").mkdir()
    other = tmp_path / "other/tokenizer.json"
    other.write_text(json.dumps(json.loads(file.read_text()), indent=7))
    (tmp_path / "other/tokenizer_config.json").write_text('{"eos_token": {"content": "t"}, "bos_token": "r"}')
    _, same = load_tokenizer(str(tmp_path / "other"))
    assert ours["sha256"] == same["sha256"]
    assert same["special"] == {"eos_token": "t", "pad_token": "t", "bos_token": "r"}
    assert same["eos"] == json.loads(file.read_text())["model"]["vocab"]["t"]
    (tmp_path / "bytes.json").write_text(byte_tokenizer().to_str(pretty=True))
    _, of_bytes = load_tokenizer(str(tmp_path / "bytes.json"))
    assert of_bytes == load_tokenizer("bytes")[1]
    assert (of_bytes["kind"], of_bytes["vocab_size"], of_bytes["eos"]) == ("bytes", 256, 0)
    assert of_bytes["sha256"] != ours["sha256"]


CHANGES = {
    "truncation and padding": (True, lambda file: file.update(truncation=TRUNCATION, padding=PADDING)),
    "no affixes as null": (True, lambda file: file["model"].update(continuing_subword_prefix=None)),
    "decoder": (True, lambda file: file.update(decoder=None)),
    "offsets": (True, lambda file: file["pre_tokenizer"].update(trim_offsets=False)),
    "flags of a special token": (True, lambda file: file["added_tokens"][0].update(normalized=True, rstrip=True)),
    "one special token more": (True, lambda file: file["added_tokens"].append(SPECIAL | {"id": 400})),
    "another id of a special token": (
        False,
        lambda file: file["added_tokens"].insert(2, SPECIAL | {"id": 400}),
    ),  # the next one's
    "another special token of an id": (False, lambda file: file["added_tokens"][-1].update(content="[MASK]")),
    "flags of another token": (False, lambda file: file["added_tokens"][1].update(rstrip=True)),
    "a special token is none": (False, lambda file: file["added_tokens"][0].update(special=False)),
    "an affix": (False, lambda file: file["model"].update(end_of_word_suffix="</w>")),
    "normalizer": (False, lambda file: file.update(normalizer={"type": "Lowercase"})),
    "space before the text": (False, lambda file: file["pre_tokenizer"].update(add_prefix_space=True)),
    "order of merges": (False, lambda file: file["model"]["merges"].reverse()),
    "two ids": (
        False,
        lambda file: file["model"]["vocab"].update(a=file["model"]["vocab"]["b"], b=file["model"]["vocab"]["a"]),
    ),
}
SPECIAL = {"content": "[PAD]", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
SPECIAL |= {"special": True}
TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
PADDING |= {"pad_token": "</s>"}


@pytest.mark.parametrize("change", CHANGES)
def test_only_what_gives_ids_tells_tokenizers_apart(change, tmp_path):
    from tokenizers import AddedToken, Tokenizer, decoders

    ours = Tokenizer.from_file(str(trained(tmp_path)))
    ours.decoder = decoders.ByteLevel()
    ours.add_tokens([AddedToken("rain in", normalized=False)])
    ours.add_special_tokens(["[SEP]"])
    file = json.loads(ours.to_str())
    file["model"].update(continuing_subword_prefix="", end_of_word_suffix="")
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    is_same, apply = CHANGES[change]
    apply(file)
    (tmp_path / "changed.json").write_text(json.dumps(file))
    assert same_ids(str(tmp_path / "tokenizer.json"), str(tmp_path / "changed.json")) == is_same


def test_transformers_saves_the_same_tokenizer_in_other_bytes(tmp_path):
    transformers = pytest.importorskip("transformers")
    hub, again = tmp_path / "hub", tmp_path / "again"
    hub.mkdir()
    trained(hub, end="<|endoftext|>")
    (hub / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    transformers.AutoTokenizer.from_pretrained(hub).save_pretrained(again)
    (_, first), (_, second) = (load_tokenizer(str(folder)) for folder in (hub, again))
    assert first["sha256"] != second["sha256"], "the case is not met: transformers writes what it read"
    assert same_ids(str(hub), str(again))


def test_bytes_stay_bytes_when_transformers_saves_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, text in tokenizer_files(*load_tokenizer("bytes")).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    loaded("text", padding="max_length", truncation=True, max_length=8)
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/tokenizer.json").read_text() != (tmp_path / "tokenizer.json").read_text()
    assert load_tokenizer(str(tmp_path / "again"))[1] == load_tokenizer("bytes")[1]


def test_a_tokenizer_that_cannot_be_had_is_one_line(tmp_path, monkeypatch):
    # The variable of this name counts only before the library's import. Afterwards, it would ask the network, and wait.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "notes.txt").write_text("no JSON")
    for given, said in [
        (str(tmp_path), f"there is no file {tmp_path}/tokenizer.json"),
        ("missing.json", "there is no file missing.json"),
        (str(tmp_path / "notes.txt"), "notes.txt: not a file of the library tokenizers"),
        ("nobody/nothing", "tokenizer 'nobody/nothing' is neither bytes, a file, a folder with tokenizer.json"),
    ]:
        with pytest.raises(InputError) as error:
            load_tokenizer(given)
        assert said in str(error.value)
        assert "\n" not in str(error.value)
