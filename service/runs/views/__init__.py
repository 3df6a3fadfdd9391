"""What runs show: their state and cost, their history, and both in words. No Temporal and no web framework."""
