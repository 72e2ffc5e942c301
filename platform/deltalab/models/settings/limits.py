"""The largest numbers of a model, and the check that a setting is a whole number within them."""

from deltalab.errors import InputError

MOST = {
    "vocab_size": 2**24,
    "d_model": 2**16,
    "layers": 1000,
    "heads": 2**12,
    "key_dim": 2**16,
    "conv": 2**10,
    "qk_heads": 2**12,
    "kv_heads": 2**12,
    "rope_dim": 2**16,
    "q_rank": 2**16,
    "kv_rank": 2**16,
    "gate_rank": 2**16,
    "value_residual.rank": 2**16,
    "token_shift.rank": 2**16,
    "mlp_width": 2**20,
    "base_width": 2**16,
    "experts.count": 2**12,
    "experts.width": 2**20,
    "window": 2**31 - 1,
    "chunk_size": 2**16,
}
"""The largest value of each whole number of a model. No published model comes near any of them.

The largest value of `layers` also bounds the number of blocks.
"""

MOST_EXPANDED = 256
"""The largest value of `ModelSpec.expand_v`."""


def whole(name: str, value: object, *, least: int) -> None:
    """Raises `InputError` if the setting `name` of a model is no whole number from `least` to its limit in `MOST`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        problem = f"model.{name} must be a whole number of at least {least}, not {value!r}"
        raise InputError(problem, key=f"model.{name}")
    if value > (most := MOST.get(name, MOST["layers"])):
        raise InputError(f"model.{name} must be at most {most:,}, not {value:,}", key=f"model.{name}")
