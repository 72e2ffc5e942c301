"""What one stack of trials takes of a machine."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from deltalab.study.specs.sections.search_space import MOST_TRIALS, Number, Strict, Whole

LEAST_SHARE = 0.01
"""The least share of a core or a GPU that a stack may take."""


class Resources(Strict):
    """What one stack takes: trials of one shape that train as one model, on a GPU or, with `gpu: 0`, on CPUs.

    Attributes:
        cpu: Cores.
        gpu: GPUs, 0 to 1; a fraction is a share of a GPU's memory. With an `engine`, a whole number, which is that of a
            training.
        memory: The most that a stack may use, in GiB; None for an equal share of the machine's memory for every place.
        stack: The most trials in one stack. `auto` shares the trials over all places; on CPUs it takes no more than
            make a core faster. The number does not change what a trial computes, but for rounding on a GPU.
    """

    cpu: Annotated[Number, Field(ge=LEAST_SHARE, le=4096)] = 1
    gpu: Annotated[Number, Field(ge=0, le=64)] = 0
    memory: Annotated[Number, Field(gt=0, le=2**20)] | None = None
    stack: Annotated[Whole, Field(ge=1, le=MOST_TRIALS)] | Literal["auto"] = "auto"

    @field_validator("stack", mode="before")
    @classmethod
    def _a_number_or_auto(cls, raw: Any) -> Any:
        if raw != "auto" and (isinstance(raw, bool) or not isinstance(raw, int) or raw < 1):
            raise ValueError(f"must be auto or a whole number of at least 1, not {raw!r}")
        return raw

    @field_validator("gpu")
    @classmethod
    def _none_or_a_share(cls, raw: float) -> float:
        if 0 < raw < LEAST_SHARE:
            raise ValueError(f"must be 0, or at least {LEAST_SHARE}, not {raw}")
        if raw > 1 and raw != int(raw):
            raise ValueError(f"must be at most 1 or a whole number, not {raw}")
        return raw

    @property
    def threads(self) -> int:
        """Threads of a trial: the same number everywhere, since another number may round otherwise."""
        return max(1, math.floor(self.cpu))

    @property
    def bytes(self) -> int | None:
        """The most memory that a stack may use, in bytes; None for an equal share."""
        return None if self.memory is None else int(self.memory * 2**30)

    def idle(self, gpus: float) -> str | None:
        """Warns of GPUs that no stack will use; None if there are none.

        Args:
            gpus: The GPUs of all machines.

        Examples:
            >>> Resources(cpu=1).idle(2)
            'no stack takes a GPU, and there are 2: resources: {gpu: 1} gives each stack one'
        """
        if self.gpu or not gpus:
            return None
        return f"no stack takes a GPU, and there are {gpus:g}: resources: {{gpu: 1}} gives each stack one"

    def places(self, cpus: float, gpus: float) -> int:
        """How many stacks run at a time on a machine; no stack shares a GPU with one that takes several.

        Args:
            cpus: The machine's cores.
            gpus: The machine's GPUs.

        Examples:
            >>> Resources(cpu=4, gpu=0.4).places(32, 2)
            4
        """
        on_cpus = math.floor(cpus / self.cpu)
        if not self.gpu:
            return on_cpus
        of_gpus = math.floor(gpus / self.gpu) if self.gpu > 1 else math.floor(gpus) * math.floor(1 / self.gpu)
        return min(on_cpus, of_gpus)
