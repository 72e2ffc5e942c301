"""Kernels of reads by ridge regression."""
