"""Benchmarks of rules: measuring, counting, the peers and the results."""
