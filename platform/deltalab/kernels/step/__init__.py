"""Kernels of the rest of a training step: data, embedding, convolution, norm, loss and AdamW."""
