"""Checks, before a study starts, that the settings it tunes or searches exist and that its space has candidates."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from deltalab.errors import InputError
from deltalab.study.planning.matching import Bounded
from deltalab.study.planning.warm_starts import named
from deltalab.study.specs.budget import Searching
from deltalab.study.specs.method_settings import resolve, setting
from deltalab.study.specs.search_space import INTEGERS, Search, Space, combinations, count, example

if TYPE_CHECKING:
    from deltalab.study.planning.plan import Plan, PlannedArm

MOST_COMBINATIONS = 500
"""Candidates that a plan tries to make, over all its arms."""
MOST_SIZED = 200
"""Candidates that it draws, at the most, until one has a size that `match` and `constrain` allow."""


def check_space(plan: "Plan") -> list[str]:
    """Notes on the space: which combinations make no model, and which have no size that is allowed.

    Raises `InputError` for settings and objectives that do not exist, for a choice or bound that makes no model in any
    combination, for arms that are one and the same once tuned, and for a space without a candidate.
    """
    space = plan.budget
    assert space is not None
    key = "search" if plan.spec.search else "tune"
    if space.whole is not None and space.trials > space.whole:
        raise InputError(f"{key}.trials {space.trials}: there are only {space.whole} choices to try")
    found = _check_models(plan, space, key)
    try:
        plan.objectives  # noqa: B018 raises for those that do not exist
        named(plan)
        for arm in plan.arms:
            if arm.is_base:
                plan.candidates(arm)
    except InputError as error:
        raise InputError(f"{key}.{error}") from None
    search = plan.spec.search
    if search:
        _check_finalists(search)
    if search and search.fidelity:
        found += _check_rungs(plan, search)
    if search and (search.match or search.constrain.bounds or search.fidelity):
        found += _check_sizes(plan, space)
    return found


def _check_finalists(search: Searching) -> None:
    """Raises `InputError` where the space has fewer models than finalists are wanted."""
    models = {name: knob for name, knob in search.knobs.items() if not name.startswith("train.")}
    if models and all(parent in models for knob in models.values() for parent in knob.parents):
        most = count(models)
        if most is not None and search.finalists > most:
            raise InputError(
                f"search.finalists {search.finalists}: the space has {most} models, and each is confirmed once"
            )


def _check_rungs(plan: "Plan", search: Searching) -> list[str]:
    """A note where the last rung is another training than the base's. Raises `InputError` for one that is none."""
    found = []
    for arm in plan.arms:
        if arm.is_base:
            try:
                *_, last = (plan.sized(arm, {}, rung) for rung in range(len(search.rungs)))
            except InputError as error:
                raise InputError(f"search.fidelity: {error}") from None
            for path in search.rungs[-1]:
                if path != "train.seeds" and setting(last, path, "") != (own := setting(arm.config, path, "")):
                    found.append(
                        f"search.fidelity.{path} ends at {setting(last, path, '')}: candidates are judged there, and "
                        f"confirmed at the base's {own} on task '{arm.task}'."
                    )
    return found


