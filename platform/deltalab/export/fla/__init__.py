"""Models of ours as models of flash-linear-attention (FLA 0.6), and the way back."""

from deltalab.export.fla.conversion import from_fla, to_fla

__all__ = ["from_fla", "to_fla"]
