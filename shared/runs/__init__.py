"""Runs as users request them, what is accepted of that, their status and events, and previews of their data."""
