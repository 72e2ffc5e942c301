"""Tasks of recall: what was written once, twice, under two names or in a chain is asked for later."""
