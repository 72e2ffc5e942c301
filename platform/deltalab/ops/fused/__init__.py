"""What a model computes around its scans, in few operations: short convolutions, norms, losses and products."""
