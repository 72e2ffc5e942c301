"""Settings given beside a study's file: `train.steps=100 seeds=7` on the command line, or a mapping in Python.

A key is a path in the file, as it is after a profile is merged over it: `resources.cpu`, `arms.deltanet.rule`,
`tune.train.lr.log_uniform`, `ablate.0`. `rule`, `model` and `train` stand for those of `base`. A value replaces what
was there; null, or nothing after `=`, takes the key away.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.reading import MOST_DEPTH, read_pairs
from deltalab.study.specs.sections.budget import Searching, Tune
from deltalab.study.specs.sections.search_space import Search

Overrides = Mapping[str, Any] | Sequence[str] | None
"""Overrides as a mapping, or as words KEY=VALUE of a command line."""

OF_THE_BASE = ("rule", "model", "train")
"""Keys that stand for keys of `base`."""
_WITH_PATHS: dict[str, tuple[str, ...]] = {
    "tune": tuple(Tune.model_fields),
    "search": tuple(Searching.model_fields),
    "scales": ("transfer", "keep_out"),
    "fidelity": ("keep",),
    "when": (),
    "settings": (),
}
"""Maps each section whose keys are paths with dots to the keys of the section that are no paths."""


def read_overrides(overrides: Overrides) -> dict[str, Any]:
    """Reads overrides as values by key.

    Raises:
        InputError: A word is no KEY=VALUE, a key is given twice, a value exceeds the limits of `deltalab.reading`, or
            JSON cannot express a value.
    """
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        return read_pairs(overrides)
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(overrides), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"takes texts, finite numbers, lists and mappings: {error}") from None
    return values


def with_overrides(study: Mapping[str, Any], values: Mapping[str, Any], allowed: Sequence[str]) -> dict[str, Any]:
    """Puts overrides into a study's mapping, one after the other.

    Args:
        study: What a study's file says, with a profile merged over it.
        values: The overrides, as `read_overrides` returns them.
        allowed: The keys that a study may have.

    Raises:
        InputError: A key cannot be in a study, a key to take away is not there, or the study sets a key of
            `OF_THE_BASE` again for a task or for every size.
    """
    changed = copy.deepcopy(dict(study))
    if isinstance(changed.get("task"), str):
        changed["task"] = {changed["task"]: {}}
    for key, value in values.items():
        parts = key.split(".")
        if not all(parts) or len(parts) > MOST_DEPTH:
            problem = f"'{key}': a key is up to {MOST_DEPTH} words with dots between, such as train.steps"
            raise InputError(problem, key=key)
        if parts[0] in OF_THE_BASE:
            _require_effect(changed, key, values)
            parts = ["base", *parts]
        elif parts[0] not in allowed:
            raise unknown("key", parts[0], [*allowed, *OF_THE_BASE])
        _put(changed, parts, value, key)
    return changed


def error_prefix(study_file: str, overrides: Overrides) -> str:
    """Says where an error may be: the study's file, and what overrides it.

    Examples:
        >>> error_prefix("a.yaml", ["seeds=7"]), error_prefix("a.yaml", {"seeds": 7}), error_prefix("a.yaml", None)
        ('a.yaml: command line', 'a.yaml: overrides', 'a.yaml')
    """
    if not overrides:
        return study_file
    return f"{study_file}: {'overrides' if isinstance(overrides, Mapping) else 'command line'}"


def _put(study: dict[str, Any], parts: list[str], value: Any, key: str) -> None:
    """Sets the value at a path of a study's mapping, or takes the path away if the value is None."""
    here: Any = study
    above: list[str] = []
    while True:
        if isinstance(here, list):
            if not parts[0].isdecimal() or int(parts[0]) >= len(here):
                known = f"its entries are 0 to {len(here) - 1}" if here else "it is empty"
                wrong = InputError(f"{'.'.join(above)} has no entry '{parts[0]}': {known}", where=key, key=parts[0])
                raise wrong.with_fields(allowed=[*map(str, range(len(here)))])
            at: Any = int(parts[0])
            above, parts = [*above, parts[0]], parts[1:]
        else:
            at, rest = _key(here, parts, above)
            above, parts = [*above, at], rest
        if not parts:
            break
        below = here[at] if isinstance(here, list) else here.get(at)
        if below is None:
            below = {}
        elif isinstance(below, tuple):
            below = list(below)
        elif isinstance(below, str) and at in ("rule", "engine"):
            below = {"name": below}
        elif not isinstance(below, dict | list):
            lacks = ".".join(parts)
            problem = f"{'.'.join(above)} is {json.dumps(below)}, which has no key '{lacks}'"
            raise InputError(problem, where=key, key=lacks)
        here[at] = below
        here = below
    if value is not None:
        here[at] = value
    elif isinstance(here, list):
        raise InputError(f"{key}: an entry of a list cannot be taken away: give the whole list")
    elif at not in here:
        raise unknown("key to take away", at, here, where=f"{key}=")
    else:
        del here[at]


def _key(here: Mapping[str, Any], parts: list[str], above: list[str]) -> tuple[str, list[str]]:
    """Splits a path after its first key. Keys may have dots, so the first key is the longest that the mapping has."""
    for end in range(len(parts), 0, -1):
        if (key := ".".join(parts[:end])) in here:
            return key, parts[end:]
    end = 1
    if above and above[-1] in _WITH_PATHS and parts[0] not in _WITH_PATHS[above[-1]]:
        inside = () if above[-1] in ("scales", "fidelity", "when", "settings") else Search.model_fields
        end = next((i for i in range(1, len(parts)) if parts[i] in inside), len(parts))
    return ".".join(parts[:end]), parts[end:]


def _require_effect(study: Mapping[str, Any], key: str, values: Mapping[str, Any]) -> None:
    """Refuses to override a setting of the base that the study sets again elsewhere, so that nothing would change."""
    section, _, setting = key.partition(".")
    setting = setting.partition(".")[0]
    again = []
    scales = study.get("scales")
    if isinstance(scales, Mapping) and key in scales:
        again.append(f"scales.{key}")
    for_task = study.get("for_task")
    for task, change in for_task.items() if isinstance(for_task, Mapping) else ():
        changed = change.get(section) if isinstance(change, Mapping) else None
        if changed is not None and (isinstance(changed, str) or not setting or setting in changed):
            again.append(f"for_task.{task}.{key}")
    if missing := [path for path in again if path not in values]:
        raise InputError(
            f"{key} does not reach all models, since the study sets {' and '.join(missing)}: "
            f"set {'these' if len(missing) > 1 else 'this'}, too, or say base.{key}"
        )
