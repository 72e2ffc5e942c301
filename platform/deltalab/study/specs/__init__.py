"""What a study file may say, and says."""
