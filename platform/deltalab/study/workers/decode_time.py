"""Times on this machine how long a model takes for one token after a prompt."""

import logging
import time

import torch

from deltalab.models.graphs.capture import captured
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.training.device import device_type
from deltalab.training.spec import TrainSpec

TRIES = 100
"""How often the token is timed. The shortest time counts, since other work on the machine only adds to a time."""

_log = logging.getLogger(__name__)
_known: dict[tuple[str, int, str, bool], float] = {}


@torch.no_grad()
def decode_us(model: ModelSpec, train: TrainSpec, length: int) -> float:
    """Times one token of one sequence after a prompt, logits included. A model is timed once in a process.

    On a GPU the token is one CUDA graph, so that the time is the device's. If it cannot be, a warning says why.

    Args:
        model: The model.
        train: The training, whose device and precision are used.
        length: The tokens of the prompt.

    Returns:
        Microseconds. What the model raises when it runs passes through.
    """
    device = torch.device(device_type(train.device))
    bf16 = train.precision == "bf16" or (train.precision == "auto" and device.type == "cuda")
    key = repr(model), length, device.type, bf16
    if key not in _known:
        _known[key] = _timed(model, length, device, bf16)
    return _known[key]


def _timed(model: ModelSpec, length: int, device: torch.device, bf16: bool) -> float:
    """Times one token after a prompt, in microseconds."""
    network = build_model(model).to(device)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    following = torch.zeros((), dtype=torch.long, device=device)
    # Replay within the context: it keeps the weights that it has cast, which the graph reads.
    with torch.autocast(device.type, torch.bfloat16, bf16):
        _, prompt = network.hidden(token.expand(1, length))

        def decode() -> None:
            hidden, _ = network.hidden(token, prompt)
            following.copy_(network.logits(hidden).argmax())

        run = decode
        if device.type == "cuda":
            try:
                run = captured(decode)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                _log.warning(
                    "decode_us has the time of Python's launches, without a CUDA graph: %s",
                    str(error).partition("\n")[0],
                )
        times = []
        for _ in range(TRIES):
            began = time.perf_counter()
            run()
            following.item()  # Decoding must know the next token, and so waits for the device.
            times.append(time.perf_counter() - began)
    return min(times) * 1e6
