"""Parts of a block beside its rule: attention over depth, experts, images, and what layers hold between calls."""
