"""Places the attention of a hybrid: a supernet orders placements, and trainings from scratch confirm the order."""
