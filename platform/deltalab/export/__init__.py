"""Winners leave for training: a trained model as a folder that needs nothing of this platform."""

from deltalab.export.hf import export_hf
from deltalab.export.winner import export_arm

__all__ = ["export_arm", "export_hf"]
