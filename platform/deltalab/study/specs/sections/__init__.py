"""The sections of a study file, each with what it takes."""
