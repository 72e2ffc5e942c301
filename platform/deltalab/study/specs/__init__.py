"""Reads study files: the keys that a file may have, and the values that it gives them."""
