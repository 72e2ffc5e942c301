"""Training of many runs as one, from a specification to measured results."""
