"""The Triton kernels: one folder for each structure of the algebra, and `step` for the rest of a training step.

This module imports nothing, so that Triton is loaded only when a kernel is first used. docs/kernels.md explains the
kernels.
"""
