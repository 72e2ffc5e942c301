"""Studies in the ledger: their list, their trials, and the drivers and the queue of those that run."""
