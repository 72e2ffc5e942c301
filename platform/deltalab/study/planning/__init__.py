"""Expands a study's file into arms and trials."""
