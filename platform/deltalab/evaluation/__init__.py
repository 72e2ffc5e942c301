"""Measures trained folders: the loss by length, a needle in a long text, the proxy task, and lm-evaluation-harness."""
