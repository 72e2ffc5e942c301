"""An answer, shown."""
