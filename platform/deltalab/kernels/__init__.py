"""Triton kernels: a folder for each structure of the algebra, and one for the rest of a training step.

This module imports nothing, so that Triton is loaded on first use alone. docs/kernels.md explains the kernels.
"""
