"""The learning rate of each step, for studies and for the engines. Exported folders hold a copy of this module."""

import math

STABLE = 0.9
"""The share of the steps after which the schedule `wsd` decays."""

DECAYS = ("linear", "cosine", "sqrt")
"""How the schedule `wsd` decays: the share of lr at the share x of the decay is 1 - x, (1 + cos pi x) / 2 or
1 - x^(1/2)."""


def learning_rate(
    lr: float,
    step: float,
    steps: int,
    *,
    warmup: int,
    kind: str,
    final: float = 0.0,
    stable: float = STABLE,
    decay: str = "linear",
) -> float:
    """Returns the learning rate of the update that follows `step` updates.

    Args:
        lr: The largest learning rate.
        step: The updates so far. It need not be whole: time may say how much of a training is done.
        steps: The updates of the whole training.
        warmup: The updates in which the rate rises, the first of them by lr / warmup.
        kind: How the rate falls after them: cosine, linear, constant or wsd.
        final: The share of lr at which the decay would end with one more update.
        stable: The share of the steps after which wsd decays.
        decay: A word of `DECAYS`, for wsd.

    Examples:
        >>> [round(learning_rate(1.0, step, 100, warmup=10, kind="linear", final=0.1), 3) for step in (0, 9, 10, 55)]
        [0.1, 1.0, 1.0, 0.55]
        >>> [round(learning_rate(1.0, step, 100, warmup=0, kind="wsd", stable=0.8), 3) for step in (0, 80, 90, 99)]
        [1.0, 1.0, 0.5, 0.05]
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    if kind == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * done))
    elif kind == "linear":
        share = 1 - done
    elif kind == "wsd":
        share = _decayed(min(1.0, (steps - step) / max(round((1 - stable) * steps), 1)), decay)
    else:
        share = 1.0
    return lr * (final + (1 - final) * share) if final else lr * share


def _decayed(left: float, decay: str) -> float:
    """Returns the share of lr at which the share `left` of a decay is left."""
    if decay == "cosine":
        return 0.5 * (1 - math.cos(math.pi * left))
    return 1 - math.sqrt(1 - left) if decay == "sqrt" else left
