"""The charts and tables of the pages."""
