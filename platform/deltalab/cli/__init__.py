"""The command `deltalab`, a module for each group of its commands."""
