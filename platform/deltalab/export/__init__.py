"""Exports a model as a folder that needs nothing of this platform, for training and for use."""

from deltalab.export.hf import export_hf
from deltalab.export.retrain import rebuild

__all__ = ["export_hf", "rebuild"]
