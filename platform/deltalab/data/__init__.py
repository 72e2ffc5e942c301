"""Packs text into memory-mapped shards of tokens, which `deltalab.data.token_shards` reads."""
