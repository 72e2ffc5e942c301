"""Recall: which value belongs to a key that changed, has two parts, stands among others, or was passed on."""
