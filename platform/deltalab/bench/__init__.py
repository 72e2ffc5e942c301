"""Benchmarks of rules: measuring time and memory, counting operations and bytes, published peers, and the results."""
