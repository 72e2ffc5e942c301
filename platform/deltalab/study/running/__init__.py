"""A plan, run to its end."""
