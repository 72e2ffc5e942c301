"""The documents of text files, folders, JSONL, Parquet and data sets of the Hugging Face Hub, in a fixed order."""

import gzip
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, cast

from deltalab.data.named_corpora import nearest, written_out
from deltalab.errors import InputError, NotInstalled, missing_file, nearest_of, one_line

JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
PARQUET = ".parquet"
BLOCK = 2**20
"""The bytes that are read at a time."""


@dataclass(frozen=True)
class Reading:
    """The settings by which sources are read.

    Attributes:
        field: The field or column that holds a document.
        separator: The text that ends a document within a text file; None if a file is one document.
        pattern: The pattern of the names of a folder's files that are read, as a shell would match it.
    """

    field: str = "text"
    separator: str | None = None
    pattern: str = "*"


@dataclass
class Place:
    """Where the reading of a source is.

    Attributes:
        row: The number of rows of a stream that have been read.
        state: The state of the stream's data set from which reading goes on; None for its start.
        stream: The data set that is read; None as long as the source is no stream.
    """

    row: int = 0
    state: dict[str, Any] | None = None
    stream: Any = None


@dataclass(frozen=True)
class Source:
    """A source that a user named.

    Attributes:
        name: The name that the user gave.
        files: The path and the bytes of each file, in the order of reading; None for a data set of the Hub.
        revision: The commit of a data set of the Hub; None for what its name says.
    """

    name: str
    files: tuple[tuple[Path, int], ...] | None
    revision: str | None = None

    @property
    def size(self) -> int | None:
        """The bytes on disk; None if they are not known."""
        return None if self.files is None else sum(size for _, size in self.files)

    def documents(self, reading: Reading, place: Place | None = None) -> Iterator[tuple[bytes, int]]:
        """Yields each document, and the number of bytes of the source that have been read at its end.

        Args:
            reading: How the source is read.
            place: Where to begin in a stream. It goes along with the documents.

        Raises:
            InputError: A document cannot be read. The message names the file and the line.
        """
        if self.files is None:
            for document in _of_hub(self.name, self.revision, reading.field, place or Place()):
                yield document, 0
            return
        before = 0
        for file, size in self.files:
            try:
                for document, read in _of_file(file, size, reading):
                    yield document, before + min(read, size)
            except (OSError, EOFError) as error:
                raise InputError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
            before += size


def find(names: list[str], reading: Reading) -> list[Source]:
    """Returns the sources that a user named.

    Args:
        names: The names. A name that is no path is a corpus of `named_corpora`, or a data set of the Hugging Face Hub:
            NAME, with :CONFIG or @REVISION or both behind it, in this order.
        reading: How sources are read.

    Raises:
        InputError: A path does not exist, or a folder has no files that match.
    """
    return [_source(name, reading) for name in names]


def _source(name: str, reading: Reading) -> Source:
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            files = _members(path, reading.pattern)
            if not files:
                raise InputError(f"{name}: holds no files that match '{reading.pattern}', hidden ones not counted")
            return Source(name, tuple((file, file.stat().st_size) for file in files))
        if path.exists():
            return Source(name, ((path, path.stat().st_size),))
    except OSError as error:
        raise InputError(f"{error.filename or name}: cannot be read: {error.strerror}") from None
    before, colon, after = name.rpartition(":")
    if colon and Path(before).expanduser().exists():
        weight = f": a weight is written {before}={after}" if re.fullmatch(r"\d*\.?\d+", after) else ""
        raise InputError(
            f"{name}: no such file or folder; {before} is one, and a path takes no ':{after}'{weight}; NAME:CONFIG is "
            "for data sets of the Hub"
        )
    if path.is_absolute() or name.count("/") > 1 or path.suffix in (".txt", ".json", ".gz", PARQUET, *JSONL):
        raise missing_file(path, "file or folder")
    return Source(written_out(name), None)


def _members(root: Path, pattern: str) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise error

    paths = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names = [name for name in files if not name.startswith(".") and fnmatch(name, pattern)]
        paths += [path for name in names if (path := Path(folder, name)).is_file()]
    return sorted(paths, key=lambda path: path.relative_to(root).parts)


def _of_file(file: Path, size: int, reading: Reading) -> Iterator[tuple[bytes, int]]:
    name = file.name.lower()
    if name.endswith(PARQUET):
        yield from _of_parquet(file, size, reading.field)
        return
    with file.open("rb") as raw:
        opened = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if name.endswith(".gz") else raw
        documents = _of_jsonl(opened, file, reading.field) if name.endswith(JSONL) else _of_text(opened, reading)
        for document in documents:
            yield document, raw.tell()


