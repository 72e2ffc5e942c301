"""Kernels that go through the tokens one by one, with the state in registers."""
