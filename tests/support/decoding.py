"""What every model keeps, however it reads its tokens: at once, one by one, packed, or packed and continued."""

from typing import Any

import torch
from torch import Tensor


def read_in_every_way(model: Any, tokens: Tensor) -> list[Any]:
    """Asserts that a model has the same logits in each way of reading two rows of ten tokens.

    Args:
        model: The model.
        tokens: The tokens [2, 10].

    Returns:
        The model's cache after it read the tokens one by one.
    """
    want = model(tokens)
    logits, cache = model.step(tokens[:, :2])
    parts = [logits]
    for i in range(2, 10):
        logits, cache = model.step(tokens[:, i : i + 1], cache)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), want)
    packed = model(tokens.reshape(1, 20), cu_seqlens=torch.tensor([0, 10, 20]))
    torch.testing.assert_close(packed.reshape(want.shape), want)
    _, caches = model.step(tokens.reshape(1, 20)[:, :13], cu_seqlens=torch.tensor([0, 10, 13]))
    after, _ = model.step(tokens[:, 3:5].reshape(1, 4), caches, cu_seqlens=torch.tensor([0, 2, 4]))
    torch.testing.assert_close(after[0, 2:], want[1, 3:5])
    return list(cache)
