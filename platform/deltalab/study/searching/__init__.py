"""Decides which candidates a search tries, and which of them train for longer or are confirmed."""
