"""What a rule reads of x: gates, latents of q, k and v, means with the token before, and the first layer's values."""
