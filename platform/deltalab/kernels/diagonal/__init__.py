"""Kernels of states that decay channel by channel, with or without a low rank."""
