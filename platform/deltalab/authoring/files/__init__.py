"""The files of authors: templates to start from, rules that a search writes, and studies found by their names."""
