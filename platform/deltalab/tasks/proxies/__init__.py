"""Proxy tasks beyond MAD: recall under changes, structured reasoning, state tracking in traces."""
