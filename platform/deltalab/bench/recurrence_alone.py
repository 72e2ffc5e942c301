"""The recurrence of a rule without what surrounds it: what the rule's time is told in."""

import dataclasses
from typing import Any

from torch import Tensor

from deltalab.authoring.inputs import Inputs
from deltalab.bench.peers import Call, Contestant
from deltalab.bench.results import ALONE
from deltalab.ops.lowering import for_kernels
from deltalab.ops.recurrence import Backend, recurrence
from deltalab.ops.scan import operands
from deltalab.rule import Operands, State, UpdateRule


def alone(rule: UpdateRule, x: Inputs, backend: Backend) -> Contestant:
    """Makes the contestant that runs a rule's recurrence on operands that are ready.

    The operands are made, and signs are rewritten, ahead of the call. Normalizers and other
    `Operands.output` are left out. So the rule's time over this one is the price of what surrounds its kernel.

    Args:
        rule: A rule of the algebra.
        x: The inputs of a sequence.
        backend: The backend that runs the recurrence.
    """
    assert rule.transition is not None
    made = operands(rule, x.q, x.k, x.v, x.gates)
    low = for_kernels(rule.transition, made)
    ready = low.operands.changed(output=None, carry=())
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def named(prefix: str, holder: object) -> dict[str, str]:
        """The name of each tensor of `holder`. A tensor that stands in two places has one, as kernels read it once."""
        found = {}
        for field in dataclasses.fields(holder):  # type: ignore[arg-type]
            value = getattr(holder, field.name)
            if isinstance(value, Tensor):
                name = names.setdefault(id(value), prefix + field.name)
                found[field.name], tensors[name] = name, value.detach().contiguous()
        return found

    places = named("", ready)
    of_fit = {} if ready.fit is None else named("fit_", ready.fit)

    def run(**given: Tensor) -> tuple[Tensor, State]:
        of_now: dict[str, Any] = {place: given[name] for place, name in of_fit.items()}
        fit = ready.fit and dataclasses.replace(ready.fit, **of_now)
        now: Operands = ready.changed(**{place: given[name] for place, name in places.items()}, fit=fit)
        scale = rule.scale(x.k.shape[-1])
        return recurrence(low.transition, now, dtype=x.v.dtype, scale=scale, backend=backend)

    return Contestant(ALONE, Call(run, tensors), same=False)
