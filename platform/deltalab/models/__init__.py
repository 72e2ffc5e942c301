"""Models of rule layers: their specification, their layers and the whole."""
