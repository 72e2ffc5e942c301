"""Trains exported folders on packed data, by torchtitan or by transformers' Trainer under Accelerate."""

from deltalab.engines.checkpoints import read_checkpoint

__all__ = ["read_checkpoint"]
