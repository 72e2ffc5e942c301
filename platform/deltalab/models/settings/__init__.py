"""What the settings of a model may be: their largest numbers, the layers that a list names, and what goes together."""
