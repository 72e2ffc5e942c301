"""Tokenizers of packed data and exported models, as files of the library `tokenizers`."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltalab.errors import InputError, NotInstalled

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = "bytes"
"""The name of `byte_tokenizer`."""

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
"""`FILE` holds a tokenizer, and `CONFIG` its configuration. Both are names of files in a folder."""

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<0x00>")
"""The tokens that end a document if the configuration of a tokenizer names no other."""


def byte_tokenizer() -> "Tokenizer":
    """Returns a tokenizer whose ids are the 256 values of a byte: the tokens of a text are its bytes in UTF-8.

    Its model is a BPE without merges, which falls back to bytes for every character. The token of byte b is `<0xB>`.
    Byte 0, which no text contains, ends a document.

    Raises:
        InputError: The package tokenizers is missing.

    Examples:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer.encode("Ā!").ids, tokenizer.decode([196, 128, 33])
        ([196, 128, 33], 'Ā!')
    """
    library = _library()
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = library.decoders.Sequence([library.decoders.ByteFallback(), library.decoders.Fuse()])
    return tokenizer  # type: ignore[no-any-return]


def load_tokenizer(name: str) -> tuple["Tokenizer", dict[str, Any]]:
    """Returns a tokenizer and its description.

    The description has these entries:

    - `kind`: bytes or file;
    - `name`: the name that the user gave;
    - `vocab_size`: the largest id plus 1;
    - `sha256`: the hash of `to_str()`, so that equal tokenizers agree if their files are laid out differently;
    - `eos`: the id of the token that ends a document, or None;
    - `special`: the special tokens by transformers' names, such as `eos_token: </s>`.

    Args:
        name: `bytes`; a file of the library `tokenizers`; a folder that holds `tokenizer.json`, such as packed data,
            an exported model or a checkpoint; or the name of a repository on the Hugging Face Hub.

    Raises:
        InputError: The name is none of these, the file is no tokenizer, or the package tokenizers is missing.
    """
    if name == BYTES:
        end = {"eos_token": ENDS[-1], "pad_token": ENDS[-1]}
        return _described(byte_tokenizer(), BYTES, name, end)
    library, path = _library(), Path(name)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        if path.exists() or path.suffix == ".json" or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise InputError(f"tokenizer '{name}': there is no file {file}", key=name)
        try:
            tokenizer = library.Tokenizer.from_pretrained(name)
        except Exception as error:
            raise InputError(
                f"tokenizer '{name}' is neither {BYTES}, a file, a folder with {FILE}, nor a name that the Hugging "
                f"Face Hub gives: {_first_line(error)}",
                key=name,
            ) from None
        return _described(tokenizer, "file", name, {})
    try:
        tokenizer = library.Tokenizer.from_file(str(file))
    except Exception as error:
        raise InputError(f"{file}: not a file of the library tokenizers: {_first_line(error)}") from None
    special = _special(file.with_name(CONFIG))
    if _same_ids(tokenizer, byte_tokenizer()):
        return load_tokenizer(BYTES)
    return _described(tokenizer, "file", name, special)


def same_ids(one: str, other: str) -> bool:
    """Determines whether two tokenizers give every text the same ids, as packing asks for them.

    Their files may differ in all that gives no ids. transformers changes some of it when it saves a tokenizer anew, and
    adds special tokens.

    Args:
        one: A tokenizer, as `load_tokenizer` takes it.
        other: Another one.

    Raises:
        InputError: As `load_tokenizer` does.
    """
    return _same_ids(load_tokenizer(one)[0], load_tokenizer(other)[0])


def tokenizer_files(tokenizer: "Tokenizer", description: dict[str, Any]) -> dict[str, str]:
    """Returns the texts of the two files from which `AutoTokenizer.from_pretrained` loads a tokenizer, by file name.

    Args:
        tokenizer: The tokenizer.
        description: The description that `load_tokenizer` returned.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **description["special"],
    }
    return {FILE: tokenizer.to_str(pretty=True) + "\n", CONFIG: json.dumps(config, indent=2) + "\n"}


def _described(
    tokenizer: "Tokenizer", kind: str, name: str, special: dict[str, str]
) -> tuple["Tokenizer", dict[str, Any]]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    end = special.get("eos_token") or next((token for token in ENDS if token in vocabulary), None)
    if end is not None:
        special = {"eos_token": end, "pad_token": end, **special}
    description = {
        "kind": kind,
        "name": name,
        "vocab_size": max(vocabulary.values()) + 1,
        "sha256": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        "eos": None if end is None else vocabulary.get(end),
        "special": special,
    }
    return tokenizer, description


def _same_ids(one: "Tokenizer", other: "Tokenizer") -> bool:
    if _what_gives_ids(one) != _what_gives_ids(other):
        return False
    # One may have special tokens that the other lacks, but no token has two ids, and no id two tokens.
    pairs = one.get_vocab().items() | other.get_vocab().items()
    return len(pairs) == len({token for token, _ in pairs}) == len({number for _, number in pairs})


def _what_gives_ids(tokenizer: "Tokenizer") -> dict[str, Any]:
    """Returns the parts of a tokenizer's file that give a text its ids: not decoder, template or padding."""
    content = json.loads(tokenizer.to_str())
    model = content["model"]
    if model["type"] == "BPE":  # null and "" both mean none
        model = model | {name: model[name] or "" for name in ("continuing_subword_prefix", "end_of_word_suffix")}
    splits = content["pre_tokenizer"]
    for step in (splits or {}).get("pretokenizers", [splits] if splits else []):
        step.pop("trim_offsets", None)  # moves offsets, no ids
    added = [token for token in content["added_tokens"] if not token["special"]]  # those are text in a packed text
    return {"model": model, "normalizer": content["normalizer"], "pre_tokenizer": splits, "added": added}


def _special(config: Path) -> dict[str, str]:
    """Returns the special tokens that a tokenizer's configuration names; none without such a file."""
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = content.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
    except ImportError:
        raise NotInstalled("a tokenizer needs the package tokenizers", "'deltalab[hf]'") from None
    return tokenizers


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
