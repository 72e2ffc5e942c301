"""Copies of a ledger: backups while studies write it, a ledger in another database, and that of shipped studies."""
