"""Studies of other tools, read as text: nothing of theirs is run."""
