"""Back ends that call published kernels. Each computes `reference.recurrent` for the structures that it has."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deltalab.errors import InputError, NotInstalled
from deltalab.ops.backends import ScanKernel
from deltalab.ops.peers.table import op_of
from deltalab.rule import Operands, State
from deltalab.structure import Transition

PACKAGES = {"fla": "flash-linear-attention", "flash_qla": "flash-qla"}
"""The back ends by their modules' names, each with the package to install."""

DEVICE = "cuda"
"""The type of device that the published kernels run on."""

DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes of products that the published kernels are written for."""


def lacks(name: str, *, where: str) -> None:
    """Checks that a back end can run here.

    Args:
        name: A key of `PACKAGES`.
        where: What asks for it, for the message.

    Raises:
        InputError: The package is not installed, or there is no GPU.
    """
    if importlib.util.find_spec(name) is None:
        raise NotInstalled("not installed", PACKAGES[name], where=where)
    if not torch.cuda.is_available():
        raise InputError(f"{where}: needs a GPU")


def imported(module: str, *, where: str) -> Any:
    """Returns a module of a published package.

    Raises:
        InputError: The module does not import; the message has the reason.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{where}: does not import: {type(error).__name__}: {reason}") from error


def scan_by(name: str, device: str) -> ScanKernel:
    """Returns the scan of a back end for tensors on a type of device.

    Raises:
        InputError: The back end cannot run there.
    """
    lacks(name, where=f"backend '{name}'")
    if device != DEVICE:
        raise InputError(f"backend '{name}' takes tensors on a GPU, not on '{device}'")

    def scan(
        transition: Transition,
        operands: Operands,
        /,
        *,
        dtype: torch.dtype,
        scale: float,
        state: State | None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        function, arguments, options = _call(name, transition, operands, dtype)
        try:
            o, last = function(
                **arguments,
                **options,
                scale=scale,
                initial_state=None if state is None else state[0],
                output_final_state=True,
                cu_seqlens=cu_seqlens,
            )
        except (AssertionError, ValueError, NotImplementedError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"backend '{name}' refuses these inputs: {reason}") from error
        return o, (last,)

    return scan


def _call(
    name: str, transition: Transition, operands: Operands, dtype: torch.dtype
) -> tuple[Callable[..., Any], dict[str, Tensor], dict[str, Any]]:
    """Returns the function of a back end for a recurrence, with its tensors and its further arguments."""
    where = f"backend '{name}'"
    op = op_of(transition, operands)
    if isinstance(op, str):
        raise InputError(f"{where}: {op}: use 'auto', 'chunked' or 'recurrent'")
    if dtype not in DTYPES:
        raise InputError(f"{where} takes q, k and v in bf16 or fp16, not {dtype}")
    arguments = op.arguments(operands, dtype)
    if name == "fla":
        return getattr(imported(op.path, where=where), f"chunk_{op.name}"), arguments, dict(op.options)
    if op.name != "gated_delta_rule":
        raise InputError(f"{where} has the gated delta rule alone, and no {op.name}: use 'auto', 'chunked' or 'fla'")
    return imported("flash_qla", where=where).chunk_gated_delta_rule, arguments, {}
