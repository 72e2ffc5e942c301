"""Trains a tokenizer on text: byte-level BPE, with the library `tokenizers`."""

from pathlib import Path

from deltalab.data.sources import Reading, find
from deltalab.errors import InputError

END = "<eos>"
"""The token, of id 0, that ends a document."""


def train_tokenizer(names: list[str], out: Path, *, vocab_size: int, reading: Reading = Reading()) -> int:  # noqa: B008
    """Writes a byte-level BPE of at most `vocab_size` ids (Sennrich et al. 2016, arXiv:1508.07909), trained on the
    documents of the sources, as a file of the library `tokenizers`; returns how many ids it has.

    The ids are `END`, the 256 bytes and one for each merge. The same documents give the same file.

    Raises `InputError` for a size below 257, for sources that cannot be read or hold no text, for a file that exists,
    and without the package tokenizers.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise InputError("a tokenizer needs the package tokenizers: pip install 'deltalab[hf]'") from None
    if vocab_size < 257:
        raise InputError(f"--vocab {vocab_size}: a byte-level vocabulary has at least 257 ids, the bytes and {END}")
    if out.exists():
        raise InputError(f"{out}: exists; give another --out")
    sources = find(names, reading)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = (text for source in sources for text, _ in source.documents(reading))
    texts = (text.decode(errors="replace") for text in documents if text)
    tokenizer.train_from_iterator(texts, trainer)
    size: int = tokenizer.get_vocab_size()
    if size == 257:
        raise InputError(f"{', '.join(names)}: too little text to learn a merge from")
    partial = out.with_name(out.name + ".partial")
    try:
        partial.write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror or error}") from None
    return size
