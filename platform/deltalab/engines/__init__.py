"""Real training of exported folders, by torchtitan or by transformers' Trainer under Accelerate."""

from deltalab.engines.checkpoints import read_checkpoint

__all__ = ["read_checkpoint"]
