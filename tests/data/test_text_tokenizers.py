"""A tokenizer goes along with data and models: bytes, or a file of the library `tokenizers`."""

import json

import pytest

from deltalab.data.text_tokenizers import byte_tokenizer, load_tokenizer, tokenizer_files
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
