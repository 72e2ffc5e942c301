"""Runs a study's stacks on Ray, which lives in a process of its own, and in folders that the driver removes."""