def _check_models(plan: "Plan", space: Space, key: str) -> list[str]:
    """A note on the combinations that make no model, none where all that are tried make one."""
    tuned = [arm for arm in plan.arms if arm.is_base or not plan.spec.search]
    drawn = _drawn(space.knobs, max(1, MOST_COMBINATIONS // len(tuned)))
    note: list[str] = []
    seen: dict[tuple[str, str], str] = {}
    for arm in tuned:
        reasons: list[str | None] = []
        first = None
        for knobs in drawn:
            config = plan.with_values(arm, space.settings(knobs))
            try:
                config = resolve(config, plan.tasks[arm.task])
            except InputError as error:
                reasons.append(str(error))
            else:
                first = first or json.dumps(config, sort_keys=True)
                reasons.append(None)
        if None not in reasons:
            raise InputError(
                f"{key}: no combination makes a model on task '{arm.task}', such as {_said(drawn[0])}: {reasons[0]}"
            )
        for name, knob in space.knobs.items():
            for value in knob.extremes:
                why = [r for knobs, r in zip(drawn, reasons, strict=True) if name in knobs and knobs[name] == value]
                if None not in why:
                    raise InputError(f"{key}.{name}: {value!r} makes no model on task '{arm.task}': {why[0]}")
        bad = [i for i, why in enumerate(reasons) if why is not None]
        if bad and not note:
            note = [
                f"{key}: {len(bad)} of {len(drawn)} combinations tried make no model, such as {_said(drawn[bad[0]])}: "
                f"{reasons[bad[0]]}. The run records such a candidate as infeasible and draws another in its place."
            ]
        twin = seen.setdefault((arm.task, first or ""), arm.name)
        if twin != arm.name:
            paths = list(space.searched)
            raise InputError(
                f"arm '{arm.name}' is the same as {twin if twin == 'base' else repr(twin)} on task '{arm.task}' "
                f"once {', '.join(paths)} {'is' if len(paths) == 1 else 'are'} tuned"
            )
    return note


def _check_sizes(plan: "Plan", space: Space) -> list[str]:
    """Draws candidates until one fits on every task. A note on those before it, if there were any."""
    bases = [arm for arm in plan.arms if arm.is_base]
    draw = random.Random(0)
    drawn = [space.draw(lambda _, knob: draw.choice(knob.points(INTEGERS))) for _ in range(MOST_SIZED)]
    # The training changes no size, so that models count once.
    models = [{path: value for path, value in one.items() if not path.startswith("train.")} for one in drawn]
    different = {_said(model): values for model, values in zip(models, drawn, strict=True)}
    nearest: dict[str, tuple[Bounded, str]] = {}
    reasons: list[str] = []
    for values in different.values():
        why = next(filter(None, (_misfit(plan, arm, values, nearest) for arm in bases)), None)
        if why is None:
            if not reasons:
                return []
            return [
                f"search: {len(reasons)} of {len(reasons) + 1} candidates drawn do not fit, such as {reasons[0]}. "
                "The run records such a candidate as infeasible and draws another in its place."
            ]
        reasons.append(f"{_said(values)}: {why}")
    for what, (bounded, said) in nearest.items():
        if not bounded.holds:
            raise InputError(
                f"search.constrain.{what}: none of {len(reasons)} candidates drawn has {bounded.bound}: "
                f"the nearest has {bounded.size:,.0f}, with {said}"
            )
    raise InputError(f"search: none of {len(reasons)} candidates drawn is feasible, such as {reasons[0]}")


def _misfit(
    plan: "Plan", arm: "PlannedArm", values: Mapping[str, Any], nearest: dict[str, tuple[Bounded, str]]
) -> str | None:
    """Why a candidate does not fit; None where it does. nearest: the candidate that came nearest to each bound."""
    try:
        found = plan.bounded(arm, plan.sized(arm, values))
        for rung in range(len(plan.spec.search.rungs) if plan.spec.search else 0):
            plan.sized(arm, values, rung)
    except InputError as error:
        return str(error)
    for what, bounded in found.items():
        if what not in nearest or bounded.apart < nearest[what][0].apart:
            nearest[what] = bounded, _said(values)
    return next((f"constrain.{what}: {bounded}" for what, bounded in found.items() if not bounded.holds), None)


def _said(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{path}={value}" for path, value in values.items())


def _drawn(knobs: Mapping[str, Search], most: int) -> list[dict[str, Any]]:
    """All combinations of choices, bounds and some integers between; a random sample where they are more than `most`.

    Every choice and bound is in at least one.
    """
    found = [*islice(combinations(knobs, lambda knob: knob.points(INTEGERS)), most + 1)]
    if len(found) <= most:
        # A condition may name an integer that is not among the points.
        drawn = {name for one in found for name in one}
        return [*found, *_covering(knobs, [name for name in knobs if name not in drawn])]
    draw = random.Random(0)
    sample = [next(combinations(knobs, lambda knob: [draw.choice(knob.points(INTEGERS))])) for _ in range(most)]
    return [*_covering(knobs, knobs), *sample]


def _covering(knobs: Mapping[str, Search], names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """For each point of the knobs named, a combination that has it; other knobs have their first one."""
    for name in names:
        above = example(knobs, name) or {}
        for value in knobs[name].points(INTEGERS):
            wanted = {**above, name: value}
            drawn: dict[str, Any] = {}
            for other, knob in knobs.items():
                if knob.exists(drawn):
                    drawn[other] = wanted.get(other, knob.points(INTEGERS)[0])
            yield drawn
