"""Published kernels that compute a recurrence in the place of ours, for users who ask for them by name."""
