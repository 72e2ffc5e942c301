"""Whether Triton kernels can run on this machine, asked once."""

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

OLDEST_TRITON = (3, 4)
"""The first whose tensor descriptors the kernels' tiles are."""

_log = logging.getLogger("deltalab")


def constant(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which loads the compiler: half of all time that a command starts in."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def once(function: Callable[[str], T]) -> "functools._lru_cache_wrapper[T]":
    """For a look at the machine: cached, and a constant to torch.compile."""
    return functools.cache(constant(function))


@once
def lacks_triton(device: str) -> str | None:
    """What is missing for the kernels, if anything is."""
    try:
        import triton

        importlib.import_module("deltalab.kernels")
    except ImportError as error:
        return f"the package {(error.name or 'triton').split('.')[0]}"
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        return f"Triton {'.'.join(map(str, OLDEST_TRITON))} or later, not {triton.__version__}"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device != "cuda" and not interpreted:
        return "a GPU, or TRITON_INTERPRET=1"
    importlib.import_module("deltalab.kernels.dispatch")
    importlib.import_module("deltalab.kernels.step.convolution")
    importlib.import_module("deltalab.kernels.step.embedding")
    importlib.import_module("deltalab.kernels.step.norm")
    return None if interpreted else importlib.import_module("deltalab.kernels.ptxas").choose()


@once
def may_launch(device: str) -> bool:
    """Whether kernels are taken where nobody asked for them by name; on a GPU it says once why not."""
    if device != "cuda":
        _log.info("no GPU: backend 'auto' takes 'chunked'")
        return False
    missing = lacks_triton(device)
    if missing:
        _log.warning("backend 'auto' takes 'chunked': kernels need %s", missing)
    return missing is None
