"""Exports a trained model as a folder that needs nothing of this platform."""

from deltalab.export.best_run import export_arm
from deltalab.export.hf import export_hf

__all__ = ["export_arm", "export_hf"]
