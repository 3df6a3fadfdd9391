"""Temporal workflows: the order of a run's steps, deterministic, on one page each."""
