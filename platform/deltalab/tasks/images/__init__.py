"""Tasks of images: their inputs are patches of numbers, and their answer is a class."""
