"""The checks of modules that stand in place of rules."""
