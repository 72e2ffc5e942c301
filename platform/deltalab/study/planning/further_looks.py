"""Finds whether a study was tested with fewer seeds before, so that its test is a further look at the same data."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from deltalab.errors import InputError
from deltalab.statistics.looks import left_error, looks_of, seeds_of_base, trained_in_parts
from deltalab.store import Store
from deltalab.study.planning.plan import Plan
from deltalab.study.specs.study_file import StudySpec

TESTED = ("done", "failed")
"""The states of a study whose arms were tested."""


def as_further_look(plan: Plan, store: Store) -> Plan:
    """Returns the plan with its seeds as a further look, if the ledger has tested the same arms with fewer seeds.

    Whoever adds seeds because a test decided nothing looks at the same data twice. The ledger knows the earlier study
    by what it computes, whatever its name, margin and family are.

    Args:
        plan: The plan of a study. A ladder stays as it is, since all sizes of an arm need the same seeds.
        store: The ledger.

    Raises:
        InputError: The base has more seeds than the arms, in this study or in an earlier one of the same arms, for
            which there is no further look.
    """
    if plan.spec.scales or plan.identity in {study.identity for study in store.studies()}:
        return plan
    found = max(_further(plan, store), key=_tests, default=None)
    if found is None:
        return plan
    *earlier, last = found.spec.looks
    note = (
        f"seeds: the ledger has tested these arms with {earlier[-1].seeds} seeds, so the test with {last.seeds} is a "
        f"further look, which may err in {left_error(earlier):.2g} of studies"
    )
    return replace(found, notes=(*plan.notes, f"{note}."))


def _tests(further: Plan) -> tuple[int, int]:
    """How many tests a further look follows, and the seeds of the last of them."""
    looks = further.spec.looks
    return len(looks), looks[-2].seeds


def _further(plan: Plan, store: Store) -> Iterator[Plan]:
    """Yields the plan as a further look at each study in the ledger that it goes on from."""
    for study in store.studies():
        earlier = study.spec.get("seeds")
        if study.state not in TESTED or earlier is None:
            continue
        more = plan.spec.looks[-1].seeds - looks_of(earlier)[-1].seeds
        more_of_base = _of_base(plan.spec.model_dump()["seeds"]) - _of_base(earlier)
        if max(more, more_of_base) <= 0:
            continue
        same = {key: study.spec[key] for key in ("name", "family", "margin") if key in study.spec}
        try:
            spec = _with(plan.spec, **same, seeds=earlier)
        except InputError:  # A name or a family that an early release allowed.
            continue
        compared = tuple(study.provenance.get("compare", ()))
        if replace(plan, spec=spec, profile=study.profile, further=compared).identity == study.identity:
            if plan.spec.seeds_of_base is not None or seeds_of_base(earlier) is not None:
                raise InputError(
                    f"{plan.study_file}: seeds: '{study.address}' has tested these arms with {json.dumps(earlier)}; "
                    "only tests with as many seeds of the base as of an arm can look further"
                )
            at_most = plan.spec.looks[-1].seeds
            yield replace(plan, spec=_with(plan.spec, seeds={"after": earlier, "at_most": at_most}))


def _of_base(seeds: int | Mapping[str, Any]) -> int:
    """The most seeds of the base, from the key `seeds` of a study."""
    return trained_in_parts(seeds, is_base=True)[-1]


def _with(spec: StudySpec, **changes: object) -> StudySpec:
    return spec.model_copy(update=vars(StudySpec.model_validate({**spec.model_dump(mode="json"), **changes})))
