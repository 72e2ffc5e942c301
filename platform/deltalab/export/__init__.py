"""Exports a model as a folder that can be trained and used without this platform."""

from deltalab.export.hf import export_hf
from deltalab.export.retrain import rebuild

__all__ = ["export_hf", "rebuild"]
