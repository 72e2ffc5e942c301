"""Winners leave for training: a trained model as a folder that needs nothing of this platform."""

from deltalab.export.hf import export_hf

__all__ = ["export_hf"]
