"""Says which arms are as their authors publish them. What was found once is kept, since rules take seconds to load."""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from deltalab.errors import InputError

MOST_NAMED = 3
"""The most settings that `preset_text` names for an arm."""

READS = ("models", "gate.py", "gates.py", "registry.py", "rule.py", "structure.py", "study/answers/presets.py")
"""The code that decides in what a configuration differs from a preset, beside the rule's own file."""

_log = logging.getLogger("deltalab")


def preset_text(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Says which arms are as their authors publish them, and in what the others differ; empty if no rule has a preset.

    Args:
        configs: A configuration of each arm, with every setting spelled out.
    """
    apart: dict[str, list[str]] = {}
    for arm, config in configs.items():
        # An older version may have recorded a setting that this one refuses.
        with suppress(InputError, KeyError):
            if (settings_apart := _differences(config)) is not None:
                apart[arm] = settings_apart
    same = [arm for arm, settings_apart in apart.items() if not settings_apart]
    others = (
        f"{arm} in {', '.join(found[:MOST_NAMED])}{f' and {len(found) - MOST_NAMED} more' * (len(found) > MOST_NAMED)}"
        for arm, found in apart.items()
        if found
    )
    parts = [
        f"As published: {', '.join(same)}." if same else "",
        f"Not as published: {listed}." if (listed := "; ".join(others)) else "",
    ]
    return " ".join(filter(None, parts))


def _differences(config: Mapping[str, Any]) -> list[str] | None:
    """Returns what `deltalab.models.published.differences` finds. It is kept until the rule's file changes.

    Raises:
        InputError: There is no such rule, or this version refuses a setting.
        KeyError: The configuration lacks a part.
    """
    rule, model = config["rule"], config["model"]
    # Another folder's plugins and another file of --plugin may have another rule of this name. Whoever names a file has
    # loaded the registry.
    plugins, registry = Path("plugins").resolve(), sys.modules.get("deltalab.registry")
    files = [str(plugins) * plugins.is_dir(), *(registry.named_files() if registry else ())]
    dependencies = json.dumps([rule, model, _code(), files], sort_keys=True).encode()
    file = _folder() / f"{hashlib.sha256(dependencies).hexdigest()}.json"
    with suppress(OSError, ValueError, KeyError):  # there is no file, it was cut off, or the rule's file is gone
        kept = json.loads(file.read_text(encoding="utf-8"))
        if _hash(Path(kept["file"])) == kept["hash"]:
            settings: list[str] | None = kept["differences"]
            return settings
    # Both import torch, which takes longer than a report of thousands of trials.
    from deltalab.models.published import differences
    from deltalab.registry import rule_plugin

    found, source = differences(config), rule_plugin(rule["name"]).file
    content = {"rule": rule["name"], "file": str(source), "hash": _hash(source), "differences": found}
    partial = file.with_suffix(f".{uuid4().hex[:8]}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        _log.warning("%s: what differs from a preset cannot be kept: %s", file, error.strerror or error)
    return found


def _folder() -> Path:
    """Returns the folder of what is kept: $XDG_CACHE_HOME/deltalab/presets, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "deltalab" / "presets"


@cache
def _code() -> str:
    """Returns a hash of the code in `READS`."""
    package = Path(__file__).parents[2]
    files = [file for name in READS for file in sorted((package / name).rglob("*.py")) or [package / name]]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
