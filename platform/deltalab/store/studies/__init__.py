"""Reads and changes studies in the ledger: their list, their trials, and the drivers and queues of running studies."""
