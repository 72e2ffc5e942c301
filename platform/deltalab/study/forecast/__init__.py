"""What a study costs and can find, before it runs."""
