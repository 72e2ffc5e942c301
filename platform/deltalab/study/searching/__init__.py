"""Which candidates a search tries, and which go on."""
