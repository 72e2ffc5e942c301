"""Numbers in, numbers out: tests, intervals and choices, which know no study."""
