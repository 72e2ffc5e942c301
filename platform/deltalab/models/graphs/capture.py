"""Captures work on a GPU as a CUDA graph, or says why it cannot be captured."""

from collections.abc import Callable
from typing import Any

import torch


def captured(work: Callable[[], Any]) -> Callable[[], None]:
    """Does some work on the GPU, and returns a function that does it again as a CUDA graph.

    Args:
        work: Reads and writes tensors that keep their places.

    Raises:
        RuntimeError: The work cannot be captured, since it waits for the GPU.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
    except RuntimeError as error:
        # What stopped the work is the cause. The end of the broken capture then fails, too.
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        raise cause from None
    return graph.replay
