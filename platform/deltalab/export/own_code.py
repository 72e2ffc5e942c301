"""Compares the code of an exported folder with what this version of deltalab would write, before anything runs it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltalab import trust
from deltalab.errors import InputError
from deltalab.export.modules import MODELING, modules
from deltalab.export.retrain import load_rules
from deltalab.models.spec import ModelSpec
from deltalab.reading import read_json

CONFIGURATIONS = ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json")
"""The files by which transformers finds code."""


def require_own_code(folder: Path, *, option: str = "") -> None:
    """Raises `InputError` if loading an exported folder would run code that this version of deltalab would not write.

    A folder that the user trusts is not looked at.

    Args:
        folder: The exported folder.
        option: An option of the command that trusts the folder once, for the message.
    """
    if trust.is_trusted(folder):
        return
    file = _foreign_file(folder)
    if file is not None:
        once = f", or give {option}" if option else ""
        raise InputError(
            f"{file}: is not what this deltalab writes for the folder's model, and would run: read it, then "
            f"`deltalab trust {folder.resolve()}` lets it run{once}"
        )


def _foreign_file(folder: Path) -> Path | None:
    """Returns the first file that would run, or that names what would run, and is not as deltalab writes it."""
    for name in CONFIGURATIONS:
        if (folder / name).is_file() and not _names_ours(read_json(folder / name).get("auto_map", {})):
            return folder / name
    load_rules(folder)
    config = read_json(folder / "config.json")
    spec = ModelSpec.of({name: value for name, value in config.items() if name in ModelSpec.__dataclass_fields__})
    texts = modules(spec)
    # A file of another name does not run, unless one of these imports it. The package `x` would stand before `x.py`.
    for file in sorted(folder.iterdir()):
        name = file.name.partition(".")[0]
        is_code = name in texts and (file.is_dir() or file.suffix != ".json")
        if is_code and (file.name != f"{name}.py" or file.read_bytes() != texts[name].encode()):
            return file
    missing = [f"{name}.py" for name in texts if not (folder / f"{name}.py").is_file()]
    return folder / missing[0] if missing else None


def _names_ours(auto_map: object) -> bool:
    """Returns whether the classes that a configuration names are those of the folder's `modeling_deltalab.py`."""
    if not isinstance(auto_map, Mapping):
        return False
    names: list[Any] = list(auto_map.values())
    return all(isinstance(name, str) and name.partition(".")[0] == MODELING for name in names)
