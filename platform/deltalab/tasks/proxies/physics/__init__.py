"""The synthetic tasks of *Physics of Language Models: Part 4.1*, in miniature."""
