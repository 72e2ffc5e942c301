"""Chooses the model of a study for an export."""
