"""Kernels of states that decay by a scalar, with or without a low rank."""
