"""Trajectory groups: read, checked, packed into units with advantages."""
