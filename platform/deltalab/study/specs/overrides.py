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
from deltalab.study.specs.budget import Searching, Tune
from deltalab.study.specs.search_space import Search

Given = Mapping[str, Any] | Sequence[str] | None
"""Overrides as a mapping, or as words KEY=VALUE of a command line."""

OF_THE_BASE = ("rule", "model", "train")
"""Keys that stand for those of `base`."""
_WITH_PATHS: dict[str, tuple[str, ...]] = {
    "tune": tuple(Tune.model_fields),
    "search": tuple(Searching.model_fields),
    "scales": ("transfer", "keep_out"),
    "fidelity": ("keep",),
    "when": (),
}
"""Mappings whose keys are themselves paths with dots, and their other keys."""


def read_overrides(given: Given) -> dict[str, Any]:
    """Overrides by their keys.

    Raises `InputError` for a word that is no KEY=VALUE, a key given twice, a value that exceeds the limits of
    `deltalab.reading`, and one that JSON cannot express.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return read_pairs(given)
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(given), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"takes texts, finite numbers, lists and mappings: {error}") from None
    return found


def overridden(study: Mapping[str, Any], values: Mapping[str, Any], allowed: Sequence[str]) -> dict[str, Any]:
    """A study's mapping with overrides in place, one after the other. allowed: the keys that a study may have.

    Raises `InputError` for a key that cannot be in a study, for one to take away that is not there, and for one of
    `OF_THE_BASE` that the study sets again for a task or for every size.
    """
    changed = copy.deepcopy(dict(study))
    if isinstance(changed.get("task"), str):
        changed["task"] = {changed["task"]: {}}
    for key, value in values.items():
        parts = key.split(".")
        if not all(parts) or len(parts) > MOST_DEPTH:
            raise InputError(f"'{key}': a key is up to {MOST_DEPTH} words with dots between, such as train.steps")
        if parts[0] in OF_THE_BASE:
            _require_effect(changed, key, values)
            parts = ["base", *parts]
        elif parts[0] not in allowed:
            raise unknown("key", parts[0], [*allowed, *OF_THE_BASE])
        _put(changed, parts, value, key)
    return changed


def where_given(file: str, overrides: Given) -> str:
    """What errors name: the file, and who overrides it.

    >>> where_given("a.yaml", ["seeds=7"]), where_given("a.yaml", {"seeds": 7}), where_given("a.yaml", None)
    ('a.yaml: command line', 'a.yaml: overrides', 'a.yaml')
    """
    if not overrides:
        return file
    return f"{file}: {'overrides' if isinstance(overrides, Mapping) else 'command line'}"


def _put(study: dict[str, Any], parts: list[str], value: Any, key: str) -> None:
    here: Any = study
    above: list[str] = []
    while True:
        if isinstance(here, list):
            if not parts[0].isdecimal() or int(parts[0]) >= len(here):
                known = f"its entries are 0 to {len(here) - 1}" if here else "it is empty"
                raise InputError(f"{key}: {'.'.join(above)} has no entry '{parts[0]}': {known}")
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
        elif isinstance(below, str) and at == "rule":
            below = {"name": below}
        elif not isinstance(below, dict | list):
            raise InputError(f"{key}: {'.'.join(above)} is {json.dumps(below)}, which has no key '{'.'.join(parts)}'")
        here[at] = below
        here = below
    if value is not None:
        here[at] = value
    elif isinstance(here, list):
        raise InputError(f"{key}: an entry of a list cannot be taken away: give the whole list")
    elif at not in here:
        raise InputError(f"{key}=: takes away what is not there: {unknown('key', at, here)}")
    else:
        del here[at]


def _key(here: Mapping[str, Any], parts: list[str], above: list[str]) -> tuple[str, list[str]]:
    """The first key of a path in a mapping, and the rest: the longest that is there, for keys may have dots."""
    for end in range(len(parts), 0, -1):
        if (found := ".".join(parts[:end])) in here:
            return found, parts[end:]
    end = 1
    if above and above[-1] in _WITH_PATHS and parts[0] not in _WITH_PATHS[above[-1]]:
        inside = () if above[-1] in ("scales", "fidelity", "when") else Search.model_fields
        end = next((i for i in range(1, len(parts)) if parts[i] in inside), len(parts))
    return ".".join(parts[:end]), parts[end:]


def _require_effect(study: Mapping[str, Any], key: str, values: Mapping[str, Any]) -> None:
    """Refuses a setting of the base that the study sets again elsewhere, where the override would change nothing."""
    section, _, setting = key.partition(".")
    setting = setting.partition(".")[0]
    again = []
    scales = study.get("scales")
    if isinstance(scales, Mapping) and key in scales:
        again.append(f"scales.{key}")
    for_task = study.get("for_task")
    for task, change in for_task.items() if isinstance(for_task, Mapping) else ():
        own = change.get(section) if isinstance(change, Mapping) else None
        if own is not None and (isinstance(own, str) or not setting or setting in own):
            again.append(f"for_task.{task}.{key}")
    if missing := [path for path in again if path not in values]:
        raise InputError(
            f"{key} does not reach all models, since the study sets {' and '.join(missing)}: "
            f"set {'these' if len(missing) > 1 else 'this'}, too, or say base.{key}"
        )
