"""Loads the scripts of `benchmarks/`, which are in no package."""

import importlib.util
import sys
from types import ModuleType

import pytest
from tests.support.folders import BENCHMARKS


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)  # Scripts import one another.
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module
