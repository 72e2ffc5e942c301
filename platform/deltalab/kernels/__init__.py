"""Triton kernels, one file for each structure of the algebra. Nothing is imported here: Triton only on first use."""
