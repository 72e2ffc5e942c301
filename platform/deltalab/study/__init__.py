"""A study: from its file to arms, trials, the ledger, statistics and the report."""
