"""How long a model takes for one token: timed here, after a prompt."""

import torch

from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.training.device import chosen, moment, seconds_between
from deltalab.training.spec import TrainSpec

TOKENS = 8
"""Tokens in a timed stretch."""
STRETCHES = 3
"""Stretches that are timed; the fastest counts, since other work on the machine only adds to a time."""

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
        for _ in range(1 + STRETCHES):  # the first one warms up
            cache, began = prompt, moment(device)
            for _ in range(TOKENS):
                hidden, cache = network.hidden(token, cache)
                network.logits(hidden)
            ended = moment(device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(seconds_between(began, ended))
    return min(times[1:]) / TOKENS * 1e6
