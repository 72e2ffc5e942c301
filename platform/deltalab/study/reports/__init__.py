"""Shows the answer of a study on a terminal, in a notebook and in files."""
