"""The commands `platform data`: pack text, train a tokenizer, show what a folder holds."""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deltalab.cli.options import AsJson
from deltalab.data.pack import SHARD_TOKENS, STATE, pack
from deltalab.data.sources import Reading, find
from deltalab.data.text_tokenizers import BYTES
from deltalab.data.token_shards import SPLITS, Packed
from deltalab.data.vocabulary import train_tokenizer
from deltalab.errors import InputError, unknown

data = typer.Typer(no_args_is_help=True, help="Pack text into tokens for training.")

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...", help="Text files, folders, .jsonl, .parquet, or data sets of the Hub, NAME or NAME:CONFIG."
    ),
]
Field = Annotated[str, typer.Option("--field", help="The field, or column, that holds a document.")]
Separator = Annotated[
    str | None,
    typer.Option("--separator", help=r"What ends a document within a text file, such as '\n\n'; else a file is one."),
]
Pattern = Annotated[str, typer.Option("--files", help="Which files of a folder, such as '*.py'.")]
Out = Annotated[Path, typer.Option("--out", help="Where to write it.")]

EVERY_SECONDS = 10.0


@data.command("pack")
def data_pack(
    sources: Sources,
    out: Out,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="bytes, a tokenizer.json, a folder with one, or a name of the Hub.")
    ] = BYTES,
    field: Field = "text",
    separator: Separator = None,
    files: Pattern = "*",
    split: Annotated[
        str, typer.Option("--split", help="The shares of the splits.")
    ] = "train=0.98,validation=0.01,test=0.01",
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Threads that tokenize; by default, one for each core.")
    ] = None,
    shard: Annotated[int, typer.Option("--shard", min=1, help="Tokens of a shard.")] = SHARD_TOKENS,
    as_json: AsJson = False,
) -> None:
    """Pack text into shards of tokens; after a kill, the same command goes on."""
    _quiet_hub()
    reading = _reading(field, separator, files)
    sizes = [source.size for source in find(sources, reading)]
    pack(
        sources,
        out,
        tokenizer=tokenizer,
        reading=reading,
        shares=_shares(split),
        workers=workers or os.cpu_count() or 1,
        shard_tokens=shard,
        watch=_PackingProgress(None if None in sizes else sum(filter(None, sizes))),
    )
    packed = Packed(out)
    for name in SPLITS[1:]:
        if not packed.split(name).documents:
            print(f"note: no document fell into {name}: more documents, or --separator, would help", file=sys.stderr)
    for source in packed.meta["sources"]:
        if not_utf8 := source.get("not_utf8"):  # folders of earlier versions lack this count
            print(
                f"note: {source['source']}: {not_utf8:,} of {source['documents']:,} documents are not UTF-8 text; "
                "their bytes were packed as they are",
                file=sys.stderr,
            )
    _show(packed, as_json)


@data.command("tokenizer")
def data_tokenizer(
    sources: Sources,
    out: Out,
    vocab: Annotated[int, typer.Option("--vocab", help="At most how many ids.")] = 32000,
    field: Field = "text",
    separator: Separator = None,
    files: Pattern = "*",
) -> None:
    """Train a byte-level BPE tokenizer on text."""
    _quiet_hub()
    size = train_tokenizer(sources, out, vocab_size=vocab, reading=_reading(field, separator, files))
    print(f"{out}: {size:,} ids")


@data.command("show")
def data_show(
    folder: Path,
    as_json: AsJson = False,
) -> None:
    """Show what a folder of packed data holds."""
    state = folder / STATE
    if state.is_file():
        shards = [shard for split in json.loads(state.read_text())["splits"].values() for shard in split]
        tokens = sum(shard["tokens"] for shard in shards)
        raise InputError(
            f"{folder}: is packed as far as {len(shards)} shards of {tokens:,} tokens; the same "
            "`platform data pack` goes on"
        )
    try:
        packed = Packed(folder)
    except ValueError as error:
        raise InputError(str(error)) from None
    _show(packed, as_json)


def _show(packed: Packed, as_json: bool) -> None:
    """Prints the contents of packed data."""
    if as_json:
        print(json.dumps(packed.meta))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("split", "documents", "tokens", "bytes", "bytes/token", "shards"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for name in SPLITS:
        split = packed.split(name)
        ratio = f"{split.bytes / split.tokens:.2f}" if split.tokens else ""
        shards = len(packed.meta["splits"][name]["shards"])
        table.add_row(name, f"{split.documents:,}", f"{split.tokens:,}", f"{split.bytes:,}", ratio, str(shards))
    console = Console()
    console.print(table)
    tokenizer = packed.tokenizer
    separator_text = (
        "no token ends a document" if tokenizer["eos"] is None else f"token {tokenizer['eos']} ends a document"
    )
    lines = [f"tokenizer: {tokenizer['name']}, {tokenizer['vocab_size']:,} ids; {separator_text}"]
    for source in packed.meta["sources"]:
        lines.append(
            f"from {source['source']}: {source['documents']:,} documents, of which {source['duplicates']:,} were "
            "duplicates and left out"
        )
    lines.append(f"sha256: {packed.meta['sha256']}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _reading(field: str, separator: str | None, pattern: str) -> Reading:
    """Returns the options for reading the sources."""
    if separator is not None:
        separator = separator.replace("\\n", "\n").replace("\\t", "\t")
        if not separator:
            raise InputError("--separator: must not be empty")
    return Reading(field=field, separator=separator, pattern=pattern)


def _shares(text: str) -> dict[str, float]:
    """Returns the shares of the splits, from the text of --split."""
    shares = dict.fromkeys(SPLITS, 0.0)
    for part in text.split(","):
        name, _, share = part.partition("=")
        if name.strip() not in shares:
            raise unknown("split", name.strip(), SPLITS, where="--split")
        try:
            shares[name.strip()] = float(share)
        except ValueError:
            raise InputError(f"--split: '{part}' is no share; give for example {name}=0.98") from None
    if not all(0 <= share <= 1 for share in shares.values()) or abs(sum(shares.values()) - 1) > 1e-9:
        raise InputError(f"--split: shares lie in [0, 1] and sum to 1, not to {sum(shares.values()):g}")
    if not shares["train"]:
        raise InputError("--split: train needs a share above 0")
    return shares


def _quiet_hub() -> None:
    """Keeps the Hub's warnings, one for each of its retries, off stderr. The command's own error states the reason."""
    with suppress(ImportError):
        from huggingface_hub.utils import logging

        logging.get_logger("huggingface_hub").setLevel("ERROR")


class _PackingProgress:
    """Reports on stderr how much is packed: on a terminal in one line, else in a line every `EVERY_SECONDS`."""

    def __init__(self, total: int | None) -> None:
        self._console, self._total = Console(stderr=True), total
        self._began = self._said = time.monotonic()

    def __call__(self, read: int, tokens: int) -> None:
        now, terminal = time.monotonic(), self._console.is_terminal
        if now - self._said < (0.5 if terminal else EVERY_SECONDS):
            return
        self._said, passed = now, now - self._began
        text = f"{tokens:,} tokens, {passed:.0f} s"
        if self._total and read:
            text = f"{read / self._total:.0%}, {text}, {passed * (self._total - read) / read:.0f} s left"
        self._console.print(text, end="\r" if terminal else "\n", highlight=False, soft_wrap=True)
