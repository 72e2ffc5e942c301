"""The commands `deltalab data`: pack text, train a tokenizer, show what a folder holds."""

import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deltalab import progress
from deltalab.cli.options import AsJson, Progress, print_result
from deltalab.data.pack import SHARD_TOKENS, STATE, pack
from deltalab.data.sources import Reading, find
from deltalab.data.text_tokenizers import BYTES
from deltalab.data.token_limit import TokenLimit
from deltalab.data.token_shards import SPLITS, Packed
from deltalab.data.vocabulary import train_tokenizer
from deltalab.errors import InputError, unknown

data = typer.Typer(no_args_is_help=True, help="Pack text into tokens for training.")

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Text files, folders, .jsonl, .parquet, fineweb-edu, slimpajama, or data sets of the Hub, "
        "NAME[:CONFIG][@REVISION].",
    ),
]
Weighted = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE[=WEIGHT]...",
        help="Text files, folders, .jsonl, .parquet, fineweb-edu, slimpajama, or data sets of the Hub, "
        "NAME[:CONFIG][@REVISION]; with weights, each gives its share of --tokens.",
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
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@data.command("pack")
def data_pack(
    sources: Weighted,
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
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Training tokens at which to end, such as 15B, 300M or 50K.")
    ] = None,
    shard: Annotated[int, typer.Option("--shard", min=1, help="Tokens of a shard.")] = SHARD_TOKENS,
    as_json: AsJson = False,
    progress_form: Progress = "text",
) -> None:
    """Pack text into shards of tokens; after a kill, the same command goes on."""
    _quiet_hub()
    reading = _reading(field, separator, files)
    names, weights = _weighted(sources)
    most = None if tokens is None else _number(tokens)
    if weights is not None and most is None:
        raise InputError("--tokens: sources with weights share out a number of training tokens: give one, such as 15B")
    sizes = [source.size for source in find(names, reading)]
    pack(
        names,
        out,
        tokenizer=tokenizer,
        reading=reading,
        shares=_shares(split),
        workers=workers or os.cpu_count() or 1,
        shard_tokens=shard,
        most_tokens=most,
        weights=weights,
        watch=_PackingProgress(None if None in sizes else sum(filter(None, sizes)), most),
    )
    packed = Packed(out)
    limit = TokenLimit(most, weights, [])
    for number, source in enumerate(packed.meta["sources"]):
        if (share := limit.share(number)) is not None and source["train_tokens"] < share:
            _note(f"{source['source']}: ended after {source['train_tokens']:,} of its {share:,} training tokens")
    if most is not None and weights is None and packed.split("train").tokens < most:
        _note(f"the sources ended after {packed.split('train').tokens:,} of {most:,} training tokens")
    for name in SPLITS[1:]:
        if not packed.split(name).documents:
            _note(f"no document fell into {name}: more documents, or --separator, would help")
    for source in packed.meta["sources"]:
        if not_utf8 := source.get("not_utf8"):  # folders of earlier versions lack this count
            _note(
                f"{source['source']}: {not_utf8:,} of {source['documents']:,} documents are not UTF-8 text; "
                "their bytes were packed as they are"
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
    as_json: AsJson = False,
) -> None:
    """Train a byte-level BPE tokenizer on text."""
    _quiet_hub()
    size = train_tokenizer(sources, out, vocab_size=vocab, reading=_reading(field, separator, files))
    print_result(as_json, f"{out}: {size:,} ids", file=out, vocab_size=size)


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
            "`deltalab data pack` goes on"
        )
    try:
        packed = Packed(folder)
    except ValueError as error:
        raise InputError(str(error)) from None
    _show(packed, as_json)


def _note(text: str) -> None:
    """Tells what a user may not expect of the packed data."""
    progress.note(text if progress.is_json() else f"note: {text}")


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
    limited = "most_tokens" in packed.meta["settings"]
    for source in packed.meta["sources"]:
        lines.append(
            f"from {source['source']}: {source['documents']:,} documents, of which {source['duplicates']:,} were "
            "duplicates and left out" + (f"; {source['train_tokens']:,} training tokens" if limited else "")
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


def _weighted(sources: list[str]) -> tuple[list[str], list[float] | None]:
    """Returns the names of the sources, and their weights if they are written NAME=WEIGHT."""
    names, weights = [], list[float | None]()
    for source in sources:
        name, _, text = source.rpartition("=")
        weight = None
        if name and not Path(source).exists():
            try:
                weight = float(text)
            except ValueError:
                raise InputError(f"{source}: '{text}' is no weight; give for example {name}=0.3") from None
            if not 0 < weight < math.inf:
                raise InputError(f"{source}: a weight must be a positive number")
        names.append(source if weight is None else name)
        weights.append(weight)
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        raise InputError(f"{names[weights.index(None)]}: has no weight, and others have: give all sources one, or none")
    return names, given or None


def _number(text: str) -> int:
    """Returns a number of tokens, from the text of --tokens."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    try:
        number = round(float(text if unit == 1 else text[:-1]) * unit)
    except (ValueError, OverflowError):
        number = 0
    if number < 1:
        raise InputError(f"--tokens: '{text}' is no number of tokens; give for example 15B, 300M or 50K")
    return number


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

    def __init__(self, total: int | None, most: int | None) -> None:
        self._console, self._total, self._most = Console(stderr=True), total, most
        self._began = self._said = time.monotonic()

    def __call__(self, read: int, tokens: int) -> None:
        now, terminal = time.monotonic(), self._console.is_terminal and not progress.is_json()
        if now - self._said < (0.5 if terminal else EVERY_SECONDS):
            return
        self._said, passed = now, now - self._began
        text = f"{tokens:,} tokens, {passed:.0f} s"
        done = max(
            read / self._total if self._total else 0.0,
            min(tokens / self._most, 1.0) if self._most else 0.0,
        )
        if done:
            text = f"{done:.0%}, {text}, {passed * (1 - done) / done:.0f} s left"
        if terminal:
            self._console.print(text, end="\r", highlight=False, soft_wrap=True)
        else:
            progress.advance(text, done=done or None, total=1.0, tokens=tokens, seconds=round(passed, 1))
