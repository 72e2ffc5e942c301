"""A GPU that is too old for the kernels, such as a T4, trains by the parallel form in fp32, and says why."""

import pytest
import torch

from deltalab.cli.machine_commands import examination
from deltalab.ops.backends import lacks_triton
from deltalab.training.device import multiplies_bf16

T4, RTX_3090 = (7, 5), (8, 6)
CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Makes torch find a GPU of a capability."""

    def found(capability: tuple[int, int]) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return found


def test_the_kernels_name_the_capability_that_they_need(gpu) -> None:
    gpu(T4)
    assert lacks_triton.__wrapped__("cuda") == "a GPU of compute capability 8.0 or later, not 7.5"
    gpu(RTX_3090)
    assert lacks_triton.__wrapped__("cuda") is None


def test_bf16_is_taken_where_it_is_fast(gpu) -> None:
    gpu(T4)
    assert not multiplies_bf16(CUDA)
    gpu(RTX_3090)
    assert multiplies_bf16(CUDA)
    assert not multiplies_bf16(torch.device("cpu"))


def test_the_doctor_says_what_runs_in_their_place(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "lacks_triton", lacks_triton.__wrapped__)
    gpu(T4)
    found = examination._kernels()
    assert (found.state, found.mend) == ("absent", "")
    assert "7.5; the parallel form in PyTorch runs in their place, in fp32" in found.found
    monkeypatch.setattr(examination, "lacks_triton", lambda device: "Triton 3.4 or later, not 3.3.1")
    gpu(RTX_3090)
    found = examination._kernels()
    assert (found.state, found.mend) == ("broken", "pip install --upgrade triton")
