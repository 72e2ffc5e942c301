"""Converts our models to models of flash-linear-attention (FLA 0.6), and back."""

from deltalab.export.fla.conversion import from_fla, to_fla

__all__ = ["from_fla", "to_fla"]
