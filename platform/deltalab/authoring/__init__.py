"""For authors of rules and tasks: files to start from, checks of the contract, and cards."""