def _of_text(file: BinaryIO, reading: Reading) -> Iterator[bytes]:
    if reading.separator is None:
        yield file.read()
        return
    separator, rest = reading.separator.encode(), bytearray()
    while block := file.read(BLOCK):
        begin, searched = 0, max(0, len(rest) - len(separator) + 1)
        rest += block
        while (end := rest.find(separator, searched)) >= 0:
            yield bytes(rest[begin:end])
            begin = searched = end + len(separator)
        del rest[:begin]
    yield bytes(rest)


def _of_jsonl(lines: BinaryIO, file: Path, field: str) -> Iterator[bytes]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{file}:{number}: is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise InputError(f"{file}:{number}: is no JSON object with a field '{field}'")
        yield _text(row, field, f"{file}:{number}")


def _of_parquet(file: Path, size: int, column: str) -> Iterator[tuple[bytes, int]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise NotInstalled("needs pyarrow", "'deltalab[data]'", where=str(file)) from None
    try:
        table = parquet.ParquetFile(file)
        if column not in table.schema_arrow.names:
            raise _missing(str(file), column, table.schema_arrow.names)
        number, rows = 0, max(1, table.metadata.num_rows)
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            for text in batch.column(0).to_pylist():
                number += 1
                yield _text({column: text}, column, f"{file}: row {number}"), size * number // rows
    except pyarrow.ArrowException as error:
        raise InputError(f"{file}: is no readable Parquet file: {error}") from None


def revision_of(name: str) -> str:
    """Returns the commit that the Hub has of a data set, at the revision that the name states or the newest.

    Raises:
        InputError: The Hub has no such data set or revision, or cannot be asked.
    """
    _require_datasets(name)
    from huggingface_hub import dataset_info

    dataset, _, revision = _parts(name)
    try:
        return str(dataset_info(dataset, revision=revision).sha)
    except Exception as error:
        meant = f"; did you mean '{near}'?" if "/" not in name and (near := nearest(name)) else ""
        raise InputError(
            f"{name}: is no file or folder, and the Hub does not give it: {_reason(error)}{meant}"
        ) from None


def _of_hub(name: str, revision: str | None, field: str, place: Place) -> Iterator[bytes]:
    _require_datasets(name)
    import datasets

    dataset, config, stated = _parts(name)
    revision = revision or stated
    try:
        rows: Any = datasets.load_dataset(dataset, config, split="train", streaming=True, revision=revision)
        if place.state is not None:
            rows.load_state_dict(place.state)
        place.stream = rows
        for row in rows:
            place.row += 1
            yield _text(row, field, f"{name}: row {place.row}")
    except InputError:
        raise
    except Exception as error:
        what = f"; '{config}' is read as a configuration of the data set '{dataset}'" if config else ""
        at = f" at revision {revision}" if revision else ""
        raise InputError(
            f"{name}: is no file or folder, and datasets cannot load it{at}: {_reason(error)}{what}"
        ) from None


def _parts(name: str) -> tuple[str, str | None, str | None]:
    """The data set, the configuration and the revision of a name on the Hub."""
    rest, _, revision = name.partition("@")
    dataset, _, config = rest.partition(":")
    return dataset, config or None, revision or None


def _require_datasets(name: str) -> None:
    if find_spec("datasets") is None:
        problem = "is no file or folder, and a data set of the Hub needs the package datasets"
        raise NotInstalled(problem, "'deltalab[data]'", where=name)


def _reason(error: Exception) -> str:
    return one_line(str(error), 500) or type(error).__name__


def _text(row: dict[str, Any], field: str, where: str) -> bytes:
    if field not in row:
        raise _missing(where, field, list(row))
    text = row[field]
    if text is None:
        return b""
    if not isinstance(text, str):
        raise InputError(f"{where}: '{field}' is no text but {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: '{field}' is not Unicode text: {error.reason}") from None


def _missing(where: str, field: str, fields: list[str]) -> InputError:
    """The error for a field that rows do not have."""
    near = nearest_of(field, fields)
    meant = "" if near is None else f" did you mean '{near}'?"
    problem = f"has no '{field}';{meant} --field names one of: {', '.join(map(str, fields)) or 'nothing'}"
    return InputError(problem, where=where, key=field).with_fields(allowed=[*map(str, fields)], nearest=near)
