"""The checks of a task: its batches, its streams, its answers, and the table of their limits."""
