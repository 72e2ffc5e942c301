"""What a layer's values have of the first layer's."""

from torch import Tensor

from deltalab.models.start import Given, Started


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

    def forward(self, v: Tensor, first: Tensor) -> Tensor:
        """Computes the values that the rule reads, in the shape and dtype of v.

        Args:
            v: The layer's own values.
            first: Those of the first layer for the same tokens, in the same shape.
        """
        of_first, own = self.share
        return (own * v + of_first * first).to(v.dtype)
