"""What every test needs: GPU tests only run where there is one, and Triton's interpreter where there is none."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports Triton, whose own functions are bound to the interpreter, or not, when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
