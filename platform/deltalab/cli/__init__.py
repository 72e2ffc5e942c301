"""The command `platform`, a module for each group of its commands."""
