"""Runs a study's stacks in jobs of Slurm, which the driver submits and which stay for one stack after another."""
