"""How long a model takes for one token: timed here, after a prompt."""

import time

import torch

from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.training.device import chosen
from deltalab.training.spec import TrainSpec

TRIES = 100
"""How often the token is timed. The fastest counts: other work on the machine only adds to a time."""

_known: dict[tuple[str, int, str, bool], float] = {}


@torch.no_grad()
def decode_us(model: ModelSpec, train: TrainSpec, length: int) -> float:
    """Microseconds for one token of one sequence, logits included, after a prompt of `length` tokens.

    The device and the precision are those of the training. A model is timed once in a process.
    Raises what the model raises when it runs.
    """
    device = torch.device(chosen(train.device))
    bf16 = train.precision == "bf16" or (train.precision == "auto" and device.type == "cuda")
    key = repr(model), length, device.type, bf16
    if key not in _known:
        _known[key] = _timed(model, length, device, bf16)
    return _known[key]


def _timed(model: ModelSpec, length: int, device: torch.device, bf16: bool) -> float:
    network = build_model(model).to(device)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    times = []
    with torch.autocast(device.type, torch.bfloat16, bf16):
        _, prompt = network.hidden(token.expand(1, length))
        for _ in range(TRIES):
            began = time.perf_counter()
            hidden, _ = network.hidden(token, prompt)
            network.logits(hidden).argmax().item()  # the next token is known, as whoever decodes must know it
            times.append(time.perf_counter() - began)
    return min(times) * 1e6
