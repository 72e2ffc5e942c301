"""What every model computes: scans over any backend, convolutions, norms and losses."""
