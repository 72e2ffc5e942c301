"""Reads the data sets that suites need, from the Hugging Face Hub or from a folder that holds copies of them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deltalab.errors import InputError, NotInstalled


def copy_of(name: str, files: Path | None) -> Path | None:
    """Returns the folder with the copy of a data set; None if data sets come from the Hub.

    Args:
        name: The name ORG/NAME of a data set of the Hub.
        files: The folder of the copies: each lies in its subfolder ORG/NAME.

    Raises:
        InputError: If the folder holds no copy of the data set.
    """
    if files is None:
        return None
    if not (folder := files / name).is_dir():
        raise InputError(f"--files {files}: holds no folder {name}: `hf download --repo-type dataset {name}` gets it")
    return folder


def rows(name: str, split: str, files: Path | None) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of a split of a data set.

    Args:
        name: The name ORG/NAME of a data set of the Hub.
        split: The split.
        files: The folder of copies; None reads the Hub.

    Raises:
        InputError: If the package datasets is missing, or if the data set cannot be read.
    """
    try:
        import datasets
    except ImportError:
        raise NotInstalled("suites need the package datasets", "'deltalab[eval]'") from None
    folder = copy_of(name, files)
    try:
        yield from datasets.load_dataset(str(folder or name), split=split)
    except Exception as error:  # datasets raises whatever its readers raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{folder or name}: cannot be read: {reason:.300}; --files DIR reads a copy") from None


def essays(files: Path) -> str:
    """Returns the texts of the folder `essays` of a folder of files, one after another.

    Raises:
        InputError: If the folder has no text, or a file of it is none in UTF-8.
    """
    texts = [_text(file) for file in sorted((files / "essays").glob("*.txt"))]
    if not texts:
        raise InputError(f"{files / 'essays'}: holds no *.txt")
    return "\n".join(texts)


def json_file(name: str, files: Path | None) -> Any:
    """Returns the content of a JSON file; None if the folder of files does not hold it.

    Raises:
        InputError: If the file is no JSON.
    """
    file = None if files is None else files / name
    if file is None or not file.is_file():
        return None
    text = _text(file)
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{file}: is no JSON: {error}") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
