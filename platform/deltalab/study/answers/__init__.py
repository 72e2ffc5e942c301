"""Computes the answer of a study from the trials and metrics in the ledger."""
