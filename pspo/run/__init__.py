"""A run's state and everything it writes: records, checkpoints, resuming, trackers, model cards."""
