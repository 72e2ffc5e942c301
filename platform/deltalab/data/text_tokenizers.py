"""Tokenizers that go along with packed data and exported models, as files of the library `tokenizers`."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltalab.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = "bytes"
"""The name that stands for `byte_tokenizer`."""

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
"""The names of a tokenizer's two files in a folder."""

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<0x00>")
"""Tokens that end a document, where a tokenizer's configuration names none."""


def byte_tokenizer() -> "Tokenizer":
    """A tokenizer whose ids are the 256 values of a byte: a text's tokens are its bytes in UTF-8.

    Its model is a BPE without merges, which falls back to bytes for every character; the token of byte b is `<0xB>`.
    Byte 0, which no text contains, ends a document.

    Raises `InputError` without the package tokenizers.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.encode("Ā!").ids, tokenizer.decode([196, 128, 33])
    ([196, 128, 33], 'Ā!')
    """
    library = _library()
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = library.decoders.Sequence([library.decoders.ByteFallback(), library.decoders.Fuse()])
    return tokenizer  # type: ignore[no-any-return]


def load_tokenizer(given: str) -> tuple["Tokenizer", dict[str, Any]]:
    """A tokenizer and its description, for what a user names.

    given: `bytes`; a file of the library `tokenizers`; a folder that holds `tokenizer.json`, such as packed data, an
    exported model or a checkpoint; or the name of a repository on the Hugging Face Hub.

    The description has `kind` (bytes or file), `name` (as given), `vocab_size` (the largest id and 1), `sha256` (of
    `to_str()`, so that equal tokenizers agree however their files are laid out), `eos` (the id of the token that ends a
    document, or None), and `special`: transformers' names of special tokens and the tokens, such as `eos_token: </s>`.

    Raises `InputError` for a name that is neither, for a file that is no tokenizer, and without the package tokenizers.
    """
    if given == BYTES:
        end = {"eos_token": ENDS[-1], "pad_token": ENDS[-1]}
        return _described(byte_tokenizer(), BYTES, given, end)
    library, path = _library(), Path(given)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        if path.exists() or path.suffix == ".json" or given.startswith((".", "/", "~")) or given.count("/") > 1:
            raise InputError(f"tokenizer '{given}': there is no file {file}")
        try:
            tokenizer = library.Tokenizer.from_pretrained(given)
        except Exception as error:
            raise InputError(
                f"tokenizer '{given}' is neither {BYTES}, a file, a folder with {FILE}, nor a name that the Hugging "
                f"Face Hub gives: {_first_line(error)}"
            ) from None
        return _described(tokenizer, "file", given, {})
    try:
        tokenizer = library.Tokenizer.from_file(str(file))
    except Exception as error:
        raise InputError(f"{file}: not a file of the library tokenizers: {_first_line(error)}") from None
    special = _special(file.with_name(CONFIG))
    if tokenizer.to_str() == byte_tokenizer().to_str():
        return load_tokenizer(BYTES)
    return _described(tokenizer, "file", given, special)


def tokenizer_files(tokenizer: "Tokenizer", about: dict[str, Any]) -> dict[str, str]:
    """The two files, by name, from which `AutoTokenizer.from_pretrained` loads what `load_tokenizer` returned."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **about["special"],
    }
    return {FILE: tokenizer.to_str(pretty=True) + "\n", CONFIG: json.dumps(config, indent=2) + "\n"}


def _described(
    tokenizer: "Tokenizer", kind: str, name: str, special: dict[str, str]
) -> tuple["Tokenizer", dict[str, Any]]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    end = special.get("eos_token") or next((token for token in ENDS if token in vocabulary), None)
    if end is not None:
        special = {"eos_token": end, "pad_token": end, **special}
    about = {
        "kind": kind,
        "name": name,
        "vocab_size": max(vocabulary.values()) + 1,
        "sha256": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        "eos": None if end is None else vocabulary.get(end),
        "special": special,
    }
    return tokenizer, about


def _special(config: Path) -> dict[str, str]:
    """The special tokens that a tokenizer's configuration names; none where there is no such file."""
    try:
        given = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = given.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
    except ImportError:
        raise InputError("a tokenizer needs the package tokenizers: pip install 'deltalab[hf]'") from None
    return tokenizers


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
