"""The built-in rules, one file each, loaded exactly like a user's."""
