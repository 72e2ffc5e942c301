"""Triton kernels: one file for each structure of the algebra, and for each of what else a training step is.

Nothing is imported here: Triton only on first use.
"""
