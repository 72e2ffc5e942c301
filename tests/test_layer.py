"""The layer's own parts, each against a plain loop: sliding windows."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deltalab.softmax import attend


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention_loop(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Softmax attention, one query at a time; head h reads key head h // (H / G)."""
    past, groups = k.shape[2] - q.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    out = []
    for t in range(q.shape[2]):
        seen = slice(max(0, past + t - window + 1) if window else 0, past + t + 1)
        weights = (scale * (k[:, :, seen] @ q[:, :, t, :, None])).softmax(2)
        out.append((weights * v[:, :, seen]).sum(2))
    return torch.stack(out, dim=2)


@pytest.mark.parametrize("window", [0, 1, 2, 4, 5, 20])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 13])
@pytest.mark.parametrize("past", [0, 1, 3, 7])
def test_attention_is_the_sum_over_its_window(window: int, length: int, past: int) -> None:
    q, k, v = normal(2, 4, length, 3), normal(2, 2, past + length, 3, seed=1), normal(2, 2, past + length, 5, seed=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found, right = attend(q, k, v, window=window, scale=0.7), attention_loop(q, k, v, window, 0.7)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
    weights = normal(*right.shape, seed=3)
    grads = (torch.autograd.grad(o, leaves, weights) for o in (found, right))
    torch.testing.assert_close(*map(list, grads), rtol=1e-9, atol=1e-9)  # type: ignore[misc]


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("past", [0, 15])
def test_a_windows_memory_is_linear_in_the_sequence(past: int) -> None:
    sizes = []
    for length in (256, 512):
        q, k = normal(1, 1, length, 4), normal(1, 1, length + past, 4)
        with Largest() as largest:
            attend(q, k, k, window=16, scale=1.0)
        sizes.append(largest.elements)
    assert sizes[1] <= 2.1 * sizes[0]
