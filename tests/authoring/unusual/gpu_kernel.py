"""Right, though unusual: a kernel that only a GPU can run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class GpuKernel(UpdateRule):
    name: ClassVar[str] = "unusual_gpu_kernel"
    paper: ClassVar[str] = "none"

    transition: Transition = DECAY
    g: Gate = knob(forms.mamba2_decay())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, g=g)

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        raise AssertionError("the kernel was launched on a CPU")

    def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
        return None if v.is_cuda else "the kernel takes tensors on a GPU"
