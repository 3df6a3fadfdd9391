"""Runs for the APIs: accept, follow, show."""
