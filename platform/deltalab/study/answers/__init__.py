"""What the ledger says of a study."""
