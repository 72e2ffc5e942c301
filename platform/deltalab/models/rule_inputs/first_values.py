"""What a layer's values have of the first layer's."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from deltalab.errors import InputError, unknown
from deltalab.models.settings.limits import whole
from deltalab.models.start import Given, Started, linear

VALUES: dict[str, Any] = {"first": 0.5, "own": 0.5, "learned": True}
"""The keys of `ModelSpec.value_residual`, with their defaults."""

RANK = "rank"
"""The key of `ModelSpec.value_residual` that stands alone: the width r of `ValueGate`."""


class ValueResidual(Started):
    """The values of a layer with those of the first, own v_l + first v_1.

    Args:
        first: The share of the first layer's values.
        own: The share of the layer's own values.
        learned: Whether both shares are learned, from these numbers on.

    References:
        Zhou et al. 2024 (ResFormer), arXiv:2410.17897.
    """

    def __init__(self, first: float, own: float, learned: bool) -> None:
        super().__init__()
        self.share = self.drawn("share", Given((first, own)), 2) if learned else (first, own)

    def forward(self, v: Tensor, first: Tensor, x: Tensor) -> Tensor:
        """Computes the values that the rule reads, in the shape and dtype of v.

        Args:
            v: The layer's own values.
            first: Those of the first layer for the same tokens, in the same shape.
            x: What v is projected from, which the shares do not depend on.
        """
        of_first, own = self.share
        return (own * v + of_first * first).to(v.dtype)


class ValueGate(nn.Module):
    """The values of a layer moved towards those of the first, v_l + s (v_1 - v_l), s = sigmoid(W_1 W_2 x + c).

    c starts at 0.

    Args:
        d_model: The width of x.
        width: The values of a token, of all heads.
        rank: The width r of W_2 x.

    References:
        Peng et al. 2025 (RWKV-7), arXiv:2503.14456.
    """

    def __init__(self, d_model: int, width: int, rank: int) -> None:
        super().__init__()
        self.into = linear(d_model, rank)
        self.out = linear(rank, width, bias=True, widens=False)

    def forward(self, v: Tensor, first: Tensor, x: Tensor) -> Tensor:
        """Computes the values that the rule reads, in the shape and dtype of v, as `ValueResidual` does.

        Args:
            v: The layer's own values, [B, T, H, V].
            first: Those of the first layer for the same tokens, in the same shape.
            x: What v is projected from, [B, T, d].
        """
        share: Tensor = self.out(self.into(x)).sigmoid().view(v.shape)
        return (v + share * (first - v)).to(v.dtype)


def shares_in_full(setting: object) -> dict[str, Any]:
    """Returns `ModelSpec.value_residual` with all its keys; raises `InputError` if it mixes no values."""
    if isinstance(setting, Mapping) and RANK in setting:
        if others := [key for key in setting if key != RANK]:
            raise InputError(f"model.value_residual.{others[0]} has no effect beside rank, whose gate is the share")
        whole("value_residual.rank", setting[RANK], least=1)
        return {RANK: setting[RANK]}
    if not isinstance(setting, Mapping):
        raise InputError(f"model.value_residual must be {{{', '.join(VALUES)}}}, {{rank}}, or null, not {setting!r}")
    for key in setting:
        if key not in VALUES:
            raise unknown("key", key, [*VALUES, RANK], where="model.value_residual")
    given = {**VALUES, **setting}
    if not isinstance(given["learned"], bool):
        raise InputError(f"model.value_residual.learned must be true or false, not {given['learned']!r}")
    for key in ("first", "own"):
        share = given[key]
        if isinstance(share, bool) or not isinstance(share, int | float) or not abs(share) < 1e6:
            raise InputError(f"model.value_residual.{key} must be a number, not {share!r}")
        given[key] = float(share)
    if not given["learned"] and given["first"] == 0:
        raise InputError("model.value_residual.first 0 that is not learned mixes nothing: leave value_residual out")
    return given
