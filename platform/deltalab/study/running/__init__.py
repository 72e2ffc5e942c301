"""Runs a plan to its end."""
