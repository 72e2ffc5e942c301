"""Packs text into memory-mapped shards of tokens, which `deltalab.packed` reads."""
