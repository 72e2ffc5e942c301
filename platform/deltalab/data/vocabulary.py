"""Trains a tokenizer on text: byte-level BPE, with the library `tokenizers`."""

from pathlib import Path

from deltalab.data.sources import Reading, find
from deltalab.errors import InputError, NotInstalled

END = "<eos>"
"""The token that ends a document, of id 0."""


def train_tokenizer(names: list[str], out: Path, *, vocab_size: int, reading: Reading = Reading()) -> int:  # noqa: B008
    """Trains a byte-level BPE on the documents of sources, and writes it as a file of the library `tokenizers`.

    The ids are `END`, the 256 bytes and one id for each merge. The same documents give the same file.

    Args:
        names: The sources, as a user names them.
        out: The file.
        vocab_size: The largest number of ids.
        reading: How sources are read.

    Returns:
        The number of ids.

    Raises:
        InputError: `vocab_size` is below 257, sources cannot be read or hold no text, the file exists, or the package
            tokenizers is missing.

    References:
        Sennrich et al. 2016, arXiv:1508.07909.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise NotInstalled("a tokenizer needs the package tokenizers", "'deltalab[hf]'") from None
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
