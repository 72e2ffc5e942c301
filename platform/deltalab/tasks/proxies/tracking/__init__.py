"""State tracking in streams that are no words of a group: traces of programs, and grammars with gaps."""
