"""Scores rules that a program proposes, one after the other, so that the whole loop keeps the promised error."""
