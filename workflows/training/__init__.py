"""A run's jobs on leased workers."""
