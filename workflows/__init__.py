"""Temporal workflows: the order of things, deterministic, on one page each."""
