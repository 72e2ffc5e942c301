"""Parts of a block beside its rule: attention over depth, experts, latents of q, k and v."""
