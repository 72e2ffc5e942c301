"""Commands about this machine: what works on it, what serves on it, and what starts again on it."""
