"""Real training of exported folders, by torchtitan or by transformers' Trainer under Accelerate."""
