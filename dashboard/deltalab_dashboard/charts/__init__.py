"""Charts and tables of which a page shows several."""
