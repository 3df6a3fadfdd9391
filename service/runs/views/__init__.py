"""Views of runs: their state and cost, their history, and both as text. No Temporal and no web framework."""
