"""What stands beside every page: the choice of the study, and the views that readers saved."""
