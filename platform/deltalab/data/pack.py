"""Packs documents into shards of tokens. The same sources give the same bytes, and a killed packing can go on."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deltalab.data import row_log
from deltalab.data.key_set import KeySet
from deltalab.data.row_log import RowLog
from deltalab.data.shard_writer import PARTIAL, Shards, write_json
from deltalab.data.sources import Place, Reading, Source, find, revision_of
from deltalab.data.text_tokenizers import BYTES, load_tokenizer, same_ids, tokenizer_files
from deltalab.data.token_limit import TokenLimit
from deltalab.data.token_shards import META, SPLITS, VERSION
from deltalab.errors import InputError

STATE = "packing.json"
"""The file with the settings and the finished shards of an unfinished packing, until `meta.json` takes its place."""

LOCK = ".lock"

SHARES = {"train": 0.98, "validation": 0.01, "test": 0.01}
SHARD_TOKENS = 2**27
BATCH_BYTES, BATCH_DOCUMENTS = 2**21, 2**13
"""A batch of documents, which are tokenized together, ends at either of these sizes."""


class Watch(Protocol):
    """The function that a packing calls to report how far it is."""

    def __call__(self, read: int, tokens: int) -> None:
        """Takes a report.

        Args:
            read: The bytes of the sources that have been read.
            tokens: The tokens so far, those of finished shards included.
        """


@dataclass(frozen=True)
class Document:
    """A document of a batch.

    Attributes:
        text: The text.
        digest: The SHA-256 of the text.
        split: The split that the digest puts the document in.
        source: The number of the source that the document comes from.
        read: The bytes of all sources that have been read at the end of the document.
    """

    text: bytes
    digest: bytes
    split: str
    source: int
    read: int


def pack(
    names: list[str],
    out: Path,
    *,
    tokenizer: str = BYTES,
    reading: Reading = Reading(),  # noqa: B008
    shares: Mapping[str, float] = SHARES,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    most_tokens: int | None = None,
    weights: Sequence[float] | None = None,
    watch: Watch = lambda read, tokens: None,
) -> dict[str, Any]:
    """Packs sources into a folder, or goes on where a killed packing stopped.

    The SHA-256 of a document's text decides its split, so that splits share no text: its first 64 bits, as a fraction
    of 2^64, lie in the split's share of [0, 1). The first of equal documents is kept, and empty documents are left out.
    A document ends with the end-of-document token of the tokenizer, if there is one. The tokenizer `bytes` takes text
    in any encoding, and `meta.json` counts the documents of each source that are not UTF-8.

    Args:
        names: The sources, as a user names them.
        out: The folder.
        tokenizer: The tokenizer, as `load_tokenizer` takes it.
        reading: How sources are read.
        shares: The share of the documents that goes into each split.
        workers: The threads that tokenize.
        shard_tokens: The tokens at which a shard ends.
        most_tokens: The training tokens at which the packing ends, with the document that reaches them.
        weights: The weight of each source in `most_tokens`, as `TokenLimit` takes it.
        watch: Called after each batch of documents.

    `meta.json` has the revision of each data set of the Hub, which a packing that goes on reads, too, and from the row
    after its last whole shard: `RowLog` keeps what came before. A packing that fails before its first shard is whole
    leaves nothing behind.

    Returns:
        The content of `meta.json`.

    Raises:
        InputError: Sources cannot be read, hold no text, or have changed since a killed packing; there is no such
            tokenizer, or it cannot take a text; the folder has other contents or is packed with other settings; or the
            disk is full.
    """
    # Set both variables first: the library reads them when it first tokenizes.
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if workers > 1 else "false"
    sources = find(names, reading)
    encoder, description = load_tokenizer(tokenizer)
    if description["vocab_size"] > 2**32:
        raise InputError(f"tokenizer '{tokenizer}': {description['vocab_size']} ids are more than 2^32")
    sources = _at_revisions(sources, out)
    revisions = {source.name: source.revision for source in sources if source.revision is not None}
    identity = {key: description[key] for key in ("kind", "name", "vocab_size", "sha256", "eos")}
    settings = {
        "tokenizer": identity,
        "sources": [source.name for source in sources],
        "files": _listing(sources),
        "shares": dict(shares),
        **asdict(reading),
        "shard_tokens": shard_tokens,
        **({"most_tokens": most_tokens} if most_tokens is not None else {}),
        **({"weights": list(weights)} if weights is not None else {}),
        **({"revisions": revisions} if revisions else {}),
    }
    try:
        with _held(out):
            finished = _earlier(out, settings)
            if "splits" in finished and "sha256" in finished:
                (out / STATE).unlink(missing_ok=True)  # the kill came between the two
                row_log.remove(out)
                return finished
            dtype = "uint16" if description["vocab_size"] <= 2**16 else "uint32"
            shards = {
                split: Shards(out, split, dtype, shard_tokens, finished["splits"].get(split, [])) for split in SPLITS
            }
            # A tokenizer of the same ids may have other files. Those of the finished shards stay.
            identity = settings["tokenizer"] = finished["settings"]["tokenizer"]
            is_new = not any(split.finished for split in shards.values())
            of_tokenizer = tokenizer_files(encoder, description) if is_new else {}
            limit = TokenLimit(most_tokens, weights, finished.get("ends", []))
            try:
                for name, text in of_tokenizer.items():
                    (out / name).write_text(text, encoding="utf-8")
                counts = _write(sources, reading, encoder, identity, shards, shares, limit, watch, out, settings)
            except Exception:
                if not any(split.finished for split in shards.values()):
                    row_log.remove(out)
                    for file in (out / STATE, *(out / name for name in of_tokenizer), *out.glob(f"*{PARTIAL}")):
                        file.unlink(missing_ok=True)
                raise
            meta = _meta(settings, dtype, shards, counts)
            write_json(out / META, meta)
            (out / STATE).unlink(missing_ok=True)
            row_log.remove(out)
            return meta
    except OSError as error:
        raise InputError(
            f"{out}: cannot be written: {error.strerror or error}; the same command goes on from the last whole shard"
        ) from None


def _write(
    sources: list[Source],
    reading: Reading,
    encoder: Any,
    tokenizer: Mapping[str, Any],
    shards: Mapping[str, Shards],
    shares: Mapping[str, float],
    limit: TokenLimit,
    watch: Watch,
    out: Path,
    settings: Mapping[str, Any],
) -> list[dict[str, int]]:
    """Writes every document that is not in a finished shard, and returns the counts of each source."""
    keys, counts = KeySet(), [{"documents": 0, "duplicates": 0, "bytes": 0, "not_utf8": 0} for _ in sources]
    tokens = sum(shard["tokens"] for split in shards.values() for shard in split.finished)
    trained, train = sum(shard["tokens"] for shard in shards["train"].finished), shards["train"]
    log, place = RowLog(out), Place()
    last_stream = max((number for number, source in enumerate(sources) if source.files is None), default=-1)
    again = _take_again(log, keys, counts, shards, shares, limit, out)
    tokens, trained = tokens + sum(again.values()), trained + again["train"]
    for batch in _batches(sources, reading, shares, limit, log, place):
        source, count = batch[0].source, counts[batch[0].source]
        if limit.enter(source, [each["documents"] for each in counts], trained):
            write_json(out / STATE, _state(settings, shards, limit))
        numbers = np.array([int.from_bytes(document.digest[8:16]) for document in batch], np.uint64)
        is_new = keys.new(numbers)
        unwritten = _unwritten(batch, is_new, shards)
        ids_of = zip(unwritten, _tokens(unwritten, encoder, tokenizer, sources), strict=True)
        taken, whole = 0, False
        for document, first in zip(batch, is_new, strict=True):
            taken += 1
            split = shards[document.split]
            count["documents"] += 1
            count["bytes"] += len(document.text)
            is_utf8 = _is_utf8(document.text)
            count["not_utf8"] += not is_utf8
            changed, written = False, 0
            if not first:
                count["duplicates"] += 1
            elif _passed(split, document.digest, out):
                _, ids = next(ids_of)
                written = len(ids)
                tokens += written
                trained += written * (split is train)
                changed = split.add(ids, len(document.text), split.chain())
            if source <= last_stream:
                log.add(source, document.digest, len(document.text), written, is_utf8)
            whole |= changed
            changed |= limit.took(count["documents"], None if train.skip else trained)
            if changed:
                write_json(out / STATE, _state(settings, shards, limit))
            if not limit.wants(source):
                break
        keys.add(numbers[:taken])
        if source <= last_stream:
            log.write()
        if whole and place.stream is not None:
            log.keep(source, place.row, place.stream.state_dict(), shards)
        watch(batch[taken - 1].read, tokens)
    if any(split.skip for split in shards.values()):
        raise _changed(out)
    if not any(count["documents"] for count in counts):
        raise InputError(f"{', '.join(source.name for source in sources)}: no text to pack")
    for split in shards.values():
        split.finish(split.chain())
    limit.enter(len(sources), [each["documents"] for each in counts], trained)
    before = 0
    for count, end in zip(counts, limit.ends, strict=True):
        count["train_tokens"], before = end["tokens"] - before, end["tokens"]
    return counts


def _take_again(
    log: RowLog,
    keys: KeySet,
    counts: list[dict[str, int]],
    shards: Mapping[str, Shards],
    shares: Mapping[str, float],
    limit: TokenLimit,
    out: Path,
) -> dict[str, int]:
    """Takes the documents of a log without their texts, and returns the tokens of each split's shard that is not whole.

    The arguments are changed as they were when the log was kept.
    """
    begun: dict[str, list[tuple[int, int]]] = {split: [] for split in shards}
    for rows in log.rows():
        numbers = rows["digest"].copy().view(">u8").reshape(-1, 4)[:, 1].astype(np.uint64)
        for row, first in zip(rows, keys.add(numbers), strict=True):
            count, digest = counts[row["source"]], row["digest"].tobytes()
            limit.enter(int(row["source"]), [each["documents"] for each in counts], 0)
            split = _split(digest, shares)
            count["documents"] += 1
            count["bytes"] += int(row["bytes"])
            count["not_utf8"] += not row["is_utf8"]
            count["duplicates"] += not first
            if first and _passed(shards[split], digest, out):
                begun[split].append((int(row["tokens"]), int(row["bytes"])))
            limit.took(count["documents"], None)
    for split, texts in begun.items():
        if texts:
            tokens, sizes = zip(*texts, strict=True)
            try:
                shards[split].reopen(tokens, sum(sizes))
            except ValueError as error:
                raise InputError(f"{error}: delete {out}, and pack anew") from None
    return {split: sum(tokens for tokens, _ in texts) for split, texts in begun.items()}


def _unwritten(batch: list[Document], is_new: NDArray[np.bool_], shards: Mapping[str, Shards]) -> list[Document]:
    """Returns the new documents of a batch that are in no finished shard."""
    skip, unwritten = {name: split.skip for name, split in shards.items()}, []
    for document, first in zip(batch, is_new, strict=True):
        if first and skip[document.split]:
            skip[document.split] -= 1
        elif first:
            unwritten.append(document)
    return unwritten


def _batches(
    sources: list[Source],
    reading: Reading,
    shares: Mapping[str, float],
    limit: TokenLimit,
    log: RowLog,
    place: Place,
) -> Iterator[list[Document]]:
    """Yields the documents that follow a log, in batches, each of one source, as long as the source has not ended.

    `place` is where the reading of the source is.
    """
    before = 0
    for number, source in enumerate(sources):
        batch, size = list[Document](), 0
        is_read = log.source is not None and number < log.source
        place.row, place.state, place.stream = (log.row, log.state, None) if number == log.source else (0, None, None)
        for text, read in source.documents(reading, place) if limit.wants(number) and not is_read else ():
            if not text:
                continue
            digest = hashlib.sha256(text).digest()
            batch.append(Document(text, digest, _split(digest, shares), number, before + read))
            size += len(text)
            if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
                if not limit.wants(number):
                    break
        if batch:
            yield batch
        before += source.size or 0


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _split(digest: bytes, shares: Mapping[str, float]) -> str:
    place, edge = int.from_bytes(digest[:8]) / 2**64, 0.0
    for split, share in shares.items():
        edge += share
        if place < edge:
            return split
    return "train"  # rounding left the sum just below 1


def _tokens(
    documents: list[Document], encoder: Any, tokenizer: Mapping[str, Any], sources: list[Source]
) -> Iterator[NDArray[Any]]:
    end = [] if tokenizer["eos"] is None else [tokenizer["eos"]]
    if tokenizer["kind"] == BYTES:
        for document in documents:
            yield np.append(np.frombuffer(document.text, np.uint8), np.array(end, np.uint8))
        return
    texts = []
    for document in documents:
        try:
            texts.append(document.text.decode())
        except UnicodeDecodeError as error:
            start = document.text[:40].decode(errors="replace")
            raise InputError(
                f"{sources[document.source].name}: the document that starts with {start!r} is not UTF-8: byte "
                f"{error.start} is {document.text[error.start]:#04x}; --tokenizer bytes takes any bytes"
            ) from None
    encoder.no_truncation()
    encoder.no_padding()
    encoder.encode_special_tokens = True  # "</s>" in a text is text, and ends no document
    for encoding in encoder.encode_batch_fast(texts, add_special_tokens=False):
        yield np.array(encoding.ids + end, np.int64)


def _passed(shards: Shards, digest: bytes, out: Path) -> bool:
    try:
        return shards.passed(digest)
    except ValueError:
        raise _changed(out) from None


def _changed(out: Path) -> InputError:
    return InputError(f"{out}: the sources have changed since its first shards were packed; give another --out")


def _state(settings: Mapping[str, Any], shards: Mapping[str, Shards], limit: TokenLimit) -> dict[str, Any]:
    finished = {name: split.finished for name, split in shards.items()}
    return {"settings": settings, "splits": finished, "ends": limit.ends}


def _meta(
    settings: Mapping[str, Any], dtype: str, shards: Mapping[str, Shards], counts: list[dict[str, int]]
) -> dict[str, Any]:
    splits: dict[str, Any] = {}
    for name, split in shards.items():
        finished = [{key: value for key, value in shard.items() if key != "chain"} for shard in split.finished]
        totals = {key: sum(shard[key] for shard in finished) for key in ("tokens", "documents", "bytes")}
        splits[name] = {**totals, "shards": finished}
    tokenizer = settings["tokenizer"]
    content = {key: tokenizer[key] for key in ("vocab_size", "sha256", "eos")}
    identity = json.dumps({"version": VERSION, "tokenizer": content, "dtype": dtype, "splits": splits}, sort_keys=True)
    return {
        "version": VERSION,
        "tokenizer": tokenizer,
        "dtype": dtype,
        "splits": splits,
        "sources": [{"source": name, **count} for name, count in zip(settings["sources"], counts, strict=True)],
        "settings": settings,
        "sha256": hashlib.sha256(identity.encode()).hexdigest(),
    }


def _earlier(out: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `meta.json` if an earlier packing ended, or else the finished shards of each split.

    Raises `InputError` if the earlier packing had other settings, or the folder holds something else.
    """
    entries = [entry for entry in out.iterdir() if not entry.name.endswith(PARTIAL) and entry.name != LOCK]
    file = next((out / name for name in (META, STATE) if (out / name).exists()), None)
    if file is None:
        if entries:
            raise InputError(f"{out}: exists, and holds something else than packed data")
        return _begun(out, settings)
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        earlier_settings = content["settings"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{file}: is no packed data of this deltalab") from None
    if not any(content["splits"].values()):
        return _begun(out, settings)
    tokenizer, earlier = settings["tokenizer"], earlier_settings["tokenizer"]
    same = tokenizer["sha256"] == earlier["sha256"] or same_ids(tokenizer["name"], str(out))
    if not same or tokenizer["eos"] != earlier["eos"]:
        raise InputError(
            f"{out}: is packed with another tokenizer: '{earlier['name']}' of {earlier['vocab_size']} ids, not "
            f"'{tokenizer['name']}' of {tokenizer['vocab_size']}; give another --out"
        )
    for key in settings | earlier_settings:
        was, now = earlier_settings.get(key), settings.get(key)
        if key == "revisions" and (was is None or now is None):
            continue  # packings of earlier versions lack them
        if key != "tokenizer" and was != now:
            if key == "files":
                raise _changed(out)
            raise InputError(f"{out}: is packed with {key} {was!r}, not {now!r}; give another --out")
    return content


def _at_revisions(sources: list[Source], out: Path) -> list[Source]:
    """Returns the sources with the revisions of those of the Hub: those that the folder's packing began with, if any.

    A name that states a revision itself, NAME@REVISION, has that one.
    """
    known: dict[str, str] = {}
    for file in (out / META, out / STATE):
        with suppress(OSError, ValueError, KeyError, TypeError):  # `_earlier` says what is wrong with a file
            known |= json.loads(file.read_text(encoding="utf-8"))["settings"].get("revisions", {})
    return [
        source
        if source.files is not None
        else replace(source, revision=known.get(source.name) or revision_of(source.name))
        for source in sources
    ]


def _begun(out: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    state = {"settings": settings, "splits": {}}
    write_json(out / STATE, state)
    return state


def _listing(sources: list[Source]) -> str:
    """Returns the hash of the names and sizes of the sources' files."""
    lines = [f"{file} {size}" for source in sources for file, size in source.files or ()]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """Makes the folder, and keeps other packings out of it until the end. A new folder that stays empty is removed."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(out):
            yield
    finally:
        for folder in made:
            with suppress(OSError):  # a folder with contents stays
                folder.rmdir()


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keeps other packings out of a folder until the end."""
    with (out / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{out}: another process is packing into it") from None
        try:
            yield
        finally:
            (out / LOCK).unlink(missing_ok=True)
