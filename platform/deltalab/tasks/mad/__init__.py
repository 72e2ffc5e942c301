"""The six tasks of Mechanistic Architecture Design (arXiv:2403.17844)."""
