"""From a study file to arms and trials."""
